// Carving a workspace into arrays.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"

namespace sheaf::kernels::cuda {

/// Rounds up to whole 128-byte lines.
constexpr size_t line_align(size_t bytes) { return (bytes + 127) / 128 * 128; }

/// Hands out line-aligned arrays of a workspace, one after another.
class Carver {
 public:
  Carver(const char* name, Workspace w)
      : name_(name), next_(static_cast<char*>(w.data)), left_(w.bytes) {}
  template <class T>
  T* take(int64_t count) {
    const size_t bytes = line_align(static_cast<size_t>(count) * sizeof(T));
    check<ShapeError>(bytes <= left_, "[", name_, "] workspace too small by ",
                      bytes > left_ ? bytes - left_ : 0, " bytes");
    T* out = reinterpret_cast<T*>(next_);
    next_ += bytes, left_ -= bytes;
    return out;
  }

 private:
  const char* name_;
  char* next_;
  size_t left_;
};

}  // namespace sheaf::kernels::cuda
