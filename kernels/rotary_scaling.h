// How rotary frequencies are lowered for sequences longer than those of a model's original training.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/core/interned.h"
#include "sheaf/core/random.h"

namespace sheaf {

/// Scaled rotary positions. A frequency f, radians per position, makes n = f original_context / 2π turns within the
/// original training's context. From high_freq_factor turns on it is unchanged, up to low_freq_factor turns it is
/// divided by `factor`, and in between it is a blend:
///
///   f (s + (1 - s) / factor),   s = (n - low_freq_factor) / (high_freq_factor - low_freq_factor)
///
/// with s in [0, 1]: Llama 3.1's (`apply_scaling` in models/llama3/model.py of
/// https://github.com/meta-llama/llama-models; "llama3" in transformers' modeling_rope_utils.py).
/// Without an original context s is 0 and every frequency is divided: positions are interpolated
/// (Chen et al., https://arxiv.org/abs/2306.15595; "linear" there). A factor of 1 changes no bit.
///
/// YaRN (Peng et al., https://arxiv.org/abs/2309.00071; "yarn" there) has the same bounds under other names, beta_slow and beta_fast,
/// but s decreases linearly with the index of the frequency, between the indices at the bounds, which RotaryFrequencies computes.
/// Rotated elements are also multiplied by `amplitude`.
///
/// LongRoPE (Ding et al., https://arxiv.org/abs/2402.13753; "longrope" there) divides each frequency by a number of its own, which a
/// search has found: one of `short_factors`, or of `long_factors` in contexts longer than the original one. `factor`, by which the
/// context is longer, affects only the amplitude, sqrt(1 + ln(factor) / ln(original_context)).
struct RotaryScaling {
  enum class Blend : int8_t {
    by_turns,
    by_index,        ///< YaRN
    by_whole_index,  ///< YaRN with its bounds rounded outwards to whole indices
    by_pair,         ///< LongRoPE
  };
  double factor = 1.0;            ///< what slow frequencies are divided by, at least 1
  double low_freq_factor = 1.0;   ///< turns, above 0
  double high_freq_factor = 4.0;  ///< turns, above low_freq_factor (YaRN: or the same)
  int64_t original_context = 0;   ///< tokens; 0: all frequencies are divided
  Blend blend = Blend::by_turns;
  double amplitude = 1.0;  ///< what rotated elements are multiplied by, above 0
  const std::vector<double>* short_factors = nullptr;  ///< divisors of the frequencies, one for each pair, interned (LongRoPE)
  const std::vector<double>* long_factors = nullptr;   ///< those in longer contexts
  bool is_long = false;                                ///< the latter apply

  static constexpr int64_t kMostPairs = 128;  ///< of LongRoPE

  bool is_yarn() const { return blend == Blend::by_index || blend == Blend::by_whole_index; }
  bool is_longrope() const { return blend == Blend::by_pair; }
  const std::vector<double>& pair_factors() const { return is_long ? *long_factors : *short_factors; }

  static RotaryScaling linear(double factor) { return {.factor = factor}; }
  static RotaryScaling llama3(double factor, double low = 1.0, double high = 4.0,
                              int64_t original_context = 8192) {
    return {factor, low, high, original_context};
  }
  static RotaryScaling yarn(double factor, int64_t original_context, double beta_slow = 1.0,
                            double beta_fast = 32.0, bool truncate = true) {
    const Blend blend = truncate ? Blend::by_whole_index : Blend::by_index;
    return {factor, beta_slow, beta_fast, original_context, blend, yarn_amplitude(factor)};
  }
  /// The amplitude that YaRN recommends; 1 for a factor up to 1.
  static double yarn_amplitude(double factor, double scale = 1.0) {
    return factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0;
  }
  static RotaryScaling longrope(const std::vector<double>& short_factors, const std::vector<double>& long_factors, double factor,
                                int64_t original_context) {
    RotaryScaling s = {.factor = factor, .original_context = original_context, .blend = Blend::by_pair};
    s.amplitude = longrope_amplitude(factor, original_context);
    s.short_factors = interned(short_factors), s.long_factors = interned(long_factors);
    return s;
  }
  /// The amplitude that LongRoPE recommends.
  static double longrope_amplitude(double factor, int64_t original_context) {
    return factor <= 1.0 ? 1.0 : std::sqrt(1.0 + std::log(factor) / std::log(static_cast<double>(original_context)));
  }
  /// The same for a model of this context, by which it chooses LongRoPE's factors, once: `transformers` chooses by the length of each
  /// text, so that a key would depend on how many tokens follow it. The others do not depend on it.
  RotaryScaling for_context(int64_t context) const {
    RotaryScaling s = *this;
    s.is_long = is_longrope() && context > original_context;
    return s;
  }
  bool operator==(const RotaryScaling&) const = default;

  /// Only IEEE operations without contraction: the same bits everywhere.
  SHEAF_HOST_DEVICE double scaled(double frequency) const {
    constexpr double kTwoPi = 6.283185307179586;
    const double turns = frequency * static_cast<double>(original_context) / kTwoPi;
    const double part = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    return blended(frequency, std::min(std::max(part, 0.0), 1.0));
  }
  SHEAF_HOST_DEVICE double blended(double frequency, double s) const {
    return frequency * (s + (1.0 - s) / factor);
  }

