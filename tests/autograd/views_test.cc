// Where the results of reshape() share their operand's memory: wherever strides can express them. How tensors are printed.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "sheaf/autograd/ops.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {
namespace {

// The offsets of a view's elements, in row-major order.
std::vector<int64_t> offsets_of(const Shape& shape, const Shape& strides) {
  std::vector<int64_t> out{0};
  for (int d = 0; d < shape.rank(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t at : out)
      for (int64_t i = 0; i < shape[d]; ++i) next.push_back(at + i * strides[d]);
    out = std::move(next);
  }
  return out;
}

// By definition: some strides visit these offsets in this shape.
bool has_strides(const std::vector<int64_t>& offsets, const Shape& shape) {
  Shape strides = Shape::filled(shape.rank(), 0);
  int64_t below = 1;
  for (int d = shape.rank() - 1; d >= 0; below *= shape[d--])
    if (shape[d] > 1) strides[d] = offsets[static_cast<size_t>(below)];
  return offsets_of(shape, strides) == offsets;
}

Shape random_shape(Generator& draw, int64_t elements) {
  Shape shape;
  while (elements > 1 || shape.rank() == 0) {
    std::vector<int64_t> divisors{1};
    for (int64_t d = 2; d <= elements; ++d)
      if (elements % d == 0) divisors.push_back(d);
    const int64_t size = shape.rank() == 4 ? elements : divisors[static_cast<size_t>(draw.below(std::ssize(divisors)))];
    shape.push_back(size);
    elements /= size;
  }
  return shape;
}

TEST(Reshape, SharesMemoryWhereverStridesCanExpressIt) {
  Generator draw("reshape");
  int shared = 0, copied = 0;
  for (int round = 0; round < 4000; ++round) {
    const int64_t elements = std::vector<int64_t>{1, 2, 6, 8, 12, 24, 36}[static_cast<size_t>(draw.below(7))];
    Shape whole = random_shape(draw, elements);
    Tensor x = Tensor::from([&] {
      std::vector<double> values(static_cast<size_t>(2 * elements));
      std::iota(values.begin(), values.end(), 0.0);
      return values;
    }(), Shape{2 * elements});
    const bool sliced = draw.below(2) == 1;
    if (sliced) whole[0] *= 2;
    x = reshape(sliced ? x : slice(x, 0, 0, elements), whole);
    if (sliced) x = slice(x, 0, 0, whole[0] / 2);
    if (x.rank() > 1 && draw.below(2) == 1) x = transpose(x, static_cast<int>(draw.below(x.rank())), static_cast<int>(draw.below(x.rank())));
    const Shape shape = random_shape(draw, elements);
    const Tensor y = reshape(x, shape);
    EXPECT_EQ(y.to_vector<double>(), x.to_vector<double>()) << str(x.type(), " to ", shape);
    const bool can = has_strides(offsets_of(x.shape(), x.view().strides), shape);
    EXPECT_EQ(y.storage() == x.storage(), can) << str(x.type(), " with strides ", x.view().strides, " to ", shape);
    ++(can ? shared : copied);
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(copied, 300);
}

TEST(Tensor, PrintsItsFirstElements) {
  Generator draw("print");
  for (int round = 0; round < 300; ++round) {
    Shape shape;
    for (int64_t d = draw.below(4); d >= 0; --d) shape.push_back(draw.below(9) + (draw.below(4) ? 0 : 60));
    std::vector<double> numbers(static_cast<size_t>(shape.numel()));
    std::iota(numbers.begin(), numbers.end(), 0.0);
    Tensor x = Tensor::from(numbers, shape);
    if (x.rank() > 1) x = transpose(x, 0, static_cast<int>(draw.below(x.rank())));
    const std::vector<double> values = x.to_vector<double>();
    std::string expected = str(x.type(), " cpu");
    for (size_t i = 0; i < std::min<size_t>(values.size(), 64); ++i)
      expected += str(i % static_cast<size_t>(x.shape().back()) == 0 ? "\n  " : " ", values[i]);
    EXPECT_EQ(x.to_string(), expected + (values.size() > 64 ? " ..." : ""));
  }
}

}  // namespace
}  // namespace sheaf::testing
