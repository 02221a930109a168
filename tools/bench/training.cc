#include "sheaf/tools/bench/training.h"

#include <algorithm>

#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/local_communicator.h"
#include "sheaf/models/plan.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/config.h"

namespace sheaf::bench {
namespace {

const std::vector<std::string> kGpt2 = {"--model.preset=gpt2-124m"};
// nanoGPT's configuration for CPUs, and the one for characters. The 124M cases have fewer tokens than the published context: unused
// positions are not trained.
const std::vector<std::string> kNano = {"--model.layers=4", "--model.width=128", "--model.heads=4",
                                        "--model.vocab=65", "--model.bias=false"};
const std::vector<std::string> kChar = {"--model.layers=6", "--model.width=384", "--model.heads=6",
                                        "--model.vocab=65", "--model.bias=false"};

// A Llama, and one with mixtures of experts of the same work per token: two of eight experts.
std::vector<std::string> small_llama(std::vector<std::string> mlp) {
  mlp.insert(mlp.end(), {"--model.type=llama", "--model.layers=4", "--model.width=384",
                         "--model.heads=6", "--model.vocab=65"});
  return mlp;
}
const std::vector<std::string> kMixture = {"--model.experts=8", "--model.expert_hidden=512",
                                           "--model.aux_loss=0.01"};
const std::vector<std::string> kFineMixture = {"--model.experts=32", "--model.experts_per_token=4",
                                               "--model.expert_hidden=256", "--model.aux_loss=0.01"};

// Three of four blocks have linear attention, whose state is as wide as the heads.
const std::vector<std::string> kLinear = {"--model.mlp_width=1024", "--model.linear_key_heads=6",
                                          "--model.full_attention_every=4"};

TrainingCase make(std::string_view name, std::vector<std::string> model, const char* dtype,
                  int batch, int context) {
  model.push_back(std::string("--train.dtype=") + dtype);
  model.push_back("--train.batch=" + std::to_string(batch));
  model.push_back("--model.context=" + std::to_string(context));
  return {name, std::move(model)};
}

// Steps of half a million tokens, as in the training of GPT-3's small models (Brown et al. 2020).
TrainingCase gpt2_on_gpu(std::string_view name, const char* preset) {
  return make(name, {std::string("--model.preset=") + preset, "--model.vocab=50304"}, "bf16", 512,
              1024);
}

}  // namespace

std::vector<TrainingCase> training_cases(Device device) {
  if (device.is_cuda())
    return {
        gpt2_on_gpu("gpt2-124m-bf16-512x1024", "gpt2-124m"),
        gpt2_on_gpu("gpt2-774m-bf16-512x1024", "gpt2-774m"),
        gpt2_on_gpu("gpt2-1558m-bf16-512x1024", "gpt2-1558m"),
        make("llama3-8b-bf16-4x8192", {"--model.preset=llama3-8b"}, "bf16", 4, 8192),
        // As many layers as leave room for a peer program with the same number.
        make("llama3-8b-8layers-bf16-4x8192", {"--model.preset=llama3-8b", "--model.layers=8"},
             "bf16", 4, 8192),
        make("llama3-8b-8layers-fp8-4x8192",
             {"--model.preset=llama3-8b", "--model.layers=8", "--train.fp8=all"}, "bf16", 4, 8192),
    };
  return {
      make("gpt2-124m-f32-4x64", kGpt2, "f32", 4, 64),
      make("gpt2-124m-f32-1x1024", kGpt2, "f32", 1, 1024),
      make("gpt2-124m-bf16-1x1024", kGpt2, "bf16", 1, 1024),
      make("nanogpt-f32-12x64", kNano, "f32", 12, 64),
      make("char-f32-16x256", kChar, "f32", 16, 256),
      make("char-bf16-16x256", kChar, "bf16", 16, 256),
      make("llama-f32-8x256", small_llama({"--model.mlp_width=1024"}), "f32", 8, 256),
      make("llama-bf16-8x256", small_llama({"--model.mlp_width=1024"}), "bf16", 8, 256),
      make("mixture-f32-8x256", small_llama(kMixture), "f32", 8, 256),
      make("mixture-4-of-32-bf16-8x256", small_llama(kFineMixture), "bf16", 8, 256),
      make("linear-f32-1x2048", small_llama(kLinear), "f32", 1, 2048),
      make("linear-bf16-1x2048", small_llama(kLinear), "bf16", 1, 2048),
  };
}

models::TrainConfig training_config(std::string_view name, const std::vector<std::string>& more) {
  for (Device device : {Device::cpu(), Device::cuda()})
    for (const TrainingCase& c : training_cases(device)) {
      if (c.name != name) continue;
      std::vector<std::string> overrides = c.overrides;
      overrides.insert(overrides.end(),
                       {"--train.clip=1.0", "--train.schedule=constant", "--train.warmup=0",
                        "--train.lr=1e-4", "--model.dropout=0"});
      overrides.insert(overrides.end(), more.begin(), more.end());
      return tools::load_config("", overrides);
    }
  fail<ConfigError>("[bench] no training case '", name, "'");
}

std::vector<std::string> tiny_model() {
  return {"--model.layers=2",     "--model.width=32",   "--model.heads=2",  "--model.kv_heads=2",
          "--model.mlp_width=64", "--model.context=16", "--model.vocab=64", "--train.batch=8"};
}

Fitted fit_to_gpu(models::TrainConfig config, int64_t bytes) {
  constexpr int64_t kMostTokens = 65536;  // more do not utilise a GPU any better
  const int64_t batch = config.train.batch, layers = config.model.layers;
  // Every micro-batch after the first takes the same memory, so two suffice.
  const auto peak = [&](int64_t sequences) {
    models::TrainConfig c = config;
    c.train.batch = std::min(batch, 2 * sequences);
    c.train.micro_batches = c.train.batch / sequences;
    return models::plan_step(c, c.model.vocab, 0, 1, 1, "local", Device::cuda()).peak.bytes;
  };
  int64_t sequences = std::min(batch, std::max<int64_t>(1, kMostTokens / config.model.context)),
          planned;
  while (batch % sequences != 0) --sequences;
  while ((planned = peak(sequences)) > bytes) {
    if (sequences > 1) {
      do --sequences;
      while (batch % sequences != 0);
    } else {
      check<OutOfMemory>(--config.model.layers > 0, "[bench] one layer and one sequence of ",
                         config.model.context, " tokens take ", planned, " bytes of ", bytes);
    }
  }
  config.train.micro_batches = batch / sequences;
  return {config, layers, planned};
}

models::FillBatch random_tokens(const models::TrainConfig& config) {
  const auto context = config.model.context;
  const auto vocab = static_cast<uint64_t>(config.model.vocab);
  // Scaled instead of divided: the host does this within the timed region while a GPU waits.
  const auto token = [vocab](uint64_t place) {
    return static_cast<int32_t>(scramble(place) * vocab >> 32);
  };
  return [=](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    const auto begin = static_cast<uint64_t>(first * context);
    const auto tokens = static_cast<uint64_t>(count * context);
    for (uint64_t i = 0; i < tokens; ++i) {
      inputs[i] = token(begin + i);
      targets[i] = token(begin + i + 1);
    }
  };
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
