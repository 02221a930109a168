// Stands in for cuDNN if kernels run on a CPU: the CPU's attention, on the emulated GPU's memory.
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"
#include "sheaf/kernels/cuda/emulation.h"

namespace sheaf::kernels::cuda::cudnn {
namespace {

constexpr size_t kWorkspace = 4096;
std::atomic<int64_t> calls{0};

struct alignas(128) Line {
  char bytes[128];
};

/// There are no plans here, but they must be requested when cuDNN would make them.
void plan(const Attention& a) {
  static std::mutex mutex;
  static std::set<std::vector<int64_t>> known;
  std::lock_guard lock(mutex);
  const std::vector<int64_t> key = plan_key(parts_of(a).front());
  if (known.contains(key)) return;
  check_can_be_planned(a);
  known.insert(key);
}

void run(const Attention& a, Workspace workspace) {
  std::memset(workspace.data, 0xff, kWorkspace);  // it is ours to use
  const bool backward = a.dout.rank() != 0;
  const AttentionMask mask(a.causal, a.begins, a.window);
  const size_t bytes = backward
                           ? cpu::attention_backward_workspace(a.q, a.k, a.v, a.out, a.lse, a.dout,
                                                               mask, a.dq, a.dk, a.dv)
                           : cpu::attention_workspace(a.q, a.k, a.v, mask, a.out, a.lse);
  std::vector<Line> lines(bytes / sizeof(Line) + 1);
  const Workspace scratch{lines.data(), lines.size() * sizeof(Line)};
  if (backward)
    cpu::attention_backward(a.q, a.k, a.v, a.out, a.lse, a.dout, mask, a.scale, a.dq, a.dk,
                            a.dv, scratch);
  else
    cpu::attention(a.q, a.k, a.v, mask, a.scale, a.out, a.lse, scratch);
}

}  // namespace

std::string refusal(const Attention& a) {
  const std::string why = layout_refusal(a);
  if (why.empty()) plan(a);
  return why;
}
std::string refusal_on(std::string_view, const Attention&, int64_t*) { return "emulated GPU"; }

size_t attention_workspace(const Attention& a) {
  plan(a);
  return kWorkspace;
}

void attention(const Stream& stream, const Attention& a, Workspace workspace) {
  const std::string why = layout_refusal(a);
  if (!why.empty()) fail_for(a, why);
  plan(a);
  check<ShapeError>(workspace.bytes >= kWorkspace,
                    "[attention] workspace too small: ", workspace.bytes, " bytes");
  check<ShapeError>(reinterpret_cast<uintptr_t>(workspace.data) % 256 == 0,  // as on a GPU
                    "[attention] the workspace is not at a multiple of 256 bytes");
  ++calls;
  for (const Attention& part : parts_of(a))
    emulation::enqueue(stream, [part, workspace] { run(part, workspace); });
}

int64_t attention_calls() { return calls; }

}  // namespace sheaf::kernels::cuda::cudnn
