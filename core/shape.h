// Shape: up to eight sizes, by value. Also used for strides (in elements) and permutations.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include "sheaf/core/error.h"

namespace sheaf {

inline constexpr int kMaxDims = 8;

class Shape {
 public:
  constexpr Shape() = default;
  constexpr Shape(std::initializer_list<int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
  constexpr explicit Shape(std::span<const int64_t> sizes) {
    if (sizes.size() > kMaxDims) fail<ShapeError>("[shape] more than 8 dimensions");
    rank_ = static_cast<int32_t>(sizes.size());
    for (int i = 0; i < rank_; ++i) v_[i] = sizes[i];
  }
  static constexpr Shape filled(int rank, int64_t value) {
    Shape s;
    s.rank_ = rank;
    for (int i = 0; i < rank; ++i) s.v_[i] = value;
    return s;
  }

  constexpr int rank() const { return rank_; }
  constexpr bool empty() const { return rank_ == 0; }
  constexpr int64_t operator[](int i) const { return v_[i]; }
  constexpr int64_t& operator[](int i) { return v_[i]; }
  /// Size of dimension i; negative i counts from the end. ShapeError if there is no such dimension.
  constexpr int64_t dim(int i) const {
    if (i < -rank_ || i >= rank_) [[unlikely]] fail<ShapeError>("[size] ", *this, " has no dimension ", i);
    return v_[i < 0 ? i + rank_ : i];
  }
  constexpr int64_t back() const { return v_[rank_ - 1]; }
  constexpr const int64_t* begin() const { return v_.data(); }
  constexpr const int64_t* end() const { return v_.data() + rank_; }
  constexpr void push_back(int64_t value) {
    if (rank_ == kMaxDims) fail<ShapeError>("[shape] more than 8 dimensions");
    v_[rank_++] = value;
  }
  constexpr void insert(int at, int64_t value) {
    push_back(0);
    for (int i = rank_ - 1; i > at; --i) v_[i] = v_[i - 1];
    v_[at] = value;
  }
  constexpr void erase(int at) {
    for (int i = at; i + 1 < rank_; ++i) v_[i] = v_[i + 1];
    v_[--rank_] = 0;
  }
  /// Number of elements; 1 for a scalar.
  constexpr int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= v_[i];
    return n;
  }
  /// Row-major strides, in elements.
  constexpr Shape contiguous_strides() const {
    Shape s = filled(rank_, 1);
    for (int i = rank_ - 2; i >= 0; --i) s.v_[i] = s.v_[i + 1] * v_[i + 1];
    return s;
  }
  constexpr bool operator==(const Shape& o) const {
    if (rank_ != o.rank_) return false;
    for (int i = 0; i < rank_; ++i)
      if (v_[i] != o.v_[i]) return false;
    return true;
  }
  std::string to_string() const {  // "[2,3]"
    std::string out = "[";
    for (int i = 0; i < rank_; ++i) out += (i ? "," : "") + std::to_string(v_[i]);
    return out + "]";
  }

 private:
  std::array<int64_t, kMaxDims> v_{};
  int32_t rank_ = 0;
};

/// Maps a dimension index, negative from the end, into [0, rank); `who` names the op in the error.
inline int wrap_dim(std::string_view who, int dim, int rank) {
  check<ShapeError>(dim >= -rank && dim < rank, "[", who, "] dimension ", dim, " is out of range for rank ", rank);
  return dim < 0 ? dim + rank : dim;
}

/// NumPy broadcasting of two shapes; throws ShapeError.
Shape broadcast_shapes(std::string_view who, const Shape& a, const Shape& b);

/// Bytes of a tensor whose elements have `element` bytes each; nothing if a size is negative or the product does not fit 63 bits.
/// Sizes of 0 do not hide an overflow of the others.
std::optional<int64_t> byte_size(size_t element, const Shape& shape);

}  // namespace sheaf
