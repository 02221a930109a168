// Training on examples: the loss is the mean over all trained targets of the whole batch, however ranks and micro-batches cut it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/packed_examples.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int32_t kEnd = 5;

models::TrainConfig config_of(const std::string& type) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_model(type, 10, 5);
  c.model.end_of_text = kEnd;
  c.data.examples = true;
  return c;
}

// Examples of all lengths, alone and packed.
TEST(Examples, AWindowIsTheSumOfItsExamples) {
  constexpr int64_t kContext = 24;
  std::mt19937 random(7);
  std::vector<models::MarkedToken> all;
  std::vector<std::vector<models::MarkedToken>> examples;
  for (int i = 0; i < 9; ++i) {
    std::vector<models::MarkedToken> one;
    const unsigned prompt = 1 + random() % 6, answer = 1 + random() % 6;
    for (unsigned t = 0; t < prompt + answer; ++t) one.push_back((6 + random() % 7) | (t < prompt ? models::kReadOnly : 0));
    one.push_back(kEnd);
    all.insert(all.end(), one.begin(), one.end());
    examples.push_back(std::move(one));
  }
  const models::PackedExamples packed(models::Tokens::from_examples(all, kEnd, 13, "examples"), kContext);
  ASSERT_LT(packed.num_windows(), 6);
  for (const char* type : {"gpt2", "untied llama", "qwen3"}) {
    models::ModelConfig config = tiny_model(type, 10, 5);
    config.context = kContext;
    config.end_of_text = kEnd;
    const auto gradients = [&](bool alone) {
      Whole whole;
      run_local(1, [&](World& world) {
        const Mesh mesh = world.mesh({{"data", 1}});
        const auto model = tiny_model_f64(mesh, {.strategy = "replicate"}, {}, 5, config);
        const Layout rows(mesh.spec, Placement::shard(0));
        const Tensor divisor = full({}, static_cast<double>(packed.num_targets()), kF64);
        Recording recording;
        Tensor loss;
        const auto add_loss = [&](const std::vector<int32_t>& x, const std::vector<int32_t>& y) {
          const Type type{kI32, {1, static_cast<int64_t>(x.size())}, rows};
          const Tensor one = model->loss(Tensor::from_local(x, type), Tensor::from_local(y, type), {.divisor = divisor});
          loss = loss ? add(loss, one) : one;
        };
        for (int64_t w = 0; !alone && w < packed.num_windows(); ++w) {
          std::vector<int32_t> inputs(kContext), targets(kContext);
          packed.fill(w, inputs.data(), targets.data());
          add_loss(inputs, targets);
        }
        for (size_t e = 0; alone && e < examples.size(); ++e) {
          std::vector<int32_t> inputs, targets;
          for (size_t t = 0; t + 1 < examples[e].size(); ++t) {
            inputs.push_back(static_cast<int32_t>(examples[e][t] & ~models::kReadOnly));
            targets.push_back(examples[e][t + 1] & models::kReadOnly ? -1 : static_cast<int32_t>(examples[e][t + 1]));
          }
          add_loss(inputs, targets);
        }
        recording.backward(loss);
        whole.collect(*model, true);
      });
      return whole.values();
    };
    const Values together = gradients(false), alone = gradients(true);
    EXPECT_LE(max_difference(together, alone), 1e-12 * max_magnitude(alone)) << type;
  }
}

TEST(Examples, StrategiesProgramsAndRecomputeChangeNoBit) {
  for (const char* type : {"gpt2", "untied llama"}) {
    models::TrainConfig c = config_of(type);
    const TrainedRun expected = train_tiny(c, 2, 5);
    for (const char* strategy : {"zero1", "shard_grad_op", "replicate"}) {
      c = config_of(type);
      c.sharding.strategy = strategy;
      expect_same_bits(expected, train_tiny(c, 2, 5));
    }
    c = config_of(type);
    c.train.compile = true;
    expect_same_bits(expected, train_tiny(c, 2, 5));
    c.train.recompute = "block";
    expect_same_bits(expected, train_tiny(c, 2, 5));
    c = config_of(type);
    c.data.examples = false;
    EXPECT_NE(train_tiny(c, 2, 5).losses, expected.losses);
  }
}

