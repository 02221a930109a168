// What newer x86 machines multiply bf16 with.
#pragma once

namespace sheaf::kernels::cpu {

namespace amx {
/// Whether this machine multiplies bf16 in matrix tiles (AMX), and lets this process do so.
bool available();
/// Defined in tests alone, which can emulate the tiles of a machine (tests/kernels/emulated_tiles.h).
[[gnu::weak]] bool emulated();
}  // namespace amx

namespace dot {
/// Whether this machine multiplies vectors of pairs of bf16 (AVX512_BF16): half as fast again or twice as fast as f32.
bool available();
}  // namespace dot

}  // namespace sheaf::kernels::cpu
