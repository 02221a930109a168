// A pass: elementwise ops that stand in a row become one node, whose kernel reads operands and writes results once. What lies
// between them is never in memory, and every bit stays as it was (kernels/fused.h).
//
//   %5 = exp %1   %6 = mul %5, %2   %7 = add %6, %3      ->      %8 = fused %1, %2, %3   (exp, mul, add)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sheaf/autograd/program.h"

namespace sheaf {

/// Joins ops of one phase, shape and layout where one reads what another gives, or both read the same: at the place of the last of
/// them, if nothing needs any of it before. Values of `keep`, and all that other nodes read, stay; the values of fused nodes have
/// new ids. `alive[i]` are the bytes alive at node i of the tape (Program::alive_bytes()): with all operands and results of a fused
/// node at once they are nowhere more than `limit`, but for where they were before. Empty: memory does not matter. Returns how many
/// nodes it took together. Leaves are taken to have memory of their own each.
int fuse_elementwise(Tape& tape, std::span<const ValueId> keep, std::vector<int64_t> alive = {}, int64_t limit = 0);

/// The program with its elementwise ops fused, as far as it takes no more memory.
Program fuse_elementwise(Program plain);

}  // namespace sheaf
