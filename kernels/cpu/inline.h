#pragma once

/// For functions used inside loops: g++ does not inline larger functions on its own, and a loop that contains a call is not
/// vectorised.
#define SHEAF_INLINE __attribute__((always_inline)) inline
