// Decoder: what next-token prediction models have in common, from a token embedding through blocks to logits and losses. gpt.h and
// llama.h define their blocks.
//
//   B batch   T tokens   C width   V vocabulary
#pragma once

#include <optional>

#include "sheaf/distributed/pipeline.h"
#include "sheaf/nn/layers/embedding.h"
#include "sheaf/nn/layers/key_value_cache.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/norm.h"

namespace sheaf::models {

/// The state of a forward that is recorded in parts: what Decoder::loss_until() needs to continue.
struct ForwardProgress {
  nn::Residual stream = {};  ///< before `block`; undefined before the first part
  int64_t block = 0;
  Tensor penalty = {};  ///< of the blocks so far, if they have any
  Tensor tokens = {};   ///< placed where the stream is, for MTP layers
  Tensor mtp = {};      ///< after the last part: the mean of their losses, as in the loss but without its factor
};

/// A block of the residual stream. With a cache it also attends to the tokens that the cache has read.
struct DecoderBlock : nn::Module {
  virtual nn::Residual forward(nn::Residual stream, nn::KeyValueCache* cache = nullptr) = 0;
  SHEAF_FIELDS();
};

/// Weights are initialized as GPT-2's: with standard deviation 0.02 or, if they write to the residual stream of `layers` blocks, 0.02
/// / sqrt(2 layers), so that its variance does not grow with depth.
nn::Init weight_init();
nn::Init residual_init(int64_t layers);
/// An embedding of all tokens, whose vocabulary a tensor axis shards.
nn::Embedding token_table(int64_t vocab, int64_t width);

/// A custom model derives from it and overrides its private functions (docs/own_models.md).
struct Decoder : nn::Module {
  std::optional<nn::Linear> head;  ///< absent if the token embedding is the head; models list it last in SHEAF_FIELDS

  /// Cross-entropy of integer targets[B, T], in nats, without the logits ever existing whole. By default the mean over all targets of
  /// the logical batch, on all ranks; targets of -1 add nothing to the loss, but are counted in that mean: pass divisor. Partial over
  /// the axes that shard the batch or the model. With per_target, losses[B, T], placed as the tokens, and Partial over those that
  /// shard the model; ConfigError in training with auxiliary losses of blocks, or for a softcap that is not the model's. If a token ends documents, a document's tokens are
  /// predicted only from its own; logits() and next_logits() treat all tokens as one document. In training, the losses of MTP layers
  /// are added, see Sizes.
  Tensor loss(const Tensor& tokens_BT, const Tensor& targets_BT, const CrossEntropyOptions& options = {});
  /// loss() in parts, between which others may be recorded (Recording::resume_micro_batch): continues from `progress` to
  /// before block `until`, and after the last block to the loss, which is undefined before that.
  Tensor loss_until(int64_t until, ForwardProgress& progress, const Tensor& tokens_BT, const Tensor& targets_BT,
                    const CrossEntropyOptions& options = {});
  /// [B, T, V], placed as the tokens.
  Tensor logits(const Tensor& tokens_BT);
  /// [B, 1, V]: logits of the token after these, which follow those that `cache` has read; it reads them, too. On CPUs they are, bit
  /// for bit, the last ones of logits() of all. Outside of any recording. Models that forbid tokens, or monitor generate(), override
  /// it; if MTP layers draft, the next two are called instead.
  virtual Tensor next_logits(const Tensor& tokens_BT, nn::KeyValueCache& cache);
  /// The same pass for drafting (drafter.h): x[B, T, C], the head's input after each of these tokens.
  virtual Tensor read(const Tensor& tokens_BT, nn::KeyValueCache& cache);
  /// [B, T, V] for such an x.
  virtual Tensor logits_behind(const Tensor& x_BTC);
  int64_t num_mtp_layers() const { return sizes_.mtp_layers; }
  /// Most tokens of a sequence.
  int64_t context() const { return sizes_.context; }
  /// The head's input from MTP layer k, computed from such an x, which is the model's or the previous layer's, and from the tokens k
  /// + 1 further, which follow those that its `cache` has read.
  Tensor read_further(int64_t k, const Tensor& x_BTC, const Tensor& next_BT, nn::KeyValueCache& cache);
  Tensor forward(const Tensor& tokens_BT) { return logits(tokens_BT); }

