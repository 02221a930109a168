// A word to the user where one of our own kernels does what NVIDIA's libraries should have done.
#pragma once

#include <cstdint>
#include <string_view>

namespace sheaf::kernels::cuda {

/// Scores of an attention, or products of numbers in a matrix product, from which on it matters who
/// computes them.
inline constexpr int64_t kWorthANotice = int64_t{1} << 24;

/// One line on stderr: "sheaf: " and `text`. The first time in this process that this is the text;
/// after kMostNotices texts no more. Nothing where the GPU is emulated: its time tells nothing.
void slow_notice(std::string_view text);
inline constexpr int kMostNotices = 16;

}  // namespace sheaf::kernels::cuda
