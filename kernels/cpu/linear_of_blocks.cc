#include "sheaf/kernels/linear_of_blocks.h"

#include <algorithm>

#include "sheaf/core/parallel.h"
#include "sheaf/kernels/cpu/block_rows.h"
#include "sheaf/kernels/cpu/block_values.h"
#include "sheaf/kernels/cpu/gemm_part.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/linear_of_blocks_operands.h"
#include "sheaf/kernels/quantize.h"

namespace sheaf::kernels::cpu {
namespace {

constexpr int64_t kMostRows = 32;
// Outputs and depth of a piece of W. Its depth is that of the product's own blocks, so that sums are the same
// ([Note: the bits of a product] in gemm_part.h); its values stay in a second-level cache.
constexpr int64_t kOutputs = 48, kDepth = kDepthBlock;
constexpr size_t kValueBytes = kOutputs * kDepth * sizeof(float);

bool in_pieces(const View& x, const View& bias, const View& y) {
  const int64_t inputs = x.shape.back();
  const bool fits_bias = bias.rank() == 0 || (bias.dtype == kF32 && bias.contiguous());
  return x.dtype == kF32 && y.dtype == kF32 && fits_bias && x.contiguous() && y.contiguous() &&
         inputs > 0 && x.numel() / inputs <= kMostRows;
}

bool is_for_registers(const View& x) { return x.numel() / x.shape.back() <= BlockRows::kMostRows; }

int64_t slots_for(int64_t items, int64_t multiply_adds) {
  constexpr int64_t kGrain = 300000;  // multiply-adds for which waking a thread pays off
  return std::clamp<int64_t>(multiply_adds / kGrain, 1, std::min<int64_t>(items, num_threads()));
}

/// For so few rows that values are multiplied as they are decoded.
void in_registers(const View& x, const View& blocks, BlockFormat format, const View& bias,
                  const View& y) {
  const BlockRows p{.x = x.as<const float>(),
                    .rows = x.numel() / x.shape.back(),
                    .inputs = x.shape.back(),
                    .outputs = y.shape.back(),
                    .blocks = blocks.as<const uint8_t>(),
                    .row_bytes = blocks.shape[1],
                    .format = format,
                    .bias = bias.rank() ? bias.as<const float>() : nullptr,
                    .y = y.as<float>()};
  const int64_t items = (p.outputs + BlockRows::kOutputs - 1) / BlockRows::kOutputs;
  const int64_t slots = slots_for(items, p.rows * p.outputs * p.inputs);
  parallel_slots(items, slots, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) multiply_blocks(p, item * BlockRows::kOutputs);
  });
}

/// A product as pieces of kOutputs outputs, for the threads.
struct Pieces {
  const View &x, &weight, &bias, &y;  // only the shape of weight
  int64_t rows, outputs, inputs, items, slots;

  Pieces(const View& x_in, const View& weight_in, const View& bias_in, const View& y_in)
      : x(x_in), weight(weight_in), bias(bias_in), y(y_in) {
    outputs = weight.shape[0], inputs = weight.shape[1], rows = x.numel() / inputs;
    items = (outputs + kOutputs - 1) / kOutputs;
    slots = slots_for(items, rows * outputs * inputs);
  }

  /// y[:, first ..] from inputs [k ..], whose values of W are at `values` in rows of kDepth.
  GemmPart part(int64_t first, int64_t k, float* values) const {
    const int64_t count = std::min(kOutputs, outputs - first);
    const auto at = [](const View& v, int64_t i) { return reinterpret_cast<char*>(v.as<float>() + i); };
    GemmPart p{.rows = rows, .cols = count, .depth = std::min(kDepth, inputs - k),
               .a = {at(x, k), kF32, inputs, 1}, .b = {reinterpret_cast<char*>(values), kF32, 1, kDepth},
               .c = {at(y, first), kF32, outputs, 1}, .bias = {}, .accumulate = k > 0};
    if (bias.rank() != 0 && k == 0) p.bias = {at(bias, first), kF32, 0, 1};
    return p;
  }
  size_t slot_bytes() const { return kValueBytes + line_align(gemm_scratch(part(0, 0, nullptr))); }
};

}  // namespace

size_t linear_of_blocks_workspace(const View& x, const View& blocks, BlockFormat format,
                                  const View& bias, const View& y) {
  const View weight = weight_of_blocks(x, blocks, format, bias, y, nullptr);
  if (y.numel() == 0) return 0;
  if (in_pieces(x, bias, y)) {
    if (is_for_registers(x)) return 0;
    const Pieces pieces(x, weight, bias, y);
    return pieces.slot_bytes() * static_cast<size_t>(pieces.slots);
  }
  return weight_bytes(weight) + linear_workspace(x, weight, bias, y);
}

void linear_of_blocks(const View& x, const View& blocks, BlockFormat format, const View& bias,
                      const View& y, Workspace workspace) {
  const View weight = weight_of_blocks(x, blocks, format, bias, y, workspace.data);
  if (y.numel() == 0) return;
  if (!in_pieces(x, bias, y)) {
    const Workspace rest = behind(workspace, weight_bytes(weight));
    dequantize(blocks, format, weight);
    return linear(x, weight, bias, y, rest);
  }
  if (is_for_registers(x)) return in_registers(x, blocks, format, bias, y);
  const Pieces pieces(x, weight, bias, y);
  const size_t slot_bytes = pieces.slot_bytes();
  check<ShapeError>(workspace.bytes >= slot_bytes * static_cast<size_t>(pieces.slots),
                    "[linear_of_blocks] workspace too small: ", workspace.bytes, " bytes");
  const int64_t each = block_bytes(format), row_bytes = blocks.shape[1];
  parallel_slots(pieces.items, pieces.slots, [&](int64_t slot, int64_t begin, int64_t end) {
    char* scratch = static_cast<char*>(workspace.data) + static_cast<size_t>(slot) * slot_bytes;
    auto* values = reinterpret_cast<float*>(scratch);
    for (int64_t item = begin; item < end; ++item)
      for (int64_t k = 0; k < pieces.inputs; k += kDepth) {
        const GemmPart part = pieces.part(item * kOutputs, k, values);
        for (int64_t o = 0; o < part.cols; ++o) {
          const uint8_t* from = blocks.as<uint8_t>() + (item * kOutputs + o) * row_bytes + k / kBlockSize * each;
          for (int64_t i = 0; i < part.depth; i += kBlockSize, from += each)
            block_values(from, format, values + o * kDepth + i);
        }
        gemm_part(part, scratch + kValueBytes);
      }
  });
}

}  // namespace sheaf::kernels::cpu
