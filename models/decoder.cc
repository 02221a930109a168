// From tokens through the blocks to logits or a loss, for all kinds of blocks.
#include "sheaf/models/decoder.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "sheaf/nn/layers/attention.h"
#include "sheaf/nn/layers/context_region.h"
#include "sheaf/nn/layers/stages.h"
#include "sheaf/nn/layers/tensor_region.h"

namespace sheaf::models {
namespace {

constexpr double kInitStd = 0.02;

// For the embedding and for the head.
OwnershipMap vocabulary_cut() { return OwnershipMap::even(0); }

// Integers x[B, T], of whole sequences, shifted by `by` tokens; `fill` if there is none in the same document.
Tensor shift_left(const Tensor& x_BT, int64_t by, int64_t fill, const Tensor& begins_BT = {}) {
  const auto shifted = [by = std::min(by, x_BT.size(1))](const Tensor& whole_BT, int64_t none) {
    return pad(slice(whole_BT, 1, by, whole_BT.size(1)), 1, 0, by, static_cast<double>(none));
  };
  const Tensor y_BT = shifted(x_BT, fill);
  return begins_BT ? where(eq(shifted(begins_BT, -1), begins_BT), y_BT, static_cast<double>(fill)) : y_BT;
}

// x in the pipeline stage of y.
Tensor in_stage_of(const Tensor& x, const Tensor& y) {
  Layout to = x.layout();
  for (int a = 0; a < to.num_axes(); ++a)
    if (to[a].is_single()) to[a] = y.layout()[a];
  return redistribute(x, to);
}

}  // namespace

nn::Init weight_init() { return nn::Init::normal(kInitStd); }
nn::Init residual_init(int64_t layers) { return nn::Init::normal(kInitStd / std::sqrt(2.0 * static_cast<double>(layers))); }
nn::Embedding token_table(int64_t vocab, int64_t width) { return {vocab, width, weight_init(), vocabulary_cut()}; }

Decoder::Decoder(const Sizes& sizes) : sizes_(sizes) {
  check<ConfigError>(sizes.layers > 0 && sizes.vocab > 0 && sizes.context > 0, "[", sizes.type, "] layers ", sizes.layers,
                     ", vocab ", sizes.vocab, ", context ", sizes.context, ": all must be positive");
  check<ConfigError>(sizes.mtp_layers >= 0 && sizes.mtp_layers < sizes.context, "[", sizes.type, "] mtp_layers ", sizes.mtp_layers,
                     ": at least 0, and less than the context of ", sizes.context, " tokens");
  check<ConfigError>(sizes.final_logit_softcapping >= 0, "[", sizes.type, "] final_logit_softcapping ", sizes.final_logit_softcapping,
                     ": a positive number; 0: logits are not capped");
  if (sizes.tied) return;
  head.emplace(sizes.width, sizes.vocab, nn::LinearOptions{.bias = false, .init = weight_init(), .cut = vocabulary_cut()});
  head->weight.set_table();
}

int Decoder::stage_of(const nn::Module& module, const StageCut& cut) {
  const int last = cut.stage_of(sizes_.layers - 1);
  for (int64_t i = 0; i < sizes_.layers + sizes_.mtp_layers; ++i)
    if (&module == &block(i)) return i < sizes_.layers ? cut.stage_of(i) : last;
  if (head && &module == &table()) return sizes_.mtp_layers && last > 0 ? -1 : 0;
  return head && &module == &*head ? last : -1;
}

nn::Residual Decoder::stream_of(const Tensor& tokens_BT, nn::KeyValueCache* cache, const Tensor& begins_BT) {
  check<ShapeError>(tokens_BT.rank() == 2, "[", sizes_.type, "] tokens must be [B, T], not ", tokens_BT.shape());
  const int64_t position = cache ? cache->length() : 0, tokens = tokens_BT.size(1), end = position + tokens;
  const Tensor rows_BT = cache ? cache->begins(tokens) : Tensor();  // then rows may be shorter than `end`: their setter checks that
  check<ShapeError>((rows_BT ? tokens : end) <= sizes_.context, "[", sizes_.type, "] ", end, " tokens are more than the context of ",
                    sizes_.context);
  return embedded(tokens_BT, position, rows_BT ? rows_BT : begins_BT);
}

Tensor Decoder::loss(const Tensor& tokens_BT, const Tensor& targets_BT, const CrossEntropyOptions& options) {
  ForwardProgress whole;
  return loss_until(sizes_.layers, whole, tokens_BT, targets_BT, options);
}

// Blocks [progress.block, until). The first part embeds and the last one computes the loss: only these open the model's own unit.
Tensor Decoder::loss_until(int64_t until, ForwardProgress& progress, const Tensor& tokens_BT, const Tensor& targets_BT,
                           const CrossEntropyOptions& options) {
  const bool is_first = !progress.stream.x, is_last = until == sizes_.layers;
  const auto scope = is_first || is_last ? enter() : enter_without_unit();
  if (is_first) {
    const Tensor begins_BT = sizes_.end_of_text < 0 ? Tensor() : nn::document_begins(tokens_BT, sizes_.end_of_text);
    progress.stream = stream_of(tokens_BT, nullptr, begins_BT);
    progress.stream.begins = begins_BT;
    if (sizes_.mtp_layers && training()) progress.tokens = tokens_BT;
  }
  const int64_t first_block = progress.block;  // of this part
  for (; progress.block < until; ++progress.block) {
    progress.stream = block(progress.block)(std::move(progress.stream), nullptr);
    if (progress.tokens) progress.tokens = in_stage_of(progress.tokens, progress.stream.x);
  }
  if (!is_last) {
    add_penalties(first_block, until, progress.penalty);
    return {};
  }
  const Tensor loss = loss_after_blocks(progress, targets_BT, options);
  add_penalties(first_block, until + sizes_.mtp_layers, progress.penalty);
  const Tensor penalty = std::exchange(progress.penalty, {});
  check<ConfigError>(!penalty || !options.per_target, "[", sizes_.type, "] what blocks add to the loss in training belongs to no target: ask for ",
                     "the mean, or call eval()");
  return penalty ? with_penalty(loss, penalty, targets_BT.numel(), options) : loss;
}

// With that of the MTP layers.
Tensor Decoder::loss_after_blocks(ForwardProgress& progress, const Tensor& targets_BT, const CrossEntropyOptions& options) {
  nn::Residual last{.x = {}, .begins = progress.stream.begins};
  last.x = normed(std::move(progress.stream));
  const Tensor loss = loss_of(last.x, targets_BT, options);
  if (!progress.tokens) return loss;
  progress.mtp = mtp_losses(std::move(last), std::exchange(progress.tokens, {}), targets_BT, options);
  return loss + progress.mtp * sizes_.mtp_loss;
}

Tensor Decoder::loss_of(const Tensor& x_BTC, const Tensor& targets_BT, const CrossEntropyOptions& options) {
  const nn::TensorRegion region(x_BTC, head_weight());
  check<ConfigError>(options.softcap == 0 || options.softcap == sizes_.final_logit_softcapping, "[", sizes_.type, "] a loss with softcap ", options.softcap,
                     " of a model whose final_logit_softcapping is ", sizes_.final_logit_softcapping, ": the model's applies, also where it generates");
  CrossEntropyOptions capped = options;
  capped.softcap = sizes_.final_logit_softcapping;
  return nn::sum_over_stages(
      linear_cross_entropy(region.enter(x_BTC, /*in_pieces=*/false), head_weight(), region.enter(targets_BT), capped));
}

// Padding tokens at the end influence only later positions, which have no targets.
Tensor Decoder::mtp_losses(nn::Residual stream, const Tensor& tokens_BT, const Tensor& targets_BT, const CrossEntropyOptions& options) {
  check<ConfigError>(!options.per_target, "[", sizes_.type, "] what MTP layers add to the loss in training belongs to no target: ask for ",
                     "the mean, or call eval()");
  const Tensor all_tokens_BT = nn::whole_sequences(tokens_BT), all_targets_BT = nn::whole_sequences(targets_BT);
  Tensor losses;
  for (int64_t k = 0; k < sizes_.mtp_layers; ++k) {
    const Tensor next_BT = redistribute(shift_left(all_tokens_BT, k + 1, 0), tokens_BT.layout());
    const Tensor wanted_BT = redistribute(shift_left(all_targets_BT, k + 1, options.ignore_index, stream.begins), targets_BT.layout());
    nn::Residual next = embedded(next_BT, 0, stream.begins);
    next.join();
    stream.x = mtp(k, stream, next.x, nullptr);
    const Tensor loss = loss_of(stream.x, wanted_BT, options);
    losses = losses ? losses + loss : loss;
  }
  return sizes_.mtp_layers == 1 ? losses : losses * (1.0 / static_cast<double>(sizes_.mtp_layers));
}

Tensor Decoder::mtp(int64_t, nn::Residual, const Tensor&, nn::KeyValueCache*) { fail<ConfigError>("[", sizes_.type, "] it has no MTP layers"); }

Tensor Decoder::hidden(const Tensor& tokens_BT, nn::KeyValueCache* cache) {
  nn::Residual stream = stream_of(tokens_BT, cache);
  for (int64_t i = 0; i < sizes_.layers; ++i) stream = block(i)(std::move(stream), cache);
  if (cache) cache->advance(tokens_BT.size(1));
  return normed(std::move(stream));
}

Tensor Decoder::logits_of(const Tensor& x_BTC) {
  const nn::TensorRegion region(x_BTC, head_weight());
  const Tensor logits_BTV = nn::to_all_stages(region.leave(linear(region.enter(x_BTC), head_weight())));
  const double cap = sizes_.final_logit_softcapping;
  return cap != 0 ? softcap(logits_BTV, cap) : logits_BTV;
}

Tensor Decoder::logits(const Tensor& tokens_BT) {
  const auto scope = enter();
  return logits_of(hidden(tokens_BT, nullptr));
}

Tensor Decoder::next_logits(const Tensor& tokens_BT, nn::KeyValueCache& cache) {
  const auto scope = enter();
  const Tensor x_BTC = hidden(tokens_BT, &cache);
  return logits_of(slice(x_BTC, 1, x_BTC.size(1) - 1, x_BTC.size(1)));
}

Tensor Decoder::read(const Tensor& tokens_BT, nn::KeyValueCache& cache) {
  const auto scope = enter();
  return hidden(tokens_BT, &cache);
}

Tensor Decoder::logits_behind(const Tensor& x_BTC) {
  const auto scope = enter();
  return logits_of(x_BTC);
}

Tensor Decoder::read_further(int64_t k, const Tensor& x_BTC, const Tensor& next_BT, nn::KeyValueCache& cache) {
  const auto scope = enter();
  nn::Residual next = embedded(next_BT, cache.length(), {});
  next.join();
  Tensor y_BTC = mtp(k, {.x = x_BTC}, next.x, &cache);
  cache.advance(y_BTC.size(1));
  return y_BTC;
}

}  // namespace sheaf::models
