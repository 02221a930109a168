// A pass: consecutive elementwise ops become one node, whose kernel reads operands and writes results once. Intermediate values are
// never in memory, and every bit is unchanged (kernels/fused.h).
//
//   %5 = exp %1   %6 = mul %5, %2   %7 = add %6, %3      ->      %8 = fused %1, %2, %3   (exp, mul, add)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sheaf/autograd/program.h"

namespace sheaf {

/// Fuses ops of one phase, shape and layout where one reads another's result, or both read the same value: at the position of the
/// last of them, if nothing needs any of it before. Values in `keep`, and all that other nodes read, are kept; the values of fused
/// nodes get new ids. `alive[i]` are the bytes alive at node i of the tape (Program::alive_bytes()): with all operands and results of
/// a fused node alive at once they exceed `limit` nowhere where they did not before. Empty: memory does not matter. Returns how many
/// nodes were fused. Assumes that leaves do not share memory.
int fuse_elementwise(Tape& tape, std::span<const ValueId> keep, std::vector<int64_t> alive = {}, int64_t limit = 0);

/// The program with its elementwise ops fused, as far as that does not take more memory.
Program fuse_elementwise(Program plain);

}  // namespace sheaf
