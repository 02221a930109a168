#include "sheaf/kernels/attention.h"

#include <gmock/gmock.h>

#include "sheaf/tests/kernels/attention_kernels.h"
#include "sheaf/tests/kernels/attention_sizes.h"

namespace sheaf::kernels::cpu {
namespace {

using namespace sheaf::testing;
using ::testing::HasSubstr;

using Sizes = AttentionSizes;
const Sizes kSizes[] = {{2, 5, 5, 3, 3, 8},    {1, 64, 64, 2, 1, 64},  {2, 130, 130, 4, 2, 16},
                        {1, 1, 200, 4, 2, 32}, {1, 70, 193, 2, 2, 20}, {1, 100, 40, 2, 1, 16},
                        {3, 33, 33, 1, 1, 1},  {1, 65, 65, 2, 2, 80},
                        {1, 70, 193, 4, 2, 64}, {1, 100, 40, 2, 1, 96}, {2, 50, 50, 1, 1, 128},
                        // Values of another width: narrower and wider ones, those that bf16 kernels support and others.
                        {2, 130, 130, 4, 2, 24, 16}, {1, 70, 193, 4, 1, 192, 128}, {1, 130, 130, 4, 2, 32, 64},
                        {2, 65, 70, 2, 2, 20, 7}, {1, 100, 40, 2, 1, 40, 96}, {1, 66, 66, 2, 1, 64, 40},
                        {1, 1, 200, 4, 2, 96, 32}, {2, 33, 33, 2, 1, 1, 20}};

struct Result {
  std::vector<double> out, lse, dq, dk, dv;
};

/// Softmax attention and its gradients from the definition, in f64.
Result reference(const Sizes& s, const View& q, const View& k, const View& v, const View& dout,
                 const AttentionMask& mask, double scale) {
  Result r;
  r.out.resize(dout.numel()), r.dq.resize(q.numel()), r.dk.resize(k.numel()), r.dv.resize(v.numel()),
      r.lse.resize(s.lse().numel());
  auto qi = [&](int64_t b, int64_t t, int64_t h, int64_t d) {
    return ((b * s.queries + t) * s.heads + h) * s.width + d;
  };
  auto ki = [&](int64_t b, int64_t t, int64_t g, int64_t d) {
    return ((b * s.keys + t) * s.key_heads + g) * s.width + d;
  };
  auto oi = [&](int64_t b, int64_t t, int64_t h, int64_t e) {
    return ((b * s.queries + t) * s.heads + h) * s.value_width + e;
  };
  auto vi = [&](int64_t b, int64_t t, int64_t g, int64_t e) {
    return ((b * s.keys + t) * s.key_heads + g) * s.value_width + e;
  };
  const auto Q = values(q), K = values(k), V = values(v), G = values(dout);
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t t = 0; t < s.queries; ++t) {
        const int64_t g = h / (s.heads / s.key_heads), position = t + s.keys - s.queries;
        const int32_t* const begins = mask.has_documents() ? mask.begins.as<int32_t>() + b * mask.begins.strides[0] : nullptr;
        int64_t from = begins ? begins[t] : 0, seen = mask.causal ? std::max<int64_t>(0, std::min(s.keys, position + 1)) : s.keys;
        if (begins && !mask.causal) {
          const int32_t* const of_key = mask.key_begins.as<int32_t>() + b * mask.key_begins.strides[0];
          for (seen = from; seen < s.keys && of_key[seen] == from;) ++seen;
        }
        if (mask.window) from = std::max(from, position - mask.window + 1);
        const auto capped = [cap = mask.softcap](double score) { return cap != 0 ? cap * std::tanh(score / cap) : score; };
        std::vector<double> p(static_cast<size_t>(seen)), slopes(static_cast<size_t>(seen), 1.0);
        double most = -INFINITY, total = 0, dot = 0;
        for (int64_t j = from; j < seen; ++j) {
          double sum = 0;
          for (int64_t d = 0; d < s.width; ++d) sum += Q[qi(b, t, h, d)] * K[ki(b, j, g, d)];
          p[j] = capped(sum * scale), most = std::max(most, p[j]);
        }
        for (int64_t j = from; j < seen && mask.softcap != 0; ++j) slopes[j] = 1 - std::pow(p[j] / mask.softcap, 2);
        for (int64_t j = from; j < seen; ++j) p[j] = std::exp(p[j] - most), total += p[j];
        for (double& x : p) x = total > 0 ? x / total : 0;
        r.lse[(b * s.heads + h) * s.queries + t] = most + std::log(total);
        for (int64_t e = 0; e < s.value_width; ++e) {
          double sum = 0;
          for (int64_t j = 0; j < seen; ++j) sum += p[j] * V[vi(b, j, g, e)];
          r.out[oi(b, t, h, e)] = sum, dot += sum * G[oi(b, t, h, e)];
        }
        for (int64_t j = 0; j < seen; ++j) {
          double dp = 0;
          for (int64_t e = 0; e < s.value_width; ++e) dp += G[oi(b, t, h, e)] * V[vi(b, j, g, e)];
          const double ds = p[j] * (dp - dot) * scale * slopes[j];
          for (int64_t d = 0; d < s.width; ++d) {
            r.dq[qi(b, t, h, d)] += ds * K[ki(b, j, g, d)];
            r.dk[ki(b, j, g, d)] += ds * Q[qi(b, t, h, d)];
          }
          for (int64_t e = 0; e < s.value_width; ++e) r.dv[vi(b, j, g, e)] += p[j] * G[oi(b, t, h, e)];
        }
      }
  return r;
}

struct Arrays {
  Array out, lse, dq, dk, dv;
};

Arrays run(const Sizes& s, const View& q, const View& k, const View& v, const View& dout,
           const AttentionMask& mask, double scale, const Kernels& by = kChosen) {
  const DType d = q.dtype, stat = d == kF64 ? kF64 : kF32;
  Arrays a{Array(d, s.out()), Array(stat, s.lse()), Array(d, s.q()), Array(d, s.k()),
           Array(d, s.v())};
  const View types[] = {without_data(q), without_data(k), without_data(v)};
  with_workspace(by.workspace(types[0], types[1], types[2]),
                 [&](Workspace w) { by.forward(q, k, v, mask, scale, a.out, a.lse, w); });
  with_workspace(by.backward_workspace(types[0], types[1], types[2]), [&](Workspace w) {
    by.backward(q, k, v, a.out, a.lse, dout, mask, scale, a.dq, a.dk, a.dv, w);
  });
  return a;
}

double largest(const View& x) {
  double out = 0;
  for (const double value : values(x)) out = std::isnan(value) ? INFINITY : std::max(out, std::abs(value));
  return out;
}

void expect_the_definition(DType d, const Sizes& s, const AttentionMask& mask) {
  const Array q = Array::random(d, s.q(), 1), k = Array::random(d, s.k(), 2), v = Array::random(d, s.v(), 3),
              dout = Array::random(d, s.out(), 4);
  const double scale = std::min(0.4, 2 / std::sqrt(static_cast<double>(s.width)));  // or wide heads' scores, and so errors, are large
  const Result want = reference(s, q, k, v, dout, mask, scale);
  for (const Kernels& by : kernels(d, s.width, s.value_width)) {
    const Arrays got = run(s, q, k, v, dout, mask, scale, by);
    const double bound = 16 * epsilon(d);
    const std::string where = str(by.name, ' ', d, s.q(), s.k(), s.v(), mask.causal ? " causal" : "", " window ", mask.window,
                                  mask.has_documents() ? " documents" : "", " softcap ", mask.softcap);
    EXPECT_LT(scaled_error(got.out, want.out), bound) << where;
    EXPECT_LT(scaled_error(got.dv, want.dv), bound) << where;
    if (mask.window == 1) {  // each probability is 1, whatever the scores
      for (const Array* gradient : {&got.dq, &got.dk}) EXPECT_LT(largest(*gradient), 8 * bound) << where;
    } else {
      EXPECT_LT(scaled_error(got.dq, want.dq), bound) << where;
      EXPECT_LT(scaled_error(got.dk, want.dk), bound) << where;
    }
    Array got_lse = got.lse.clone();
    std::vector<double> want_lse = want.lse;
    for (size_t i = 0; i < want_lse.size(); ++i) {
      if (!std::isinf(want_lse[i])) continue;  // of a query that sees no key
      EXPECT_EQ(got_lse.at(static_cast<int64_t>(i)), want_lse[i]) << where;
      want_lse[i] = 0, got_lse.set(static_cast<int64_t>(i), 0);
    }
    EXPECT_LT(scaled_error(got_lse, want_lse), d == kF64 ? 1e-14 : 1e-6) << where;
  }
}

TEST(Attention, MatchesTheDefinition) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Sizes& s : kSizes)
      for (bool causal : {false, true}) expect_the_definition(d, s, causal);
}

