// A pass: elementwise ops that stand in a row become one node, whose kernel reads operands and writes results once. What lies
// between them is never in memory, and every bit stays as it was (kernels/fused.h).
//
//   %5 = exp %1   %6 = mul %5, %2   %7 = add %6, %3      ->      %8 = fused %1, %2, %3   (exp, mul, add)
#pragma once

#include <cstdint>
#include <span>

#include "sheaf/autograd/program.h"

namespace sheaf {

/// What a fused node may take: it has all of its operands and results at once, which its nodes had one after the other.
enum class FusedMemory : bool {
  same,   ///< no more than they did at most
  more,   ///< more than they did, there; but where other nodes run between them, no more is kept than is saved
};

/// Joins ops of one phase, shape and layout where one reads what another gives, or both read the same: at the place of the last of
/// them, if nothing needs any of it before. Values of `keep`, and all that other nodes read, stay; the values of fused nodes have
/// new ids. Returns how many nodes it took together.
int fuse_elementwise(Tape& tape, std::span<const ValueId> keep, FusedMemory memory = FusedMemory::more);

/// The program with its elementwise ops fused, as far as it takes no more memory.
Program fuse_elementwise(Program plain);

}  // namespace sheaf
