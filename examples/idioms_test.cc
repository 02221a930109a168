// Ops that the library does not have, from those that it has (docs/own_models.md, "Ops that do not exist"): each against plain loops, with
// a batch that is cut over ranks.
//
//   B samples   H height   W width   C channels   P size of a patch or window   K classes
#include <algorithm>
#include <cmath>
#include <functional>

#include <gtest/gtest.h>

#include "sheaf/sheaf.h"

namespace examples {
namespace {

using namespace sheaf;

/// Patches of images, row by row: [B, H, W, C] to [B, H/P · W/P, P · P · C], for an nn::Linear.
Tensor patches(const Tensor& x_BHWC, int64_t size) {
  const int64_t B = x_BHWC.size(0), H = x_BHWC.size(1), W = x_BHWC.size(2), C = x_BHWC.size(3);
  const Tensor split = reshape(x_BHWC, {B, H / size, size, W / size, size, C});
  return reshape(permute(split, {0, 1, 3, 2, 4, 5}), {B, (H / size) * (W / size), size * size * C});
}

/// A convolution over windows of 3 x 3, with zeros around the image: [B, H, W, C] and weight[O, 9 C] to [B, H, W, O].
Tensor conv3x3(const Tensor& x_BHWC, const Tensor& weight) {
  const int64_t H = x_BHWC.size(1), W = x_BHWC.size(2);
  const Tensor padded = pad(pad(x_BHWC, 1, 1, 1), 2, 1, 1);
  std::vector<Tensor> columns;
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 3; ++j) columns.push_back(slice(slice(padded, 1, i, i + H), 2, j, j + W));
  return linear(concat(columns, 3), weight);
}

/// The largest element of each window of P x P, per channel.
Tensor max_pool(const Tensor& x_BHWC, int64_t size) {
  const int64_t B = x_BHWC.size(0), H = x_BHWC.size(1), W = x_BHWC.size(2), C = x_BHWC.size(3);
  return max(reshape(x_BHWC, {B, H / size, size, W / size, size, C}), {2, 4});
}

Tensor one_hot(const Tensor& labels_B, int64_t classes) { return cast(eq(unsqueeze(labels_B, -1), arange(classes)), kF32); }

/// In descending order along the last dimension.
Tensor sorted(const Tensor& x) { return gather(x, -1, top_k(x, x.size(-1))); }

Tensor reversed(const Tensor& x, int dim) { return take(x, arange(static_cast<double>(x.size(dim) - 1), -1, -1), dim); }

/// Attention of each token to itself and earlier ones, among those that `visible`, bool[B, T], allows. q, k, v: [B, T, H, D], H heads.
Tensor masked_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& visible_BT = {}) {
  const int64_t T = q.size(1);
  const Tensor scores_BHTT = einsum("bthd,bshd->bhts", {q, k}) / std::sqrt(static_cast<double>(q.size(3)));
  Tensor mask = tril(ones({T, T}, kBool));  // the key is not later than the query
  if (visible_BT) mask = logical_and(mask, unsqueeze(visible_BT, {1, 2}));  // [B, 1, T, T]
  const Tensor weights_BHTT = softmax(where(mask, scores_BHTT, -1e30));
  return einsum("bhts,bshd->bthd", {weights_BHTT, v});
}

double value_at(int64_t i) { return static_cast<double>(static_cast<float>(std::sin(static_cast<double>(i * i)))); }

/// Cut over the ranks along dimension 0.
Tensor cut(const Mesh& mesh, const Tensor& x) { return redistribute(x, Layout(mesh.spec, Placement::shard(0))); }
Tensor values(const Mesh& mesh, const Shape& shape) {
  std::vector<float> x;
  for (int64_t i = 0; i < shape.numel(); ++i) x.push_back(static_cast<float>(value_at(i)));
  return cut(mesh, Tensor::from(x, shape));
}
std::vector<double> whole(const Tensor& x) { return full_tensor(x).to_vector<double>(); }

void on_ranks(const std::function<void(const Mesh&)>& test) {
  for (const int ranks : {1, 2, 3})
    run_local(ranks, [&](World& world) { test(world.mesh({{"data", world.size()}})); });
}

constexpr int64_t kB = 5, kH = 4, kW = 6, kC = 2;
int64_t index(int64_t b, int64_t h, int64_t w, int64_t c) { return ((b * kH + h) * kW + w) * kC + c; }

TEST(Idioms, Patches) {
  on_ranks([](const Mesh& mesh) {
    const Tensor y = patches(values(mesh, {kB, kH, kW, kC}), 2);
    EXPECT_EQ(y.shape(), (Shape{kB, 6, 8}));
    const auto got = whole(y);
    size_t at = 0;
    for (int64_t b = 0; b < kB; ++b)
      for (int64_t i = 0; i < kH; i += 2)
        for (int64_t j = 0; j < kW; j += 2)
          for (int64_t p = 0; p < 2; ++p)
            for (int64_t q = 0; q < 2; ++q)
              for (int64_t c = 0; c < kC; ++c) EXPECT_EQ(got[at++], value_at(index(b, i + p, j + q, c)));
  });
}