// Windows of the query alone, within a block, up to one block, over several, and wider than the context; with as many queries as keys, with
// fewer queries than keys (the last ones, as with a cache), and with more.
TEST(Attention, WindowsMatchTheDefinition) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Sizes& s : {Sizes{1, 200, 200, 4, 2, 32}, {1, 70, 300, 2, 1, 20}, {2, 1, 200, 4, 2, 64}, {1, 100, 40, 2, 2, 96},
                           {1, 130, 200, 4, 2, 96, 64}, {1, 100, 100, 2, 1, 24, 40}})
      for (const int64_t window : {1, 2, 5, 64, 65, 66, 130, 1000}) expect_the_definition(d, s, {true, {}, window});
}

// Caps that scores come close to, and one that they do not.
TEST(Attention, SoftcapsMatchTheDefinition) {
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const Sizes& s : {Sizes{1, 200, 200, 4, 2, 32}, {1, 70, 300, 2, 1, 20}, {2, 1, 200, 4, 2, 64}, {1, 130, 200, 4, 2, 96, 64}})
      for (const double cap : {0.7, 2.0, 50.0})
        for (const AttentionMask& mask : {AttentionMask(false, {}, 0, cap), AttentionMask(true, {}, 0, cap), AttentionMask(true, {}, 70, cap)})
          expect_the_definition(d, s, mask);
}

