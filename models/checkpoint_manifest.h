// The manifest of a checkpoint: which parts of tensors are in which file. It is treated as untrusted input: whatever numbers it
// contains, they are checked in time and memory bounded by its length.
#pragma once

#include <string>
#include <string_view>

#include "sheaf/models/checkpoint_store.h"

namespace sheaf::models {

/// The same elements as an interval, if they are one.
Runs simplified(const Runs& runs);

/// The name of a part in its file. A whole tensor keeps its own, so that a plain safetensors reader finds it; a part names
/// its elements: "name[begin:end]" or "name[begin:size:count:stride]".
std::string part_key(std::string_view name, const Shape& shape, const Runs& runs);
/// Its shape there: the tensor's own if it is whole, [elements] or [count, size].
Shape part_shape(const Shape& shape, const Runs& runs);

/// [file, begin, end] or [file, begin, size, count, stride].
Json json_of(const Checkpoint::Part& part);
/// Reads a part of the tensor `name`, in one of `files` files. Throws DataError, CheckpointError.
Checkpoint::Part part_of(const Json& json, const std::string& name, int64_t files);

Json json_of(const Shape& shape);
/// Throws CheckpointError for sizes whose product could overflow.
Shape shape_of(const Json& json);
/// By its name(); throws CheckpointError.
DType dtype_of_name(const std::string& text);

/// Adds a part to a tensor that may be known from other parts. One without elements makes the tensor known. Throws
/// CheckpointError where they do not agree, or for elements that the tensor does not have.
void add_part(Checkpoint::Tensors& tensors, const std::string& name, DType dtype, const Shape& shape,
              const Checkpoint::Part& part);
/// Sorts the parts of each tensor, and throws CheckpointError naming an element that is in none of them or in two.
void check_coverage(Checkpoint::Tensors& tensors);

/// The member "tensors" of a manifest.
Json json_of(const Checkpoint::Tensors& tensors);
/// Everything in it is checked, also that the parts are in one of `files` files. Throws DataError, CheckpointError.
Checkpoint::Tensors tensors_of(const Json& json, int64_t files);

}  // namespace sheaf::models
