// Tells the user that one of our own kernels does the work that NVIDIA's libraries should have done.
#pragma once

#include <cstdint>
#include <string_view>

namespace sheaf::kernels::cuda {

/// Scores of an attention, or multiply-adds of a matrix product, from which on the choice of kernel matters.
inline constexpr int64_t kWorthANotice = int64_t{1} << 24;

/// One line on stderr: "sheaf: " and `text`. Each text once per process; nothing after kMostNotices texts, nor if
/// the GPU is emulated: its time is meaningless.
void slow_notice(std::string_view text);
inline constexpr int kMostNotices = 16;

}  // namespace sheaf::kernels::cuda
