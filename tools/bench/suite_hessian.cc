// hessian: Hessian-vector products of a loss (nn/direction.h), against gradients of the same loss, alternating.
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/models/sample_block.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tools/bench/gpu_time.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

void measure(Session& session, std::string_view name, std::vector<std::string> overrides,
             World& world, Line& line) {
  if (session.options().quick)
    for (const std::string& o : tiny_model()) overrides.push_back(o);
  const models::TrainConfig config = training_config(name, overrides);
  const Device device = world.device();
  const models::ShardedModel model = models::sharded_model(config, config.model.vocab, world),
                             direction = models::sharded_model(config, config.model.vocab, world);
  materialize(*model.model, device, {.seed = 1});
  materialize(*direction.model, device, {.seed = 2});
  const Type rows{kI32,
                  {config.train.batch, config.model.context},
                  Layout(model.mesh.spec, Placement::shard(0))};
  const Tensor here[] = {Tensor::empty(rows), Tensor::empty(rows)};
  models::fill_block(0, random_tokens(config), here[0], here[1]);
  const Tensor tokens = here[0].to(device), targets = here[1].to(device);

  Allocator& memory = *RankContext::current().memory(device);
  const auto timed = [&](bool second) {
    return device_seconds([&] {
      zero_grad(*model.model);
      Recording recording({.higher_order = second});
      const Tensor loss = model.model->loss(tokens, targets);
      recording.backward(second ? derivative_along(loss, *model.model, *direction.model) : loss);
    });
  };
  const auto peak = [&](bool second) {
    memory.reset_peak();
    timed(second);
    return static_cast<double>(memory.stats().peak) / (1 << 20);
  };
  for (int warm = session.options().quick ? 1 : 3; warm > 0; --warm) timed(true), timed(false);
  auto [own, peers] = session.turns([&] { return timed(true); }, [&] { return timed(false); });
  line.samples_s = std::move(own);
  line.peer = "a gradient";
  line.peer_value = quantile(peers, 0.5);
  line.more = {{"MiB live", peak(true)}, {"MiB live for a gradient", peak(false)}};
}

}  // namespace

void hessian_suite(Session& session) {
  const auto add = [&](const char* line_name, const char* name,
                       const std::vector<std::string>& overrides) {
    session.line("hessian", line_name, Unit::seconds, [&](Line& line) {
      run_local(1, [&](World& world) { measure(session, name, overrides, world, line); },
                {.threads_per_rank = session.machine().threads, .device = session.device()});
    });
  };
  if (session.on_gpu()) {
    add("gpt2-124m-bf16-4x1024", "gpt2-124m-bf16-512x1024", {"--train.batch=4"});
  } else {
    add("nanogpt-f32-12x64", "nanogpt-f32-12x64", {});
    add("gpt2-124m-f32-4x64", "gpt2-124m-f32-4x64", {});
  }
}

}  // namespace sheaf::bench
