// Rows: a view as rows over its last dimension, and slots: how kernels get scratch memory per thread.
#pragma once

#include <algorithm>

#include "sheaf/core/device.h"
#include "sheaf/core/parallel.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels::cpu {

/// The rows of a view: all dimensions but the last, in row-major order, whatever their strides. The
/// last dimension must be dense. T is the storage type.
template <class T>
class Rows {
 public:
  Rows(const char* who, const View& v) : data_(v.as<T>()), cols_(v.shape.back()) {
    check<ShapeError>(v.strides.back() == 1 || cols_ <= 1 || v.numel() == 0, "[", who,
                      "] the last dimension must be dense, its stride is ", v.strides.back());
    for (int i = 0; i + 1 < v.rank(); ++i) {
      if (v.shape[i] == 1) continue;
      if (!shape_.empty() && strides_.back() == v.strides[i] * v.shape[i]) {
        shape_[shape_.rank() - 1] *= v.shape[i];
        strides_[strides_.rank() - 1] = v.strides[i];
      } else {
        shape_.push_back(v.shape[i]);
        strides_.push_back(v.strides[i]);
      }
    }
    if (shape_.empty()) shape_.push_back(1), strides_.push_back(0);
  }

  int64_t count() const { return shape_.numel(); }
  int64_t cols() const { return cols_; }
  T* operator[](int64_t row) const {
    if (shape_.rank() == 1) return data_ + row * strides_[0];
    int64_t offset = 0;
    for (int i = shape_.rank() - 1; i >= 0; --i)
      offset += row % shape_[i] * strides_[i], row /= shape_[i];
    return data_ + offset;
  }

 private:
  T* data_;
  int64_t cols_;
  Shape shape_, strides_;
};

/// The elements of a view in row-major order, whatever its strides.
template <class T>
class Elements {
 public:
  Elements(const char* who, View v) : rows_(who, as_column(v)) {}
  int64_t count() const { return rows_.count(); }
  T operator[](int64_t i) const { return *rows_[i]; }

 private:
  static View& as_column(View& v) {
    v.shape.push_back(1), v.strides.push_back(1);
    return v;
  }
  Rows<const T> rows_;
};

/// The elements of a view of an index type, as i64. One class for all five types: reading one costs little compared
/// to the row that it selects, and kernels need not be compiled five times.
class Indices {
 public:
  Indices(const char* who, const View& v)
      : rows_(who, bytes_of(v)), read_(visit_index(who, v.dtype, []<class I>() -> Read {
          return [](const char* p) { return static_cast<int64_t>(*reinterpret_cast<const I*>(p)); };
        })) {}
  int64_t count() const { return rows_.count(); }
  int64_t operator[](int64_t i) const { return read_(rows_[i]); }

 private:
  using Read = int64_t (*)(const char*);
  static View bytes_of(View v) {
    for (int i = 0; i < v.rank(); ++i) v.strides[i] *= static_cast<int64_t>(size_of(v.dtype));
    v.shape.push_back(1), v.strides.push_back(1);
    return v;
  }
  Rows<const char> rows_;
  Read read_;
};

/// Number of rows of `cols` elements of work for which waking a thread pays off.
inline int64_t row_grain(int64_t cols) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1));
}

/// Slots: parts of an index range that run concurrently, each with separate scratch memory. Their number depends on the thread count,
/// so a slot's result for an item must not depend on the items before it.
inline int64_t slot_count(int64_t items, int64_t grain) {
  return std::max<int64_t>(1,
                           std::min<int64_t>(num_threads(), items / std::max<int64_t>(grain, 1)));
}
/// Calls f(slot, begin, end).
template <class F>
void parallel_slots(int64_t items, int64_t slots, F&& f) {
  parallel_for(slots, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) f(s, items * s / slots, items * (s + 1) / slots);
  });
}

/// Rounds up to whole 128-byte lines.
constexpr size_t line_align(size_t bytes) { return (bytes + 127) / 128 * 128; }

/// Cuts a workspace into aligned arrays.
class Carver {
 public:
  Carver(const char* who, Workspace w)
      : who_(who), next_(static_cast<char*>(w.data)), left_(w.bytes) {}
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = line_align(static_cast<size_t>(count) * sizeof(T));
    check<ShapeError>(bytes <= left_, "[", who_, "] workspace too small by ",
                      bytes - std::min(bytes, left_), " bytes");
    T* out = reinterpret_cast<T*>(next_);
    next_ += bytes, left_ -= bytes;
    return out;
  }

 private:
  const char* who_;
  char* next_;
  size_t left_;
};

}  // namespace sheaf::kernels::cpu
