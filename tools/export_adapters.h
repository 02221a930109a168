// What `sheaf export` turns a run's adapters (nn::Lora) into: a part of the weights, or files of their own.
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

/// Bytes that follow each other, each run of them stored somewhere else.
using Spans = std::vector<std::span<const std::byte>>;
/// Bytes [begin, end) of these.
Spans part_of(const Spans& whole, int64_t begin, int64_t end);

/// a[rank, in] and those rows of b[out, rank], f32, that belong to the rows of the weight in a published tensor.
struct Adapter {
  Spans a, b;
  int64_t rank;
  double scale;
};
/// nullopt if the layer has none.
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

/// adapter_model.safetensors and adapter_config.json of Hugging Face's PEFT, in which queries, keys and values have adapters of their
/// own: with one a, and each with its rows of b.
std::vector<SafetensorsInput> adapter_tensors(models::Checkpoint& checkpoint, const models::ModelConfig& model, const models::PublishedForm& form);
Json adapter_config(const models::ModelConfig& model, const models::PublishedForm& form, const std::string& weights);

}  // namespace sheaf::tools
