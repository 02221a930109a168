// experts: gradients of a model with mixtures of experts as MLPs, against those of a dense model with the same work per token,
// alternating. The difference is the cost of routing, of sending and returning rows, and of products with fewer rows and more
// matrices.
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

/// A model, and its gradients on a fixed batch.
class Gradients {
 public:
  Gradients(const models::TrainConfig& config, World& world) : model_(models::sharded_model(config, config.model.vocab, world)) {
    materialize(*model_.model, world.device(), {.seed = 1});
    const Type rows{kI32, {config.train.batch, config.model.context}, Layout(model_.mesh.spec, Placement::shard(0))};
    const Tensor tokens = Tensor::empty(rows), targets = Tensor::empty(rows);
    models::fill_block(0, random_tokens(config), tokens, targets);
    tokens_ = tokens.to(world.device()), targets_ = targets.to(world.device());
  }
  double seconds() {
    return device_seconds([&] {
      zero_grad(*model_.model);
      Recording recording;
      recording.backward(model_.model->loss(tokens_, targets_));
    });
  }
  /// The peak memory of a step beyond persistent memory.
  double peak_mib(Allocator& memory) {
    zero_grad(*model_.model);
    const auto before = static_cast<double>(memory.stats().live);
    memory.reset_peak();
    seconds();
    return (static_cast<double>(memory.stats().peak) - before) / (1 << 20);
  }

 private:
  models::ShardedModel model_;
  Tensor tokens_, targets_;
};

void measure(Session& session, std::string_view name, const std::vector<std::string>& common, const std::vector<std::string>& mixture,
             const std::vector<std::string>& dense, World& world, Line& line) {
  const auto with = [&](const std::vector<std::string>& more) {
    std::vector<std::string> all = common;
    if (session.options().quick)
      for (const std::string& o : tiny_model()) all.push_back(o);
    all.insert(all.end(), more.begin(), more.end());
    return training_config(name, all);
  };
  Gradients own(with(mixture), world), peer(with(dense), world);
  for (int warm = session.options().quick ? 1 : 3; warm > 0; --warm) own.seconds(), peer.seconds();
  auto [seconds, peers] = session.turns([&] { return own.seconds(); }, [&] { return peer.seconds(); });
  line.samples_s = std::move(seconds);
  line.peer = "one MLP of as much work";
  line.peer_value = quantile(peers, 0.5);
  Allocator& memory = *RankContext::current().memory(world.device());
  line.more = {{"MiB of a step", own.peak_mib(memory)}, {"MiB of the peer's", peer.peak_mib(memory)}};
}

}  // namespace

void experts_suite(Session& session) {
  const auto add = [&](const std::string& line_name, const char* name, const std::vector<std::string>& common, int64_t width, int64_t choices,
                       int64_t experts, double capacity) {
    session.line("experts", line_name, Unit::seconds, [&](Line& line) {
      std::vector<std::string> mixture = {str("--model.experts=", experts), str("--model.experts_per_token=", choices),
                                          str("--model.expert_hidden=", width / choices)};
      if (capacity > 0) mixture.push_back(str("--model.capacity_factor=", capacity));
      run_local(1, [&](World& world) { measure(session, name, common, mixture, {str("--model.mlp_width=", width)}, world, line); },
                {.threads_per_rank = session.machine().threads, .device = session.device()});
    });
  };
  struct Case { int64_t choices, experts; double capacity; };
  for (const char* dtype : {"f32", "bf16"}) {
    if (session.on_gpu() && dtype == std::string_view("f32")) continue;
    for (const auto& [choices, experts, capacity] : {Case{2, 8, 0}, Case{2, 8, 1.25}, Case{4, 32, 0}, Case{8, 128, 0}}) {
      const std::string name = str(dtype, '-', choices, "-of-", experts, capacity > 0 ? str("-capacity-", capacity) : "");
      if (session.on_gpu())
        add(name, "llama3-8b-bf16-4x8192", {"--model.layers=2", "--model.vocab=4096", "--train.batch=2"}, 14336, choices, experts, capacity);
      else
        add(name, "llama-f32-8x256", {str("--train.dtype=", dtype)}, 1024, choices, experts, capacity);
    }
  }
}

}  // namespace sheaf::bench