  static bool is_block(const nn::Module& module) { return dynamic_cast<const DecoderBlock*>(&module) != nullptr; }
  /// The pipeline stage of `module` (ShardOptions::stage_of): blocks as in `cut`, untied embedding and head in the first and the
  /// last. -1: on all stages, such as the last norm and a table that both ends read.
  int stage_of(const nn::Module& module, const StageCut& cut);

 protected:
  /// The sizes it is created with; they do not change.
  struct Sizes {
    const char* type = "decoder";  ///< for messages
    int64_t layers = 0;            ///< block(i) exists for all i below it, and for MTP layers
    int64_t width = 0, vocab = 0;
    int64_t context = 0;                 ///< longest sequence
    int64_t end_of_text = -1;            ///< token that ends a document; -1: none does
    bool tied = false;                   ///< the head is the token embedding
    double final_logit_softcapping = 0;  ///< logits l become this times tanh(l / this), as Gemma 2's (https://arxiv.org/abs/2408.00118); 0:
                                         ///< no cap
    /// Layers that each predict one token further, in training and for drafts (multi-token prediction, DeepSeek-V3:
    /// https://arxiv.org/abs/2412.19437, section 2.2): they are blocks, too, numbered after the others. The mean of their losses,
    /// each with the divisor of loss() (for mean_of_counted, the number of its own targets), is multiplied by the factor and added to
    /// the loss.
    int64_t mtp_layers = 0;
    double mtp_loss = 0;
  };
  explicit Decoder(const Sizes& sizes);

 private:
  virtual nn::Embedding& table() = 0;
  virtual DecoderBlock& block(int64_t i) = 0;
  /// The residual stream of tokens. For position embeddings: token t is at position + t; if documents are kept separate, or rows of a
  /// batch do not begin at 0, it is at position + t - begins[b, t], which are whole on axes that shard sequences.
  virtual nn::Residual embedded(const Tensor& tokens_BT, int64_t position, const Tensor& begins_BT) = 0;
  virtual Tensor normed(nn::Residual stream) = 0;
  /// The head's input for predicting the tokens that are k + 2 further than each: MTP layer k computes it from the head's last input,
  /// which is the stream's x, and from the embedded tokens that are k + 1 further.
  virtual Tensor mtp(int64_t k, nn::Residual stream, const Tensor& next_BTC, nn::KeyValueCache* cache);
  /// Adds to `all` (undefined: none yet) the auxiliary training losses of blocks [begin, end), which have just run.
  virtual void add_penalties(int64_t /*begin*/, int64_t /*end*/, Tensor& /*all*/) {}
  /// The loss with the penalty, weighted as the loss counts this many targets.
  virtual Tensor with_penalty(const Tensor& loss, const Tensor& penalty, int64_t /*targets*/, const CrossEntropyOptions&) {
    return loss + penalty;
  }

  nn::Residual stream_of(const Tensor& tokens_BT, nn::KeyValueCache* cache, const Tensor& begins_BT = {});
  Tensor hidden(const Tensor& tokens_BT, nn::KeyValueCache* cache);
  Tensor loss_after_blocks(ForwardProgress& progress, const Tensor& targets_BT, const CrossEntropyOptions& options);
  Tensor loss_of(const Tensor& x_BTC, const Tensor& targets_BT, const CrossEntropyOptions& options);
  Tensor mtp_losses(nn::Residual stream, const Tensor& tokens_BT, const Tensor& targets_BT, const CrossEntropyOptions& options);
  const nn::Parameter& head_weight() { return head ? head->weight : table().weight; }
  Tensor logits_of(const Tensor& x_BTC);

  Sizes sizes_;
};

}  // namespace sheaf::models
