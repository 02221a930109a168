// [Note: recompute] A RecomputeScope leaves a region of nodes. Its values are counted as saved like others, but their tensors are not
// kept. When the scope ends, the outside values that the region's nodes would read are known and are kept. The first time that the
// reverse pass asks for a value of the region, the nodes that lead to saved values are applied again, in order, and from then on the
// values are available as if they had been kept: they are freed as the reverse pass goes back through the region. Gathered parameters
// and their views are not part of this: they are resolved as always, so the unit is gathered again by the mirror of its discard,
// once, for both the recomputation and the derivatives.
// A region that does not keep its results either keeps everything that entered it, as what will be asked for is not known at its end:
// as long as a result is referenced or saved. That is checked when the next region begins.
#include <algorithm>
#include <unordered_set>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/replay_node.h"
#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

RecomputeScope::RecomputeScope(const RecomputeOptions& options) {
  Recording* r = Recording::current();
  if (!r || r->in_region_ || r->in_backward()) return;
  if (options.selective) {
    if (r->selective_) return;
    recording_ = r->serial();
    selective_ = r->selective_ = true;
    return;
  }
  recording_ = r->serial();
  r->drop_unread_regions();
  r->offload_last_region();
  r->in_region_ = true;
  r->regions_.push_back({.begin = r->tape_.num_nodes(), .end = -1, .results = options.results, .offloads = options.offload && !options.results});
}

RecomputeScope::~RecomputeScope() {
  Recording* r = recording_ ? Recording::living(recording_) : nullptr;  // another recording may have begun inside, and still be alive
  if (!r) return;
  if (selective_) r->selective_ = false;
  else r->end_region();
}

// Computed by an op of the region: leaves, and values of a group's leaves, exist anyway.
bool Recording::made_in_region(ValueId v) const {
  const NodeId producer = tape_.value(v).producer;
  return producer >= regions_.back().begin && tape_.node(producer).op;
}

void Recording::note_entering(std::span<const ValueId> ids, std::span<const Tensor> inputs) {
  for (size_t i = 0; i < ids.size(); ++i)
    if (!states_[ids[i]].recipe && !made_in_region(ids[i])) regions_.back().entering.try_emplace(ids[i], inputs[i]);
}

void Recording::note_made(std::span<const Tensor> outputs) {
  if (!regions_.back().results) return;
  for (const Tensor& t : outputs) regions_.back().made.push_back(t.storage());
}

// For layers without a gradient nothing is saved.
void Recording::drop_unread_regions() {
  const auto unread = [&](const Region& region) {
    if (!region.results || !std::ranges::all_of(region.made, [](const auto& s) { return s.expired(); })) return false;
    for (NodeId id = region.begin; id < region.end; ++id)
      for (int o = 0; o < tape_.node(id).num_outputs; ++o)
        if (states_[tape_.output(tape_.node(id), o)].saves > 0) return false;
    return true;
  };
  while (!regions_.empty() && unread(regions_.back())) regions_.pop_back();
}

void Recording::end_region() {
  in_region_ = false;
  Region& region = regions_.back();
  region.end = tape_.num_nodes();
  if (region.results) return set_recomputed(region, true);  // their readers are recorded later
  std::unordered_set<ValueId> read;
  for (NodeId id : nodes_to_recompute(region))
    for (ValueId v : tape_.inputs(tape_.node(id))) read.insert(v);
  if (read.empty()) return regions_.pop_back();
  std::erase_if(region.entering, [&](const auto& entry) { return !read.contains(entry.first); });
}

void Recording::set_recomputed(const Region& region, bool recomputed) {
  for (NodeId id = region.begin; id < region.end; ++id)
    for (int o = 0; o < tape_.node(id).num_outputs; ++o)
      states_[tape_.output(tape_.node(id), o)].recomputed = recomputed && tape_.node(id).op;
}

// Frees the regions that the reverse pass has passed, of the nodes up to `end`; values saved after that are kept.
void ReversePass::release_regions(NodeId node, NodeId end) {
  auto after = recording_.regions_.end();
  while (after != recording_.regions_.begin() && std::prev(after)->begin >= end) --after;
  auto first = after;
  for (; first != recording_.regions_.begin() && std::prev(first)->begin >= node; --first)
    if (std::prev(first)->results) recording_.set_recomputed(*std::prev(first), false);
  recording_.regions_.erase(first, after);
}

