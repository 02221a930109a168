// Documents packed into one window: the loss and its gradients are those of the separate documents, on every mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/nn/layers/attention.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

// fill_tiny() has the end token in the middle of some windows of nine tokens, twice in one, at the end of another.
constexpr int64_t kEnd = 5;

models::ModelConfig model_of(const std::string& type, int64_t end_of_text = kEnd) {
  models::ModelConfig m = tiny_model(type, 10, 5);
  m.end_of_text = end_of_text;
  return m;
}

models::TrainConfig config_of(const std::string& type, int64_t end_of_text = kEnd) {
  models::TrainConfig c = tiny_config();
  c.model = model_of(type, end_of_text);
  return c;
}

// The gradients of a window, packed or document by document, each as if there were no other.
Values gradients_of(models::ModelConfig config, bool apart, int64_t rows) {
  config.end_of_text = apart ? -1 : kEnd;
  Whole whole;
  run_local(1, [&](World& world) {
    const Mesh mesh = world.mesh({{"data", 1}});
    const auto model = tiny_model_f64(mesh, {.strategy = "replicate"}, {}, 5, config);
    const TinyBatch batch = tiny_batch(mesh, 0, rows);
    const int64_t context = batch.tokens.size(1);
    const auto divide_by = static_cast<double>(rows * context);
    const std::vector<int32_t> tokens = batch.tokens.to_vector<int32_t>();
    Recording recording;
    Tensor loss;
    const auto add_loss = [&](const Tensor& x, const Tensor& y) {
      const Tensor one = model->loss(x, y, {.divide_by = divide_by});
      loss = loss ? add(loss, one) : one;
    };
    if (!apart) add_loss(batch.tokens, batch.targets);
    int documents = 0;
    for (int64_t r = 0; apart && r < rows; ++r)
      for (int64_t begin = 0, t = 0; t < context; ++t) {
        if (tokens[static_cast<size_t>(r * context + t)] != kEnd && t + 1 < context) continue;
        const auto document = [&](const Tensor& x) {
          const Tensor rows = slice(redistribute(x, "data", Placement::replicate()), 0, r, r + 1);
          return redistribute(slice(rows, 1, begin, t + 1), "data", x.layout()[0]);
        };
        add_loss(document(batch.tokens), document(batch.targets));
        begin = t + 1, ++documents;
      }
    EXPECT_GT(documents, apart ? rows : -1);
    recording.backward(loss);
    whole.collect(*model, true);
  });
  return whole.values();
}

// Only differences of rotary positions matter; learned positions restart with each document.
TEST(Documents, AWindowIsTheSumOfItsDocuments) {
  const models::ModelConfig mixture = tiny_mixture(0, 0);  // no token takes another's place in an expert
  models::ModelConfig further = model_of("llama");  // a token beyond a document's end affects no prediction
  further.mtp_layers = 2, further.mtp_loss = 0.7;
  for (const models::ModelConfig& config :
       {model_of("gpt2"), model_of("llama"), model_of("qwen3"), model_of("olmo"), model_of("gemma2"), model_of("latent"), mixture, further}) {
    const Values packed = gradients_of(config, false, 6), alone = gradients_of(config, true, 6);
    EXPECT_LE(max_difference(packed, alone), 1e-11 * max_magnitude(alone)) << config.experts << ' ' << config.mtp_layers;
  }
}

class DocumentGradients : public ::testing::TestWithParam<std::tuple<std::string, std::string, Axes>> {};

TEST_P(DocumentGradients, EqualThoseOfOneRank) {
  const auto [type, strategy, axes] = GetParam();
  expect_gradients_of_one_rank(axes, strategy, 3, model_of(type));
}

