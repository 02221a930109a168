#include "sheaf/tools/bench/roofline.h"

#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

/// Elements read or written per token outside of products and attention.
double elements_per_token(const models::ModelConfig& m) {
  const auto of = [](int64_t n) { return static_cast<double>(n); };
  const bool llama = m.type == "llama";
  const double width = of(m.width), hidden = of(m.mlp_width);
  const double queries = of(m.heads * m.head_dim), keys = of(m.kv_heads * m.head_dim);
  // Forward: the residual stream and a branch are read, their sum and its norm written. Backward: the gradient of the norm and the
  // sum are read, the stream's gradient is read and written.
  const double norm = 4 * width + 4 * width;
  // The product fused with GELU also writes its input, which the following product reads in the backward pass. SwiGLU reads two
  // tensors and writes one; its backward reads three and writes two.
  const double activation = llama ? 3 * hidden + 5 * hidden : hidden + hidden;
  const double rotary = llama ? 2 * (queries + keys) + 2 * (queries + keys) : 0;
  // Token embedding, and GPT-2's position embedding; the same in backward.
  const double embedding = 2 * (llama ? 2 : 3) * width;
  const double logits = 2 * of(m.vocab);  // overwritten by their gradient
  return of(m.layers) * (2 * norm + activation + rotary) + norm + embedding + logits;
}

}  // namespace

double roofline_seconds(const models::TrainConfig& config, int64_t parameters, const Rates& rates) {
  constexpr double kBytesPerParameter = 32;  // weight, two moments, gradient; compute copy; norm
  const double causal = models::flops_per_step(config),
               attention = models::flops_per_step(config, models::CountAttention::full) - causal;  // 6 L T C
  const auto tokens = static_cast<double>(config.train.batch * config.model.context);
  const double bytes_per_element = config.train.dtype == "bf16" ? 2 : 4;
  const double bytes =
      tokens * bytes_per_element * elements_per_token(models::resolved(config.model)) +
      kBytesPerParameter * static_cast<double>(parameters);
  return (causal - attention) / rates.products +
         attention / 6 * (2 / rates.attention_forward + 5 / rates.attention_backward) +
         bytes / rates.copy;
}

}  // namespace sheaf::bench
