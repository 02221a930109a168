#include "sheaf/tools/bench/training.h"

#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/local_communicator.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/config.h"

namespace sheaf::bench {
namespace {

const std::vector<std::string> kGpt2 = {"--model.preset=gpt2-124m"};
// nanoGPT's configuration for CPUs, and the one for characters. Tokens in the 124M cases are fewer
// than the published context: positions that are not there are not trained.
const std::vector<std::string> kNano = {"--model.layers=4", "--model.width=128", "--model.heads=4",
                                        "--model.vocab=65", "--model.bias=false"};
const std::vector<std::string> kChar = {"--model.layers=6", "--model.width=384", "--model.heads=6",
                                        "--model.vocab=65", "--model.bias=false"};

TrainingCase make(std::string_view name, std::vector<std::string> model, const char* dtype,
                  int batch, int context) {
  model.push_back(std::string("--train.dtype=") + dtype);
  model.push_back("--train.batch=" + std::to_string(batch));
  model.push_back("--model.context=" + std::to_string(context));
  return {name, std::move(model)};
}

}  // namespace

std::vector<TrainingCase> training_cases() {
  return {
      make("gpt2-124m-f32-4x64", kGpt2, "f32", 4, 64),
      make("gpt2-124m-f32-1x1024", kGpt2, "f32", 1, 1024),
      make("gpt2-124m-bf16-1x1024", kGpt2, "bf16", 1, 1024),
      make("nanogpt-f32-12x64", kNano, "f32", 12, 64),
      make("char-f32-16x256", kChar, "f32", 16, 256),
      make("char-bf16-16x256", kChar, "bf16", 16, 256),
  };
}

models::TrainConfig training_config(std::string_view name, const std::vector<std::string>& more) {
  for (const TrainingCase& c : training_cases()) {
    if (c.name != name) continue;
    std::vector<std::string> overrides = c.overrides;
    overrides.insert(overrides.end(), {"--train.clip=1.0", "--train.schedule=constant",
                                       "--train.warmup=0", "--train.lr=1e-4", "--model.dropout=0"});
    overrides.insert(overrides.end(), more.begin(), more.end());
    return tools::load_config("", overrides);
  }
  fail<ConfigError>("[bench] no training case '", name, "'");
}

models::FillBatch random_tokens(const models::TrainConfig& config) {
  const auto context = config.model.context;
  const auto vocab = static_cast<uint64_t>(config.model.vocab);
  return [=](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    for (int64_t i = 0; i < count * context; ++i) {
      const auto place = static_cast<uint64_t>(first * context + i);
      inputs[i] = static_cast<int32_t>(scramble(place) % vocab);
      targets[i] = static_cast<int32_t>(scramble(place + 1) % vocab);
    }
  };
}

double flops_per_step(const models::TrainConfig& config) {
  const auto layers = static_cast<double>(config.model.layers),
             width = static_cast<double>(config.model.width),
             vocab = static_cast<double>(config.model.vocab),
             context = static_cast<double>(config.model.context),
             tokens = context * static_cast<double>(config.train.batch);
  // GPT-2's block: 3 C² for queries, keys and values, C² for the output, 8 C² for the MLP.
  const double in_products = layers * 12 * width * width + vocab * width;
  return tokens * (6 * in_products + 6 * layers * context * width);
}

World solo_world() {
  RankContext& context = RankContext::current();
  const int threads = context.threads;
  World world(std::make_shared<LocalTransport>(std::make_shared<LocalJob>(1, LocalOptions{})),
              context, 0, 1, 0, 1);
  context.threads = threads;
  return world;
}

}  // namespace sheaf::bench
