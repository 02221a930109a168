// The orthogonal factor of matrices.
#include "sheaf/nn/optim/orthogonalize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"

namespace sheaf {
namespace {

TEST(Orthogonalize, BringsSingularValuesNearOne) {
  const Tensor x = uniform({kF64, {2, 5, 3}, {}}, key_of("x", 1), -1, 1);
  const Tensor o = optim::orthogonalize(x);
  EXPECT_EQ(o.shape(), x.shape());
  const std::vector<double> gram = matmul(transpose(o, 1, 2), o).to_vector<double>();
  for (int b = 0; b < 2; ++b) {
    double trace = 0;
    for (int i = 0; i < 3; ++i) trace += gram[static_cast<size_t>(9 * b + 4 * i)];
    EXPECT_GT(trace, 3 * 0.68 * 0.68);
    EXPECT_LT(trace, 3 * 1.21 * 1.21);
  }
  // For a diagonal matrix it is the polynomial.
  const Tensor d = optim::orthogonalize(Tensor::from<double>({3, 0, 0, 4}, {2, 2}), {.steps = 1, .eps = 0});
  const auto p = [](double s) { return 3.4445 * s - 4.7750 * s * s * s + 2.0315 * s * s * s * s * s; };
  EXPECT_THAT(d.to_vector<double>(), ::testing::Pointwise(::testing::DoubleNear(1e-14), {p(0.6), 0.0, 0.0, p(0.8)}));
  EXPECT_EQ(optim::orthogonalize(zeros({2, 3})).to_vector(), std::vector<float>(6, 0.0f));
  EXPECT_THROW(optim::orthogonalize(ones({3})), ShapeError);
}

TEST(Orthogonalize, MultipliesOverTheLongerSide) {
  for (const Shape& shape : {Shape{9, 2}, Shape{2, 9}}) {
    Recording recording;
    optim::orthogonalize(ones(shape), {.steps = 1});
    std::vector<int64_t> sizes;
    for (NodeId i = 0; i < recording.tape().num_nodes(); ++i)
      if (const Node& n = recording.tape().node(i); n.op && recording.tape().op_name(n) == "matmul")
        sizes.push_back(recording.tape().type(recording.tape().output(n)).shape.numel());
    EXPECT_THAT(sizes, ::testing::ElementsAre(4, 4, 18)) << str(shape);
  }
}

}  // namespace
}  // namespace sheaf
