// Products of a few rows with a weight in blocks, 32 outputs at a time.
#pragma once

#include <cstdint>

#include "sheaf/core/block_format.h"

namespace sheaf::kernels::cpu {

/// y[rows, outputs] = x[rows, inputs] · Wᵀ + bias, dense f32; rows of W in blocks are row_bytes apart.
struct BlockRows {
  static constexpr int kMostRows = 4, kOutputs = 32;
  const float* x;
  int64_t rows, inputs, outputs;
  const uint8_t* blocks;
  int64_t row_bytes;
  BlockFormat format;
  const float* bias;  ///< null: none
  float* y;
};

/// Outputs [first, first + 32), or fewer at the end, of at most kMostRows rows. Blocks are read once, and their values are only in
/// registers.
void multiply_blocks(const BlockRows& p, int64_t first);

}  // namespace sheaf::kernels::cpu
