#include "sheaf/core/random.h"

namespace sheaf {
namespace {

/// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijection of 64 bits that spreads every bit.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

Key key_of(std::string_view name, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return fold_in({mix(hash)}, seed);
}

Key fold_in(Key key, uint64_t data) { return {mix(key.value ^ mix(data))}; }

}  // namespace sheaf
