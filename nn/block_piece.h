// BlockPiece: a rank's bytes of a parameter stored in blocks, and the values that they are quantized from.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/runs.h"

namespace sheaf::nn {

/// The bytes are sharded at any byte, even inside of blocks: a rank quantizes the whole blocks around its bytes, from values in f32,
/// and keeps only its own bytes. So a block is the same wherever the shards are cut.
class BlockPiece {
 public:
  /// `bytes`: this rank's part of the parameter's bytes, as runs of its row-major flat index; all runs begin at the same offset in
  /// their blocks.
  BlockPiece(std::string name, BlockFormat format, const Runs& bytes);

  /// The indices of the values in values(), in order: the whole blocks that contain the bytes.
  const Runs& elements() const { return elements_; }
  std::span<float> values() { return values_; }
  /// read(begin, out) gives values [begin, begin + out.size()) of the flat index.
  void fill(const std::function<void(int64_t begin, std::span<float> out)>& read);
  /// Quantizes the values and writes the bytes to `to` on `device`. NonFiniteError, naming the parameter, for a value
  /// that is not finite.
  void store(Device device, void* to);

 private:
  std::string name_;
  BlockFormat format_;
  Runs bytes_, elements_;
  std::vector<float> values_;
};

}  // namespace sheaf::nn
