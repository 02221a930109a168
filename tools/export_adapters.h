// How `sheaf export` writes a run's adapters (nn::Lora): merged into the weights, or as separate files.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/block_format.h"
#include "sheaf/core/json.h"
#include "sheaf/core/safetensors.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/published_names.h"

namespace sheaf::tools {

/// Consecutive bytes of a tensor whose pieces are stored in different places.
using Spans = std::vector<std::span<const std::byte>>;
/// Bytes [begin, end) of `whole`.
Spans part_of(const Spans& whole, int64_t begin, int64_t end);

/// a[rank, in] and the rows of b[out, rank], in f32, that belong to the rows of the weight in a published tensor.
struct Adapter {
  Spans a, b;
  int64_t rank;
  double scale;
};
/// nullopt if the layer has none.
std::optional<Adapter> adapter_of(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedTensor& t);

/// The rows of a published tensor as stored in a checkpoint: values of a dtype, or (u8) block-quantized.
struct RestingWeight {
  Spans bytes;
  DType dtype;
  std::optional<BlockFormat> blocks;
  int64_t rows, columns;
};
RestingWeight weight_of(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedTensor& t);

/// The weight plus the adapter's contribution, computed in f32 and rounded once to `dtype`.
std::vector<std::byte> merged(const RestingWeight& weight, const std::optional<Adapter>& adapter, DType dtype);

/// adapter_model.safetensors and adapter_config.json of Hugging Face's PEFT, where queries, keys and values have separate adapters:
/// all with the same a, each with its rows of b.
std::vector<SafetensorsInput> adapter_tensors(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedForm& form);
Json adapter_config(const models::ModelConfig& model, const models::PublishedForm& form, const std::string& weights);

}  // namespace sheaf::tools
