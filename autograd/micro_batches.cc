// [Note: micro-batches] Several of them may be recorded before a backward differentiates one. The tape is then divided into segments,
// which begin where the next micro-batch begins, where an earlier one is resumed (a new part of it), or with a derivative that can be
// differentiated (not a part). Each segment knows which groups of leaves it used and how far back; a backward takes the segments that
// lead to its loss, and leaves the others for separate backwards. If a loss's parts are differentiated one by one, the parts before
// the last, and the gradients that have reached them, are kept as its rest.
#include <algorithm>

#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {

void Recording::next_micro_batch(int64_t first_sample, const Tensor& random_state) {
  begin_part(first_sample, random_state);
  calls_[first_sample].clear();
  micro_batch_ = micro_batch_of_[first_sample] = ++micro_batches_;
}

void Recording::resume_micro_batch(int64_t first_sample, const Tensor& random_state) {
  begin_part(first_sample, random_state);
  micro_batch_ = micro_batch_of_[first_sample];
}

void Recording::begin_part(int64_t first_sample, const Tensor& random_state) {
  if (random_state && !(random_state.dtype() == kI64 && random_state.shape() == Shape{3}))
    fail<ShapeError>("[recording] a random state is i64[3], not ", random_state.type());
  if (std::ranges::any_of(groups_, [](const GroupState& g) { return g.first_use >= 0; })) end_segment();
  ++epoch_;
  derivative_order_ = 0, is_derivative_ = false;
  options_.first_sample = first_sample;
  random_state_ = random_state;
}

// A derivative that can be differentiated uses existing values once more: see [Note: directions].
void Recording::begin_derivative() {
  if (std::ranges::any_of(groups_, [](const GroupState& g) { return g.first_use >= 0; })) end_segment(), is_derivative_ = true;
  ++derivative_order_;
}

// Prefetched groups that were not used belong to the next segment.
void Recording::end_segment() {
  const auto ahead = std::ranges::stable_partition(groups_, [](const GroupState& g) { return g.first_use >= 0; }).begin();
  std::vector<GroupState> next(std::make_move_iterator(ahead), std::make_move_iterator(groups_.end()));
  groups_.erase(ahead, groups_.end());
  pending_segments_.push_back(
      {segment_begin_, tape_.num_nodes(), std::exchange(groups_, std::move(next)), micro_batch_, std::exchange(is_derivative_, false)});
  segment_begin_ = tape_.num_nodes();
}

// The parts that a backward of this loss differentiates: everything that leads to it, or the last part only.
recorded::Parts Recording::take_parts(ValueId loss, bool last_part_only) {
  const auto begun = remaining_.find(loss);
  if (begun == remaining_.end() && pending_segments_.empty()) return {.segments = {{segment_begin_, tape_.num_nodes(), {}}}};
  if (tape_.num_nodes() > segment_begin_) end_segment();
  std::vector<Segment> segments = begun == remaining_.end() ? take_segments_of(loss) : std::move(begun->second.segments);
  size_t first = last_part_only ? segments.size() : 0;
  const auto is_no_part = [](const Segment& s) { return s.groups.empty() || s.is_derivative; };
  while (first > 0 && std::all_of(segments.begin() + static_cast<std::ptrdiff_t>(first), segments.end(), is_no_part))
    --first;  // neither computations on losses alone nor derivatives are parts
  const auto split = segments.begin() + static_cast<std::ptrdiff_t>(first);
  recorded::Parts parts{.segments = {std::make_move_iterator(split), std::make_move_iterator(segments.end())}};
  segments.erase(split, segments.end());
  if (!segments.empty() || begun != remaining_.end()) {
    parts.remaining = &remaining_[loss];
    parts.remaining->segments = std::move(segments);
  }
  std::vector<GroupState> ahead = std::exchange(groups_, {});
  for (size_t s = parts.segments.size(); s-- > 0;) take_groups(parts.segments[s].groups);
  for (GroupState& g : ahead)
    if (std::ranges::find(groups_, g.group, &GroupState::group) == groups_.end()) groups_.push_back(std::move(g));
  return parts;
}

// One state per group, with the earliest of its first uses; and one per order of derivatives that use it.
void Recording::take_groups(std::vector<GroupState>& groups) {
  for (GroupState& g : groups) {
    const auto own =
        std::ranges::find_if(groups_, [&](const GroupState& o) { return o.group == g.group && o.derivative_order == g.derivative_order; });
    if (own == groups_.end()) groups_.push_back(std::move(g));
    else own->first_use = std::min(own->first_use, g.first_use);
  }
}

