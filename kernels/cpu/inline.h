#pragma once

/// For functions used inside loops: g++ does not inline larger functions by itself, and a loop with a call in it is
/// not vectorised.
#define SHEAF_INLINE __attribute__((always_inline)) inline
