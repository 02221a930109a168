// How rotary frequencies are lowered for sequences longer than those of a model's first training.
#pragma once

#include <algorithm>
#include <string>

#include "sheaf/core/error.h"
#include "sheaf/core/random.h"

namespace sheaf {

/// Scaled rotary positions. A frequency f, radians per position, makes n = f original_context / 2π
/// turns within the context of the first training. From high_freq_factor turns on it stays as it
/// is, up to low_freq_factor turns it is divided by `factor`, and in between it is a blend:
///
///   f (s + (1 - s) / factor),   s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor)
///
/// with s in [0, 1]: Llama 3.1's (`apply_scaling` in models/llama3/model.py of
/// https://github.com/meta-llama/llama-models; "llama3" in transformers' modeling_rope_utils.py).
/// Without an original context s is 0 and every frequency is divided: positions are interpolated
/// (Chen et al., https://arxiv.org/abs/2306.15595; "linear" there). A factor of 1 changes no bit.
struct RotaryScaling {
  double factor = 1.0;            ///< what slow frequencies are divided by, at least 1
  double low_freq_factor = 1.0;   ///< turns, above 0
  double high_freq_factor = 4.0;  ///< turns, above low_freq_factor
  int64_t original_context = 0;   ///< tokens; 0: all frequencies are divided

  static RotaryScaling linear(double factor) { return {.factor = factor}; }
  static RotaryScaling llama3(double factor, double low = 1.0, double high = 4.0,
                              int64_t original_context = 8192) {
    return {factor, low, high, original_context};
  }
  bool operator==(const RotaryScaling&) const = default;

  /// Only IEEE operations, none of which contract: the same bits everywhere.
  SHEAF_HOST_DEVICE double scaled(double frequency) const {
    constexpr double kTwoPi = 6.283185307179586;
    const double turns = frequency * static_cast<double>(original_context) / kTwoPi;
    const double blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    const double s = std::min(std::max(blend, 0.0), 1.0);
    return frequency * (s + (1.0 - s) / factor);
  }

  /// What cannot be, by the field's name; "" if all can.
  std::string problem() const {
    if (!(factor >= 1.0 && factor <= kLargest))
      return str("factor is ", factor, ": expected a number from 1 to ", kLargest);
    if (!(low_freq_factor > 0.0))
      return str("low_freq_factor is ", low_freq_factor, ": expected a positive number");
    if (!(high_freq_factor > low_freq_factor && high_freq_factor <= kLargest))
      return str("high_freq_factor is ", high_freq_factor, ": expected a number above ",
                 "low_freq_factor, ", low_freq_factor, ", up to ", kLargest);
    if (original_context < 0)
      return str("original_context is ", original_context, ": expected a number of tokens");
    return "";
  }

 private:
  static constexpr double kLargest = 1e6;
};

}  // namespace sheaf