TEST(Attention, QueriesThatSeeNothingGiveZeros) {
  const Sizes s{1, 70, 3, 1, 1, 8};
  const Array q = Array::random(kF32, s.q(), 1), k = Array::random(kF32, s.k(), 2),
              v = Array::random(kF32, s.k(), 3);
  const Arrays got = run(s, q, k, v, q, true, 1.0);
  for (int64_t i = 0; i < 67 * 8; ++i) {
    EXPECT_EQ(got.out.at(i), 0.0);
    EXPECT_EQ(got.dq.at(i), 0.0);
  }
  EXPECT_NE(got.out.at(67 * 8), 0.0);
}

TEST(Attention, NoKeysNoQueries) {
  const Sizes no_keys{1, 3, 0, 1, 1, 4}, no_queries{1, 0, 3, 1, 1, 4};
  const Array a(kF32, {1, 3, 1, 4}), none(kF32, {1, 0, 1, 4});
  EXPECT_EQ(values(run(no_keys, Array::random(kF32, {1, 3, 1, 4}, 1), none, none,
                       Array::random(kF32, {1, 3, 1, 4}, 2), false, 1)
                       .out),
            std::vector<double>(12, 0.0));
  const Array k = Array::random(kF32, {1, 3, 1, 4}, 1);
  EXPECT_EQ(values(run(no_queries, none, k, k, none, true, 1).dk), std::vector<double>(12, 0.0));
}

TEST(Attention, SlicesOfAPackedProjection) {
  const Sizes s{2, 70, 70, 3, 3, 24};
  const int64_t c = s.heads * s.width;
  const Array packed = Array::random(kF32, {2, 70, 3 * c}, 1), dout = Array::random(kF32, s.q(), 2);
  auto slice = [&](const View& from, int which) {
    View out{from.as<float>() + which * c, kF32, s.q(), Shape{70 * 3 * c, 3 * c, s.width, 1}};
    return out;
  };
  auto dense = [&](int which) { return Array::of(kF32, s.q(), values(slice(packed, which))); };
  const Arrays want = run(s, dense(0), dense(1), dense(2), dout, true, 0.2);
  const Arrays got = run(s, slice(packed, 0), slice(packed, 1), slice(packed, 2), dout, true, 0.2);
  EXPECT_TRUE(same_bits(got.out, want.out));
  EXPECT_TRUE(same_bits(got.dq, want.dq) && same_bits(got.dk, want.dk) &&
              same_bits(got.dv, want.dv));
  // Gradients may be written into such slices, too.
  const Array gradient(kF32, {2, 70, 3 * c});
  const View q = slice(packed, 0), k = slice(packed, 1), v = slice(packed, 2),
             dq = slice(gradient, 0), dk = slice(gradient, 1), dv = slice(gradient, 2);
  attention_backward(q, k, v, got.out, got.lse, dout, true, 0.2, dq, dk, dv,
                     Scratch(attention_backward_workspace(q, k, v, got.out, got.lse, dout, true, dq,
                                                          dk, dv)));
  EXPECT_TRUE(same_bits(slice(gradient, 0), want.dq) && same_bits(slice(gradient, 1), want.dk) &&
              same_bits(slice(gradient, 2), want.dv));
}

/// Whether the memory between an array's elements is unchanged.
bool gaps_are_untouched(const Array& x) {
  const Array copy = x.clone();
  const size_t size = size_of(x.view().dtype);
  unsigned char* memory = copy.view().as<unsigned char>();
  for (int64_t i = 0; i < x.view().numel(); ++i)
    std::memset(memory + static_cast<size_t>(Array::offset(x, i)) * size, 0xff, size);
  return std::all_of(memory, memory + x.bytes(), [](unsigned char c) { return c == 0xff; });
}

TEST(Attention, StridesChangeNothingWhateverTheWidths) {
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const Sizes& s : {Sizes{2, 70, 70, 4, 2, 96, 64}, {2, 70, 90, 2, 1, 24, 40}}) {
      const Array q = Array::random(d, s.q(), 1), k = Array::random(d, s.k(), 2), v = Array::random(d, s.v(), 3),
                  dout = Array::random(d, s.out(), 4);
      // With gaps after heads, rows and sequences.
      const auto spread = [&](const Shape& shape) {
        const int64_t head = shape[3] + 8, row = shape[2] * head + 24;
        return Array(d, shape, {shape[1] * row + 40, row, head, 1});
      };
      const auto moved = [&](const Array& x) {
        Array to = spread(x.view().shape);
        to.fill([&](int64_t i) { return x.at(i); });
        return to;
      };
      const Array q2 = moved(q), k2 = moved(k), v2 = moved(v), dout2 = moved(dout);
      const Array out = spread(s.out()), dq = spread(s.q()), dk = spread(s.k()), dv = spread(s.v());
      for (const Kernels& by : kernels(d, s.width, s.value_width)) {
        const Arrays want = run(s, q, k, v, dout, true, 0.3, by);
        const Array lse(statistics_of(d), s.lse());
        with_workspace(by.workspace(q2, k2, v2), [&](Workspace w) { by.forward(q2, k2, v2, true, 0.3, out, lse, w); });
        with_workspace(by.backward_workspace(q2, k2, v2), [&](Workspace w) {
          by.backward(q2, k2, v2, out, lse, dout2, true, 0.3, dq, dk, dv, w);
        });
        const std::string where = str(by.name, ' ', d, s.q(), s.v());
        EXPECT_TRUE(same_bits(out, want.out) && same_bits(lse, want.lse)) << where;
        EXPECT_TRUE(same_bits(dq, want.dq) && same_bits(dk, want.dk) && same_bits(dv, want.dv)) << where;
        for (const Array* x : {&out, &dq, &dk, &dv}) EXPECT_TRUE(gaps_are_untouched(*x)) << where;
      }
    }
}

