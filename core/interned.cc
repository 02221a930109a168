#include "sheaf/core/interned.h"

#include <algorithm>
#include <compare>
#include <mutex>
#include <set>

namespace sheaf {
namespace {

// By std::strong_order, which orders NaN, too.
struct Before {
  template <class T>
  bool operator()(const std::vector<T>& a, const std::vector<T>& b) const {
    return std::ranges::lexicographical_compare(a, b, [](T x, T y) { return std::strong_order(x, y) < 0; });
  }
};

template <class T>
const std::vector<T>* intern(const std::vector<T>& list) {
  static std::mutex mutex;
  static auto* known = new std::set<std::vector<T>, Before>;  // whose elements never move
  std::lock_guard lock(mutex);
  return &*known->insert(list).first;
}

}  // namespace

const std::vector<int64_t>* interned(const std::vector<int64_t>& list) { return intern(list); }
const std::vector<double>* interned(const std::vector<double>& list) { return intern(list); }

}  // namespace sheaf
