#include "sheaf/kernels/cuda/slow_notice.h"

#include <string>

#include <gtest/gtest.h>

namespace sheaf::kernels::cuda {
namespace {

std::string said(const std::string& text) {
  testing::internal::CaptureStderr();
  slow_notice(text);
  return testing::internal::GetCapturedStderr();
}

TEST(SlowNotice, SaysEachTextOnce) {
  const bool speaks = !SHEAF_CUDA_EMULATED;
  EXPECT_EQ(said("one %s"), speaks ? "sheaf: one %s\n" : "");
  EXPECT_EQ(said("one %s"), "");
  for (int i = 1; i < kMostNotices; ++i)
    EXPECT_EQ(said(std::to_string(i)), speaks ? "sheaf: " + std::to_string(i) + "\n" : "");
  EXPECT_EQ(said("one more"), "");
}

}  // namespace
}  // namespace sheaf::kernels::cuda