// Zero-pads queries and keys, or values and their results' gradients, until both have one width.
TEST(Attention, WidthsThatDifferGiveTheBitsOfZerosAtTheEnd) {
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const auto& [width, value_width] : {std::pair{24, 16}, {192, 128}, {32, 64}, {20, 7}, {40, 80}, {1, 33}}) {
      const int64_t both = std::max(width, value_width);
      const Sizes s{1, 90, 130, 4, 2, width, value_width}, wide{1, 90, 130, 4, 2, both};
      const Array q = Array::random(d, s.q(), 1), k = Array::random(d, s.k(), 2), v = Array::random(d, s.v(), 3),
                  dout = Array::random(d, s.out(), 4);
      const auto widened = [&](const Array& x) {
        const Shape from = x.view().shape;
        Array to(d, {from[0], from[1], from[2], both});
        to.fill([&](int64_t i) { return i % both < from[3] ? x.at(i / both * from[3] + i % both) : 0.0; });
        return to;
      };
      const auto begin_of = [](View x, int64_t columns) {
        x.shape[3] = columns;
        return x;
      };
      for (const Kernels& by : kernels(d, s.width, s.value_width))
        for (const AttentionMask& mask : {AttentionMask(false), AttentionMask(true), AttentionMask(true, {}, 70)}) {
          const Arrays got = run(s, q, k, v, dout, mask, 0.3, by),
                       want = run(wide, widened(q), widened(k), widened(v), widened(dout), mask, 0.3, by);
          const std::string where = str(by.name, ' ', d, s.q(), s.v(), mask.causal ? " causal" : "", " window ", mask.window);
          EXPECT_TRUE(same_bits(got.out, begin_of(want.out, value_width))) << where;
          EXPECT_TRUE(same_bits(got.lse, want.lse)) << where;
          EXPECT_TRUE(same_bits(got.dq, begin_of(want.dq, width))) << where;
          EXPECT_TRUE(same_bits(got.dk, begin_of(want.dk, width))) << where;
          EXPECT_TRUE(same_bits(got.dv, begin_of(want.dv, value_width))) << where;
        }
    }
}

TEST(Attention, WorkspaceIsThatOfBothWidths) {
  for (const DType d : {kF32, kBF16}) {
    const auto sizes = [](int64_t width, int64_t value_width) { return Sizes{1, 640, 6400, 2, 1, width, value_width}; };
    for (const Kernels& by : kernels(d, 192, 128)) {
      const auto bytes = [&](bool backward, int64_t width, int64_t value_width) {
        const Sizes s = sizes(width, value_width);
        return static_cast<double>((backward ? by.backward_workspace : by.workspace)(
            View::dense(nullptr, d, s.q()), View::dense(nullptr, d, s.k()), View::dense(nullptr, d, s.v())));
      };
      // Packed keys and values take most of the workspace: in the forward pass half of that is values, in the backward pass 2 of 5, or with
      // bf16 3 of 7.
      for (const bool backward : {false, true}) {
        const double narrow = bytes(backward, 128, 128), wide = bytes(backward, 192, 192);
        for (const auto& [width, value_width] : {std::pair{192, 128}, {128, 192}}) {
          const double of_values = backward ? 0.4 : 0.5;
          EXPECT_NEAR((bytes(backward, width, value_width) - narrow) / (wide - narrow),
                      width > value_width ? 1 - of_values : of_values, 0.04)
              << by.name << name(d) << backward << width;
        }
      }
    }
  }
}

TEST(Attention, ValuesOfNoWidth) {
  const Sizes s{1, 3, 5, 2, 1, 4, 0};
  const Array q = Array::random(kF32, s.q(), 1), k = Array::random(kF32, s.k(), 2), v(kF32, s.v()), dout(kF32, s.out());
  const Arrays got = run(s, q, k, v, dout, true, 0.5);
  EXPECT_LT(scaled_error(got.lse, reference(s, q, k, v, dout, true, 0.5).lse), 1e-6);
  EXPECT_EQ(values(got.dq), std::vector<double>(24, 0.0));
  EXPECT_EQ(values(got.dk), std::vector<double>(20, 0.0));
}