TEST(Idioms, Convolution) {
  on_ranks([](const Mesh& mesh) {
    constexpr int64_t kOut = 3;
    std::vector<float> weight;
    for (int64_t i = 0; i < kOut * 9 * kC; ++i) weight.push_back(static_cast<float>(value_at(i + 1)));
    const auto got = whole(conv3x3(values(mesh, {kB, kH, kW, kC}), Tensor::from(weight, {kOut, 9 * kC})));
    size_t at = 0;
    for (int64_t b = 0; b < kB; ++b)
      for (int64_t h = 0; h < kH; ++h)
        for (int64_t w = 0; w < kW; ++w)
          for (int64_t o = 0; o < kOut; ++o) {
            double sum = 0;
            for (int64_t i = 0; i < 3; ++i)
              for (int64_t j = 0; j < 3; ++j)
                for (int64_t c = 0; c < kC; ++c) {
                  const int64_t y = h + i - 1, x = w + j - 1;
                  if (y >= 0 && y < kH && x >= 0 && x < kW) sum += value_at(((o * 3 + i) * 3 + j) * kC + c + 1) * value_at(index(b, y, x, c));
                }
            EXPECT_NEAR(got[at++], sum, 1e-5);
          }
  });
}

TEST(Idioms, Pooling) {
  on_ranks([](const Mesh& mesh) {
    const auto got = whole(max_pool(values(mesh, {kB, kH, kW, kC}), 2));
    size_t at = 0;
    for (int64_t b = 0; b < kB; ++b)
      for (int64_t h = 0; h < kH; h += 2)
        for (int64_t w = 0; w < kW; w += 2)
          for (int64_t c = 0; c < kC; ++c)
            EXPECT_FLOAT_EQ(static_cast<float>(got[at++]),
                            static_cast<float>(std::max({value_at(index(b, h, w, c)), value_at(index(b, h, w + 1, c)),
                                                         value_at(index(b, h + 1, w, c)), value_at(index(b, h + 1, w + 1, c))})));
  });
}

TEST(Idioms, OneHotSortedReversed) {
  on_ranks([](const Mesh& mesh) {
    EXPECT_EQ(whole(one_hot(cut(mesh, Tensor::from<int64_t>({2, 0, 1}, {3})), 3)), (std::vector<double>{0, 0, 1, 1, 0, 0, 0, 1, 0}));
    const Tensor x = values(mesh, {kB, 7});
    const auto plain = whole(x), descending = whole(sorted(x)), backwards = whole(reversed(x, 1));
    for (size_t b = 0; b < kB; ++b) {
      std::vector<double> row(plain.begin() + static_cast<int64_t>(7 * b), plain.begin() + static_cast<int64_t>(7 * b + 7));
      for (size_t i = 0; i < 7; ++i) EXPECT_EQ(backwards[7 * b + i], row[6 - i]);
      std::ranges::sort(row, std::greater());
      for (size_t i = 0; i < 7; ++i) EXPECT_EQ(descending[7 * b + i], row[i]);
    }
  });
}

TEST(Idioms, Masks) {
  on_ranks([](const Mesh& mesh) {
    constexpr int64_t kT = 6, kHeads = 2, kD = 4;
    const Shape shape{kB, kT, kHeads, kD};
    const Tensor x = values(mesh, shape), q = sin(x * 3.0), k = cos(x * 5.0);
    const auto expected = whole(attention(q, k, x)), got = whole(masked_attention(q, k, x));
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-6);

    // Of sample b the first b tokens are padding: the others must not depend on them.
    std::vector<int64_t> visible;
    for (int64_t b = 0; b < kB; ++b)
      for (int64_t t = 0; t < kT; ++t) visible.push_back(t >= b);
    const Tensor seen = cut(mesh, cast(Tensor::from(visible, {kB, kT}), kBool));
    const Tensor noise = where(unsqueeze(seen, {2, 3}), 0.0, full_like(x, 7));
    const auto clean = whole(masked_attention(q, k, x, seen)), noisy = whole(masked_attention(q, k + noise, x + noise, seen));
    for (int64_t b = 0; b < kB; ++b)
      for (int64_t t = b; t < kT; ++t)
        for (int64_t i = 0; i < kHeads * kD; ++i) {
          const auto at = static_cast<size_t>((b * kT + t) * kHeads * kD + i);
          EXPECT_EQ(noisy[at], clean[at]);
        }
    EXPECT_NE(noisy, clean);  // queries that are padding see something, which is not used
  });
}

}  // namespace
}  // namespace examples
