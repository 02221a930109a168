// GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, a head tied to the token embedding.
//
//   B batch   T tokens   C width   V vocabulary
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "sheaf/distributed/pipeline.h"
#include "sheaf/models/forward_progress.h"
#include "sheaf/nn/layers/attention.h"
#include "sheaf/nn/layers/embedding.h"
#include "sheaf/nn/layers/mlp.h"
#include "sheaf/nn/layers/norm.h"

namespace sheaf::models {

struct GptConfig {
  int64_t layers = 12;          ///< blocks
  int64_t heads = 12;
  int64_t width = 768;          ///< of the residual stream
  int64_t context = 1024;       ///< longest sequence
  int64_t vocab = 50257;
  int64_t mlp_width = 0;        ///< 0: 4 · width
  bool bias = true;             ///< in linear layers and norms
  double dropout = 0.0;         ///< of embeddings, attention outputs and MLP outputs
  bool tie_embeddings = true;   ///< the head is the token embedding
  double norm_eps = 1e-5;
  int64_t end_of_text = -1;     ///< token that ends a document: in loss() tokens attend to their own document's alone; -1: to
                                ///< all before them

  static GptConfig gpt2_124m();
  static GptConfig gpt2_355m();
  static GptConfig gpt2_774m();
  static GptConfig gpt2_1558m();
  /// The published sizes by name, "gpt2-124m", smallest first.
  static std::vector<std::pair<std::string, GptConfig>> published();
  /// One of them; throws ConfigError that lists them.
  static GptConfig preset(const std::string& name);
};

/// x + attention(norm(x)), then x + mlp(norm(x)), whose addition is left to the next norm.
struct Block : nn::Module {
  nn::LayerNorm ln1;
  nn::CausalSelfAttention attention;
  nn::LayerNorm ln2;
  nn::MLP mlp;

  explicit Block(const GptConfig& config);
  nn::Residual forward(nn::Residual stream, nn::KeyValueCache* cache = nullptr);
  SHEAF_FIELDS(ln1, attention, ln2, mlp);
};

/// Weights are drawn with standard deviation 0.02, those that write to the residual stream with 0.02 / sqrt(2 layers).
struct Gpt : nn::Module {
  GptConfig config;
  nn::Embedding wte, wpe;
  nn::Dropout dropout;
  std::vector<Block> blocks;
  nn::LayerNorm ln_f;
  std::optional<nn::Linear> head;  ///< absent if tied

  explicit Gpt(const GptConfig& config);

  /// Cross-entropy of integer targets[B, T], a scalar in nats, without the logits ever existing whole. By default the mean
  /// over all targets of the logical batch, on all ranks; targets of -1 count nothing, but are counted in that mean: give
  /// divide_by. Partial over the axes that cut the batch or the model. With end_of_text, a document's tokens are predicted from
  /// those of no other; logits() and next_logits() take all tokens for one document.
  Tensor loss(const Tensor& tokens_BT, const Tensor& targets_BT, const CrossEntropyOptions& options = {});
  /// loss() in parts, between which others may be recorded (Recording::resume_micro_batch): on from `at` to before block
  /// `until`, and from the last block to the loss, which is undefined before.
  Tensor loss_until(int64_t until, ForwardProgress& at, const Tensor& tokens_BT, const Tensor& targets_BT,
                    const CrossEntropyOptions& options = {});
  /// [B, T, V], placed as the tokens.
  Tensor logits(const Tensor& tokens_BT);
  /// [B, 1, V]: logits of the token after these, which come after those that `cache` has read; it reads them, too. On
  /// CPUs they are, bit for bit, the last ones of logits() of all. Outside of any recording.
  Tensor next_logits(const Tensor& tokens_BT, nn::KeyValueCache& cache);
  /// The stage of a pipeline that `module` is in (ShardOptions::stage_of): blocks as `cut` says, tables that are not tied in the
  /// first and the last. -1: what all stages have, such as the last norm and a tied table.
  int stage_of(const nn::Module& module, const StageCut& cut) const;
  Tensor forward(const Tensor& tokens_BT) { return logits(tokens_BT); }
  SHEAF_FIELDS(wte, wpe, dropout, blocks, ln_f, head);

 private:
  nn::Residual embedded(const Tensor& tokens_BT, const nn::KeyValueCache* cache = nullptr);
  Tensor hidden(const Tensor& tokens_BT, nn::KeyValueCache* cache = nullptr);
  const nn::Parameter& head_weight() const;
  Tensor logits_of(const Tensor& x_BTC) const;
};

}  // namespace sheaf::models
