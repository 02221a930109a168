#include "sheaf/models/flops.h"

#include <algorithm>

#include "sheaf/models/attention_window.h"

namespace sheaf::models {

namespace {

// Keys that a token sees: all of them, or in the mean of all blocks and tokens what masks leave, a diagonal counted half.
double keys_seen(const ModelConfig& m, CountAttention attention) {
  const auto context = static_cast<double>(m.context);
  if (attention == CountAttention::full) return context;
  double all = 0;
  for (int64_t i = 0; i < m.layers; ++i) {
    const int64_t window = window_of_block(i, m.window, m.full_attention_every);
    const double most = window ? static_cast<double>(std::min(window, m.context)) : context;
    all += most * (context - most / 2) / context;
  }
  return all / static_cast<double>(m.layers);
}

// Of a block: the elements of its matrices, the rows and columns of all of them together, and the elements of queries and of values that
// meet each key.
struct Attention {
  double weights = 0, sides = 0, of_a_key = 0;
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
  }
  a.multiply(values, m.width);
  a.of_a_key = static_cast<double>(queries + values);
  return a;
}

}  // namespace

FlopsOfParts flops_of_parts(const TrainConfig& config, CountAttention attention) {
  const ModelConfig m = resolved(config.model);
  const auto of = [](int64_t n) { return static_cast<double>(n); };
  const bool llama = m.type == "llama";
  const double width = of(m.width), tokens = of(m.context) * of(config.train.batch);
  // In the mean of all blocks. Of a mixture, the experts that a token goes through, and their router.
  const double mixtures = m.experts == 0 ? 0.0 : 1.0 - of(std::min(m.dense_layers, m.layers)) / of(m.layers);
  const double mlp = (1 - mixtures) * of(m.mlp_width) + mixtures * of(m.shared_experts * m.expert_hidden);
  const double hidden = mlp + mixtures * of(m.experts_per_token * m.expert_hidden);
  const Attention attention_of_a_block = attention_of(m);
  // Up and down, and Llama's gate.
  const double block = attention_of_a_block.weights + (llama ? 3 : 2) * width * hidden + mixtures * width * of(m.experts);
  // Frozen weights have no gradients: two products of three. Adapters' have.
  double adapters = 0;
  if (m.lora_rank && m.lora_layers != "mlp") adapters += of(m.lora_rank) * attention_of_a_block.sides;
  if (m.lora_rank && m.lora_layers != "attention") {
    const double layers = 1 - mixtures + (m.shared_experts > 0 ? mixtures : 0);
    adapters += of(m.lora_rank) * (llama ? 3 : 2) * (layers * width + mlp);
  }
  const double weights = m.lora_rank ? 4 : 6;
  return {tokens * (weights * block + 6 * adapters + 6 * keys_seen(m, attention) * attention_of_a_block.of_a_key), tokens * weights * of(m.vocab) * width};
}

double flops_per_step(const TrainConfig& config, CountAttention attention) {
  const auto [block, head] = flops_of_parts(config, attention);
  return static_cast<double>(config.model.layers) * block + head;
}

}  // namespace sheaf::models
