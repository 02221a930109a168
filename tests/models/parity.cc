#include "sheaf/tests/models/parity.h"

#include <gtest/gtest.h>

#include <cmath>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/sample_block.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/optim/muon.h"

namespace sheaf::testing {

double max_difference(const Values& a, const Values& b) {
  double worst = 0;
  if (a.size() != b.size()) fail<ShapeError>("[parity] ", a.size(), " and ", b.size(), " tensors");
  for (const auto& [name, x] : a) {
    const std::vector<double>& y = b.at(name);
    if (x.size() != y.size()) fail<ShapeError>("[parity] ", name, " has ", x.size(), " and ", y.size(), " elements");
    for (size_t i = 0; i < x.size(); ++i) {
      if (!std::isfinite(x[i]) || !std::isfinite(y[i])) return INFINITY;
      worst = std::max(worst, std::abs(x[i] - y[i]));
    }
  }
  return worst;
}

double max_magnitude(const Values& a) {
  double most = 0;
  for (const auto& [name, x] : a)
    for (double v : x) most = std::max(most, std::abs(v));
  return most;
}

double relative_difference(const Values& a, const Values& b) {
  double difference = 0, size = 0;
  for (const auto& [name, x] : a)
    for (size_t i = 0; i < x.size(); ++i) {
      difference += (x[i] - b.at(name)[i]) * (x[i] - b.at(name)[i]);
      size += x[i] * x[i];
    }
  return std::sqrt(difference / size);
}

std::vector<float> shards(nn::Module& module) {
  std::vector<float> all;
  for (const auto& unit : units(module))
    for (const FlatBuffer& buffer : unit->buffers()) {
      const std::vector<float> values = buffer.shard.to_vector();
      all.insert(all.end(), values.begin(), values.end());
    }
  return all;
}

models::TrainConfig tiny_config() {
  models::TrainConfig c;
  c.model.layers = 3;
  c.model.heads = 2;
  c.model.width = 20;
  c.model.context = 9;
  c.model.vocab = 13;
  c.model.bias = true;
  c.train.steps = 20;
  c.train.batch = 7;
  c.train.warmup = 3;
  c.train.clip = 0.5;
  c.train.lr = 3e-3;
  return c;
}

models::TrainConfig tiny_rank_config(const std::string& strategy) {
  models::TrainConfig c = tiny_config();
  c.model.dropout = 0.2;
  c.train.micro_batches = 2;
  c.sharding.strategy = strategy;
  return c;
}

void fill_tiny(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
  const models::TrainConfig c = tiny_config();
  for (int64_t s = 0; s < count; ++s)
    for (int64_t t = 0; t < c.model.context; ++t) {
      const int64_t at = s * c.model.context + t;
      const auto token = [&](int64_t i) { return static_cast<int32_t>(((first + s) * 7 + i * i * 3 + i) % c.model.vocab); };
      inputs[at] = token(t);
      targets[at] = token(t + 1);
    }
}

models::FillBatch tiny_data(const models::TrainConfig& config) {
  if (!config.data.examples) return fill_tiny;
  return [context = config.model.context](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
    fill_tiny(first, count, inputs, targets);
    for (int64_t s = 0; s < count; ++s)
      for (int64_t t = 0; t < context; ++t)
        if ((first + s) % 4 == 1 || (t + first + s) % (1 + (first + s) % 3) != 0) targets[s * context + t] = models::kIgnoreIndex;
  };
}

models::TrainingStepOptions tiny_options(const models::TrainConfig& config, DType masters) {
  models::TrainingStepOptions options{.masters = masters};
  options.num_targets = [fill = tiny_data(config), context = config.model.context](int64_t first, int64_t count) {
    std::vector<int32_t> inputs(static_cast<size_t>(count * context)), targets(inputs.size());
    fill(first, count, inputs.data(), targets.data());
    return std::ranges::count_if(targets, [](int32_t t) { return t != models::kIgnoreIndex; });
  };
  return options;
}

TrainedRun train_tiny(const models::TrainConfig& config, int world, int steps,
                      const std::function<void(models::TrainingStep&)>& inspect, Device device) {
  TrainedRun run;
  Whole whole;
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, device, tiny_options(config));
    for (int s = 0; s < steps; ++s) {
      const auto result = step.run(s, tiny_data(config));
      if (w.rank() != 0) continue;
      run.losses.push_back(result.loss.item());
      run.norms.push_back(result.grad_norm.item());
    }
    whole.collect(step.model(), false);
    if (inspect) inspect(step);
  }, {.threads_per_rank = 1, .device = device});
  run.parameters = whole.values();
  return run;
}

