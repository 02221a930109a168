// Place: the forward placement rules of an op, from which those of its backward follow (core/placement.h, [Note: dual]).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf {

struct OpDef;

/// The placement rule of an op on one mesh axis. `place()` offers the rules that hold for these inputs, best first. The first one
/// that the inputs match is taken; else the first that they match after free slices of Replicate operands; else the first that they
/// match when other Replicate operands are kept on one rank to be Partial.
///
///   static void place(const Attrs& a, Place& p) {  // an op along dimension a.dim of one operand: any other may be sharded
///     if (const OwnershipMap* map = p.sharded(); map && !map->is_flat() && map->dim() != a.dim)
///       p.rule({Placement::shard(*map)}, {Placement::shard(*map)});  // the map that there is, even or not
///     p.rule({Placement::replicate()}, {Placement::replicate()});
///   }                                              // in short: rules::beside(p, a.dim, /*linear=*/false);
///
/// Invariant is compatible only with Invariant, for every op, and needs no rule. Nor do values on one rank of the axis: if all
/// operands are there, or Replicate, that rank alone executes any op, as if there were no axis, and owns the results.
class Place {
 public:
  Place(std::span<const Tensor> inputs, int axis);
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  int axis() const { return axis_; }
  const Type& type(int i) const { return inputs_[i].type(); }
  const Shape& shape(int i) const { return type(i).shape; }
  /// The placement of input i on this axis (Replicate if it has no mesh).
  const Placement& in(int i) const { return have_[i]; }
  /// The ownership map of the first input that is sharded on this axis, or null.
  const OwnershipMap* sharded() const;
  /// The placement of the first input that is on one rank of this axis, or null.
  const Placement* single() const;
  enum class Invariants : uint8_t { none, mixed, all };
  /// Whether inputs are Invariant on this axis: some, or all but constants, which have no mesh.
  Invariants invariants() const;
  void rule(std::span<const Placement> inputs, std::span<const Placement> outputs);
  void rule(std::initializer_list<Placement> inputs, std::initializer_list<Placement> outputs) {
    rule(std::span(inputs.begin(), inputs.size()), std::span(outputs.begin(), outputs.size()));
  }

  struct Rule { std::vector<Placement> inputs, outputs; };
  std::vector<Rule> rules;
  /// Those of an op with these attributes and `outputs` outputs; without OpDef::place, replicate_only().
  void add_rules(const OpDef& op, const void* attrs, int outputs);

 private:
  std::span<const Tensor> inputs_;
  int axis_;
  std::vector<Placement> have_;
};

/// Ready-made rules.
namespace rules {
/// Elementwise, one output, NumPy broadcasting, not linear: all Replicate, or Shard(d) along any dimension d of the output, with
/// operands broadcast along d Replicate. Also for ops with one operand.
void pointwise_nonlinear(Place& p);
/// Elementwise and linear in all operands together (add, sub, neg, cast): as above, and Partial with Partial.
void pointwise_linear(Place& p);
/// Elementwise and linear in each operand alone (mul): as pointwise_nonlinear, and Partial with Replicate.
void pointwise_multilinear(Place& p);
/// Only Replicate operands, Replicate outputs (`outputs` of them).
void replicate_only(Place& p, int outputs = 1);
/// Along dimension `dim` of every operand and every output (`outputs` of them): any other dimension may be sharded. Linear in all
/// operands together: also Partial with Partial.
void beside(Place& p, int dim, bool linear, int outputs = 1);
}  // namespace rules

}  // namespace sheaf
