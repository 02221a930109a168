// Scores of tokens, however the model is cut: log-likelihoods of continuations against the logits on one rank.
#include "sheaf/models/evaluation.h"

#include <cmath>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/models/decoder.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

constexpr int64_t kContext = 256, kVocab = 256;

/// Prompts and choices of many lengths, in windows of 64, 128 and 256 tokens.
models::ChoiceQuestions questions() {
  const ScratchFolder folder;
  std::ofstream out(folder / "q.jsonl");
  int32_t at = 0;
  const auto text = [&](int64_t length) {
    std::string s;
    for (int64_t i = 0; i < length; ++i, ++at) s += static_cast<char>('a' + at * at % 23);
    return s;
  };
  for (const int64_t prompt : {3, 62, 40, 100, 129, 200, 251, 400})
    out << R"({"prompt": ")" << text(prompt) << R"(", "choices": [")" << text(1) << R"(", ")" << text(7) << R"(", ")" << text(3 + prompt / 9)
        << R"("], "answer": )" << prompt % 3 << "}\n";
  out.close();
  return models::ChoiceQuestions("", folder / "q.jsonl", *models::make_byte_tokenizer(), {.context = kContext});
}

models::TrainConfig config_of(const std::string& type = "llama") {
  models::TrainConfig c;
  c.model = tiny_model(type, 4, 2);
  c.model.layers = 4;
  c.model.context = kContext;
  c.model.vocab = kVocab;
  c.train.batch = 3;
  return c;
}

std::vector<double> likelihoods(const models::TrainConfig& c, int world, const models::ChoiceQuestions& q) {
  std::vector<double> out;
  std::mutex mutex;
  run_local(world, [&](World& w) {
    models::TrainingStep step(c, kVocab, w, Device::cpu(), tiny_options(c, kF64));
    const std::vector<double> mine = step.log_likelihoods(q);
    std::lock_guard lock(mutex);
    if (out.empty()) out = mine;
    EXPECT_EQ(out, mine) << "ranks differ";
  });
  return out;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

// Row by row, from the logits at the preceding tokens.
TEST(Evaluation, LikelihoodsAreThoseOfTheLogits) {
  const models::ChoiceQuestions q = questions();
  const models::TrainConfig c = config_of();
  std::vector<double> want;
  run_local(1, [&](World& w) {
    models::TrainingStep step(c, kVocab, w, Device::cpu(), tiny_options(c, kF64));
    step.model().eval();
    for (const models::ChoiceRow& row : q.rows()) {
      const std::vector<int32_t> read(row.tokens.begin(), row.tokens.end() - 1);
      const std::vector<double> logits = step.model().logits(Tensor::from(read, {1, std::ssize(read)})).to_vector<double>();
      double sum = 0;
      for (auto i = static_cast<size_t>(row.begin); i < row.tokens.size(); ++i) {
        const double* const of = &logits[(i - 1) * kVocab];
        double total = 0;
        for (int64_t v = 0; v < kVocab; ++v) total += std::exp(of[v]);
        sum += of[row.tokens[i]] - std::log(total);
      }
      want.push_back(sum);
    }
  });
  for (const int64_t batch : {1, 3, 50}) {
    models::TrainConfig of = c;
    of.train.batch = batch;
    EXPECT_LT(largest_difference(likelihoods(of, 1, q), want), 1e-11) << batch;
  }
  EXPECT_GT(q.num_shortened(), 0);
}

TEST(Evaluation, LikelihoodsAreTheSameOnEveryMesh) {
  const models::ChoiceQuestions q = questions();
  for (const char* type : {"gpt2", "llama", "latent"}) {
    const models::TrainConfig base = config_of(type);
    const std::vector<double> want = likelihoods(base, 1, q);
    const auto check = [&](const char* name, int world, const std::function<void(models::TrainConfig&)>& change) {
      models::TrainConfig c = base;
      change(c);
      EXPECT_LT(largest_difference(likelihoods(c, world, q), want), 1e-10) << type << ' ' << name;
    };
    check("micro-batches", 1, [](auto& c) { c.train.micro_batches = 2; });
    check("data", 3, [](auto&) {});
    check("more ranks than rows", 5, [](auto&) {});
    check("replicas", 4, [](auto& c) { c.sharding.replicas = 2; });
    check("context", 2, [](auto& c) { c.sharding.context = 2; });
    check("gathered context", 3, [](auto& c) { c.sharding.context = 3, c.sharding.context_comm = "all_gather"; });
    check("tensor", 2, [](auto& c) { c.sharding.tensor = 2; });
    check("tensor and data", 4, [](auto& c) { c.sharding.tensor = 2; });
    check("stages", 3, [](auto& c) { c.sharding.pipeline = 3, c.train.micro_batches = 2; });
    check("stages of two runs, tensor", 4, [](auto& c) {
      c.sharding.pipeline = 2, c.sharding.pipeline_runs = 2, c.train.micro_batches = 2, c.sharding.tensor = 2;
    });
    check("islands", 4, [](auto& c) { c.train.islands = 2, c.train.batch = 4; });
    check("f64 of several batches", 2, [](auto& c) { c.train.batch = 1; });
  }
  models::TrainConfig mixture = config_of();
  mixture.model.experts = 4, mixture.model.experts_per_token = 2;
  const std::vector<double> want = likelihoods(mixture, 1, q);
  mixture.sharding.experts = 2;
  EXPECT_LT(largest_difference(likelihoods(mixture, 4, q), want), 1e-10) << "experts";
}

// Expert capacities depend on the window length, so then all windows have one length: whatever a row's neighbours, and however sequences
// are cut.
TEST(Evaluation, ACapacityIsThatOfTheContext) {
  const models::ChoiceQuestions q = questions();
  models::TrainConfig c = config_of();
  c.model.experts = 4, c.model.experts_per_token = 2, c.model.capacity_factor = 0.5;
  c.model.capacity_groups = 128;  // not available with windows of 64 tokens
  const std::vector<double> want = likelihoods(c, 1, q);
  for (const int64_t batch : {1, 7}) {
    c.train.batch = batch;
    EXPECT_LT(largest_difference(likelihoods(c, 1, q), want), 1e-10) << batch;
  }
  c.sharding.context = 2;
  EXPECT_LT(largest_difference(likelihoods(c, 2, q), want), 1e-10);
  c.model.capacity_factor = 0, c.model.capacity_groups = 1, c.sharding.context = 1;
  EXPECT_GT(largest_difference(likelihoods(c, 1, q), want), 1e-3) << "nothing is dropped";
}

TEST(Evaluation, RowsThatAreTooLongAreRefused) {
  models::TrainConfig c = config_of();
  c.model.context = 128;
  EXPECT_THROW(likelihoods(c, 1, questions()), ShapeError);
}

// A loss that is not linear in the rows' log-likelihoods: log(1 + exp(-log p)) of each.
Values gradients_of_rows(const Axes& axes, const models::ModelConfig& config, double* value) {
  Whole whole;
  run_local(num_ranks(axes), [&](World& w) {
    const Mesh mesh = w.mesh(axes);
    const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 5, config);
    const TinyBatch batch = tiny_batch(mesh, 0, 6);
    Recording recording;
    Tensor rows = sum(model->loss(batch.tokens, batch.targets, {.per_target = true}), {1});
    Layout of_rows = rows.layout();
    for (int a = 0; a < of_rows.num_axes(); ++a)
      if (!of_rows[a].is_shard()) of_rows[a] = Placement::invariant();
    rows = redistribute(rows, of_rows);
    const Tensor loss = mean(log(add(exp(rows), 1.0)));
    recording.backward(loss);
    whole.collect(*model, true);
    const double mine = redistribute(loss, Layout(mesh.spec, Placement::invariant())).item<double>();
    if (w.rank() == 0) *value = mine;
  }, {.threads_per_rank = 1});
  return whole.values();
}

