// GPT-2: its blocks, and the embedding of tokens.
#include "sheaf/models/gpt.h"

#include "sheaf/models/attention_window.h"

namespace sheaf::models {
namespace {

nn::AttentionConfig attention_config(const GptConfig& c, int64_t block) {
  nn::AttentionConfig a;
  a.width = c.width;
  a.heads = c.heads;
  a.bias = c.bias;
  a.window = window_of_block(block, c.window, c.full_attention_every);
  a.softcap = c.attn_logit_softcapping;
  a.dropout = c.dropout;
  a.init = weight_init();
  a.projection_init = residual_init(c.layers);
  return a;
}

nn::MlpConfig mlp_config(const GptConfig& c) {
  nn::MlpConfig m;
  m.width = c.width;
  m.hidden = c.mlp_width;
  m.bias = c.bias;
  m.dropout = c.dropout;
  m.init = weight_init();
  m.projection_init = residual_init(c.layers);
  return m;
}

}  // namespace

Block::Block(const GptConfig& c, int64_t index)
    : ln1(c.width, {.bias = c.bias, .eps = c.norm_eps}),
      attention(attention_config(c, index)),
      ln2(c.width, {.bias = c.bias, .eps = c.norm_eps}),
      mlp(mlp_config(c)) {}

nn::Residual Block::forward(nn::Residual stream, nn::KeyValueCache* cache) {
  const Tensor begins_BT = stream.begins;
  NormedSum x_BTC = ln1(std::move(stream));
  x_BTC = ln2(nn::Residual{x_BTC.sum, attention(x_BTC.normed, cache, begins_BT)});
  return {x_BTC.sum, mlp(x_BTC.normed), begins_BT};
}

Gpt::Gpt(const GptConfig& c)
    : Decoder({.type = "gpt2", .layers = c.layers, .width = c.width, .vocab = c.vocab, .context = c.context,
               .end_of_text = c.end_of_text, .tied = c.tie_embeddings, .final_logit_softcapping = c.final_logit_softcapping}),
      config(c),
      wte(token_table(c.vocab, c.width)),
      wpe(c.context, c.width, weight_init()),
      dropout(c.dropout),
      ln_f(c.width, {.bias = c.bias, .eps = c.norm_eps}) {
  blocks.reserve(static_cast<size_t>(c.layers));
  for (int64_t i = 0; i < c.layers; ++i) blocks.emplace_back(c, i);
}

nn::Residual Gpt::embedded(const Tensor& tokens_BT, int64_t position, const Tensor& begins_BT) {
  if (begins_BT) {
    const auto first = static_cast<double>(position), end = static_cast<double>(position + tokens_BT.size(1));
    const Tensor positions_BT = arange(first, end, 1, kI32) - begins_BT;
    return {.x = dropout(wte(tokens_BT) + wpe(redistribute(positions_BT, tokens_BT.layout())))};
  }
  const Tensor positions_TC = slice(wpe.weight, 0, position, position + tokens_BT.size(1));
  return {.x = dropout(wte(tokens_BT) + positions_TC)};
}

}  // namespace sheaf::models
