// generate: many prompts continued together (models/generate_many.h) against one by one, alternating; and a single prompt, against
// copies of as many bytes as its weights have.
#include "sheaf/distributed/run_local.h"
#include "sheaf/models/generate_many.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tools/bench/gpu_time.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

struct Size {
  int64_t rows, prompt, tokens;  ///< sequences; tokens per prompt; tokens generated per sequence
};

// Random weights: any token may be generated, and no text ends early.
void measure(Session& session, DType dtype, Size size, World& world, Line& line) {
  std::vector<std::string> overrides = {str("--train.dtype=", name(dtype))};
  if (session.options().quick) {
    for (const std::string& o : tiny_model()) overrides.push_back(o);
    size.prompt = 3, size.tokens = 5;
  }
  const models::TrainConfig config = training_config("gpt2-124m-f32-1x1024", overrides);
  const models::ShardedModel model = models::sharded_model(config, config.model.vocab, world, {.frozen = true});
  materialize(*model.model, world.device(), {.seed = 1});
  std::vector<std::vector<int32_t>> prompts(static_cast<size_t>(size.rows));
  for (size_t row = 0; row < prompts.size(); ++row)
    for (int64_t t = 0; t < size.prompt; ++t)
      prompts[row].push_back(static_cast<int32_t>((static_cast<int64_t>(row) * 7919 + t * 104729) % config.model.vocab));
  models::GenerateConfig draws;
  draws.tokens = size.tokens, draws.temperature = 1;
  const auto timed = [&](int64_t rows) {
    return device_seconds([&] {
      models::generate_many(*model.model, std::span(prompts).first(static_cast<size_t>(rows)), draws,
                            {.context = config.model.context, .vocab = config.model.vocab, .at_once = rows});
    });
  };
  int64_t weights = 0;  // bytes read per token of one sequence
  for (const auto& unit : units(*model.model))
    for (const FlatBuffer& b : unit->buffers()) weights += b.shard.local_bytes();
  const auto copied = [&] { return device_seconds([&] { session.probe().run_copy(static_cast<size_t>(weights * size.tokens)); }); };
  timed(size.rows);
  const bool alone = size.rows == 1;
  auto [together, others] = session.turns([&] { return timed(size.rows); }, [&] { return alone ? copied() : timed(1); }, /*most=*/8);
  line.samples_s = std::move(together);
  line.peer = alone ? "a copy of the weights' bytes for each token" : "one by one";
  line.peer_value = quantile(others, 0.5) * static_cast<double>(size.rows);
  line.more = {{"tok/s", static_cast<double>(size.rows * size.tokens) / quantile(line.samples_s, 0.5)}};
}

}  // namespace

void generate_suite(Session& session) {
  for (const DType dtype : {kF32, kBF16})
    for (const Size& size : {Size{1, 64, 64}, {8, 64, 64}, {32, 64, 64}})
      session.line("generate", str("gpt2-124m-", name(dtype), "-", size.rows, "x64+64"), Unit::seconds, [&](Line& line) {
        run_local(1, [&](World& world) { measure(session, dtype, size, world, line); },
                  {.threads_per_rank = session.machine().threads, .device = session.device()});
      });
}

}  // namespace sheaf::bench