TEST(Losses, OfEachTargetAreTrainedOn) {
  for (const char* type : {"gpt2", "untied llama"}) {
    const models::ModelConfig config = tiny_model(type, 4, 2);
    double want = 0, value = 0;
    const Values expected = gradients_of_rows({{"data", 1}}, config, &want);
    for (const Axes& axes : {Axes{{"data", 3}}, Axes{{"replica", 2}, {"data", 2}}, Axes{{"data", 2}, {"context", 2}},
                             Axes{{"data", 2}, {"gathered", 3}}, Axes{{"data", 2}, {"model", 2}}, Axes{{"stage", 2, true}, {"data", 2}}}) {
      const Values actual = gradients_of_rows(axes, config, &value);
      EXPECT_NEAR(value, want, 1e-12 * want);
      EXPECT_LE(max_difference(expected, actual), 1e-12 * max_magnitude(expected)) << type << ' ' << axes.back().name;
    }
  }
  const models::ModelConfig mixture = tiny_mixture();
  double value = 0;
  EXPECT_THROW(gradients_of_rows({{"data", 1}}, mixture, &value), ConfigError) << "its penalty belongs to no target";
}

// Evaluation does not affect the training around it.
TEST(Evaluation, TrainingGoesOnAsWithout) {
  const models::ChoiceQuestions q("", "tests/models/two_questions.jsonl", *models::make_byte_tokenizer(), {.context = 9});
  for (const bool compile : {false, true}) {
    models::TrainConfig c = tiny_config();
    c.model.vocab = kVocab;
    c.model.dropout = 0.1;
    c.train.compile = compile;
    const auto run = [&](bool evaluates) {
      std::vector<float> losses;
      train_tiny(c, 2, 0, [&](models::TrainingStep& step) {
        std::vector<std::vector<double>> likelihoods;
        for (int s = 0; s < 6; ++s) {
          const float loss = step.run(s, fill_tiny).loss.item<float>();
          if (evaluates) likelihoods.push_back(step.log_likelihoods(q));
          if (step.world().rank() == 0) losses.push_back(loss);
        }
        EXPECT_EQ(step.program() != nullptr, compile);
        if (evaluates) { EXPECT_NE(likelihoods[0], likelihoods[5]) << "the model has learned"; }
      });
      return losses;
    };
    EXPECT_EQ(run(true), run(false)) << compile;
  }
}

}  // namespace
}  // namespace sheaf::testing