Values parameters_f64(const models::TrainConfig& config, int world, int steps) {
  Whole whole;
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, 13, w, Device::cpu(), tiny_options(config, kF64));
    for (int s = 0; s < steps; ++s) step.run(s, tiny_data(config));
    whole.collect(step.model(), false);
  }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
  return whole.values();
}

void expect_same_bits(const TrainedRun& a, const TrainedRun& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_EQ(a.norms, b.norms);
  EXPECT_EQ(max_difference(a.parameters, b.parameters), 0.0);
}

std::unique_ptr<models::Decoder> tiny_model_f64(const Mesh& mesh, ShardOptions options, Device device, uint64_t seed,
                                                const models::ModelConfig& config,
                                                const std::function<void(models::Decoder&, const ShardOptions&)>& prepare) {
  std::unique_ptr<models::Decoder> model = models::make_language_model(config, config.vocab);
  if (!mesh.spec->has_axis("data")) options.axis = mesh.spec->has_axis("context") ? "context" : "gathered";
  else if (mesh.spec->has_axis("expert") && mesh.spec->size(mesh.spec->axis("data")) == 1) options.axis = "expert";
  for (int a = 0; a < mesh.spec->num_axes(); ++a) {
    if (mesh.spec->name(a) == "replica") options.replica_axis = "replica";
    if (mesh.spec->name(a) == "secondary") options.replica_axis = "secondary", options.secondary = true;
    if (mesh.spec->name(a) == "expert") options.expert_axis = "expert";
    if (mesh.spec->name(a) == "context") options.context_axis = "context";
    if (mesh.spec->name(a) == "gathered") options.context_axis = "gathered", options.context_comm = nn::ContextComm::all_gather;
    if (mesh.spec->name(a) == "model") options.tensor_axis = "model";
    if (mesh.spec->name(a) == "stage") options.stage_axis = "stage";
  }
  options.units = nn::units_where([&](nn::Module& m, const std::string&) { return model->is_block(m); });
  if (!options.stage_axis.empty()) {
    const StageCut cut(config.layers, mesh.size("stage"));
    options.stage_of = [&model, cut](const nn::Module& m, const std::string&) { return model->stage_of(m, cut); };
    options.units = nn::units_where([&model, cut](nn::Module& m, const std::string&) { return model->stage_of(m, cut) >= 0; });
  }
  if (prepare) prepare(*model, options);
  shard(*model, mesh, options);
  materialize(*model, device, {.seed = seed, .dtype = kF64});
  return model;
}

TinyBatch tiny_batch(const Mesh& mesh, int64_t first, int64_t rows, Device device) {
  Layout layout(mesh.spec, Placement::shard(0));
  for (int a = 0; a < layout.num_axes(); ++a) {
    if (mesh.spec->name(a) == "context" || mesh.spec->name(a) == "model") layout[a] = Placement::shard(1);
    if (mesh.spec->name(a) == "gathered")
      layout[a] = Placement::shard(OwnershipMap::from_both_ends(1, tiny_config().model.context, mesh.spec->size(a)));
  }
  Layout of_targets = layout;
  if (mesh.spec->has_axis("stage")) {
    const int axis = mesh.spec->axis("stage");
    layout[axis] = Placement::on(0), of_targets[axis] = Placement::on(mesh.spec->size(axis) - 1);
  }
  const Shape shape{rows, tiny_config().model.context};
  const Tensor tokens = Tensor::empty({kI32, shape, layout}), targets = Tensor::empty({kI32, shape, of_targets});
  models::fill_block(first, fill_tiny, tokens, targets);
  return {tokens.to(device), targets.to(device)};
}

models::ModelConfig tiny_model(const std::string& type, int64_t heads, int64_t key_heads) {
  models::ModelConfig m = tiny_config().model;
  m.type = type == "gpt2" ? type : "llama";
  m.tie_embeddings = type != "untied llama" && !type.starts_with("latent");
  m.layers = 2;
  m.heads = heads;
  m.width = 4 * heads;
  m.mlp_width = 40;
  if (m.type == "llama") m.kv_heads = key_heads;
  if (type == "qwen3") m.head_dim = 6, m.qk_norm = true;
  if (type == "gemma2") m.attn_logit_softcapping = 0.7, m.final_logit_softcapping = 1.5, m.post_norms = true;
  if (type == "olmo") m.head_dim = 6, m.qk_norm = m.qk_norm_all_heads = m.post_norms = true, m.pre_norms = false;
  if (type.starts_with("latent")) m.kv_lora_rank = 7, m.qk_nope_head_dim = 5, m.qk_rope_head_dim = 4, m.v_head_dim = 3, m.kv_heads = 0;
  if (type == "latent") m.q_lora_rank = 6;
  return m;
}

