// AMX: the matrix tiles of newer x86 machines.
#pragma once

namespace sheaf::kernels::cpu::amx {

/// Whether this machine multiplies bf16 in tiles, and lets this process do so.
bool available();

}  // namespace sheaf::kernels::cpu::amx