// Takes whole segments whose parameters lead to the loss. Of other segments, such as one where an earlier micro-batch's loss was
// scaled or added to another, only the nodes that lead to it.
std::vector<recorded::Segment> Recording::take_segments_of(ValueId loss) {
  std::vector<bool> leads(static_cast<size_t>(tape_.num_values()));
  leads[static_cast<size_t>(loss)] = true;
  std::vector<Segment> taken;  // in reverse order
  std::vector<NodeId> ends;    // of segments that are taken whole
  for (size_t s = pending_segments_.size(); s-- > 0;) {
    const size_t before = taken.size();
    bool used = false;  // whether parameters of this segment are
    for (NodeId id = pending_segments_[s].end - 1; id >= pending_segments_[s].begin; --id) {
      const Node& n = tape_.node(id);
      bool leading = false;
      for (int o = 0; o < n.num_outputs; ++o)
        leading = leading || (leads[static_cast<size_t>(tape_.output(n, o))] && !state(tape_.output(n, o)).group);
      if (!leading || ends_gradients(n)) continue;
      if (taken.size() > before && taken.back().begin == id + 1) taken.back().begin = id;
      else taken.push_back({id, id + 1, {}});
      for (const ValueId v : tape_.inputs(n)) {
        used = used || state(v).recipe;
        if (state(v).needs_grad) leads[static_cast<size_t>(v)] = true;
      }
    }
    if (!used) continue;
    ends.push_back(pending_segments_[s].end);
    taken.resize(before);
    taken.push_back(std::move(pending_segments_[s]));
    pending_segments_.erase(pending_segments_.begin() + static_cast<std::ptrdiff_t>(s));
  }
  // A part of a micro-batch takes the earlier ones with it, even if all of their parameters are frozen.
  for (size_t s = pending_segments_.size(); s-- > 0;) {
    const auto is_part_of = [&](const Segment& t) {
      return !t.groups.empty() && t.micro_batch == pending_segments_[s].micro_batch && t.begin > pending_segments_[s].begin;
    };
    if (pending_segments_[s].micro_batch == 0 || std::ranges::none_of(taken, is_part_of)) continue;
    std::erase_if(taken, [&](const Segment& t) { return t.begin >= pending_segments_[s].begin && t.end <= pending_segments_[s].end; });
    ends.push_back(pending_segments_[s].end);
    taken.push_back(std::move(pending_segments_[s]));
    pending_segments_.erase(pending_segments_.begin() + static_cast<std::ptrdiff_t>(s));
  }
  // An unused derivative of a segment is taken with it, to be freed.
  for (size_t e = 0; e < ends.size(); ++e)
    for (size_t s = pending_segments_.size(); s-- > 0;) {
      if (!pending_segments_[s].is_derivative || pending_segments_[s].begin != ends[e]) continue;
      ends.push_back(pending_segments_[s].end);
      pending_segments_[s].groups.clear();
      taken.push_back(std::move(pending_segments_[s]));
      pending_segments_.erase(pending_segments_.begin() + static_cast<std::ptrdiff_t>(s));
    }
  std::ranges::sort(taken, {}, &Segment::begin);
  return taken;
}

bool Recording::is_last_micro_batch_of(const LeafGroup* group) const { return pass_ && pass_->is_last_micro_batch_of(group); }

bool ReversePass::is_last_micro_batch_of(const LeafGroup* group) const {
  const auto is_it = [group](const GroupState& g) { return g.group.get() == group; };
  if (std::ranges::any_of(recording_.groups_, [&](const GroupState& g) { return is_it(g) && g.first_use >= 0 && !g.finished; }))
    return false;  // of another order
  if (in_backward_weights_)  // as it was in its backward
    return std::ranges::any_of(recording_.groups_, [&](const GroupState& g) { return is_it(g) && g.last; });
  const auto uses_it = [&](const recorded::Segment& s) { return std::ranges::any_of(s.groups, is_it); };
  return last_micro_batch_ && !(parts_.remaining && std::ranges::any_of(parts_.remaining->segments, uses_it));
}

// Gradients that have reached the remaining parts wait for their backward.
void Recording::keep_gradients_for(recorded::RemainingParts& remaining) {
  remaining.begun = true;
  remaining.gradients.clear();
  for (const Segment& s : remaining.segments)
    for (NodeId id = s.begin; id < s.end; ++id)
      for (int o = 0; o < tape_.node(id).num_outputs; ++o)
        if (const ValueId v = tape_.output(tape_.node(id), o); gradients_[v]) remaining.gradients.emplace_back(v, std::move(gradients_[v]));
}

}  // namespace sheaf
