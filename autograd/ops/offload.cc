// offload and onload: the inputs from which a region is recomputed go to host memory and come back, concurrently with the GPU's
// compute. Both are the identity, of any placement.
//
// [Note: offload] Values that entered a region that offloads (RecomputeOptions::offload), and have a gradient, are copied to the host
// when the next region begins: those of the last region stay, as the reverse pass begins with it. Nothing waits: the copied values
// are lent to the copy lane, and are returned at a node of the tape (offloaded), where one more region or the reverse pass begins.
// When the reverse pass recomputes a region, it first brings back what entered the region before. So a GPU holds the recompute inputs
// of two blocks at a time, however many there are.
#include <algorithm>

#include "sheaf/autograd/copy_lane.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/reverse_pass.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

template <MemoryKind kind>
struct Move {
  static constexpr const char* kName = kind == MemoryKind::host ? "offload" : "onload";
  static constexpr Lane kLane = Lane::copy;
  static constexpr MemoryKind kMemory = kind;
  static constexpr HeldFor kHeldFor = HeldFor::activations;
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { p.rule({p.in(0)}, {p.in(0)}); }
  static void execute(const Attrs&, Execute& c) { copy_on_copy_stream(c); }
  static void vjp(const Attrs&, Vjp& c) { c.set(0, c.grad()); }
};
using Offload = Move<MemoryKind::host>;
using Onload = Move<MemoryKind::normal>;

/// Inputs: a value on the host, and the original that was lent.
struct Offloaded {
  static constexpr const char* kName = "offloaded";
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    c.stream();
    c.input_tensor(0).storage()->settle();
  }
};

}  // namespace

void Recording::offload_last_region() {
  if (regions_.empty() || !regions_.back().offloads || regions_.back().offloaded) return;
  Region& region = regions_.back();
  region.offloaded = true;
  const PathScope path(tape_.path(tape_.node(region.begin)));
  complete_offloads();
  std::unordered_map<ValueId, int32_t> saves;  // by nodes of the region
  for (NodeId id = region.begin; id < region.end; ++id)
    for (int i = 0; i < tape_.node(id).num_inputs; ++i)
      if (i < 64 && node_saves_[id].first & bit(i)) ++saves[tape_.inputs(tape_.node(id))[i]];
  for (const auto& [v, kept] : region.entering) {
    const Tensor& t = kept.value;
    const ValueState& s = states_[v];
    if (kept.is_changed()) continue;  // a copy on the host would not show it
    if (s.needs_grad && s.saves == saves[v] && kernels::is_for_gpu(t.device()) && t.is_contiguous() && t.local_bytes() > 0)
      region.on_host.push_back(v);
  }
  std::ranges::sort(region.on_host);
  for (const ValueId v : region.on_host) {
    recorded::Kept& kept = region.entering.at(v);
    const Tensor there = apply<Offload>({}, kept.value);
    pending_offloads_.emplace_back(there, std::exchange(kept, there).value);
    state(v).saved = Tensor();
    state(v).on_host = true;
  }
}

void Recording::complete_offloads() {
  for (const auto& [there, here] : std::exchange(pending_offloads_, {})) {
    const Tensor inputs[] = {there, here};
    apply_typed(op_def<Offloaded>(), nullptr, inputs, {});
  }
}

void ReversePass::onload(Region& region) {
  if (region.on_host.empty()) return;
  const PathScope path(tape_.path(tape_.node(region.begin)));
  for (const ValueId v : std::exchange(region.on_host, {})) {
    recorded::Kept& kept = region.entering.at(v);
    region.from_host.push_back(kept.value);
    const Tensor value = apply<Onload>({}, kept.value);
    kept = value;
    recording_.state(recording_.value_of(value)).original = v;
    ValueState& s = recording_.state(v);
    if (s.saves > 0) s.save(value);
    s.on_host = false;
  }
}

void ReversePass::onload_last_before(NodeId end) {
  const auto next =
      std::find_if(recording_.regions_.rbegin(), recording_.regions_.rend(), [&](const Region& r) { return r.offloads && r.begin < end; });
  if (next != recording_.regions_.rend() && (!to_slots() || recorded::any_contains(parts_.segments, next->begin))) onload(*next);
}

}  // namespace sheaf
