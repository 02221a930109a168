// GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, a head tied to the token embedding.
//
//   B batch   T tokens   C width   V vocabulary
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "sheaf/models/decoder.h"
#include "sheaf/nn/layers/attention.h"
#include "sheaf/nn/layers/mlp.h"

namespace sheaf::models {

struct GptConfig {
  int64_t layers = 12;  ///< blocks
  int64_t heads = 12;
  int64_t width = 768;     ///< of the residual stream
  int64_t context = 1024;  ///< longest sequence
  int64_t vocab = 50257;
  int64_t mlp_width = 0;       ///< 0: 4 · width
  bool bias = true;            ///< in linear layers and norms
  double dropout = 0.0;        ///< of embeddings, attention outputs and MLP outputs
  bool tie_embeddings = true;  ///< the head is the token embedding
  double norm_eps = 1e-5;
  int64_t window = 0;                    ///< keys that a token sees, itself and those before it; 0: all
  double attn_logit_softcapping = 0.0;   ///< scores of attention are softly limited to it (AttentionConfig::softcap), as Gemma 2's; 0: none
  double final_logit_softcapping = 0.0;  ///< the same for logits (CrossEntropyOptions::softcap)
  int64_t full_attention_every = 0;      ///< blocks N, 2 N, .. see all (window_of_block); 0: none, if there is a window
  int64_t end_of_text = -1;              ///< token that ends a document: in loss() tokens attend only to their own document's; -1: to all before
                                ///< them

  /// The published sizes by name, "gpt2-124m", smallest first.
  static std::vector<std::pair<std::string, GptConfig>> published();
  /// One of them; throws ConfigError that lists them all.
  static GptConfig preset(const std::string& name);
};

/// x + attention(norm(x)), then x + mlp(norm(x)), whose addition is done by the next norm.
struct Block : DecoderBlock {
  nn::LayerNorm ln1;
  nn::SelfAttention attention;
  nn::LayerNorm ln2;
  nn::MLP mlp;

  explicit Block(const GptConfig& config, int64_t index = 0);  ///< its number in the model, from 0, decides which keys it sees
  nn::Residual forward(nn::Residual stream, nn::KeyValueCache* cache = nullptr) override;
  SHEAF_FIELDS(ln1, attention, ln2, mlp);
};

struct Gpt : Decoder {
  GptConfig config;  ///< what it was created from
  nn::Embedding wte, wpe;
  nn::Dropout dropout;
  std::vector<Block> blocks;
  nn::LayerNorm ln_f;

  explicit Gpt(const GptConfig& config);
  SHEAF_FIELDS(wte, wpe, dropout, blocks, ln_f, head);

 private:
  nn::Embedding& table() override { return wte; }
  Block& block(int64_t i) override { return blocks[static_cast<size_t>(i)]; }
  nn::Residual embedded(const Tensor& tokens_BT, int64_t position, const Tensor& begins_BT) override;
  Tensor normed(nn::Residual stream) override { return ln_f(std::move(stream)).normed; }
};

}  // namespace sheaf::models
