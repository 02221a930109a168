// Parameters and buffers in expressions of a program that does not mention namespace sheaf: this file has no using-directive.
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/shard.h"

namespace my_project {
namespace {

using Values = std::vector<float>;

struct Leaves : sheaf::nn::Module {
  sheaf::nn::Parameter weight{{2, 2}, sheaf::nn::Init::constant(3)}, scale{{2}, sheaf::nn::Init::constant(0.5)},
      position{{1, 4}, sheaf::nn::Init::ones()};
  sheaf::nn::Buffer mean{{2}, sheaf::nn::Init::constant(2)};
  SHEAF_FIELDS(weight, scale, position, mean);
};

TEST(Expressions, FindTheOpsOfParametersAndBuffers) {
  Leaves m;
  sheaf::materialize(m);
  EXPECT_EQ((m.weight * m.scale).to_vector(), Values(4, 1.5f));
  EXPECT_EQ((2.0 * m.scale).to_vector(), Values(2, 1.0f));
  EXPECT_EQ((m.scale - 1).to_vector(), Values(2, -0.5f));
  EXPECT_EQ((-m.scale / m.mean).to_vector(), Values(2, -0.25f));
  EXPECT_EQ((m.mean + 1.0).to_vector(), Values(2, 3.0f));
  EXPECT_EQ(slice(m.position, 1, 0, 3).to_vector(), Values(3, 1.0f));
  EXPECT_EQ(sum(square(m.weight)).item(), 36.0f);
  EXPECT_EQ(matmul(m.weight, m.weight).to_vector(), Values(4, 18.0f));
  EXPECT_EQ(exp(m.mean - m.mean).to_vector(), Values(2, 1.0f));
  EXPECT_EQ(reshape(transpose(m.position, 0, 1), {2, 2}).to_vector(), Values(4, 1.0f));
}

}  // namespace
}  // namespace my_project
