#include "sheaf/tests/models/random_training.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "sheaf/core/block_format.h"
#include "sheaf/core/error.h"
#include "sheaf/tools/config.h"

namespace sheaf::testing {
namespace {

void draw_experts(models::ModelConfig& m, Draw& draw) {
  m.experts = 2 + draw.below(5);
  m.experts_per_token = 1 + draw.below(static_cast<size_t>(std::min<int64_t>(m.experts, 3)));
  m.expert_hidden = draw.one_in(2) ? 0 : 3 + draw.below(10);
  m.capacity_factor = draw.of<double>({0, 0, 0.6, 1.0, 1.25, 2.0});
  if (m.capacity_factor > 0) m.capacity_groups = draw.of<int64_t>({1, 1, 2, 3});
  m.aux_loss = draw.of<double>({0, 0.1});
  m.router_z_loss = draw.of<double>({0, 0, 0.02});
  m.normalize_experts = draw.one_in(2);
  m.expert_affinity = draw.of<std::string>({"softmax", "sigmoid"});
  m.expert_bias = draw.one_in(2);
  if (m.expert_bias) m.expert_balance_rate = draw.of<double>({0, 0.01, 0.1});
  m.expert_scale = draw.of<double>({1, 1, 2.5});
  m.shared_experts = draw.of<int64_t>({0, 0, 1, 2});
  m.shared_expert_gate = m.shared_experts && draw.one_in(2);
  m.dense_layers = std::min(draw.of<int64_t>({0, 0, 1, 2}), m.layers - 1);
  m.expert_linear_bias = draw.one_in(3);
  if (draw.one_in(3)) m.expert_gate_limit = draw.of<double>({0.2, 1, 7});
  if (draw.one_in(3) && m.experts % 2 == 0) {
    m.routing_groups = draw.one_in(2) ? 2 : m.experts;
    m.routing_groups_per_token = m.routing_groups == 2 ? (m.experts_per_token <= m.experts / 2 ? 1 : 2) : m.experts_per_token;
  }
}

void draw_model(models::ModelConfig& m, Draw& draw) {
  m.type = draw.one_in(3) ? "gpt2" : "llama";
  m.layers = 1 + draw.below(draw.one_in(4) ? 7 : 4);
  m.vocab = 5 + draw.below(19);
  m.context = draw.one_in(12) ? 1 : 2 + draw.below(10);
  m.mlp_width = draw.one_in(6) ? 1 + draw.below(3) : 4 + draw.below(20);
  m.tie_embeddings = draw.one_in(2);
  m.dropout = draw.of<double>({0, 0, 0.2});
  m.attn_logit_softcapping = draw.of<double>({0, 0, 0, 0.5}), m.final_logit_softcapping = draw.of<double>({0, 0, 0, 2});
  m.norm_eps = draw.of<double>({1e-5, 1e-3});
  if (draw.one_in(3)) m.window = 1 + draw.below(static_cast<size_t>(m.context) + 2), m.full_attention_every = draw.of<int64_t>({0, 2, 3});
  if (m.type == "gpt2") {
    m.heads = 1 + draw.below(6);
    m.width = m.heads * (2 + draw.below(4));
    m.bias = draw.one_in(2);
    return;
  }
  m.kv_heads = 1 + draw.below(6);
  m.heads = m.kv_heads * (1 + draw.below(m.kv_heads > 3 ? 2 : 3));
  m.head_dim = 2 * (1 + draw.below(3));
  m.width = draw.one_in(2) ? m.heads * m.head_dim : 3 + draw.below(20);
  m.qkv_bias = draw.one_in(3);
  m.qk_norm = draw.one_in(3);
  m.out_bias = draw.one_in(4);
  m.attention_sinks = draw.one_in(3);
  if (draw.one_in(4)) {
    m.heads = m.kv_heads = 1 + draw.below(6);
    m.head_dim = 0, m.width = m.heads * (1 + draw.below(5));
    m.qkv_bias = m.qk_norm = m.out_bias = m.attention_sinks = false;
    m.attn_logit_softcapping = 0;
    m.kv_lora_rank = 2 + draw.below(8);  // the norm of one element is its sign: rounding errors would be as large as anything
    m.q_lora_rank = draw.one_in(2) ? 0 : 2 + draw.below(8);
    m.qk_nope_head_dim = 1 + draw.below(5), m.qk_rope_head_dim = 2 * (1 + draw.below(3));
    m.v_head_dim = 1 + draw.below(6);
    m.rope_scaling.mscale_all_dim = draw.of<double>({0, 0.8});
  }
  m.qk_norm_all_heads = m.qk_norm && draw.one_in(3);
  if (m.kv_lora_rank == 0) m.query_pre_attn_scalar = draw.one_in(5) ? 7 : 0;
  if (m.kv_lora_rank == 0) m.attention_gate = draw.one_in(4), m.rotary_dim = draw.one_in(4) ? 2 : 0;
  if (draw.one_in(4)) {
    m.window = 0, m.full_attention_every = draw.of<int64_t>({0, 2, 3});
    m.linear_key_heads = 1 + draw.below(6), m.linear_value_heads = m.linear_key_heads * (1 + draw.below(3));
    m.linear_key_head_dim = 2 + draw.below(5), m.linear_value_head_dim = 2 + draw.below(5), m.linear_conv_kernel = 1 + draw.below(4);
  }
  m.rope_theta = draw.of<double>({10000, 100});
  if (m.kv_lora_rank == 0) m.nope_every = draw.of<int64_t>({0, 0, 0, 1, 2, 3});
  m.rope_scaling.rope_type = draw.of<std::string>({"default", "default", "linear", "llama3", "yarn", "longrope"});
  m.rope_scaling.original_max_position_embeddings = 8;
  m.rope_scaling.high_freq_factor = 4;
  for (int64_t i = 0; m.rope_scaling.rope_type == "longrope" && i < models::rotated_pairs(models::resolved(m)); ++i)
    m.rope_scaling.short_factor += " 1.5", m.rope_scaling.long_factor += str(' ', i + 2);
  if (draw.one_in(3)) draw_experts(m, draw);
  if (!draw.one_in(3)) return;
  m.gelu_gate = draw.one_in(2) && m.experts == 0;
  m.post_norms = draw.one_in(2);
  m.pre_norms = !m.post_norms || draw.one_in(2);
  m.scale_embedding = draw.one_in(2);
  if (m.window) m.window_rope_theta = draw.of<double>({0, 50});
}

void draw_optimization(models::OptimizationConfig& t, Draw& draw) {
  t.steps = kRandomSteps;
  t.batch = 1 + draw.below(9);
  t.seed = draw.below(1000);
  t.lr = 1e-2;
  t.min_lr = 1e-3;
  t.warmup = draw.below(3);
  t.schedule = draw.of<std::string>({"cosine", "linear", "constant"});
  t.eval_every = draw.of<int64_t>({0, 0, 1, 2});
  t.momentum = draw.of<double>({0.95, 0.5});
  t.weight_decay = draw.of<double>({0, 0.1, 1});
  t.beta1 = draw.of<double>({0.9, 0.5});
  t.beta2 = draw.of<double>({0.99, 0.9});
  t.eps = draw.of<double>({1e-8, 1e-5});
  t.clip = draw.of<double>({0, 0.1, 1, 100});
  if (draw.one_in(3)) t.lr_factors = "0.5 blocks.0.*";
  if (draw.one_in(3)) t.weight_decay_factors = "0 blocks.0.* 0.5 *";
}

/// Draws how ranks hold the model, which changes no bit.
void draw_holding(Way& way, Draw& draw) {
  models::TrainConfig& c = way.config;
  models::ShardingConfig& s = c.sharding;
  if (s.pipeline == 1 || draw.one_in(30)) s.units = draw.of<std::string>({"block", "block", "count", "none"});
  else s.units = "block";
  s.min_parameters = draw.of<int64_t>({1, 100, 1000});
  s.piece_rows = draw.of<int64_t>({128, 1, 1, 2, 5});
  way.bytes_per_second = draw.one_in(3) ? 1e8 : 0;
  s.prefetch_bytes = draw.of<int64_t>({-1, -1, 0, 1, 777, 1 << 30});
  c.train.recompute = draw.of<std::string>({"none", "none", "selective", "block"});
  c.train.recompute_blocks = c.train.recompute == "none" ? -1 : draw.below(static_cast<size_t>(c.model.layers) + 2) - 1;
  c.train.offload_activations = c.train.recompute != "none" && draw.one_in(4);
  c.train.offload_optimizer = draw.one_in(4);
  c.train.offload_parameters = s.strategy != "replicate" && draw.one_in(4);
  c.train.compile = draw.one_in(3);
  c.train.update_in_backward = c.train.clip == 0 && c.train.dtype != "f16" && draw.one_in(2);
  s.memory_budget = c.train.compile ? draw.of<int64_t>({0, 20'000, 60'000, 1LL << 40}) : 0;
  s.secondary = s.strategy != "replicate" && (s.replicas > 1 || s.context > 1 || s.experts > 1) && draw.one_in(3);
}

}  // namespace

models::TrainConfig drawn_task(Draw& draw) {
  models::TrainConfig c;
  draw_model(c.model, draw);
  draw_optimization(c.train, draw);
  // If a token attends only to itself, gradients of queries and keys are pure rounding errors, which Muon would scale up.
  if (c.model.context > 1 && c.model.window != 1 && draw.one_in(3)) c.train.optimizer = "muon";
  c.train.z_loss = draw.of<double>({0, 0, 0, 0.01});
  if (draw.one_in(3)) c.data.separate_documents = true, c.data.end_of_text = draw.below(static_cast<size_t>(c.model.vocab));
  c.data.examples = draw.one_in(4);
  if (c.model.type == "llama" && draw.one_in(4)) {
    c.model.mtp_layers = std::min<int64_t>(1 + draw.below(2), c.model.context - 1);
    c.model.mtp_loss = draw.of<double>({0.3, 1});
  }
  c.sharding.strategy = "replicate";
  if (c.model.aux_loss != 0) c.train.micro_batches = 1 + draw.below(static_cast<size_t>(std::min<int64_t>(c.train.batch, 4)));
  return c;
}

void draw_widths(models::ModelConfig& m, int64_t unit, Draw& draw) {
  m.layers = std::min<int64_t>(m.layers, 3);
  m.dense_layers = std::min(m.dense_layers, m.layers - 1);
  m.heads = m.kv_heads = 1 + draw.below(3);
  m.mlp_width = unit * (1 + draw.below(3));
  m.width = m.type == "gpt2" ? unit * m.heads : unit;
  if (m.type == "gpt2") return;
  m.expert_hidden = m.experts ? unit : 0;
  m.head_dim = m.kv_lora_rank ? 0 : unit;
  if (m.kv_lora_rank) m.kv_lora_rank = m.qk_nope_head_dim = m.v_head_dim = unit;
  if (m.q_lora_rank) m.q_lora_rank = unit;
  if (m.linear_key_heads) m.linear_key_heads = m.linear_value_heads = 1 + draw.below(3), m.linear_key_head_dim = m.linear_value_head_dim = unit;
}

Way drawn_way(const models::TrainConfig& task, Draw& draw) {
  Way way{.config = task};
  models::ShardingConfig& s = way.config.sharding;
  models::OptimizationConfig& t = way.config.train;
  const models::ModelConfig m = models::resolved(task.model);
  const auto axis = [&](int64_t most) {  // 1 is as likely as all others together
    const int64_t n = draw.one_in(2) ? 1 : draw.of<int64_t>({2, 2, 3, 4});
    return n > most && !draw.one_in(40) ? int64_t{1} : n;
  };
  int64_t world;
  do {
    s.pipeline = axis(m.layers);
    s.replicas = axis(4);
    const bool gathers = draw.one_in(2);
    s.context_comm = gathers ? "all_gather" : "all_to_all";
    // With more ranks than key heads some are replicated, if they can be cut; not with linear attention.
    const int64_t most = m.linear_key_heads ? std::min(m.heads, m.linear_key_heads) : m.heads, alone = m.linear_key_heads ? most : 4;
    s.context = axis(gathers ? alone : most);
    s.tensor = axis(gathers && !m.linear_key_heads ? m.heads : most / s.context);
    s.experts = m.experts ? axis(m.experts) : axis(1);
    world = s.pipeline * s.replicas * s.context * s.tensor * s.experts * axis(4);
  } while (world > (draw.one_in(20) ? 16 : 8));
  way.world = static_cast<int>(world);
  way.threads = draw.one_in(6) ? 2 : 1;
  s.strategy = draw.of<std::string>({"full_shard", "full_shard", "shard_grad_op", "zero1", "zero1", "replicate"});
  if (s.replicas > 1 && s.strategy == "replicate" && !draw.one_in(20)) s.replicas = 1;
  if (task.model.aux_loss == 0) t.micro_batches = 1 + draw.below(static_cast<size_t>(std::min<int64_t>(t.batch, 4)));
  if (s.pipeline > 1 && draw.one_in(2)) {
    if (task.model.aux_loss == 0 && s.pipeline <= t.batch) t.micro_batches = s.pipeline * (1 + draw.below(static_cast<size_t>(t.batch / s.pipeline)));
    const bool can = t.micro_batches % s.pipeline == 0 && m.layers >= 2 * s.pipeline;
    if (can || draw.one_in(20)) s.pipeline_runs = can && m.layers >= 3 * s.pipeline && draw.one_in(2) ? 3 : 2;
  }
  if (s.pipeline > 1) s.pipeline_head = draw.of<double>({-1, -1, 0, 0.5, 2});
  if (draw.one_in(8)) way.config.output.trace_step = 1 + draw.below(kRandomSteps);
  t.save_async = draw.one_in(2);
  draw_holding(way, draw);
  if (s.pipeline > 1 && draw.one_in(2)) s.pipeline_schedule = "zero_bubble";
  t.fuse = !draw.one_in(3);
  return way;
}

Way drawn_twin(const Way& way, Draw& draw) {
  Way twin = way;
  std::string& strategy = twin.config.sharding.strategy;
  std::vector<std::string> alike{"full_shard", "shard_grad_op"};
  if (way.config.train.micro_batches == 1) alike.push_back("zero1");
  if (std::ranges::count(alike, strategy)) strategy = draw.of(alike);
  draw_holding(twin, draw);
  // Whole replicas' values are rounded once more than their parts.
  if (way.config.sharding.reduce_dtype == "int8") twin.config.sharding.secondary = way.config.sharding.secondary;
  if (way.config.sharding.pipeline > 1) twin.config.sharding.pipeline_schedule = draw.of<std::string>({"1f1b", "zero_bubble"});
  return twin;
}

void draw_sent(models::ShardingConfig& sharding, Draw& draw) {
  sharding.reduce_dtype = draw.of<std::string>({"f32", "f32", "bf16", "int8"});
  sharding.gather_int8 = draw.one_in(4);
}

bool rounds(const models::TrainConfig& c) {
  return c.train.dtype != "f32" || c.train.outer_dtype != "f32" || c.train.state_dtype != "f32" || c.train.fp8 != "none" ||
         c.sharding.reduce_dtype != "f32" || c.sharding.gather_int8;
}

std::string to_string(const Way& way) {
  models::TrainConfig config = way.config, standard;
  const auto of = tools::config_fields(config), usual = tools::config_fields(standard);
  std::string out = str(way.world, " ranks of ", way.threads);
  for (size_t i = 0; i < of.size(); ++i)
    std::visit([&](const auto* value) {
      if (*value != *std::get<std::remove_const_t<std::remove_pointer_t<decltype(value)>>*>(usual[i].target))
        out += str(" --", of[i].key, "=", *value);
    }, of[i].target);
  return out;
}

std::vector<int> random_seeds(int usual) {
  const auto number = [](const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text ? std::atoi(text) : otherwise;
  };
  std::vector<int> seeds(static_cast<size_t>(number("SHEAF_SEEDS", usual)));
  std::iota(seeds.begin(), seeds.end(), number("SHEAF_SEED", 0));
  return seeds;
}

void fill_random(const models::TrainConfig& config, int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
  const int64_t context = config.model.context;
  for (int64_t s = 0; s < count; ++s) {
    Draw draw(static_cast<uint64_t>(config.train.seed * 1'000'003 + first + s));
    int32_t last = 0;
    for (int64_t t = 0; t <= context; ++t) {
      const bool ends = config.data.separate_documents && draw.one_in(4);
      const auto token = static_cast<int32_t>(ends ? config.data.end_of_text : draw.below(static_cast<size_t>(config.model.vocab)));
      const bool read_only = config.data.examples && t < context && draw.one_in(2);
      if (t > 0) inputs[s * context + t - 1] = last, targets[s * context + t - 1] = read_only ? models::kIgnoreIndex : token;
      last = token;
    }
  }
}

models::TrainingStepOptions options_for(const models::TrainConfig& config, DType masters) {
  return {.masters = masters, .num_targets = [&config](int64_t first, int64_t count) {
    std::vector<int32_t> inputs(static_cast<size_t>(count * config.model.context)), targets(inputs.size());
    fill_random(config, first, count, inputs.data(), targets.data());
    return std::ranges::count_if(targets, [](int32_t t) { return t != models::kIgnoreIndex; });
  }};
}

}  // namespace sheaf::testing