TEST(Attention, BatchTimeAndThreadsChangeNothing) {
  const Sizes s{3, 150, 150, 4, 2, 48};
  const Array q = Array::random(kF32, s.q(), 1), k = Array::random(kF32, s.k(), 2),
              v = Array::random(kF32, s.k(), 3);
  const Array dout = Array::random(kF32, s.q(), 4);
  Arrays one, two;
  with_threads(1, [&] { one = run(s, q, k, v, dout, true, 0.3); });
  with_threads(2, [&] { two = run(s, q, k, v, dout, true, 0.3); });
  EXPECT_TRUE(same_bits(one.out, two.out) && same_bits(one.lse, two.lse));
  EXPECT_TRUE(same_bits(one.dq, two.dq) && same_bits(one.dk, two.dk) && same_bits(one.dv, two.dv));
  // The second sequence alone.
  auto second = [&](View v) {
    v.data = v.as<float>() + v.strides[0], v.shape[0] = 1;
    return v;
  };
  const Arrays alone =
      run({1, 150, 150, 4, 2, 48}, second(q), second(k), second(v), second(dout), true, 0.3);
  EXPECT_TRUE(same_bits(alone.out, second(one.out)) && same_bits(alone.dq, second(one.dq)) &&
              same_bits(alone.dk, second(one.dk)));
  // The first 37 positions alone: the causal past.
  auto past = [&](View v) {
    v.shape[1] = 37;
    return v;
  };
  const Arrays prefix =
      run({3, 37, 37, 4, 2, 48}, past(q), past(k), past(v), past(dout), true, 0.3);
  EXPECT_TRUE(same_bits(prefix.out, past(one.out)));
  // The last position alone, with all keys: one step of generation.
  auto last = [&](View v) {
    v.data = v.as<float>() + 149 * v.strides[1], v.shape[1] = 1;
    return v;
  };
  const Arrays step = run({3, 1, 150, 4, 2, 48}, last(q), k, v, last(dout), true, 0.3);
  EXPECT_TRUE(same_bits(step.out, last(one.out)));
}

// Documents of one token, of whole blocks, beginning and ending anywhere in a block; the second sequence is one document.
constexpr int64_t kLengths[] = {1, 64, 2, 63, 130, 7, 33};

/// Where documents of these lengths begin, in the first of `batch` sequences.
Array begins_of(int64_t batch) {
  int64_t tokens = 0;
  for (const int64_t n : kLengths) tokens += n;
  Array begins(kI32, {batch, tokens});
  begins.fill([](int64_t) { return 0; });
  int64_t begin = 0;
  for (const int64_t n : kLengths) {
    for (int64_t t = begin; t < begin + n; ++t) begins.set(t, static_cast<double>(begin));
    begin += n;
  }
  return begins;
}

/// Of sequence b, `count` positions from `begin` on along dimension `dim`.
View part(View v, int64_t b, int dim, int64_t begin, int64_t count) {
  const int64_t offset = b * v.strides[0] + begin * v.strides[dim];
  v.data = v.as<char>() + offset * static_cast<int64_t>(size_of(v.dtype));
  v.shape[0] = 1, v.shape[dim] = count;
  return v;
}

TEST(Attention, PackedDocumentsHaveTheBitsThatTheyHaveAlone) {
  const Array begins = begins_of(2);
  const int64_t tokens = begins.view().shape[1];
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const auto& [s, causal] : {std::pair{Sizes{2, tokens, tokens, 4, 2, 64}, true}, {{2, tokens, tokens, 2, 2, 20}, true},
                                    {{2, tokens, tokens, 2, 1, 96, 64}, true}, {{2, tokens, tokens, 2, 1, 20, 40}, true},
                                    {{2, tokens, tokens, 4, 2, 64}, false}, {{2, tokens, tokens, 2, 1, 20, 40}, false}}) {
      const Array q = Array::random(d, s.q(), 1), k = Array::random(d, s.k(), 2), v = Array::random(d, s.v(), 3),
                  dout = Array::random(d, s.out(), 4);
      for (const Kernels& by : kernels(d, s.width, s.value_width)) {
        Arrays got, again;
        with_threads(1, [&] { got = run(s, q, k, v, dout, {causal, begins}, 0.4, by); });
        with_threads(3, [&] { again = run(s, q, k, v, dout, {causal, begins}, 0.4, by); });
        EXPECT_TRUE(same_bits(got.out, again.out) && same_bits(got.dq, again.dq) && same_bits(got.dk, again.dk) &&
                    same_bits(got.dv, again.dv)) << by.name << ' ' << name(d) << " threads";
        const auto compare = [&](int64_t b, int64_t begin, int64_t n) {
          const auto rows = [&](const View& x) { return part(x, b, 1, begin, n); };
          const Arrays alone = run({1, n, n, s.heads, s.key_heads, s.width, s.value_width}, rows(q), rows(k), rows(v), rows(dout),
                                   causal, 0.4, by);
          const std::string where = str(by.name, ' ', d, s.q(), " document from ", begin, " of ", b);
          EXPECT_TRUE(same_bits(alone.out, rows(got.out))) << where;
          EXPECT_TRUE(same_bits(alone.lse, part(got.lse, b, 2, begin, n))) << where;
          EXPECT_TRUE(same_bits(alone.dq, rows(got.dq))) << where;
          EXPECT_TRUE(same_bits(alone.dk, rows(got.dk))) << where;
          EXPECT_TRUE(same_bits(alone.dv, rows(got.dv))) << where;
        };
        int64_t begin = 0;
        for (const int64_t n : kLengths) compare(0, begin, n), begin += n;
        compare(1, 0, tokens);
      }
    }
}

TEST(Attention, DocumentsWithoutACausalMask) {
  const Array begins = begins_of(2);
  const int64_t tokens = begins.view().shape[1];
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const int64_t value_width : {32, 16}) expect_the_definition(d, {2, tokens, tokens, 4, 2, 32, value_width}, {false, begins});
}

