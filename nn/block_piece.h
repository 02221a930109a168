// BlockPiece: a rank's bytes of a parameter that rests in blocks, and the values that they are made of.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/block_format.h"
#include "sheaf/core/device.h"
#include "sheaf/core/runs.h"

namespace sheaf::nn {

/// Bytes are cut among ranks wherever it may be, also inside of blocks: a rank makes the whole blocks around its own, of values in
/// f32, and keeps its bytes of them. So a block is the same wherever it is cut.
class BlockPiece {
 public:
  /// `bytes`: which of the parameter's bytes, of its row-major flat index; runs begin at the same place of their blocks.
  BlockPiece(std::string name, BlockFormat format, const Runs& bytes);

  /// Elements of the values, side by side in values(): the whole blocks that hold the bytes.
  const Runs& elements() const { return elements_; }
  std::span<float> values() { return values_; }
  /// read(begin, out) gives values [begin, begin + out.size()) of the flat index.
  void fill(const std::function<void(int64_t begin, std::span<float> out)>& read);
  /// Quantizes the values and puts the bytes to `to` on `device`. NonFiniteError that names the parameter.
  void store(Device device, void* to);

 private:
  std::string name_;
  BlockFormat format_;
  Runs bytes_, elements_;
  std::vector<float> values_;
};

}  // namespace sheaf::nn
