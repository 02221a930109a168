// The kernels that attention's tests run.
#pragma once

#include <algorithm>
#include <vector>

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/cpu/attention_bf16.h"
#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/tests/kernels/array.h"

namespace sheaf::kernels::cpu {

struct Kernels {
  const char* name;
  size_t (*workspace)(const View& q, const View& k, const View& v);
  decltype(attention)* forward;
  size_t (*backward_workspace)(const View& q, const View& k, const View& v);
  decltype(attention_backward)* backward;
};
// On a CPU the workspace depends on queries, keys and values alone.
inline const Kernels kChosen{
    "chosen",
    [](const View& q, const View& k, const View& v) { return attention_workspace(q, k, v, true, {}, {}); },
    attention,
    [](const View& q, const View& k, const View& v) {
      return attention_backward_workspace(q, k, v, {}, {}, {}, true, q, k, v);
    },
    attention_backward};

/// The kernel that this machine would choose, and the other kernels for bf16 that it supports.
inline std::vector<Kernels> kernels(DType d, int64_t width, int64_t value_width) {
  std::vector<Kernels> out{kChosen};
  if (d != kBF16 || width % 32 != 0 || value_width % 32 != 0 || !dot::available()) return out;
  out.push_back({"dot", dot::attention_workspace, dot::attention, dot::attention_backward_workspace,
                 dot::attention_backward});
  if (amx::available())
    out.push_back({"amx", amx::attention_workspace, amx::attention,
                   amx::attention_backward_workspace, amx::attention_backward});
  return out;
}

/// Calls f(workspace), which must write nothing past its end.
template <class F>
void with_workspace(size_t bytes, F&& f) {
  constexpr size_t kBehind = 4096;
  const testing::Scratch scratch(bytes + kBehind);
  void* memory = Workspace(scratch).data;
  f(Workspace{memory, bytes});
  const unsigned char* behind = static_cast<unsigned char*>(memory) + bytes;
  EXPECT_TRUE(std::all_of(behind, behind + kBehind, [](unsigned char c) { return c == 0xff; })) << "workspace of " << bytes;
}

}  // namespace sheaf::kernels::cpu
