// Reading attention, rotary positions and experts from config.json, in the forms of different architectures: each function reads some
// keys into a model's options, and refuses what Sheaf does not compute.
#pragma once

#include <algorithm>
#include <functional>
#include <string>

#include "sheaf/models/published_reader.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// The scaling of rotary positions, in a model of m.context tokens, and their base: of all layers or, as in Gemma 3 (by_layer), of those
/// that see all tokens and of those with a window, whose base is written to `window_theta`. The rotated part of a head is written to
/// `part`, if a model may rotate less than all.
void read_rotary(const ConfigReader& r, ModelConfig& m, bool by_layer, double& window_theta, double* part);

/// LongRoPE's factor if a file does not say it: by how much a context is longer than the original one.
inline double longrope_factor(int64_t context, int64_t original) {
  return std::max(1.0, static_cast<double>(context) / static_cast<double>(original));
}

/// Refuses a scaling that is impossible for the heads of `m`, which is resolved.
void check_rotary_scaling(const ConfigReader& r, const ModelConfig& m);

/// m.rotary_dim, of this part of a head; m.head_dim is known.
void read_rotated_part(const ConfigReader& r, double part, ModelConfig& m);

/// Writes which layers see only `window` keys, as listed in the file or, if it has no list, by `slides(i)`, to m.window and
/// m.full_attention_every; `derived` is the key that defines it in the latter case.
void read_windows(const ConfigReader& r, int64_t window, const char* derived, const std::function<bool(int64_t)>& slides, ModelConfig& m);

/// DeepSeek's latent attention.
void read_latents(const ConfigReader& r, ModelConfig& m);

/// The linear attention of Qwen3-Next and Qwen3.5, and in which layers it is.
void read_linear_attention(const ConfigReader& r, ModelConfig& m);

/// Writes which layers of SmolLM3 have no rotary positions to m.nope_every: as listed in the file or, if it has no list, every n-th.
void read_nope(const ConfigReader& r, ModelConfig& m);

/// The experts of DeepSeek-V3, which dots.llm1 and GLM-4.5 share, and those of DeepSeek-V2; a file may say that no layer has any.
void read_deepseek_experts(const ConfigReader& r, const std::string& type, ModelConfig& m);

/// Mixtral's experts.
void read_mixtral_experts(const ConfigReader& r, ModelConfig& m);

/// OLMoE's experts, whose width has the key of other models' MLPs.
void read_olmoe_experts(const ConfigReader& r, ModelConfig& m);

/// Qwen3's experts, and those of Qwen3-Next and Qwen3.5, with shared ones.
void read_qwen_experts(const ConfigReader& r, const std::string& type, ModelConfig& m);

/// The caps of Gemma 2's scores and logits; a file may say that there are none.
void read_softcaps(const ConfigReader& r, ModelConfig& m);

/// gpt-oss's attention and experts.
void read_gpt_oss(const ConfigReader& r, ModelConfig& m);

}  // namespace sheaf::models