models::ModelConfig tiny_linear_attention(int64_t key_heads) {
  models::ModelConfig m = tiny_model("untied llama", 6, 3);
  m.layers = m.full_attention_every = 3;
  m.linear_key_heads = key_heads, m.linear_value_heads = 2 * key_heads;
  m.linear_key_head_dim = 3, m.linear_value_head_dim = 2, m.linear_conv_kernel = 3;
  return m;
}

models::ModelConfig tiny_qwen3_next(int64_t key_heads) {
  models::ModelConfig m = tiny_linear_attention(key_heads);
  m.head_dim = 6, m.rotary_dim = 4, m.qk_norm = m.attention_gate = true;
  m.experts = 5, m.experts_per_token = 2, m.expert_hidden = 10;
  m.shared_experts = 1, m.shared_expert_gate = true;
  m.aux_loss = 0.1;
  return m;
}

models::ModelConfig tiny_mixture(double capacity_factor, double aux_loss) {
  models::ModelConfig m = tiny_model("untied llama", 5, 5);
  m.experts = 5;
  m.experts_per_token = 3;
  m.expert_hidden = 12;
  m.capacity_factor = capacity_factor;
  m.aux_loss = aux_loss;
  return m;
}

models::ModelConfig tiny_biased_mixture(double capacity_factor) {
  models::ModelConfig m = tiny_mixture(capacity_factor, 0);
  m.experts = 6;
  m.expert_affinity = "sigmoid";
  m.expert_bias = true;
  m.expert_balance_rate = 0.02;
  m.expert_scale = 1.5;
  m.routing_groups = 3;
  m.routing_groups_per_token = 2;
  m.shared_experts = 1;
  m.layers = 3;
  m.dense_layers = 1;
  return m;
}

models::ModelConfig tiny_gpt_oss(int64_t heads, int64_t key_heads) {
  models::ModelConfig m = tiny_model("untied llama", heads, key_heads);
  m.layers = 3;
  m.head_dim = 6;
  m.qkv_bias = m.out_bias = m.attention_sinks = true;
  m.window = 3;
  m.full_attention_every = 2;
  m.experts = 7;
  m.experts_per_token = 2;
  m.expert_hidden = 12;
  m.expert_linear_bias = true;
  m.expert_gate_limit = 0.01;
  return m;
}

models::TrainConfig tiny_pipeline(int64_t stages, const std::string& type, const std::string& strategy) {
  models::TrainConfig c = tiny_config();
  c.model = tiny_model(type, 2, 2);
  c.model.layers = 5;
  c.model.dropout = 0.2;
  c.train.micro_batches = 4;
  c.sharding.strategy = strategy;
  c.sharding.pipeline = stages;
  return c;
}

Axes MeshSizes::axes() const {
  Axes out;
  for (const auto& [name, size] : {std::pair{"replica", replicas}, {"data", data}, {"context", context}, {"model", model}})
    if (size) out.push_back({name, size});
  return out;
}

int num_ranks(const Axes& axes) {
  int n = 1;
  for (const auto& axis : axes) n *= axis.size;
  return n;
}

Values gradients_f64(const Axes& axes, const std::string& strategy, int64_t rows, Device device,
                     const models::ModelConfig& config) {
  Whole whole;
  run_local(num_ranks(axes), [&](World& w) {
    const Mesh mesh = w.mesh(axes);
    const auto model = tiny_model_f64(mesh, {.strategy = strategy}, device, 5, config);
    const TinyBatch batch = tiny_batch(mesh, 0, rows, device);
    const DeviceScope scope(device);
    Recording recording;
    recording.backward(model->loss(batch.tokens, batch.targets, {.divide_by = static_cast<double>(batch.tokens.numel())}));
    whole.collect(*model, true);
  }, {.threads_per_rank = 1, .device = device});
  return whole.values();
}

void expect_gradients_of_one_rank(const Axes& axes, const std::string& strategy, int64_t rows, const models::ModelConfig& config) {
  const Values expected = gradients_f64(Axes{{"data", 1}}, "replicate", rows, {}, config);
  const Values actual = gradients_f64(axes, strategy, rows, {}, config);
  EXPECT_LE(max_difference(expected, actual), 1e-12 * max_magnitude(expected));
}

