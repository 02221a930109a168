#pragma once

/// For what stands inside loops: g++ calls functions of some size, and a loop with a call in it is not vectorised.
#define SHEAF_INLINE __attribute__((always_inline)) inline
