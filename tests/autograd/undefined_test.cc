// Operands that were never set: every op says so, and which one it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "sheaf/tests/autograd/sample_suite.h"
#include "sheaf/tests/sample_run.h"

namespace sheaf::testing {
namespace {

TEST(Undefined, OperandsAreNamedByEveryOp) {
  // Their samples look at the operands before any op does.
  const std::set<std::string> look{"attention",        "creation", "expand",  "expert_linear", "from_experts",
                                   "gated_delta_rule", "randn",    "reshape", "split",         "to_experts"};
  const std::set<std::string> optional{
      "add_layer_norm 2", "add_layer_norm 3", "add_rms_norm 2",     "attention 2",  "attention 3",       "contiguous 0",
      "expert_linear 3",  "gelu_linear 2",    "gelu_linear 4",      "layer_norm 1", "layer_norm 2",      "linear 2",
      "linear_gelu 2",    "linear_of_blocks 2", "packed_attention 1", "packed_attention 2", "rms_norm 1", "rotary 1"};
  std::set<std::string> without;  // ops, with an operand each, that work without it
  for (const OpSample& sample : op_samples()) {
    const std::vector<Tensor> inputs = make_inputs(sample, draw_inputs(sample, "undefined"), kF64);
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::vector<Tensor> with_hole = inputs;
      with_hole[i] = Tensor();
      Recording recording;
      try {
        sample.f(with_hole);
        without.insert(str(sample.op, ' ', i));
      } catch (const Error& error) {
        const std::string message = error.what();
        if (message.starts_with("use of an undefined tensor") && look.contains(sample.op)) continue;
        EXPECT_THAT(message, ::testing::MatchesRegex("\\[[a-z_0-9]+\\] root: input [0-9]+ is undefined")) << name_of(sample) << ' ' << i;
      }
    }
  }
  EXPECT_EQ(without, optional);
}

TEST(Undefined, OperandsOfOpsThatLookAtThem) {
  const auto message = [](const std::function<void(const Tensor&)>& f) -> std::string {
    try {
      f(Tensor());
    } catch (const LifetimeError& error) {
      return error.what();
    }
    return "no exception";
  };
  const Tensor y = full({2, 3}, 1.0);
  EXPECT_EQ(message([&](const Tensor& x) { attention(full({1, 2, 3, 4}, 1.0), x, x); }), "[attention] root: input 1 is undefined");
  EXPECT_EQ(message([](const Tensor& x) { reshape(x, {2}); }), "[reshape] root: input 0 is undefined");
  EXPECT_EQ(message([](const Tensor& x) { expand(x, {2}); }), "[expand] root: input 0 is undefined");
  EXPECT_EQ(message([](const Tensor& x) { chunk(x, 2); }), "[split] root: input 0 is undefined");
  EXPECT_EQ(message([&](const Tensor& x) { stack({y, x}); }), "[stack] root: input 1 is undefined");
  EXPECT_EQ(message([&](const Tensor& x) { concat({y, x}); }), "[concat] root: input 1 is undefined");
  EXPECT_EQ(message([](const Tensor& x) { redistribute(x, "data", Placement::replicate()); }), "[redistribute] root: input 0 is undefined");
  EXPECT_EQ(message([](const Tensor& x) { full_tensor(x); }), "[full_tensor] root: input 0 is undefined");
  EXPECT_EQ(message([](const Tensor& x) { x.shape(); }), "use of an undefined tensor: it was never set, or was moved from");
  EXPECT_EQ(message([](const Tensor& x) { Recording().backward(x); }), "[backward] the loss is undefined");
}

}  // namespace
}  // namespace sheaf::testing
