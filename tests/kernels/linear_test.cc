#include "sheaf/kernels/linear.h"

#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;

struct Case {
  Shape lead;
  int64_t in, out;
  Shape x_strides;  // empty: dense
};
const Case kCases[] = {{{5}, 7, 3, {}},
                       {{2, 9}, 33, 65, {}},
                       {{}, 8, 4, {}},
                       {{3, 4}, 16, 40, {200, 20, 1}},
                       {{3, 4}, 6, 5, {7, 70, 1}},
                       {{130}, 1, 1, {}}};

Shape with(Shape lead, int64_t last) {
  lead.push_back(last);
  return lead;
}

TEST(Linear, ForwardAndGradients) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Case& c : kCases)
      for (bool with_bias : {false, true}) {
        const Array x = Array::random(d, with(c.lead, c.in), 1, 1, c.x_strides),
                    w = Array::random(d, {c.out, c.in}, 2);
        const Array bias = with_bias ? Array::random(d, {c.out}, 3) : Array(),
                    dy = Array::random(d, with(c.lead, c.out), 4);
        const int64_t rows = c.lead.numel();
        std::vector<double> y(rows * c.out), dw(c.out * c.in), db(c.out);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t o = 0; o < c.out; ++o) {
            const double g = dy.at(r * c.out + o);
            double sum = with_bias ? bias.at(o) : 0;
            for (int64_t i = 0; i < c.in; ++i) {
              sum += x.at(r * c.in + i) * w.at(o * c.in + i);
              dw[o * c.in + i] += g * x.at(r * c.in + i);
            }
            y[r * c.out + o] = sum, db[o] += g;
          }
        const View b = with_bias ? bias.view() : View{};
        const Array gy(d, with(c.lead, c.out)), gw(d, {c.out, c.in}), gb(d, {c.out});
        linear(x, w, b, gy, Scratch(linear_workspace(without_data(x), w, b, gy)));
        linear_weight_gradient(
            dy, x, gw,
            Scratch(linear_weight_gradient_workspace(without_data(dy), without_data(x), gw)));
        linear_bias_gradient(dy, gb);
        const double bound = 4 * epsilon(d);
        EXPECT_LT(scaled_error(gy, y), bound) << name(d) << c.in;
        EXPECT_LT(scaled_error(gw, dw), bound) << name(d) << c.in;
        EXPECT_LT(scaled_error(gb, db), bound) << name(d) << c.in;
      }
}

TEST(Linear, WeightGradientOfNoRowsIsZero) {
  const Array dy(kF32, {0, 3}), x(kF32, {0, 4}), dw(kF32, {3, 4}), db(kF32, {3});
  linear_weight_gradient(dy, x, dw, Scratch(linear_weight_gradient_workspace(dy, x, dw)));
  linear_bias_gradient(dy, db);
  EXPECT_EQ(values(dw), std::vector<double>(12, 0.0));
  EXPECT_EQ(values(db), std::vector<double>(3, 0.0));
}

TEST(Linear, NarrowGradientsIntoF32) {
  const Array dy = Array::random(kBF16, {200, 20}, 1), x = Array::random(kBF16, {200, 30}, 2),
              dw(kF32, {20, 30}), db(kF32, {20});
  linear_weight_gradient(dy, x, dw, Scratch(linear_weight_gradient_workspace(dy, x, dw)));
  linear_bias_gradient(dy, db);
  std::vector<double> want(600), sums(20);
  for (int r = 0; r < 200; ++r)
    for (int o = 0; o < 20; ++o) {
      sums[o] += dy.at(r * 20 + o);
      for (int i = 0; i < 30; ++i) want[o * 30 + i] += dy.at(r * 20 + o) * x.at(r * 30 + i);
    }
  EXPECT_LT(scaled_error(dw, want), 1e-6);
  EXPECT_LT(scaled_error(db, sums), 1e-6);
}