/// Keys with documents of their own: of these many, some of queries, some of keys, some of both. In a second sequence all queries see
/// the first 100 keys.
struct PairedDocuments {
  static constexpr std::pair<int64_t, int64_t> kPairs[] = {{70, 64}, {0, 65}, {3, 1}, {129, 2}, {1, 130}, {0, 33}, {12, 7}, {5, 0}};
  Array of_queries, of_keys;
  PairedDocuments() {
    int64_t queries = 0, keys = 0;
    for (const auto& [q, k] : kPairs) queries += q, keys += k;
    of_queries = Array(kI32, {2, queries}), of_keys = Array(kI32, {2, keys});
    of_queries.fill([](int64_t) { return 0; });
    of_keys.fill([&](int64_t i) { return i < keys + 100 ? 0 : 100; });
    for_each([&](int64_t q, int64_t queries_here, int64_t k, int64_t keys_here) {
      for (int64_t t = q; t < q + queries_here; ++t) of_queries.set(t, static_cast<double>(k));
      for (int64_t s = k; s < k + keys_here; ++s) of_keys.set(s, static_cast<double>(k));
    });
  }
  /// Calls f(first query, queries, first key, keys) for the documents of the first sequence.
  template <class F>
  static void for_each(F&& f) {
    int64_t query = 0, key = 0;
    for (const auto& [queries, keys] : kPairs) f(query, queries, key, keys), query += queries, key += keys;
  }
  Sizes sizes(int64_t heads, int64_t key_heads, int64_t width, int64_t value_width) const {
    return {2, of_queries.view().shape[1], of_keys.view().shape[1], heads, key_heads, width, value_width};
  }
  AttentionMask mask(double cap = 0) const {
    AttentionMask m(false, of_queries, 0, cap);
    m.key_begins = of_keys;
    return m;
  }
};

TEST(Attention, DocumentsOfOtherKeys) {
  const PairedDocuments documents;
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const auto& [cap, value_width] : {std::pair{0.0, 32}, {2.0, 16}})
      expect_the_definition(d, documents.sizes(2, 1, 32, value_width), documents.mask(cap));
}

TEST(Attention, DocumentsOfOtherKeysHaveTheBitsThatTheyHaveAlone) {
  const PairedDocuments documents;
  for (const DType d : {kF32, kBF16}) {
    const Sizes s = documents.sizes(4, 2, 32, 64);
    const Array q = Array::random(d, s.q(), 1), k = Array::random(d, s.k(), 2), v = Array::random(d, s.v(), 3), dout = Array::random(d, s.out(), 4);
    for (const Kernels& by : kernels(d, s.width, s.value_width)) {
      const Arrays got = run(s, q, k, v, dout, documents.mask(), 0.4, by);
      const auto compare = [&](int64_t b, int64_t query, int64_t queries, int64_t key, int64_t keys) {
        if (queries == 0 || keys == 0) return;
        const auto of_queries = [&](const View& x) { return part(x, b, 1, query, queries); };
        const auto of_keys = [&](const View& x) { return part(x, b, 1, key, keys); };
        const Arrays alone = run({1, queries, keys, s.heads, s.key_heads, s.width, s.value_width}, of_queries(q), of_keys(k), of_keys(v),
                                 of_queries(dout), false, 0.4, by);
        EXPECT_TRUE(same_bits(alone.out, of_queries(got.out)) && same_bits(alone.lse, part(got.lse, b, 2, query, queries)) &&
                    same_bits(alone.dq, of_queries(got.dq)) && same_bits(alone.dk, of_keys(got.dk)) && same_bits(alone.dv, of_keys(got.dv)))
            << by.name << ' ' << name(d) << " queries from " << query << " of " << b;
      };
      documents.for_each([&](int64_t query, int64_t queries, int64_t key, int64_t keys) { compare(0, query, queries, key, keys); });
      compare(1, 0, s.queries, 0, 100);
    }
  }
}

TEST(Attention, WindowsAndDocumentsTogether) {
  const Array begins = begins_of(2);
  const int64_t tokens = begins.view().shape[1];
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const auto& [window, value_width] : {std::pair{1, 32}, {50, 16}, {64, 32}, {100, 64}})
      expect_the_definition(d, {2, tokens, tokens, 4, 2, 32, value_width}, {true, begins, window});
}

bool same(const Arrays& a, const Arrays& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) &&
         same_bits(a.dv, b.dv);
}

TEST(Attention, AWindowOfAllKeysIsNone) {
  for (const DType d : {kF32, kF64, kBF16, kF16})
    for (const Sizes& s : {Sizes{2, 150, 150, 2, 1, 64}, {1, 70, 193, 2, 2, 20}, {1, 70, 150, 2, 1, 64, 32}}) {
      const Array q = Array::random(d, s.q(), 1), k = Array::random(d, s.k(), 2), v = Array::random(d, s.v(), 3),
                  dout = Array::random(d, s.out(), 4);
      for (const Kernels& by : kernels(d, s.width, s.value_width)) {
        const Arrays want = run(s, q, k, v, dout, true, 0.4, by);
        for (const int64_t window : {s.keys, s.keys + 64, std::numeric_limits<int64_t>::max()})
          EXPECT_TRUE(same(run(s, q, k, v, dout, {true, {}, window}, 0.4, by), want)) << by.name << name(d) << window;
        EXPECT_FALSE(same(run(s, q, k, v, dout, {true, {}, s.keys - 1}, 0.4, by), want)) << by.name << name(d);
      }
    }
}

