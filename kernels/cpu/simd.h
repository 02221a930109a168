// Kernels that are compiled for x86-64-v3 and for -v4 (sheaf_simd_library), and how one of the two
// is chosen.
//
// [Note: two builds of one kernel] The source opens namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE,
// which is v3 or v4. The dispatcher declares both with the type of the public function and calls
// one. Both give the same bits: sums are over sixteen lanes in either build (lanes.h).
#pragma once

namespace sheaf::kernels {

/// Whether this machine can run the x86-64-v4 build: AVX-512 F, BW, CD, DQ, VL.
inline bool has_v4() {
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}

}  // namespace sheaf::kernels

/// Declares v3:: and v4:: versions of a function of namespace cpu. Used in namespace sheaf::kernels.
#define SHEAF_SIMD_DECLARE(function) \
  namespace v3 {                     \
  decltype(cpu::function) function;  \
  }                                  \
  namespace v4 {                     \
  decltype(cpu::function) function;  \
  }

/// Declares both and defines the public function, which returns void, as the one that this machine can run.
#define SHEAF_SIMD_CHOOSE(function, parameters, arguments)                         \
  SHEAF_SIMD_DECLARE(function)                                                     \
  namespace cpu {                                                                  \
  void function parameters { (has_v4() ? v4::function : v3::function) arguments; } \
  }
