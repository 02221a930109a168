// The names of published tensors and of ours: one table, for reading and for writing.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/safetensors.h"
#include "sheaf/core/shape.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// A published tensor: some or all rows of one of ours. Or a part of one: if it holds several of ours, or their rows with gaps,
/// several consecutive entries have its name and shape.
struct PublishedTensor {
  std::string name;         ///< "transformer.h.0.attn.c_attn.weight"; in MXFP4 the prefix of "_blocks" and "_scales"
  Shape shape;              ///< as published
  std::string own;          ///< "blocks.0.attention.qkv.weight"
  int64_t first_row = 0;    ///< of ours
  bool transposed = false;  ///< [in, out]: ours is [out, in]
  bool more_rows = false;   ///< it may have more rows than we use: positions
  bool above_one = false;   ///< ours is one more: factors of Gemma's and Qwen3-Next's norms, which are published minus 1
  int64_t mtp_layer = -1;   ///< number of the MTP layer that it belongs to
  bool repeats = false;     ///< a duplicate of another tensor: each MTP layer has the table and the head
  Shape part = {};          ///< for a part: the published shape of ours
  int64_t first = 0;        ///< and the offset of its first element in the tensor; of the others,
  int64_t run = 1;          ///< this many are contiguous,
  int64_t step = 1;         ///< and the next ones begin `step` times as far on
  bool mxfp4 = false;       ///< its values are in MXFP4 (PublishedSource); `shape` is theirs

  int64_t rows() const { return held()[transposed ? 1 : 0]; }                               ///< of ours
  int64_t row_size() const { return held().rank() == 2 ? held()[transposed ? 0 : 1] : 1; }  ///< elements
  const Shape& held() const { return part.rank() ? part : shape; }
  /// The offset in the tensor of element i of ours.
  int64_t place(int64_t i) const { return first + i / run * run * step + i % run; }
};

/// Properties of the tensors that the model's shape does not determine.
struct PublishedForm {
  bool mxfp4 = false;           ///< gpt-oss's experts are in MXFP4, as OpenAI publishes them
  bool joined_experts = false;  ///< experts are two tensors for all of them, as in published Qwen3.5; else three per expert
  bool fused = false;           ///< queries, keys and values are one tensor, gate and up another, as Phi-3's
  bool linear_apart = false;    ///< linear attention's queries, keys and values, gates and rates are separate tensors, as Qwen3.5's

  /// The form of files with these names.
  static PublishedForm of(const std::map<std::string, const SafetensorsFile*, std::less<>>& tensors);
  /// The form in which such a model is written (published_architecture()).
  static PublishedForm to_write(const ModelConfig& model, const std::string& like);
};

/// All tensors of Hugging Face's GPT2LMHeadModel or LlamaForCausalLM (MistralForCausalLM has the same), by model.type, or, with
/// model.qkv_bias, Qwen2ForCausalLM, with model.qk_norm Qwen3ForCausalLM, with model.experts MixtralForCausalLM, with
/// model.kv_lora_rank DeepseekV3ForCausalLM, with model.expert_bias alone Dots1ForCausalLM or Glm4MoeForCausalLM, with
/// model.scale_embedding GemmaForCausalLM or, with model.post_norms, Gemma2ForCausalLM or Gemma3ForCausalLM, with
/// model.qk_norm_all_heads Olmo2ForCausalLM, Olmo3ForCausalLM or OlmoeForCausalLM, with model.rotary_dim alone Phi3ForCausalLM, with
/// model.expert_linear_bias GptOssForCausalLM, with model.attention_gate and model.linear_key_heads Qwen3NextForCausalLM,
/// Qwen3_5ForCausalLM or Qwen3_5MoeForCausalLM; vocab must be known. Without model.bias, GPT-2's biases are not among them, nor are MTP
/// layers but where publishes_mtp(), whose last layers they are.
std::vector<PublishedTensor> published_tensors(const ModelConfig& model, const PublishedForm& form = {});

/// The tensor that only an MTP layer has, number `layer` of all layers.
std::string mtp_mark(int64_t layer);

/// The prefix of names: "transformer." or "model."; files of the model without its head lack it.
std::string_view published_prefix(const ModelConfig& model);

/// Whether a tensor of this name (with prefix) is not the model's: masks, frequencies, a head that is tied but written anyway,
/// Qwen3-Next's and Qwen3.5's layers for further tokens.
bool is_redundant(const ModelConfig& model, std::string_view name);

}  // namespace sheaf::models
