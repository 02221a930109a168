// Array: a buffer that a benchmark allocates for itself, filled with values as they occur in a network.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <utility>

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/parallel.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/storage.h"
#include "sheaf/core/view.h"

namespace sheaf::bench {

/// A hash of an index: values that are the same in every run.
inline uint32_t scramble(uint64_t i) {
  i = (i + 1) * 0x9e3779b97f4a7c15ull;
  i ^= i >> 29;
  i *= 0xbf58476d1ce4e5b9ull;
  return static_cast<uint32_t>(i >> 32);
}

class Array {
 public:
  /// Floating-point values spread evenly over (-1, 1) for f32, f64, bf16 and f16; 0 for other types. First touched by the threads
  /// that will use it.
  Array(DType dtype, const Shape& shape) : dtype_(dtype), shape_(shape) {
    const size_t bytes = static_cast<size_t>(shape.numel()) * size_of(dtype);
    memory_.reset(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096));
    check<OutOfMemory>(memory_ != nullptr, "[bench] cannot allocate ", bytes, " bytes");
    parallel_for(shape.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) set(i, 2.0f * unit(i) - 1.0f);
    });
  }
  /// Indices spread evenly over [0, below): tokens and targets.
  static Array indices(const Shape& shape, int64_t below) {
    Array a(kI32, shape);
    for (int64_t i = 0; i < shape.numel(); ++i)
      a.as<int32_t>()[i] =
          static_cast<int32_t>(scramble(static_cast<uint64_t>(i)) % static_cast<uint64_t>(below));
    return a;
  }
  /// Offsets at which documents of `length` tokens begin in sequences [B, T]; the last document may be shorter.
  static Array begins(const Shape& shape, int64_t length) {
    Array a(kI32, shape);
    for (int64_t i = 0; i < shape.numel(); ++i) a.as<int32_t>()[i] = static_cast<int32_t>(i % shape[1] / length * length);
    return a;
  }
  /// These values.
  template <class T>
  static Array of(const Shape& shape, std::initializer_list<T> values) {
    Array a(dtype_of<T>, shape);
    std::copy(values.begin(), values.end(), a.as<T>());
    return a;
  }
  /// The same on `device`: on a GPU a copy in the calling rank's memory.
  Array on(Device device) && {
    if (!device.is_cuda()) return std::move(*this);
    Array a(dtype_, shape_, device);
    Gpu& gpu = RankContext::current().gpu_of(device);
    const auto bytes = static_cast<size_t>(view().bytes());
    gpu.copy(gpu.compute(), a.storage_->data(), memory_.get(), bytes, Gpu::Copy::to_device);
    return a;
  }

  View view() const {
    return View::dense(storage_ ? storage_->data() : memory_.get(), dtype_, shape_);
  }
  operator View() const { return view(); }  // NOLINT: an array is where a kernel wants a view
  /// Memory of the host.
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  /// Bytes of all elements, as the double that rates are computed in.
  double bytes() const { return static_cast<double>(view().bytes()); }

 private:
  Array(DType dtype, const Shape& shape, Device gpu)
      : dtype_(dtype),
        shape_(shape),
        storage_(Storage::allocate(gpu, shape.numel() * static_cast<int64_t>(size_of(dtype)))) {}

  static float unit(int64_t i) {
    return static_cast<float>(scramble(static_cast<uint64_t>(i)) >> 8) * 0x1p-24f;
  }
  void set(int64_t i, float x) {
    if (dtype_ == kF32)
      as<float>()[i] = x;
    else if (dtype_ == kBF16)
      as<bf16>()[i] = bf16(x);
    else if (dtype_ == kF16)
      as<f16>()[i] = f16(x);
    else if (dtype_ == kF64)
      as<double>()[i] = x;
    else if (dtype_ == kI64)
      as<int64_t>()[i] = 0;
    else if (dtype_ == kI32)
      as<int32_t>()[i] = 0;
    else if (dtype_ == kU8)
      as<uint8_t>()[i] = 0;
    else
      fail<DTypeError>("[bench] no arrays of ", dtype_);
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  DType dtype_;
  Shape shape_;
  std::unique_ptr<void, Free> memory_;  // of the host, or else
  std::shared_ptr<Storage> storage_;    // of a GPU
};

/// Scratch memory of a kernel.
class Scratch {
 public:
  explicit Scratch(size_t bytes, Device device = {})
      : memory_(Array(kF32, {static_cast<int64_t>(bytes / 4 + 32)}).on(device)), bytes_(bytes) {}
  operator Workspace() const { return {memory_.view().data, bytes_}; }  // NOLINT

 private:
  Array memory_;
  size_t bytes_;
};

}  // namespace sheaf::bench
