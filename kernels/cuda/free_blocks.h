// FreeBlocks: the unused pieces of a range of memory. Best fit; adjacent pieces are merged.
#pragma once

#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace sheaf::kernels::cuda {

class FreeBlocks {
 public:
  /// Takes `size` bytes out of the smallest piece that is large enough; returns their offset.
  std::optional<size_t> take(size_t size) {
    const auto fit = by_size_.lower_bound({size, 0});
    if (fit == by_size_.end()) return {};
    const auto [piece, offset] = *fit;
    remove(offset);
    if (piece > size) insert(offset + size, piece - size);
    return offset;
  }

  void put(size_t offset, size_t size) {
    const auto next = pieces_.find(offset + size);
    if (next != pieces_.end()) {
      size += next->second;
      remove(next->first);
    }
    const auto after = pieces_.lower_bound(offset);
    if (after != pieces_.begin())
      if (const auto before = std::prev(after); before->first + before->second == offset) {
        offset = before->first, size += before->second;
        remove(before->first);
      }
    insert(offset, size);
  }

  /// Size of the piece that ends at `end`, 0 if there is none.
  size_t before(size_t end) const {
    if (pieces_.empty()) return 0;
    const auto last = std::prev(pieces_.end());
    return last->first + last->second == end ? last->second : 0;
  }
  size_t bytes() const { return bytes_; }
  const std::map<size_t, size_t>& pieces() const { return pieces_; }  ///< offset, size

 private:
  void insert(size_t offset, size_t size) {
    pieces_[offset] = size;
    by_size_.insert({size, offset});
    bytes_ += size;
  }
  void remove(size_t offset) {
    const auto it = pieces_.find(offset);
    bytes_ -= it->second;
    by_size_.erase({it->second, offset});
    pieces_.erase(it);
  }

  std::map<size_t, size_t> pieces_;
  std::set<std::pair<size_t, size_t>> by_size_;
  size_t bytes_ = 0;
};

}  // namespace sheaf::kernels::cuda
