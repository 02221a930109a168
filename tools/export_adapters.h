// What `sheaf export` makes of a run's adapters (nn::Lora): a part of the weights, or files of their own.
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

/// Bytes that lie end to end, each run of them somewhere else.
using Spans = std::vector<std::span<const std::byte>>;
/// Bytes [begin, end) of these.
Spans part_of(const Spans& whole, int64_t begin, int64_t end);

/// a[rank, in] and as many rows of b[out, rank], f32, as a published tensor has of the weight that they belong to.
struct Adapter {
  Spans a, b;
  int64_t rank;
  double scale;
};
/// Nothing if the layer has none.
std::optional<Adapter> adapter_of(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedTensor& t);

/// The rows of a published tensor as a checkpoint has them: values of a dtype, or (u8) in blocks.
struct RestingWeight {
  Spans bytes;
  DType dtype;
  std::optional<BlockFormat> blocks;
  int64_t rows, columns;
};
RestingWeight weight_of(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedTensor& t);

/// The values, and what an adapter adds to them, in f32, rounded once to `dtype`.
std::vector<std::byte> merged(const RestingWeight& weight, const std::optional<Adapter>& adapter, DType dtype);

/// adapter_model.safetensors and adapter_config.json of Hugging Face's PEFT, for whom queries, keys and values have adapters of their
/// own: with one a, and each its rows of b.
std::vector<SafetensorsInput> adapter_tensors(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedForm& form);
Json adapter_config(const models::ModelConfig& model, const models::PublishedForm& form, const std::string& weights);

}  // namespace sheaf::tools
