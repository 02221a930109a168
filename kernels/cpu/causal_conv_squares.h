// How a short convolution is divided, and the scratch memory of its backward; shared by dispatcher and kernels.
#pragma once

#include "sheaf/kernels/causal_conv.h"
#include "sheaf/kernels/cpu/head_rows.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels::cpu {

inline constexpr int64_t kConvTokens = 64, kConvChannels = 128;

/// Tokens [first, end) of a sequence, block number `block` of all, and some of their channels.
struct ConvSquare {
  int64_t sequence, block, first, end, first_channel, channels;
};

/// The squares of one call: all channels of a block of tokens, then of the next.
struct ConvSquares {
  int64_t batch, tokens, channels;
  explicit ConvSquares(const CausalConvOperands& x) : batch(x.x.shape[0]), tokens(x.x.shape[1]), channels(x.x.shape[2]) {}

  int64_t across() const { return (channels + kConvChannels - 1) / kConvChannels; }
  int64_t along() const { return (tokens + kConvTokens - 1) / kConvTokens; }
  int64_t blocks() const { return batch * along(); }
  int64_t count() const { return blocks() * across(); }
  ConvSquare operator[](int64_t i) const {
    const int64_t block = i / across(), first = block % along() * kConvTokens, channel = i % across() * kConvChannels;
    return {block / along(), block, first, std::min(first + kConvTokens, tokens), channel, std::min(kConvChannels, channels - channel)};
  }

  int64_t padded_channels() const { return padded(channels); }
  int64_t grain() const { return row_grain(kConvTokens * kConvChannels); }
  int64_t slots() const { return slot_count(count(), grain()); }
  /// Scratch of a slot: gradients of a square's tokens, and of later ones that read some of them.
  int64_t slope_cells(int64_t taps) const { return (kConvTokens + taps - 1) * kConvChannels; }
  /// Each block of tokens' contribution to the gradient of the weight.
  int64_t part_cells(int64_t taps) const { return blocks() * taps * padded_channels(); }
};

}  // namespace sheaf::kernels::cpu
