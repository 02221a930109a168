#include "sheaf/models/flops.h"

#include <algorithm>

#include "sheaf/models/attention_window.h"

namespace sheaf::models {

namespace {

// Keys that a token sees, averaged over blocks [begin, end): all of them, or those that masks leave, averaged over all tokens, a
// diagonal counted half. Linear attention has none.
double keys_seen(const ModelConfig& m, int64_t begin, int64_t end, CountAttention attention) {
  const auto context = static_cast<double>(m.context);
  double all = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (is_linear_block(m, i)) continue;
    const int64_t window = window_of_block(i, m.window, m.full_attention_every);
    const double most = window ? static_cast<double>(std::min(window, m.context)) : context;
    all += attention == CountAttention::full ? context : most * (context - most / 2) / context;
  }
  return all / static_cast<double>(end - begin);
}

// For a block: the elements of its matrices, the sum of their rows and columns, and the elements of queries and of values that are
// multiplied with each key; for linear attention, those that are multiplied with the states: a key, its update, and a query.
struct Attention {
  double weights = 0, sides = 0, of_a_key = 0, of_states = 0;
  void multiply(int64_t in, int64_t out) {
    weights += static_cast<double>(in) * static_cast<double>(out), sides += static_cast<double>(in + out);
  }
};

Attention attention_of(const ModelConfig& m) {
  Attention a;
  const int64_t queries = m.heads * m.head_dim, values = m.kv_lora_rank ? m.heads * m.v_head_dim : queries;
  if (m.kv_lora_rank) {
    a.multiply(m.width, m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim);
    a.multiply(m.q_lora_rank ? m.q_lora_rank : m.width, queries);
    a.multiply(m.kv_lora_rank, m.heads * (m.qk_nope_head_dim + m.v_head_dim));
  } else {
    a.multiply(m.width, queries + 2 * m.kv_heads * m.head_dim);
    if (m.attention_gate) a.multiply(m.width, queries);
  }
  a.multiply(values, m.width);
  a.of_a_key = static_cast<double>(queries + values);
  return a;
}

Attention linear_attention_of(const ModelConfig& m) {
  Attention a;
  const int64_t values = m.linear_value_heads * m.linear_value_head_dim;
  a.multiply(m.width, 2 * m.linear_key_heads * m.linear_key_head_dim + values);
  a.multiply(m.width, values);
  a.weights += static_cast<double>(m.width * 2 * m.linear_value_heads);  // rates, which have no adapters
  a.multiply(values, m.width);
  a.of_states = 3.0 * static_cast<double>(values * m.linear_key_head_dim);
  return a;
}

// The mean over all blocks, `linear` of which have linear attention.
Attention mean_of(const Attention& full, const Attention& of_linear, double linear) {
  const auto mean = [linear](double a, double b) { return (1 - linear) * a + linear * b; };
  return {mean(full.weights, of_linear.weights), mean(full.sides, of_linear.sides), full.of_a_key, linear * of_linear.of_states};
}

}  // namespace

FlopsOfParts flops_of_parts(const TrainConfig& config, CountAttention attention) {
  const ModelConfig m = resolved(config.model);
  const auto of = [](int64_t n) { return static_cast<double>(n); };
  const bool llama = m.type == "llama";
  const double width = of(m.width), tokens = of(m.context) * of(config.train.batch);
  double linear = 0;
  for (int64_t i = 0; i < m.layers; ++i) linear += is_linear_block(m, i) ? 1 / of(m.layers) : 0;
  const Attention full = attention_of(m), attention_of_a_block = mean_of(full, linear_attention_of(m), linear);
  // For a block's MLPs, averaged over blocks of which `mixtures` have mixtures: those that all tokens pass through.
  const auto mlp_of = [&](double mixtures) { return (1 - mixtures) * of(m.mlp_width) + mixtures * of(m.shared_experts * m.expert_hidden); };
  // Its matrices: up and down, and Llama's gate; for a mixture, the experts that a token is routed to, and their router.
  const auto block_of = [&](double mixtures, const Attention& attention) {
    const double hidden = mlp_of(mixtures) + mixtures * of(m.experts_per_token * m.expert_hidden);
    return attention.weights + (llama ? 3 : 2) * width * hidden + mixtures * width * of(m.experts + (m.shared_expert_gate ? 1 : 0));
  };
  const double mixtures = m.experts == 0 ? 0.0 : 1.0 - of(std::min(m.dense_layers, m.layers)) / of(m.layers), mlp = mlp_of(mixtures);
  // Frozen weights have no gradients: two products of three. Adapters have them.
  double adapters = 0;
  if (m.lora_rank && m.lora_layers != "mlp") adapters += of(m.lora_rank) * attention_of_a_block.sides;
  if (m.lora_rank && m.lora_layers != "attention") {
    const double layers = 1 - mixtures + (m.shared_experts > 0 ? mixtures : 0);
    adapters += of(m.lora_rank) * (llama ? 3 : 2) * (layers * width + mlp);
  }
  const double weights = m.lora_rank ? 4 : 6;
  const auto keys = [&](int64_t begin, int64_t end) { return 6 * keys_seen(m, begin, end, attention) * full.of_a_key; };
  const double block = weights * block_of(mixtures, attention_of_a_block) + 6 * (adapters + attention_of_a_block.of_states) + keys(0, m.layers);
  const double head = weights * of(m.vocab) * width;
  // Two inputs become one; then it is a block like the last ones.
  const double mtp = m.mtp_layers ? weights * (2 * width * width + block_of(m.experts ? 1 : 0, full)) + keys(m.layers, m.layers + m.mtp_layers) : 0;
  return {tokens * block, tokens * head, tokens * of(m.mtp_layers) * mtp};
}

double flops_per_step(const TrainConfig& config, CountAttention attention) {
  const auto [block, head, mtp] = flops_of_parts(config, attention);
  return static_cast<double>(config.model.layers) * block + static_cast<double>(1 + config.model.mtp_layers) * head + mtp;
}

}  // namespace sheaf::models