// A world of k ranks has the bits of one rank with k micro-batches; in f64 all cuts agree.
TEST(Examples, RanksAndMicroBatchesCutTheMeanAlike) {
  models::TrainConfig c = config_of("untied llama");
  c.train.batch = 12;
  const Values expected = parameters_f64(c, 1, 3);
  for (const int world : {1, 2, 3, 5})
    for (const int64_t micro_batches : {1, 3}) {
      c.train.micro_batches = micro_batches;
      EXPECT_LE(max_difference(parameters_f64(c, world, 3), expected), 1e-11) << world << " x " << micro_batches;
    }
  c.train.micro_batches = 3;
  const TrainedRun one = train_tiny(c, 1, 4);
  c.train.micro_batches = 1;
  expect_same_bits(one, train_tiny(c, 3, 4));
}

TEST(Examples, OnAllAxes) {
  models::TrainConfig c = config_of("untied llama");
  c.train.batch = 6;
  c.train.micro_batches = 2;
  const Values expected = parameters_f64(c, 1, 3);
  const auto expect_same = [&](const models::ShardingConfig& sharding, int world) {
    models::TrainConfig other = c;
    other.sharding = sharding;
    EXPECT_LE(max_difference(parameters_f64(other, world, 3), expected), 1e-11);
  };
  expect_same({.context = 2}, 4);
  expect_same({.tensor = 3}, 3);
  expect_same({.pipeline = 2}, 4);
  expect_same({.context = 2, .pipeline = 2, .tensor = 2}, 8);
  expect_same({.replicas = 2}, 4);
  expect_same({.pipeline = 2, .pipeline_schedule = "zero_bubble"}, 2);
}

// In f64 the loss equals its definition.
TEST(Examples, TheLossIsTheMeanOverWhatIsLearned) {
  const models::TrainConfig c = config_of("gpt2");
  const int64_t rows = c.train.batch, context = c.model.context;
  std::vector<int32_t> inputs(static_cast<size_t>(rows * context)), targets(inputs.size());
  tiny_data(c)(0, rows, inputs.data(), targets.data());
  run_local(1, [&](World& world) {
    models::TrainingStep step(c, 13, world, Device::cpu(), tiny_options(c, kF64));
    step.model().eval();
    double sum = 0;
    int64_t count = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const std::vector<int32_t> x(inputs.begin() + r * context, inputs.begin() + (r + 1) * context);
      for (int64_t t = 0; t < context; ++t) {
        const int32_t target = targets[static_cast<size_t>(r * context + t)];
        if (target < 0) continue;
        std::vector<int32_t> one(static_cast<size_t>(context), -1);
        one[static_cast<size_t>(t)] = target;
        sum += redistribute(step.model().loss(Tensor::from(x, {1, context}), Tensor::from(one, {1, context}), {.divide_by = 1}),
                            Layout(step.mesh().spec, Placement::invariant())).item<double>();
        ++count;
      }
    }
    EXPECT_GT(count, 0);
    EXPECT_LT(count, rows * context * 2 / 3);
    const double loss = step.run(0, tiny_data(c)).loss.item<double>();
    EXPECT_NEAR(loss, sum / static_cast<double>(count), 1e-6 * loss);
  });
}

TEST(Examples, EvaluationCountsWhatIsLearned) {
  std::vector<models::MarkedToken> all;
  for (uint32_t i = 0; i < 40; ++i) {
    for (uint32_t t = 0; t < 1 + i % 3; ++t) all.push_back(((i * 7 + t * 3) % 5) | models::kReadOnly);
    for (uint32_t t = 0; t < 1 + i % 4; ++t) all.push_back(6 + (i + t * t) % 7);
    all.push_back(kEnd);
  }
  models::TrainConfig c = config_of("untied llama");
  const models::Tokens tokens = models::Tokens::from_examples(all, kEnd, 13, "examples");
  const models::SequentialWindows windows(tokens, c.model.context);
  for (const int world : {1, 3}) {
    train_tiny(c, world, 0, [&](models::TrainingStep& step) {
      const double loss = step.evaluate(windows);
      EXPECT_NEAR(loss, std::log(13.0), 0.3);  // of untrained weights
      EXPECT_GT(std::abs(loss * static_cast<double>(windows.num_targets()) / static_cast<double>(tokens.size()) - std::log(13.0)), 0.3);
    });
  }
}

TEST(Examples, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  for (const char* type : {"gpt2", "untied llama"}) {
    models::TrainConfig c = config_of(type);
    c.train.micro_batches = 2;
    expect_planned_tapes(c, 2);
    c.train.compile = true;
    expect_planned_tapes(c, 2);
    c.train.compile = false;
    c.sharding.context = 2;
    expect_planned_tapes(c, 4);
  }
}

}  // namespace
}  // namespace sheaf::testing