// The past and the last position alone, as with a cache, and with foreign keys before the window.
TEST(Attention, RowsUnderAWindowDependOnWhatTheySeeAlone) {
  for (const DType d : {kF32, kBF16}) {
    const Sizes s{2, 300, 300, 4, 2, 32};
    const Array q = Array::random(d, s.q(), 1), k = Array::random(d, s.k(), 2), v = Array::random(d, s.k(), 3),
                dout = Array::random(d, s.q(), 4);
    for (const Kernels& by : kernels(d, s.width, s.value_width))
      for (const int64_t window : {1, 64, 90}) {
        const AttentionMask mask(true, {}, window);
        const std::string where = str(by.name, ' ', d, " window ", window);
        Arrays all, threads;
        with_threads(1, [&] { all = run(s, q, k, v, dout, mask, 0.4, by); });
        with_threads(3, [&] { threads = run(s, q, k, v, dout, mask, 0.4, by); });
        EXPECT_TRUE(same(all, threads)) << where;
        const auto rows = [&](const View& x, int64_t first, int64_t count) { return part(x, 1, 1, first, count); };
        const Arrays past = run({1, 170, 170, 4, 2, 32}, rows(q, 0, 170), rows(k, 0, 170), rows(v, 0, 170), rows(dout, 0, 170),
                                mask, 0.4, by);
        EXPECT_TRUE(same_bits(past.out, rows(all.out, 0, 170)) && same_bits(past.dq, rows(all.dq, 0, 170))) << where;
        const Arrays last = run({1, 7, 300, 4, 2, 32}, rows(q, 293, 7), rows(k, 0, 300), rows(v, 0, 300), rows(dout, 293, 7),
                                mask, 0.4, by);
        EXPECT_TRUE(same_bits(last.out, rows(all.out, 293, 7)) && same_bits(last.dq, rows(all.dq, 293, 7))) << where;
        // Replaces the keys and values that no query from 256 on sees.
        Array other_k = Array::of(d, s.k(), values(k)), other_v = Array::of(d, s.k(), values(v));
        const int64_t hidden = 256 - window + 1, row = s.key_heads * s.width;
        for (int64_t i = 0; i < hidden * row; ++i) {
          other_k.set(300 * row + i, 3.0), other_v.set(300 * row + i, -2.0);
        }
        const Arrays other = run(s, q, other_k, other_v, dout, mask, 0.4, by);
        EXPECT_TRUE(same_bits(rows(other.out, 256, 44), rows(all.out, 256, 44))) << where;
        EXPECT_TRUE(same_bits(rows(other.dq, 256, 44), rows(all.dq, 256, 44))) << where;
      }
  }
}

// NaN among a block's keys would spread through its products, even where it counts nothing.
TEST(Attention, BlocksOutsideOfAWindowAreNotTouched) {
  for (const DType d : {kF32, kF64, kBF16, kF16}) {
    const Sizes s{1, 256, 256, 2, 1, 64, 32};
    const Array q = Array::random(d, s.q(), 1), dout = Array::random(d, s.out(), 4);
    Array k = Array::random(d, s.k(), 2), v = Array::random(d, s.v(), 3);
    for (int64_t i = 0; i < 64 * s.width; ++i) k.set(i, NAN);
    for (int64_t i = 0; i < 64 * s.value_width; ++i) v.set(i, NAN);
    const auto clean = [](const View& x) {
      for (const double value : values(x))
        if (std::isnan(value)) return false;
      return true;
    };
    for (const Kernels& by : kernels(d, s.width, s.value_width)) {
      const Arrays got = run(s, q, k, v, dout, {true, {}, 64}, 0.4, by);
      EXPECT_TRUE(clean(part(got.out, 0, 1, 128, 128))) << by.name << name(d);
      EXPECT_TRUE(clean(part(got.dq, 0, 1, 128, 128))) << by.name << name(d);
      EXPECT_TRUE(clean(part(got.dk, 0, 1, 128, 128))) << by.name << name(d);
      EXPECT_TRUE(clean(part(got.dv, 0, 1, 128, 128))) << by.name << name(d);
    }
  }
}

TEST(Attention, RefusesWindowsAndCapsThatAreNone) {
  const Array q = Array::random(kF32, {1, 4, 2, 8}, 1), lse(kF32, {1, 2, 4}), out(kF32, {1, 4, 2, 8});
  for (const auto& [mask, message] : {std::pair{AttentionMask(true, {}, -1), "[attention] a window of -1 keys"},
                                      {AttentionMask(false, {}, 2), "a window of 2 keys, not causal"},
                                      {AttentionMask(true, {}, 0, -1.0), "[attention] a softcap of -1; wants 0 for none"}})
    try {
      attention(q, q, q, mask, 1, out, lse, Scratch(1 << 20));
      ADD_FAILURE();
    } catch (const ShapeError& e) {
      EXPECT_THAT(e.what(), HasSubstr(message));
    }
}

