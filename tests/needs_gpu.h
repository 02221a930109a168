// Tests of GPU code. With --config=emulated the GPU is kernels/cuda/emulation.h.
#pragma once

#include <gtest/gtest.h>

#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/runtime.h"

/// Skips the test that calls it where there is no GPU.
#define SHEAF_NEEDS_GPU()                          \
  if constexpr (!kernels::kHasCuda)                \
    GTEST_SKIP() << "not run: built without CUDA"; \
  else if (kernels::cuda::device_count() == 0)     \
  GTEST_SKIP() << "not run: no GPU here (" << kernels::cuda::why_no_device() << ")"
