// Training with FP8 products: how close it is to f32 and bf16, which layers use them, and which guarantees stay exact.
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 12;

models::TrainConfig in_fp8(const std::string& products, const std::string& type = "gpt2") {
  models::TrainConfig c = tiny_config();
  c.model.type = type;
  c.model.width = 32, c.model.mlp_width = type == "llama" ? 48 : 0;
  c.train.batch = 6;
  c.train.fp8 = products;
  return c;
}

TEST(Fp8Training, LearnsAsWithoutIt) {
  for (const char* type : {"gpt2", "llama"})
    for (const char* dtype : {"f32", "bf16"}) {
      models::TrainConfig plain = in_fp8("none", type);
      plain.train.dtype = dtype;
      const TrainedRun exact = train_tiny(plain, 1, kSteps);
      for (const char* products : {"activations", "all"}) {
        SCOPED_TRACE(str(type, ' ', dtype, ' ', products));
        models::TrainConfig c = in_fp8(products, type);
        c.train.dtype = dtype;
        const TrainedRun run = train_tiny(c, 1, kSteps);
        EXPECT_NE(run.losses, exact.losses);
        EXPECT_LT(run.losses.back(), run.losses.front() - 0.1f);
        for (size_t i = 0; i < run.losses.size(); ++i) EXPECT_NEAR(run.losses[i], exact.losses[i], 0.03f) << i;
        EXPECT_NEAR(run.norms.front() / exact.norms.front(), 1, 0.05);
      }
    }
}

/// The number of nodes with this op in a step, and how many of them round to FP8.
std::pair<int, int> rounding(const Tape& tape, std::string_view op) {
  int all = 0, rounds = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (tape.op_name(n) != op) continue;
    std::string attrs;
    if (n.op->describe) n.op->describe(tape.attrs(n), attrs);
    ++all, rounds += attrs.starts_with("fp8");
  }
  return {all, rounds};
}

TEST(Fp8Training, TheTapeSaysWhatIsRounded) {
  for (const bool all : {false, true})
    run_local(2, [&](World& w) {
      const models::TrainConfig c = in_fp8(all ? "all" : "activations");
      models::TrainingStep step(c, c.model.vocab, w, Device::cpu());
      models::RecordedStep recorded;
      step.run(0, fill_tiny, &recorded);
      const Tape& tape = recorded.tape;
      const int layers = static_cast<int>(c.model.layers);
      using Count = std::pair<int, int>;
      EXPECT_EQ(rounding(tape, "linear"), Count(2 * layers, 2 * layers));  // attention's
      EXPECT_EQ(rounding(tape, "linear_gelu"), Count(layers, layers));
      EXPECT_EQ(rounding(tape, "gelu_linear"), Count(layers, layers));
      EXPECT_EQ(rounding(tape, "gelu_linear_backward"), Count(layers, layers));
      EXPECT_EQ(rounding(tape, "matmul"), Count(3 * layers, 3 * layers));
      EXPECT_EQ(rounding(tape, "linear_gradients"), Count(4 * layers, all ? 4 * layers : 0));
      for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.message;
    }, {.threads_per_rank = 1});
}

// Results that do not depend on the cut of the batch stay bitwise equal: over strategies, prefetch, and ranks against micro-batches with
// the same rows.
TEST(Fp8Training, StrategiesAndMicroBatchesAgreeBitwise) {
  for (const char* products : {"activations", "all"}) {
    models::TrainConfig c = in_fp8(products);
    c.train.dtype = "bf16";
    const TrainedRun expected = train_tiny(c, 2, kSteps);
    const auto expect_same = [&](const models::TrainConfig& config, int world) { expect_same_bits(train_tiny(config, world, kSteps), expected); };
    for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
      models::TrainConfig other = c;
      other.sharding.strategy = strategy;
      expect_same(other, 2);
    }
    models::TrainConfig eager = c, again = c, program = c;
    eager.sharding.prefetch_bytes = 0, again.train.recompute = "block", program.train.compile = true;
    for (const models::TrainConfig& other : {eager, again, program}) expect_same(other, 2);
    models::TrainConfig micro = c;
    micro.train.micro_batches = 2;
    expect_same(micro, 1);
  }
}

TEST(Fp8Training, RefusesWhatItCannotDo) {
  models::TrainConfig narrow = tiny_config();  // whose widths are no multiples of 16
  narrow.train.fp8 = "all";
  EXPECT_THROW(train_tiny(narrow, 1, 1), ConfigError);
  EXPECT_THROW(train_tiny(in_fp8("rowwise"), 1, 1), ConfigError);
}

}  // namespace
}  // namespace sheaf::testing
