#include "sheaf/models/batch_sampler.h"

#include <algorithm>
#include <vector>

namespace sheaf::models {
namespace {

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits in which every input bit reaches
// every output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// Uniform in [0, n), n > 0: the high word of a 128-bit product.
int64_t below(uint64_t random, int64_t n) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(random) * static_cast<uint64_t>(n) >> 64);
}

}  // namespace

RandomWindows::RandomWindows(Tokens tokens, int64_t context, uint64_t seed)
    : tokens_(std::move(tokens)), context_(context), seed_(seed) {
  check<ConfigError>(context >= 1, "[data] a context of ", context);
  check<DataError>(tokens_.size() > context, "[data] '", tokens_.name(), "': ", tokens_.size(),
                   " tokens are too few for a context of ", context);
}

int64_t RandomWindows::start(int64_t index) const {
  // Two rounds, so that runs with neighbouring seeds do not see each other's samples shifted.
  const uint64_t random = mix(mix(seed_ + 0x9E3779B97F4A7C15u) + static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15u);
  return below(mix(random), tokens_.size() - context_);
}

void RandomWindows::fill(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = start(first + i);
    tokens_.copy(at, context_, inputs + i * context_);
    tokens_.copy(at + 1, context_, targets + i * context_);
  }
}

SequentialWindows::SequentialWindows(Tokens tokens, int64_t context, int64_t max_targets)
    : tokens_(std::move(tokens)), context_(context) {
  check<ConfigError>(context >= 1, "[data] a context of ", context);
  check<DataError>(tokens_.size() >= 2, "[data] '", tokens_.name(), "': ", tokens_.size(),
                   " tokens leave nothing to predict");
  num_targets_ = tokens_.size() - 1;
  if (max_targets > 0) num_targets_ = std::min(num_targets_, max_targets);
}

int64_t SequentialWindows::fill(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  int64_t counted = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = std::min((first + i) * context_, num_targets_);
    const int64_t n = std::min(context_, num_targets_ - at);
    int32_t* input = inputs + i * context_;
    int32_t* target = targets + i * context_;
    tokens_.copy(at, n, input);
    tokens_.copy(at + 1, n, target);
    std::fill(input + n, input + context_, 0);
    std::fill(target + n, target + context_, kIgnoreIndex);
    counted += n;
  }
  return counted;
}

}  // namespace sheaf::models