void magnify(nn::Module& model, double factor) {
  for (const nn::Parameter& p : model.parameters())
    if (p.shape().rank() >= 2) assign(p, full_parameter(p) * factor);
}

void draw_all_parameters(models::Decoder& model, const ShardOptions&) {
  for (nn::Parameter p : model.parameters()) p.set_init(nn::Init::normal(0.1));
}

HessianProducts hessian_f64(const Axes& axes, const std::string& strategy, int64_t rows, const models::ModelConfig& config, Device device) {
  HessianProducts out;
  Whole product, direction;
  run_local(num_ranks(axes), [&](World& w) {
    const Mesh mesh = w.mesh(axes);
    const auto model = tiny_model_f64(mesh, {.strategy = strategy}, device, 5, config);
    const auto v = tiny_model_f64(mesh, {.strategy = strategy}, device, 6, config, draw_all_parameters);
    const TinyBatch batch = tiny_batch(mesh, 0, rows, device);
    const DeviceScope scope(device);
    const auto loss = [&] {
      return model->loss(batch.tokens, batch.targets, {.divide_by = static_cast<double>(batch.tokens.numel())});
    };
    {
      Recording recording;
      recording.backward(loss());
    }
    const double by_gradient = gradient_along(*model, *v).item<double>();
    zero_grad(*model);
    Tensor slope;
    {
      Recording recording({.higher_order = true});
      slope = derivative_along(loss(), *model, *v);
      recording.backward(slope);
    }
    product.collect(*model, true);
    direction.collect(*v, false);
    const double along = gradient_along(*model, *v).item<double>(),
                 d = redistribute(slope, Layout(mesh.spec, Placement::invariant())).item<double>();
    if (w.rank() == 0) out.along = along, out.slope = d, out.slope_by_gradient = by_gradient;
  }, {.threads_per_rank = 1, .device = device});
  out.product = product.values(), out.direction = direction.values();
  return out;
}

std::map<std::string, Traffic> traffic(const Tape& tape) {
  std::map<std::string, Traffic> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    if (n.phase == Phase::update || !n.op || n.op->kind != OpKind::redistribute) continue;
    const auto all = transfers(tape, n);
    const auto row = [&](const Transfer& t) -> Traffic& {
      return out[t.name + " " + tape.type(t.to).layout.mesh()->name(t.axis)];
    };
    for (const Transfer& t : all) ++row(t).count;
    if (!all.empty()) row(all[0]).bytes += tape.wire_bytes(n);
  }
  return out;
}

void expect_ways_change_no_bit(const models::TrainConfig& config, int world, int steps) {
  const TrainedRun expected = train_tiny(config, world, steps);
  EXPECT_LT(expected.losses.back(), expected.losses.front());
  for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
    models::TrainConfig c = config;
    c.sharding.strategy = strategy;
    expect_same_bits(expected, train_tiny(c, world, steps));
  }
  for (const char* recompute : {"block", "selective"}) {
    models::TrainConfig c = config;
    c.train.recompute = recompute;
    c.sharding.units = "none";
    expect_same_bits(expected, train_tiny(c, world, steps));
  }
  models::TrainConfig c = config;
  c.train.compile = true;
  expect_same_bits(expected, train_tiny(c, world, steps));
}

void expect_stages_of_one_rank(models::TrainConfig config, int64_t stages) {
  const TrainedRun expected = train_tiny(config, 1, 4);
  config.sharding.pipeline = stages;
  const TrainedRun actual = train_tiny(config, static_cast<int>(stages), 4);
  EXPECT_LE(max_difference(expected.parameters, actual.parameters), 5e-5);
  for (size_t s = 0; s < 4; ++s) EXPECT_NEAR(expected.losses[s], actual.losses[s], 2e-5);
}

// Whole, a line for each holder.
static std::string holders_of(const MemoryLedger::Peak& peak) {
  std::string out;
  const auto line = [&](const MemoryLedger::Holder& h) {
    out += str(name(h.use), ": ", h.op, " of ", h.module, ", ", h.bytes, " bytes in ", h.blocks, "\n");
  };
  line(peak.last);
  for (const MemoryLedger::Holder& h : peak.holders) line(h);
  return out;
}

