// config.json: Hugging Face's description of a model in addition to its weights. It is converted to the shape of our models; anything
// that Sheaf's models do not compute is refused by name, since they would train on, and wrongly.
#pragma once

#include <string>

#include "sheaf/core/dtype.h"
#include "sheaf/core/json.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// The config.json of published weights: in the folder `path`, or next to the file `path`. "" if there is none.
std::string published_config_file(const std::string& path);

/// FP8 as in DeepSeek-V3's published weights (https://arxiv.org/abs/2412.19437, section 3.3.2): a matrix is numbers in E4M3, and each
/// block of its rows and columns has a factor in a tensor "_scale_inv" by which all of its numbers are multiplied; blocks at the end
/// may be smaller.
struct Fp8Block {
  int64_t rows = 128, columns = 128;
};

/// The quantization of a config.json, if there is any; CheckpointError for invalid sizes.
Fp8Block published_fp8_block(const std::string& file);

/// The model that a config.json describes, resolved: type, layers, heads, kv_heads, width, head_dim, mlp_width, context, vocab, bias,
/// tie_embeddings, rope_theta, rope_scaling, norm_eps, window, full_attention_every, and further fields of the architecture. Dropout
/// stays 0: it is a choice of training. For a model of images and text it is the text model. Throws CheckpointError naming the file
/// and the key: missing, of the wrong type, or of a model that Sheaf does not have (another architecture, other scalings of rotary
/// positions, biases in Llama's attention, windows in other layers, other activations, ...).
ModelConfig read_published_config(const std::string& file);

/// The value of `key` in a config.json, or, for models of images that lack it, in its text_config; null if neither has it.
const Json* find_published(const Json& config, const char* key);

/// The model_type for read_published_config(), for models of images that of the text model.
std::string published_type(const std::string& file);

/// Throws ConfigError with both values if `model` has another shape than `published`, read from `file`. A shorter context is allowed:
/// of learned positions, the first are used.
void check_published_shape(const ModelConfig& model, const ModelConfig& published, const std::string& file);

/// Whether the architecture that a model is published as includes its MTP layers: only DeepSeek-V3's and GLM-4.5's
/// do.
bool publishes_mtp(const ModelConfig& model);

/// The model_type as which `model` can be published; if two are possible, that of `like`. ConfigError for a model of no published
/// architecture.
std::string published_architecture(const ModelConfig& model, const std::string& like = "");

/// The inverse: a config.json from which `transformers` builds `model`, whose weights are of this dtype.
Json published_config(const ModelConfig& model, DType dtype = kF32, const std::string& like = "");

}  // namespace sheaf::models
