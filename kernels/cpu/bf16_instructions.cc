#include "sheaf/kernels/cpu/bf16_instructions.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sheaf/kernels/cpu/simd.h"

// This file is built for every machine; code with these instructions is called only after its checks.
namespace sheaf::kernels::cpu {

bool dot::available() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_v4() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
  }();
  return has;
}

namespace {

bool machine_has_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2): ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool amx::available() {
  static const bool has = dot::available() && (machine_has_tiles() || (emulated && emulated()));
  return has;
}

}  // namespace sheaf::kernels::cpu
