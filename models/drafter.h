// Drafter: drafts the next tokens by a model's MTP layers; the model then reads them together with the token before them and keeps
// those that it would have chosen itself, all in one pass (speculative decoding: Leviathan et al.,
// https://arxiv.org/abs/2211.17192; by MTP layers: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 5.4.3).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sheaf/models/decoder.h"

namespace sheaf::models {

class Drafter {
 public:
  /// Drafts at most `most` tokens at once, at most as many as there are MTP layers, all below `vocab`; up to `capacity` tokens
  /// are read.
  Drafter(Decoder& model, int64_t most, int64_t capacity, int64_t vocab);

  int64_t most() const { return static_cast<int64_t>(caches_.size()); }
  /// At most `most` tokens, no more than at the call before, that are expected after `tokens`, the likeliest each. The model has read all
  /// of `tokens`, which begin with those of the call before, except the last: x[1, T, C] is Decoder::read() of the T that it has read
  /// since.
  std::vector<int32_t> draft(const Tensor& x_BTC, std::span<const int32_t> tokens, int64_t most);

 private:
  Decoder& model_;
  int64_t vocab_;
  std::vector<nn::KeyValueCache> caches_;  // of the layers: computed from no draft
  std::vector<Tensor> before_;             // of each layer's input, the part to read again, [1, 1, C]
};

}  // namespace sheaf::models