// The nodes whose values are saved for the backward but not kept, and those whose values they read, in order.
std::vector<NodeId> Recording::nodes_to_recompute(const Region& region) const {
  std::unordered_set<ValueId> needed;
  std::vector<NodeId> nodes;
  for (NodeId id = region.end - 1; id >= region.begin; --id) {
    const Node& n = tape_.node(id);
    bool repeat = false;
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape_.output(n, o);
      const ValueState& s = states_[v];
      repeat = repeat || needed.contains(v) || (s.saves > 0 && !s.saved && !s.recipe);
    }
    if (!n.op || !repeat) continue;
    nodes.push_back(id);
    for (ValueId v : tape_.inputs(n))
      if (!states_[v].recipe && !states_[v].saved) needed.insert(v);
  }
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

void ReversePass::expect_unchanged(const Region& region) const {
  for (const auto& [v, kept] : region.entering)
    if (kept.is_changed())
      fail<LifetimeError>("[backward] value %", v, " ", tape_.type(v), " was changed in place between forward and backward, and what a ",
                          "RecomputeScope computed from it is computed again: change a copy");
}

void ReversePass::recompute(Region& region) {
  onload(region);
  if (region.offloads) onload_last_before(region.begin);
  const std::vector<NodeId> nodes = recording_.nodes_to_recompute(region);
  if (const PendingRedistribute pending = std::exchange(region.pending, {})) {
    const ValueId v = tape_.output(tape_.node(nodes[0]));
    const PathScope path(tape_.path(tape_.node(nodes[0])));
    recording_.flag_next(Node::kRecomputed);
    const Tensor again = wait(pending);
    recording_.state(recording_.value_of(again)).original = v;
    return recording_.state(v).save(again);
  }
  std::unordered_map<ValueId, NodeId> last_read;
  for (NodeId id : nodes)
    for (ValueId v : tape_.inputs(tape_.node(id))) last_read[v] = id;
  expect_unchanged(region);
  std::unordered_map<ValueId, Tensor> values;
  for (auto& [v, kept] : region.entering) values.emplace(v, std::move(kept.value));
  region.entering.clear();
  if (region.results) recording_.set_recomputed(region, false);  // its inputs are released: later saves of its values keep the tensors
  const auto keep = [&](NodeId id, std::span<const Tensor> outputs) {
    for (size_t o = 0; o < outputs.size(); ++o) {
      const ValueId v = tape_.output(tape_.node(id), static_cast<int>(o));
      recording_.state(recording_.value_of(outputs[o])).original = v;
      if (ValueState& s = recording_.state(v); s.saves > 0 && !s.saved) s.save(outputs[o]);
      if (last_read.contains(v)) values[v] = outputs[o];
    }
  };
  for (size_t i = 0; i < nodes.size(); ++i) {
    const NodeId id = nodes[i];
    const Node n = tape_.node(id);  // copies: the tape grows
    const PathScope path(tape_.path(n));
    const PerRankScope per_rank(n.flags & Node::kPerRank);
    const std::vector<ValueId> ids(tape_.inputs(n).begin(), tape_.inputs(n).end());
    std::vector<Tensor> inputs;
    for (ValueId v : ids) {
      const auto here = values.find(v);
      inputs.push_back(here != values.end() ? here->second : resolve(v));
    }
    if (i + 1 < nodes.size() && nodes[i + 1] == id + 1 && output_pieces(tape_, id)) {
      const Node scatter = tape_.node(id + 1);
      const auto [made, sent] = replay_and_redistribute(tape_, n, scatter, inputs, Node::kRecomputed);
      keep(id, std::span(&made, 1)), keep(id + 1, std::span(&sent, 1));
      if (last_read.at(tape_.output(n)) == id + 1) values.erase(tape_.output(n));
      ++i;
    } else {
      recording_.flag_next(Node::kRecomputed);
      keep(id, replay_node(tape_, n, inputs));
    }
    for (ValueId v : ids)
      if (last_read.at(v) == id) values.erase(v);
  }
  values.clear();
  region.from_host.clear();  // after the readers that waited for the copies
}

}  // namespace sheaf