TEST(Attention, RefusesWhatIsNoBeginOfADocument) {
  const Array q = Array::random(kF32, {1, 4, 2, 8}, 1);
  const Array lse(kF32, {1, 2, 4}), out(kF32, {1, 4, 2, 8});
  const auto refusal = [&](const View& begins, bool causal = true, int64_t keys = 4) -> std::string {
    const Array k = Array::random(kF32, {1, keys, 2, 8}, 2);
    try {
      attention(q, k, k, {causal, begins}, 1, out, lse, Scratch(1 << 20));
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  const auto begins = [](std::vector<double> values, DType d = kI32) { return Array::of(d, {1, 4}, values); };
  EXPECT_EQ(refusal(begins({0, 0, 2, 2})), "");
  EXPECT_THAT(refusal(begins({0, 0, 1, 2})), HasSubstr("[attention] begins[0,2] is 1"));
  EXPECT_THAT(refusal(begins({0, 1, 0, 0})), HasSubstr("begins[0,2] is 0"));
  EXPECT_THAT(refusal(begins({-1, 0, 0, 0})), HasSubstr("begins[0,0] is -1"));
  EXPECT_THAT(refusal(begins({0, 0, 9, 9})), HasSubstr("begins[0,2] is 9"));
  EXPECT_EQ(refusal(begins({0, 0, 2, 2}), false), "");
  EXPECT_THAT(refusal(begins({0, 0, 2, 2}), false, 5), HasSubstr("not causal; wants [B,S] of keys"));
  for (const std::vector<double>& wrong : {std::vector<double>{0, 0, 1, 1}, {0, 0, 9, 9}, {0, -1, 0, 0}, {0, 2, 0, 0}})
    EXPECT_THAT(refusal(begins(wrong), false), HasSubstr("] is ")) << wrong[2];
  EXPECT_THAT(refusal(begins({0, 0, 2, 2}), true, 3), HasSubstr("no fewer keys than queries"));
  EXPECT_THAT(refusal(begins({0, 0, 2, 2}, kI64)), HasSubstr("must be i32, not i64"));
  EXPECT_THAT(refusal(Array::of(kI32, {2, 2}, {0, 0, 0, 0})), HasSubstr("wants [B,T]"));
}

TEST(Attention, LargeScoresStayFinite) {
  const Sizes s{1, 80, 80, 1, 1, 16};
  const Array q = Array::random(kF32, s.q(), 1, 100), k = Array::random(kF32, s.k(), 2, 100),
              v = Array::random(kF32, s.k(), 3);
  const Arrays got = run(s, q, k, v, q, true, 1.0);
  EXPECT_LT(scaled_error(got.out, reference(s, q, k, v, q, true, 1.0).out), 1e-2);
}

TEST(Attention, RefusesWrongShapes) {
  const Array q(kF32, {1, 4, 3, 8}), k(kF32, {1, 4, 2, 8}), lse(kF32, {1, 3, 4});
  EXPECT_THROW(attention(q, k, k, true, 1, q, lse, Scratch(1 << 20)), ShapeError);
}

TEST(Attention, RefusesWrongShapesOfValues) {
  const Array q = Array::random(kF32, {1, 4, 4, 8}, 1), k = Array::random(kF32, {1, 5, 2, 8}, 2), lse(kF32, {1, 4, 4});
  const Shape v_shape{1, 5, 2, 6}, out_shape{1, 4, 4, 6};
  const auto array = [](const Shape& s) { return Array::random(kF32, s, 3); };
  const auto forward = [&](const Shape& v, const Shape& out) -> std::string {
    try {
      attention(q, k, array(v), true, 1, array(out), lse, Scratch(1 << 20));
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "";
  };
  const auto backward = [&](const Shape& v, const Shape& out, const Shape& dout, const Shape& dv) -> std::string {
    try {
      attention_backward(q, k, array(v), array(out), lse, array(dout), true, 1, array(q.view().shape), array(k.view().shape),
                         array(dv), Scratch(1 << 20));
    } catch (const ShapeError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(forward(v_shape, out_shape), "");
  EXPECT_EQ(backward(v_shape, out_shape, out_shape, v_shape), "");
  for (const Shape& v : {Shape{2, 5, 2, 6}, {1, 4, 2, 6}, {1, 5, 1, 6}, {1, 5, 4, 6}, {1, 5, 2, 8}, {1, 5, 12}}) {
    EXPECT_THAT(forward(v, out_shape), HasSubstr("values [B,S,G,E]")) << v.to_string();
    EXPECT_THAT(backward(v, out_shape, out_shape, v), HasSubstr("values [B,S,G,E]")) << v.to_string();
    EXPECT_NE(backward(v_shape, out_shape, out_shape, v), "") << v.to_string();
  }
  for (const Shape& out : {Shape{2, 4, 4, 6}, {1, 5, 4, 6}, {1, 4, 2, 6}, {1, 4, 4, 8}, {1, 4, 24}}) {
    EXPECT_THAT(forward(v_shape, out), HasSubstr("output [B,T,H,E]")) << out.to_string();
    EXPECT_THAT(backward(v_shape, out, out_shape, v_shape), HasSubstr("output [B,T,H,E]")) << out.to_string();
    EXPECT_THAT(backward(v_shape, out_shape, out, v_shape), HasSubstr("output [B,T,H,E]")) << out.to_string();
  }
  // Gradients of values of another width than theirs, together with such a gradient of the output.
  EXPECT_THAT(backward(v_shape, out_shape, {1, 4, 4, 8}, {1, 5, 2, 8}), HasSubstr("gradients"));
}

}  // namespace
}  // namespace sheaf::kernels::cpu