// In the order of blocks of 64 rows, in whichever order memory is read.
TEST(Linear, BiasGradientIsTheSumThatItSays) {
  for (const DType d : {kF32, kBF16, kF16, kF64})
    for (const int64_t rows : {1, 3, 64, 66, 131})
      for (const int64_t cols : {1, 17, 1024, 2083}) {
        const Array dy = Array::random(d, {rows, cols}, 1, 1, {cols + 3, 1});
        const DType wide = statistics_of(d);
        const Array got(wide, {cols});
        Array want(wide, {cols});
        with_threads(3, [&] { linear_bias_gradient(dy, got); });
        const auto sum = [&]<class C>() {
          for (int64_t j = 0; j < cols; ++j) {
            C total = 0;
            for (int64_t first = 0; first < rows; first += 64) {
              C block = 0;
              for (int64_t r = first; r < std::min(first + 64, rows); ++r)
                block += static_cast<C>(dy.at(r * cols + j));
              total += block;
            }
            want.set(j, static_cast<double>(total));
          }
        };
        wide == kF64 ? sum.operator()<double>() : sum.operator()<float>();
        EXPECT_TRUE(same_bits(got, want)) << name(d) << rows << "x" << cols;
      }
}

// Rows that are not evenly spaced, elements that are not adjacent.
TEST(Linear, WeightGradientOfAnyStrides) {
  for (const DType d : {kF32, kBF16}) {
    const Array x = Array::random(d, {3, 40, 33}, 1), dy = Array::random(d, {3, 40, 65}, 2),
                want(d, {65, 33});
    linear_weight_gradient(dy, x, want, Scratch(linear_weight_gradient_workspace(dy, x, want)));
    Array x2(d, {3, 40, 33}, {1, 99, 3}), dy2(d, {3, 40, 65}, {65, 200, 1});
    x2.fill([&](int64_t i) { return x.at(i); }), dy2.fill([&](int64_t i) { return dy.at(i); });
    const Array got(d, {65, 33});
    linear_weight_gradient(dy2, x2, got, Scratch(linear_weight_gradient_workspace(dy2, x2, got)));
    EXPECT_TRUE(same_bits(got, want)) << name(d);
  }
}

TEST(Linear, OfNoInputsIsItsBias) {
  for (const DType d : {kF32, kBF16}) {
    const Array x(d, {2, 5, 0}), w(d, {3, 0}), b = Array::random(d, {3}, 1), y(d, {2, 5, 3});
    linear(x, w, b, y, Scratch(linear_workspace(x, w, b, y)));
    for (int64_t i = 0; i < 30; ++i) EXPECT_EQ(y.at(i), b.at(i % 3)) << name(d);
    linear(x, w, View{}, y, Scratch(linear_workspace(x, w, View{}, y)));
    EXPECT_EQ(values(y), std::vector<double>(30, 0.0));
  }
}

void rows_and_threads_change_nothing(DType d) {
  const int64_t rows = 300, in = 130, out = 1024;
  const Array x = Array::random(d, {rows, in}, 1), w = Array::random(d, {out, in}, 2),
              b = Array::random(d, {out}, 3);
  const Array dy = Array::random(d, {rows, out}, 4);
  auto run = [&](int threads, int64_t m) {
    View xm = x, dym = dy;
    xm.shape[0] = dym.shape[0] = m;
    const Array y(d, {m, out}), dw(d, {out, in}), db(d, {out});
    with_threads(threads, [&] {
      linear(xm, w, b, y, Scratch(linear_workspace(xm, w, b, y)));
      linear_weight_gradient(dym, xm, dw, Scratch(linear_weight_gradient_workspace(dym, xm, dw)));
      linear_bias_gradient(dym, db);
    });
    return std::array{y, dw, db};
  };
  const auto one = run(1, rows), two = run(2, rows);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(one[i], two[i])) << i;
  for (int64_t m : {1, 7, 8, 9, 25, 64}) {
    View expected = one[0];
    expected.shape[0] = m;
    EXPECT_TRUE(same_bits(run(2, m)[0], expected)) << name(d) << m;
  }
}
TEST(Linear, RowsAndThreadsChangeNothing) {
  for (const DType d : {kF32, kBF16}) rows_and_threads_change_nothing(d);
}

}  // namespace
}  // namespace sheaf::kernels::cpu