  /// What is wrong with the first invalid field, by its name; "" if all are valid for heads with this many rotated pairs.
  std::string problem(int64_t pairs) const {
    if (!(factor >= 1.0 && factor <= kLargest))
      return str("factor is ", factor, ": expected a number from 1 to ", kLargest);
    if (is_longrope()) {
      const std::string of_short = problem_of("short_factor", short_factors, pairs);
      if (const std::string of_any = of_short.empty() ? problem_of("long_factor", long_factors, pairs) : of_short; !of_any.empty()) return of_any;
    }
    const char* low = is_yarn() ? "beta_slow" : "low_freq_factor";
    const char* high = is_yarn() ? "beta_fast" : "high_freq_factor";
    if (!(low_freq_factor > 0.0))
      return str(low, " is ", low_freq_factor, ": expected a positive number");
    // At the same bounds YaRN's blend is a step.
    if (!(high_freq_factor > low_freq_factor || (is_yarn() && high_freq_factor == low_freq_factor)) || !(high_freq_factor <= kLargest))
      return str(high, " is ", high_freq_factor, ": expected a number ", is_yarn() ? "not below " : "above ",
                 low, ", ", low_freq_factor, ", up to ", kLargest);
    if (original_context < (blend == Blend::by_turns ? 0 : 1))
      return str("original_context is ", original_context, ": expected a number of tokens");
    if (!(amplitude > 0.0 && amplitude <= kLargest))
      return str("attention_factor is ", amplitude, ": expected a positive number up to ",
                 kLargest);
    return "";
  }

 private:
  static constexpr double kLargest = 1e6;

  static std::string problem_of(const char* name, const std::vector<double>* factors, int64_t pairs) {
    if (pairs > kMostPairs) return str(name, " is for at most ", kMostPairs, " pairs of a head's rotated elements, which are ", pairs);
    if (!factors || std::ssize(*factors) != pairs)
      return str(name, " has ", factors ? factors->size() : 0, " numbers: expected one for each of the ", pairs,
                 " pairs of a head's rotated elements");
    for (size_t i = 0; i < factors->size(); ++i)
      if (const double x = (*factors)[i]; !(x > 0.0 && x <= kLargest))
        return str(name, '[', i, "] is ", x, ": expected a positive number up to ", kLargest);
    return "";
  }
};

/// The frequencies of a head of 2 `half` elements, radians per position.
class RotaryFrequencies {
 public:
  RotaryFrequencies(double theta, int64_t half, const RotaryScaling& scaling)
      : theta_(theta), half_(half), scaling_(scaling) {
    if (scaling.is_longrope()) {
      const std::vector<double>& factors = scaling.pair_factors();
      check<ConfigError>(std::ssize(factors) == half && half <= RotaryScaling::kMostPairs, "[rotary] ", factors.size(),
                         " factors of longrope for ", half, " pairs");
      std::ranges::copy(factors, divisors_);
    }
    if (!scaling.is_yarn()) return;
    check<ConfigError>(theta > 1, "[rotary] theta ", theta, ": yarn needs a number above 1");
    const double width = 2 * static_cast<double>(half);
    // The index, a real number, of the frequency that makes `turns` turns in the original context.
    const auto index = [&](double turns) {
      constexpr double kTwoPi = 6.283185307179586;
      const double context = static_cast<double>(scaling.original_context);
      return width * std::log(context / (turns * kTwoPi)) / (2 * std::log(theta));
    };
    const bool whole = scaling.blend == RotaryScaling::Blend::by_whole_index;
    first_ = index(scaling.high_freq_factor), last_ = index(scaling.low_freq_factor);
    if (whole) first_ = std::floor(first_), last_ = std::ceil(last_);
    first_ = std::max(first_, 0.0), last_ = std::min(last_, width - 1);
    if (first_ == last_) last_ += 0.001;  // as transformers does
  }
  SHEAF_HOST_DEVICE double operator()(int64_t i) const {
    const double frequency = ::pow(theta_, -static_cast<double>(i) / static_cast<double>(half_));
    if (scaling_.blend == RotaryScaling::Blend::by_turns) return scaling_.scaled(frequency);
    if (scaling_.blend == RotaryScaling::Blend::by_pair) return frequency / divisors_[i];
    const double ramp = (static_cast<double>(i) - first_) / (last_ - first_);
    return scaling_.blended(frequency, 1.0 - std::min(std::max(ramp, 0.0), 1.0));
  }
  SHEAF_HOST_DEVICE double amplitude() const { return scaling_.amplitude; }

 private:
  double theta_;
  int64_t half_;
  RotaryScaling scaling_;
  double first_ = 0, last_ = 0;
  double divisors_[RotaryScaling::kMostPairs] = {};  // by value: a kernel gets them as its parameters, also in a CUDA graph
};

}  // namespace sheaf
