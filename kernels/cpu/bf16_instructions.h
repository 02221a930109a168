// The instructions by which newer x86 machines multiply bf16.
#pragma once

namespace sheaf::kernels::cpu {

namespace amx {
/// Whether this machine multiplies bf16 in matrix tiles (AMX), and this process may use them.
bool available();
/// Defined only in tests, which can emulate a machine's tiles (tests/kernels/emulated_tiles.h).
[[gnu::weak]] bool emulated();
}  // namespace amx

namespace dot {
/// Whether this machine multiplies vectors of pairs of bf16 (AVX512_BF16): 1.5 to 2 times as fast as f32.
bool available();
}  // namespace dot

}  // namespace sheaf::kernels::cpu