INSTANTIATE_TEST_SUITE_P(Meshes, DocumentGradients,
                         ::testing::Combine(::testing::Values("gpt2", "untied llama", "latent"), ::testing::Values("full_shard", "zero1"),
                                            ::testing::Values(Axes{{"data", 1}}, Axes{{"data", 2}}, MeshSizes{2, 2, 0, 0}.axes(),
                                                              MeshSizes{0, 1, 3, 0}.axes(), MeshSizes{0, 2, 1, 2}.axes(),
                                                              MeshSizes{0, 1, 2, 2}.axes(),
                                                              Axes{{"stage", 2, true}, {"data", 1}},
                                                              Axes{{"stage", 2, true}, {"data", 1}, {"context", 2}})));

// The same mask is saved for the backward, sent, or recomputed.
TEST(Documents, StrategiesProgramsAndRecomputeChangeNoBit) {
  for (const char* type : {"gpt2", "untied llama"}) {
    const TrainedRun expected = train_tiny(config_of(type), 2, 5);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    EXPECT_NE(train_tiny(config_of(type, -1), 2, 5).losses, expected.losses);
    models::TrainConfig c = config_of(type);
    c.sharding.strategy = "zero1";
    expect_same_bits(expected, train_tiny(c, 2, 5));
    for (const char* recompute : {"block", "selective"}) {
      c = config_of(type);
      c.train.recompute = recompute;
      expect_same_bits(expected, train_tiny(c, 2, 5));
    }
    c = config_of(type);
    c.train.compile = true;
    expect_same_bits(expected, train_tiny(c, 2, 5));
  }
}

TEST(Documents, TapesPassAllChecksAndTakeTheBytesOfThePlan) {
  models::TrainConfig c = config_of("untied llama");
  c.train.micro_batches = 2;
  expect_planned_tapes(c, 2);
  c.sharding.context = 2;
  c.sharding.tensor = 2;
  expect_planned_tapes(c, 4);
  for (const bool compile : {false, true}) {
    models::TrainConfig staged = tiny_pipeline(2);
    staged.model.end_of_text = kEnd;
    staged.train.compile = compile;
    expect_planned_tapes(staged, 2);
  }
}

// A stage receives the documents' begins from the previous one, once per micro-batch.
TEST(Documents, BeginsGoAlongAPipeline) {
  for (const int64_t stages : {2, 3}) {
    models::TrainConfig c = tiny_pipeline(1);
    c.model.end_of_text = kEnd;
    c.model.dropout = 0;
    expect_stages_of_one_rank(c, stages);
  }
}

TEST(Documents, WithExperts) {
  models::ModelConfig m = tiny_mixture();
  m.end_of_text = kEnd;
  expect_gradients_of_one_rank({{"data", 1}, {"expert", 2}}, "full_shard", 4, m);
}

TEST(Documents, EvaluationSeesTheSameMask) {
  const auto first_loss = [](int64_t end_of_text) {
    double loss = 0;
    models::TrainConfig c = config_of("gpt2", end_of_text);
    std::vector<int32_t> data(400);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<int32_t>((i * i + i / 3) % 13);
    train_tiny(c, 1, 0, [&](models::TrainingStep& step) {
      loss = step.evaluate(models::SequentialWindows(models::Tokens::from_ids(data, 13, "ids"), c.model.context));
    });
    return loss;
  };
  EXPECT_NE(first_loss(kEnd), first_loss(-1));
  EXPECT_EQ(first_loss(12345), first_loss(-1)) << "no token is that";
}

TEST(Documents, ACacheHasOne) {
  nn::SelfAttention attention({.width = 8, .heads = 2});
  materialize(attention, Device::cpu(), {.seed = 1});
  nn::KeyValueCache cache(4);
  const Tensor x = ones({1, 3, 8}), begins = document_begins(zeros({1, 3}, kI32), 0);
  EXPECT_EQ(attention(x, nullptr, begins).shape(), x.shape());
  EXPECT_THAT([&] { attention(x, &cache, begins); }, ::testing::ThrowsMessage<ConfigError>(HasSubstr("are one document")));
}

}  // namespace
}  // namespace sheaf::testing
