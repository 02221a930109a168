// [Note: directions] The derivative of a loss along a direction v in parameter space is Σ <g, v> over the parameters' gradients g, a
// number; its gradient is the product H v of the loss's Hessian with v. Since g is Partial where v is Replicate, <g, v> needs no
// communication: g is never reduced, and only one unit's gradients exist at a time. When the reverse pass has passed all uses of a
// unit, the unit's part of v is requested (gathered, if v is sharded as the parameters are), the addends are recorded, and both g and
// that part may be freed.
//
// The backward of the sum goes through the derivative's nodes, last first, and then through the forward's. Both use each unit: it is
// finished, and its gradients are reduced, twice, one after the other, as with two micro-batches. So only one unit's part of H v
// exists at a time, too. For that the uses of each order have separate states (GroupState::derivative_order), in derivatives along a
// direction and in gradients that are kept (GradientOptions::keep). A unit that was opened for v alone has no gradient.
//
// A derivative of a derivative keeps more: what the inner one's backward reads of v, for all units.
#include <algorithm>
#include <utility>

#include "sheaf/autograd/ops/second.h"
#include "sheaf/autograd/reverse_pass.h"

namespace sheaf {
namespace {

// Of a gradient and the constant v, in `dtype`.
Tensor inner_product(const Tensor& g, const Tensor& v, DType dtype) {
  const Tensor term = sum(mul(ops::in_statistics_dtype(g), ops::in_statistics_dtype(stop_gradient(v))));
  for (int a = 0; a < term.layout().num_axes(); ++a)
    if (!term.layout()[a].is_partial() && !term.layout()[a].is_invariant())
      fail<PlacementError>("[derivative_along] ", path_label(PathScope::current()), ": the gradient ", g.type(), " times the direction's ",
                           v.type(), " is ", term.type(), ", where each rank of mesh axis ", term.layout().mesh()->name(a),
                           " should have an addend: stages of a pipeline have none of others' parameters");
  return term.dtype() == dtype ? term : cast(term, dtype);
}

}  // namespace

Tensor Recording::derivative_along(const Tensor& y, const Direction& direction) {
  expect_can_differentiate("derivative_along");
  expect_parameters("derivative_along", "y", expect_value("derivative_along", "y", y));
  expect_scalar("derivative_along", y);
  ReversePass pass(*this, ReversePass::Leaves::direction, /*keep=*/true);
  pass.want_parameters();
  begin_derivative();
  ReversePass::DirectionalSum along{.direction = direction, .dtype = y.dtype()};
  pass.direction_ = &along;
  pass.run(y);
  gradients_.clear();
  if (!along.sum) fail<LifetimeError>("[derivative_along] the direction has no part in what leads to ", y.type());
  return along.sum;
}

// For gradients of groups whose uses the reverse pass, now before `node`, has passed: within their segment, as others may be of a
// higher order, or of another micro-batch.
void ReversePass::add_directional(NodeId node) {
  const auto is_behind = [&](const DirectionalSum::Part& part) {
    const auto is_groups = [&](const GroupState& g) { return g.group.get() == part.group; };
    NodeId first = tape_.num_nodes();  // first use in any segment: the group may be open since an earlier one
    for (const recorded::Segment& s : recording_.pending_segments_) {
      const auto own = std::ranges::find_if(s.groups, is_groups);
      if (own == s.groups.end()) continue;
      if (s.contains(part.from)) return own->first_use > node;
      first = std::min(first, own->first_use);
    }
    return first > node;
  };
  auto& gradients = direction_->gradients;
  while (true) {
    const auto first = std::ranges::find_if(gradients, is_behind);
    if (first == gradients.end()) return;
    LeafGroup* const group = first->group;
    const auto now = std::ranges::stable_partition(gradients, [&](const auto& p) { return p.group != group || !is_behind(p); });
    const PathScope path(group->group_name());
    for (DirectionalSum::Part& part : now) {
      direction_->asks = true;
      const Tensor v = direction_->direction(*group, part.leaf);
      direction_->asks = false;
      if (!v) continue;
      const Tensor term = inner_product(part.gradient, v, direction_->dtype);
      direction_->sum = direction_->sum ? add(direction_->sum, term) : term;
      part.gradient = Tensor();
    }
    gradients.erase(now.begin(), now.end());
    for (const GroupState& g : recording_.groups_)
      if (g.for_direction) g.group->release_after_gradient();
  }
}

}  // namespace sheaf
