#include "sheaf/core/interned.h"

#include <mutex>
#include <set>

namespace sheaf {

const std::vector<int64_t>* interned(const std::vector<int64_t>& list) {
  static std::mutex mutex;
  static auto* known = new std::set<std::vector<int64_t>>;  // whose elements never move
  std::lock_guard lock(mutex);
  return &*known->insert(list).first;
}

}  // namespace sheaf
