// Strategy zero1 under gradient accumulation: gathered weights stay for all micro-batches of a step, and gradients wait, Partial, for its
// end. One all_gather and one reduce_scatter per unit and step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/plan.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int kMicroBatches = 3;
constexpr int64_t kRows = 7;  // of a micro-batch

/// Variants of a user-defined loop.
struct Loop {
  bool says_last = true;      // BackwardOptions::last_micro_batch
  bool one_recording = true;  // for all micro-batches of a step
  int replicas = 1;
  int steps = 2;
  std::string strategy = "zero1";
  int64_t prefetch = -1;
};

struct Result {
  Values parameters, gradients;  // of the last step
  std::vector<Tape> tapes;       // of rank 0's last step
};

/// A tiny GPT in f64, `steps` of AdamW with clipping.
Result train(int world, const Loop& loop) {
  Whole parameters, gradients;
  Result result;
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh({{"replica", loop.replicas}, {"data", w.size() / loop.replicas}});
    const auto model = tiny_model_f64(mesh, {.strategy = loop.strategy, .prefetch_bytes = loop.prefetch});
    optim::AdamW optimizer(model->parameters(), {});
    for (int step = 0; step < loop.steps; ++step) {
      std::optional<Recording> recording;
      const auto end = [&] {
        if (w.rank() == 0 && step + 1 == loop.steps) result.tapes.push_back(recording->take());
        recording.reset();
      };
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        if (!recording) recording.emplace(RecordingOptions{.step = step});
        const TinyBatch batch = tiny_batch(mesh, kRows * (step * kMicroBatches + micro), kRows);
        recording->next_micro_batch(kRows * micro);
        const Tensor loss =
            model->loss(batch.tokens, batch.targets, {.divide_by = static_cast<double>(kMicroBatches * batch.tokens.numel())});
        recording->backward(loss, {.last_micro_batch = loop.says_last && micro + 1 == kMicroBatches});
        if (!loop.one_recording) end();
      }
      if (step + 1 == loop.steps && !recording) gradients.collect(*model, true);
      clip_grad_norm(*model, 0.5);
      optimizer.step({.lr = 0.01});
      if (recording) end();
      if (step + 1 == loop.steps && loop.one_recording) gradients.collect(*model, true);
      optimizer.zero_grad();
    }
    parameters.collect(*model, false);
  }, {.threads_per_rank = 1});
  result.parameters = parameters.values();
  result.gradients = gradients.values();
  return result;
}

/// The phases in which units are gathered and reduced, such as "all_gather blocks.0 forward".
std::vector<std::string> collectives_of(const Tape& tape) {
  std::vector<std::string> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    const std::string name(n.op ? tape.op_name(n) : "");
    if (name == "all_gather" || name == "reduce_scatter")
      out.push_back(str(name, " ", path_label(tape.path(n)), " ", n.phase));
  }
  return out;
}

TEST(Zero1, EqualsTheOtherStrategiesInF64) {
  const Result expected = train(1, {.strategy = "replicate"});
  for (int world = 1; world <= 5; ++world)
    for (bool says_last : {true, false})
      for (bool one_recording : {true, false}) {
        SCOPED_TRACE(str(world, says_last ? " last" : "", one_recording ? " one recording" : ""));
        const Result actual = train(world, {.says_last = says_last, .one_recording = one_recording});
        EXPECT_LE(max_difference(expected.gradients, actual.gradients), 1e-12 * max_magnitude(expected.gradients));
        EXPECT_LE(max_difference(expected.parameters, actual.parameters), 1e-9);
      }
}

TEST(Zero1, WhenItIsReducedAndWhatIsGatheredAheadChangeNoBit) {
  for (int replicas : {1, 2}) {
    const Result expected = train(4, {.replicas = replicas});
    for (const Loop& loop : {Loop{.says_last = false}, Loop{.says_last = false, .one_recording = false},
                             Loop{.one_recording = false}, Loop{.prefetch = 0}, Loop{.prefetch = 1 << 30}}) {
      Loop other = loop;
      other.replicas = replicas;
      const Result actual = train(4, other);
      EXPECT_EQ(max_difference(expected.gradients, actual.gradients), 0.0);
      EXPECT_EQ(max_difference(expected.parameters, actual.parameters), 0.0);
    }
  }
}

TEST(Zero1, GathersAndReducesOncePerStep) {
  const auto once = [](const char* phase) {
    std::vector<std::string> out;
    for (const char* unit : {"root", "blocks.0", "blocks.1", "blocks.2"}) out.push_back(str("all_gather ", unit, " forward"));
    for (const char* unit : {"blocks.2", "blocks.1", "blocks.0", "root"}) out.push_back(str("reduce_scatter ", unit, " ", phase));
    return out;
  };
  EXPECT_THAT(collectives_of(train(2, {}).tapes[0]), ::testing::ElementsAreArray(once("backward")));
  EXPECT_THAT(collectives_of(train(2, {.says_last = false}).tapes[0]), ::testing::UnorderedElementsAreArray(once("update")));
  // The other strategies once per micro-batch.
  EXPECT_EQ(collectives_of(train(2, {.strategy = "shard_grad_op"}).tapes[0]).size(), kMicroBatches * once("").size());
}

TEST(Zero1, TapesPassAllChecks) {
  for (const Loop& loop : {Loop{}, Loop{.says_last = false}, Loop{.one_recording = false}, Loop{.replicas = 2}})
    for (const Tape& tape : train(4, loop).tapes)
      for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
}

TEST(Zero1, ZeroGradDropsWhatWaits) {
  run_local(2, [](World& w) {
    const models::TrainConfig config = tiny_config();
    const auto model = models::make_language_model(config.model, config.model.vocab);
    const Mesh mesh = w.mesh({{"data", 2}});
    shard(*model, mesh, {.strategy = Strategy::zero1});
    materialize(*model);
    optim::AdamW optimizer(model->parameters(), {});
    const Tensor tokens = full_of(Type{kI32, {4, config.model.context}, Layout(mesh.spec, Placement::shard(0))}, 1);
    const auto backward = [&] {
      Recording recording;
      recording.backward(model->loss(tokens, tokens, {.divide_by = 10.0}));
    };
    backward();
    const float norm = grad_norm(*model).item();
    EXPECT_GT(norm, 0);
    EXPECT_EQ(grad_norm(*model).item(), norm) << "asked again";
    backward();
    EXPECT_FLOAT_EQ(grad_norm(*model).item(), 2 * norm) << "one that was reduced, and one that waited";
    backward();
    optimizer.zero_grad();
    EXPECT_THROW(grad_norm(*model), LifetimeError);
    backward();
    EXPECT_EQ(grad_norm(*model).item(), norm);
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
