// Starting from published weights: GPT-2's, Llama's and those of models of its shape, in Hugging Face's form, read into a model that
// may be sharded. Each rank reads the bytes of its own part and nothing else.
//
//   models::Gpt model(models::GptConfig::preset("gpt2-124m"));
//   shard(model, mesh, ...);
//   materialize(model, world.device());
//   models::load_weights(model, "gpt2");  // a folder with model.safetensors and config.json
#pragma once

#include <span>

#include "sheaf/models/published_files.h"
#include "sheaf/models/train_config.h"
#include "sheaf/nn/state_dict.h"

namespace sheaf::models {

/// Fills the parameters of a materialized Gpt or Llama from weights in f32, f16 or bf16 (or f64, into f64), or in FP8 by blocks, and
/// experts in MXFP4, whose every value f32 and f64 hold exactly; frozen parameters may be bf16 or f16, with rounding. Adapters
/// (nn::add_lora) are unchanged, and so are MTP layers that the files do not have. Without communication, and outside of any
/// recording; optimizers are not notified. Of learned positions, the first `context` are used. Returns the size of this rank's part
/// in the files. Everything is checked before anything is written: ConfigError if the model is not the one that config.json, if there
/// is one, describes, or trains parameters narrower than f32; CheckpointError naming file, tensor, what was expected and what was
/// found.
int64_t load_weights(nn::Module& model, const PublishedFiles& files);
int64_t load_weights(nn::Module& model, const std::string& path);

/// load_weights() for the parts of a model that this rank holds: those of one parameter are consecutive. It checks all names, shapes
/// and dtypes, but does not read config.json.
int64_t fill_weights(std::span<const nn::StatePiece> pieces, const PublishedFiles& files, const ModelConfig& model);

/// The number of MTP layers in the files, for a model that publishes_mtp().
int64_t num_mtp_layers(const PublishedFiles& files, const ModelConfig& model);

/// load_weights()' checks of names, shapes and dtypes, before there is a model; vocab must be known.
void check_weights(const PublishedFiles& files, const ModelConfig& model);

/// The shape of a Gpt or Llama; ConfigError for other modules.
ModelConfig model_config(nn::Module& model);

}  // namespace sheaf::models
