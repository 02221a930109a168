// [Note: axes in order] Axes that shard the same elements do so in a fixed order (cuts_after), and a step changes one axis. Before an
// earlier axis changes its shard of a dimension, the shards of later axes are therefore gathered, and sliced again afterwards.
#include "sheaf/autograd/ops/route.h"

#include <utility>

#include "sheaf/core/small_vector.h"

namespace sheaf {
namespace {

// Whether both shard the same elements.
bool meet(const Placement& p, const Placement& q) {
  if (p.is_single() || q.is_single()) return false;
  return p.is_shard() && q.is_shard() && (p.map().is_flat() || q.map().is_flat() || p.map().dim() == q.map().dim());
}

// Whether mesh axis `other` shards what `axis` has, or will have, under placement `p`.
bool is_inside(const Layout& l, int other, int axis, const Placement& p) {
  if (other == axis || !meet(l[other], p) || !cuts_after(l[other], other, p, axis)) return false;
  const OwnershipMap& map = l[other].map();
  return l.mesh()->size(other) > 1 || p.map().is_flat() || !(map == OwnershipMap::even(map.dim()));
}

// All axes, in reverse order of how they would shard the same dimension.
SmallVector<int, kMaxAxes> last_cut_first(const Layout& l) {
  SmallVector<int, kMaxAxes> out;
  for (const bool inner : {true, false})
    for (int axis = l.num_axes() - 1; axis >= 0; --axis)
      if ((l[axis].is_shard() && l[axis].map().is_inner()) == inner) out.emplace_back(axis);
  return out;
}

// Whether the relative order of two axes changes, or one needs a dimension that the other has yet to give up: where shards become
// inner ones, or no longer are. Then everything is gathered before it is sharded anew.
bool reorders(const Layout& from, const Layout& to) {
  const auto gives_up = [&](int a, int b) {  // b gives up what a is to shard after it; but a's turn comes before
    return !(from[a] == to[a]) && !(from[b] == to[b]) && meet(from[b], to[a]) && cuts_after(to[a], a, from[b], b) &&
           cuts_after(to[b], b, to[a], a);
  };
  for (int a = 0; a < to.num_axes(); ++a)
    for (int b = 0; b < a; ++b) {
      if (from[a] == to[a] && from[b] == to[b]) continue;
      bool after = false, before = false;
      for (const Placement& p : {from[a], to[a]})
        for (const Placement& q : {from[b], to[b]})
          if (meet(p, q)) (cuts_after(p, a, q, b) ? after : before) = true;
      if ((after && before) || gives_up(a, b) || gives_up(b, a)) return true;
    }
  return false;
}

class Route {
 public:
  Route(const Layout& from, const Layout& to) : have_(from), to_(to) {}

  std::vector<Layout> steps() && {
    if (reorders(have_, to_))
      for (const int axis : last_cut_first(have_))
        if (have_[axis].is_shard()) change(axis, Placement::replicate());
    while (!(have_ == to_)) {  // at most twice: when an outer shard changes, inner ones must be redone
      const SmallVector<int, kMaxAxes> axes = last_cut_first(to_);
      for (size_t i = axes.size(); i-- > 0;) arrange(axes[i]);
    }
    return std::move(steps_);
  }

 private:
  // `axis`, and the shards inside of its own.
  void arrange(int axis) {
    if (have_[axis] == to_[axis]) return;
    for (const int later : last_cut_first(have_)) {
      if (!is_inside(have_, later, axis, have_[axis]) && !is_inside(have_, later, axis, to_[axis])) continue;
      bool at_once = !meet(to_[later], to_[axis]);  // else it is sharded again once the axes before it are done
      for (int other = 0; other < to_.num_axes(); ++other)
        at_once &= other == later || !(meet(to_[later], have_[other]) ||
                                       (cuts_after(to_[later], later, to_[other], other) && meet(to_[later], to_[other])));
      change(later, at_once ? to_[later] : Placement::replicate());
    }
    change(axis, to_[axis]);
  }

  void change(int axis, const Placement& p) {
    const Placement from = have_[axis];
    if (from.is_single() && p.is_single() && to_.mesh()->is_chain(axis)) {
      // From neighbour to neighbour: ranks in between forward, uninvolved ranks need not take part, as they would have to via R. In a
      // ring there is only one direction.
      const int end = p.map().owner(), ranks = to_.mesh()->size(axis);
      for (int at = from.map().owner(); at != end;) {
        at = to_.mesh()->is_ring(axis) ? (at + 1) % ranks : at < end ? at + 1 : at - 1;
        step(axis, Placement::on(at));
      }
      return;
    }
    if (from.is_shard() && p.is_shard() && !(from == p)) {
      // No rank's slice is one contiguous run: go via R.
      const bool flat_and_inner = from.map().is_flat() ? p.map().dim() > 0 : p.map().is_flat() && from.map().dim() > 0;
      if (flat_and_inner || from.is_single() || p.is_single()) step(axis, Placement::replicate());
    }
    step(axis, p);
  }

  void step(int axis, const Placement& p) { steps_.push_back(have_ = have_.with(axis, p)); }

  Layout have_;
  const Layout& to_;
  std::vector<Layout> steps_;
};

}  // namespace

std::vector<Layout> route(const Layout& from, const Layout& to) {
  if (from == to) return {};
  const Layout have = from.mesh() ? from : Layout(to.mesh());
  return have == to ? std::vector{to} : Route(have, to).steps();
}

bool can_slice(const Layout& l, int axis, const Placement& p) {
  for (int a = 0; a < l.num_axes(); ++a)
    if (a != axis && (is_inside(l, a, axis, p) || (meet(l[a], p) && (p.map().is_flat() || l[a].map().is_flat())))) return false;
  return true;
}

}  // namespace sheaf