void expect_planned_tapes(const models::TrainConfig& config, int world, const std::function<void(World&, const Tape&)>& inspect) {
  std::vector<Tape> tapes(static_cast<size_t>(world));
  run_local(world, [&](World& w) {
    MemoryLedger ledger;
    models::TrainingStep step(config, config.model.vocab, w, Device::cpu(), tiny_options(config));
    Allocator& memory = *RankContext::current().memory(Device::cpu());
    models::RecordedStep recorded;
    const int last = config.train.compile ? 3 : 2;
    for (int s = 0; s <= last; ++s) {
      memory.reset_peak(), ledger.reset_peak();
      step.run(s, tiny_data(config), s == last ? &recorded : nullptr);
    }
    const models::Plan plan = models::plan_step(config, config.model.vocab, w.rank(), world, 1, "local");
    EXPECT_EQ(memory.stats().peak, plan.peak.bytes) << "rank " << w.rank();
    EXPECT_EQ(holders_of(ledger.peak(memory)), holders_of(plan.peak)) << "rank " << w.rank();
    tapes[static_cast<size_t>(w.rank())] = recorded.tape;
    if (inspect) inspect(w, recorded.tape);
  }, {.threads_per_rank = 1});
  std::vector<const Tape*> ranks;
  for (const Tape& t : tapes) {
    ranks.push_back(&t);
    for (const Finding& f : check_tape(t)) ADD_FAILURE() << f.to_string();
  }
  if (config.sharding.pipeline > 1) return;  // stages issue their own collectives, in their own order
  for (const Finding& f : check_collectives(ranks)) ADD_FAILURE() << f.to_string();
}

void expect_checkpoint_moves(const std::string& folder, const Axes& from, const std::vector<Axes>& to,
                             const models::ModelConfig& config, bool muon) {
  const auto last_step = [&](const Axes& axes, bool save) {
    Whole whole;
    run_local(num_ranks(axes), [&](World& w) {
      const Mesh mesh = w.mesh(axes);
      const auto model = tiny_model_f64(mesh, {}, Device::cpu(), save ? 3 : 4, config);
      std::unique_ptr<optim::Optimizer> optimizer;
      if (muon) optimizer = std::make_unique<optim::Muon>(*model);
      else optimizer = std::make_unique<optim::AdamW>(*model);
      const TinyBatch batch = tiny_batch(mesh, 0, 7);
      const auto step = [&] {
        Recording recording;
        recording.backward(model->loss(batch.tokens, batch.targets, {.divide_by = 63.0}));
        optimizer->step({.lr = 0.01});
        optimizer->zero_grad();
      };
      if (save) {
        step();
        models::save_checkpoint(folder, 1, *model, {optimizer.get()}, w);
      } else {
        ASSERT_TRUE(models::load_checkpoint(folder, *model, {optimizer.get()}, w));
      }
      step();
      whole.collect(*model, false);
    }, {.threads_per_rank = 1});
    return whole.values();
  };
  const Values expected = last_step(from, true);
  for (const Axes& axes : to) {
    std::string trace;
    for (const auto& axis : axes) trace += str(" ", axis.name, "=", axis.size);
    SCOPED_TRACE(str(num_ranks(from), " ranks, then", trace));
    EXPECT_LE(max_difference(expected, last_step(axes, false)), 1e-12);
  }
}

void expect_cached_logits(const models::ModelConfig& m) {
  const auto model = models::make_language_model(m, 13);
  materialize(*model, Device::cpu(), {.seed = 4, .dtype = kF64});
  model->eval();
  std::vector<int32_t> text;
  for (int64_t t = 0; t < m.context; ++t) text.push_back(static_cast<int32_t>(t * t % 13));
  const Tensor tokens = Tensor::from(text, {1, m.context});
  const std::vector<double> expected = model->logits(tokens).to_vector<double>();
  nn::KeyValueCache cache(m.context);
  for (int64_t begin = 0, end; begin < m.context; begin = end) {
    end = std::min(begin == 0 ? 3 : begin + 1, m.context);  // a prompt, then one by one
    const std::vector<double> next = model->next_logits(slice(tokens, 1, begin, end), cache).to_vector<double>();
    ASSERT_EQ(next.size(), 13u);
    for (int64_t v = 0; v < 13; ++v) EXPECT_EQ(next[static_cast<size_t>(v)], expected[static_cast<size_t>((end - 1) * 13 + v)]);
  }
}

std::string refusal(int world, const models::TrainConfig& config) {
  try {
    models::plan_step(config, config.model.vocab, 0, world, 1, "local");
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

}  // namespace sheaf::testing
