// Random choices that are the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sheaf::testing {

/// Counter-based (Steele et al. 2014, SplitMix).
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  int below(size_t n) { return static_cast<int>(bits() % n); }
  bool one_in(size_t n) { return below(n) == 0; }
  template <class T>
  const T& of(const std::vector<T>& choices) { return choices[static_cast<size_t>(below(choices.size()))]; }

 private:
  uint64_t state_;
};

}  // namespace sheaf::testing
