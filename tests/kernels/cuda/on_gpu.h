// Runs a CUDA kernel on test data: arrays are copied to the GPU with their strides, gaps and
// poison, and back. With --config=emulated the GPU is kernels/cuda/emulation.h; without a GPU the
// tests skip and say so.
#pragma once

#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/tests/kernels/array.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {

/// The stream of the tests.
inline const Stream& stream_of_tests() {
  static const Stream stream = kernels::cuda::make_stream(0);
  return stream;
}

/// Frees device memory. Tests drop operands and workspaces right after the calls that use them, and CUDA does not promise that cudaFree()
/// waits for kernels.
inline void free_after_use(void* memory) {
  try {
    kernels::cuda::synchronize(stream_of_tests());
  } catch (const std::exception& e) {  // destructors call this
    ADD_FAILURE() << e.what();
  }
  kernels::cuda::free(memory);
}

/// Device memory with the contents of an array, gaps included. Aligned for whole packs; with
/// SHEAF_SHIFT_OPERANDS in the environment, shifted by one element.
class OnGpu {
 public:
  OnGpu() = default;  ///< an absent operand: View{}
  explicit OnGpu(const Array& array) : host_(array) {
    const size_t bytes = array.bytes();
    const size_t shift = std::getenv("SHEAF_SHIFT_OPERANDS") ? size_of(array.view().dtype) : 0;
    memory_.reset(kernels::cuda::allocate(shift + bytes), free_after_use);
    data_ = static_cast<char*>(memory_.get()) + shift;
    kernels::cuda::copy_bytes(stream(), data_, array.view().data, bytes,
                              kernels::cuda::Copy::to_device);
    view_ = array.view();
    view_.data = data_;
  }
  const View& view() const { return view_; }
  operator const View&() const { return view_; }

  /// Copies the contents back into a copy of the array. Waits for the stream.
  Array back() const {
    Array out = host_.clone();
    kernels::cuda::synchronize(stream());
    kernels::cuda::copy_bytes(stream(), out.view().data, data_, out.bytes(),
                              kernels::cuda::Copy::to_host);
    kernels::cuda::synchronize(stream());
    return out;
  }

  static const Stream& stream() { return stream_of_tests(); }

 private:
  Array host_;
  std::shared_ptr<void> memory_;
  char* data_ = nullptr;
  View view_;
};

/// GPU workspace of exactly the requested bytes, filled with NaN patterns.
class GpuScratch {
 public:
  explicit GpuScratch(size_t bytes)
      : bytes_(bytes), memory_(kernels::cuda::allocate(bytes), free_after_use) {
    kernels::cuda::fill_bytes(OnGpu::stream(), memory_.get(), 0xff, bytes);
  }
  operator Workspace() const { return {memory_.get(), bytes_}; }

 private:
  size_t bytes_;
  std::shared_ptr<void> memory_;
};

/// Dense values of f32 or bf16, every fifth made subnormal: via its bits, since a thread that
/// flushes such numbers cannot compute one.
inline Array with_subnormals(Array x) {
  for (int64_t i = 0; i < x.view().numel(); i += 5)
    if (x.view().dtype == kF32) x.view().as<uint32_t>()[i] &= 0x807fffffu;
    else x.view().as<uint16_t>()[i] &= 0x807fu;
  return x;
}

}  // namespace sheaf::testing
