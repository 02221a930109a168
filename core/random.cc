#include "sheaf/core/random.h"

namespace sheaf {

Key key_of(std::string_view name, uint64_t seed) {
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return fold_in({detail::mix(hash)}, seed);
}

}  // namespace sheaf
