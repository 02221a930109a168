#include "sheaf/models/gpt.h"

#include <cmath>

#include "sheaf/nn/layers/stages.h"

namespace sheaf::models {
namespace {

constexpr double kInitStd = 0.02;

// A tensor axis cuts the vocabulary, of the token embedding and of the head alike.
OwnershipMap vocabulary_cut() { return OwnershipMap::even(0); }

// Of the layers that write to the residual stream: its variance then does not grow with depth.
nn::Init residual_init(const GptConfig& c) {
  return nn::Init::normal(kInitStd / std::sqrt(2.0 * static_cast<double>(c.layers)));
}

nn::AttentionConfig attention_config(const GptConfig& c) {
  nn::AttentionConfig a;
  a.width = c.width;
  a.heads = c.heads;
  a.bias = c.bias;
  a.dropout = c.dropout;
  a.init = nn::Init::normal(kInitStd);
  a.projection_init = residual_init(c);
  return a;
}

nn::MlpConfig mlp_config(const GptConfig& c) {
  nn::MlpConfig m;
  m.width = c.width;
  m.hidden = c.mlp_width;
  m.bias = c.bias;
  m.dropout = c.dropout;
  m.init = nn::Init::normal(kInitStd);
  m.projection_init = residual_init(c);
  return m;
}

GptConfig gpt2(int64_t layers, int64_t heads, int64_t width) {
  GptConfig c;
  c.layers = layers;
  c.heads = heads;
  c.width = width;
  return c;
}

}  // namespace

GptConfig GptConfig::gpt2_124m() { return preset("gpt2-124m"); }
GptConfig GptConfig::gpt2_355m() { return preset("gpt2-355m"); }
GptConfig GptConfig::gpt2_774m() { return preset("gpt2-774m"); }
GptConfig GptConfig::gpt2_1558m() { return preset("gpt2-1558m"); }

// Radford et al. 2019, table 2.
std::vector<std::pair<std::string, GptConfig>> GptConfig::published() {
  return {{"gpt2-124m", gpt2(12, 12, 768)},
          {"gpt2-355m", gpt2(24, 16, 1024)},
          {"gpt2-774m", gpt2(36, 20, 1280)},
          {"gpt2-1558m", gpt2(48, 25, 1600)}};
}

GptConfig GptConfig::preset(const std::string& name) {
  std::string known;
  for (const auto& [key, config] : published()) {
    if (key == name) return config;
    known += (known.empty() ? "" : ", ") + key;
  }
  fail<ConfigError>("[gpt2] no preset '", name, "'; there are ", known);
}

Block::Block(const GptConfig& c)
    : ln1(c.width, {.bias = c.bias, .eps = c.norm_eps}),
      attention(attention_config(c)),
      ln2(c.width, {.bias = c.bias, .eps = c.norm_eps}),
      mlp(mlp_config(c)) {}

nn::Residual Block::forward(nn::Residual stream, nn::KeyValueCache* cache) {
  const Tensor begins_BT = stream.begins;
  NormedSum x_BTC = ln1(std::move(stream));
  x_BTC = ln2(nn::Residual{x_BTC.sum, attention(x_BTC.normed, cache, begins_BT)});
  return {x_BTC.sum, mlp(x_BTC.normed), begins_BT};
}

Gpt::Gpt(const GptConfig& c)
    : config(c),
      wte(c.vocab, c.width, nn::Init::normal(kInitStd), vocabulary_cut()),
      wpe(c.context, c.width, nn::Init::normal(kInitStd)),
      dropout(c.dropout),
      ln_f(c.width, {.bias = c.bias, .eps = c.norm_eps}) {
  check<ConfigError>(c.layers > 0 && c.vocab > 0 && c.context > 0, "[gpt2] layers ", c.layers, ", vocab ", c.vocab,
                     ", context ", c.context, ": all must be positive");
  blocks.reserve(static_cast<size_t>(c.layers));
  for (int64_t i = 0; i < c.layers; ++i) blocks.emplace_back(c);
  if (c.tie_embeddings) return;
  head.emplace(c.width, c.vocab, nn::LinearOptions{.bias = false, .init = nn::Init::normal(kInitStd), .cut = vocabulary_cut()});
  head->weight.set_table();
}

int Gpt::stage_of(const nn::Module& module, const StageCut& cut) const {
  for (size_t i = 0; i < blocks.size(); ++i)
    if (&module == &blocks[i]) return cut.stage_of(static_cast<int64_t>(i));
  if (head && &module == &wte) return 0;
  return head && &module == &*head ? cut.stage_of(std::ssize(blocks) - 1) : -1;
}

nn::Residual Gpt::embedded(const Tensor& tokens_BT, const nn::KeyValueCache* cache) {
  check<ShapeError>(tokens_BT.rank() == 2, "[gpt2] tokens must be [B, T], not ", tokens_BT.shape());
  const int64_t begin = cache ? cache->length() : 0, end = begin + tokens_BT.size(1);
  check<ShapeError>(end <= config.context, "[gpt2] ", end, " tokens are more than the context of ", config.context);
  const Tensor positions_TC = slice(wpe.weight, 0, begin, end);
  return {.x = dropout(wte(tokens_BT) + positions_TC)};
}

Tensor Gpt::hidden(const Tensor& tokens_BT, nn::KeyValueCache* cache) {
  nn::Residual stream = embedded(tokens_BT, cache);
  for (Block& block : blocks) stream = block(std::move(stream), cache);
  return ln_f(std::move(stream)).normed;
}

const nn::Parameter& Gpt::head_weight() const { return head ? head->weight : wte.weight; }

Tensor Gpt::logits_of(const Tensor& x_BTC) const {
  const nn::TensorRegion region(x_BTC, head_weight());
  return nn::to_all_stages(region.leave(linear(region.enter(x_BTC), head_weight())));
}

Tensor Gpt::loss(const Tensor& tokens_BT, const Tensor& targets_BT, const CrossEntropyOptions& options) {
  ForwardProgress whole;
  return loss_until(config.layers, whole, tokens_BT, targets_BT, options);
}

Tensor Gpt::loss_until(int64_t until, ForwardProgress& at, const Tensor& tokens_BT, const Tensor& targets_BT,
                       const CrossEntropyOptions& options) {
  const bool begins = !at.stream.x, ends = until == config.layers;
  const auto scope = begins || ends ? enter() : enter_without_unit();
  if (begins) {
    const Tensor begins_BT = config.end_of_text < 0 ? Tensor() : nn::document_begins(tokens_BT, config.end_of_text);
    at.stream = embedded(tokens_BT);
    at.stream.begins = begins_BT;
  }
  for (; at.block < until; ++at.block) at.stream = blocks[static_cast<size_t>(at.block)](std::move(at.stream), nullptr);
  if (!ends) return {};
  const Tensor x_BTC = ln_f(std::move(at.stream)).normed;
  const nn::TensorRegion region(x_BTC, head_weight());
  return nn::sum_over_stages(
      linear_cross_entropy(region.enter(x_BTC), head_weight(), region.enter(targets_BT), options));
}

Tensor Gpt::logits(const Tensor& tokens_BT) {
  const auto scope = enter();
  return logits_of(hidden(tokens_BT));
}

Tensor Gpt::next_logits(const Tensor& tokens_BT, nn::KeyValueCache& cache) {
  const auto scope = enter();
  const Tensor x_BTC = hidden(tokens_BT, &cache);
  cache.advance(x_BTC.size(1));
  return logits_of(slice(x_BTC, 1, x_BTC.size(1) - 1, x_BTC.size(1)));
}

}  // namespace sheaf::models
