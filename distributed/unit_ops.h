// The ops of units. They are ordinary ops with given types, so a tape that holds them replays like any other.
#pragma once

#include "sheaf/autograd/op.h"

namespace sheaf {

struct UnitOps {
  struct Attrs {
    int32_t axis;
    int32_t buffers;  ///< inputs that are buffers; the outputs begin with as many
  };
  static const OpDef& resting();         ///< → a shard at rest, in wire memory, filled with zeros
  static const OpDef& resting_alone();   ///< the same in memory from which nothing is gathered
  static const OpDef& resting_on_host();  ///< the same in the host's memory, for a GPU
  static const OpDef& quantize_shard();  ///< a shard → int8 blocks of it, in wire memory: what is gathered
  static const OpDef& unpack();          ///< gathered buffers, some in blocks → buffers for compute, then the parameters inside
  static const OpDef& cast_shard();      ///< a shard → the same in another dtype, in wire memory: what is gathered
  static const OpDef& onload_shard();    ///< a shard in the host's memory → the same in the GPU's, in whatever dtype, by the lane of copies
  static const OpDef& onload_values();   ///< the same for a single rank, which sends it to nobody
  static const OpDef& all_gather();      ///< shards → landing buffers, then the parameters inside them
  static const OpDef& gather_copies();   ///< the same without parameters, into wire memory: the buffers are gathered again from there
  static const OpDef& open();            ///< the same without communication: the shards are the buffers
  static const OpDef& discard();         ///< buffers →
  static const OpDef& grad_slots();      ///< → buffers in wire memory, then the slots inside them; padding is zeroed
  static const OpDef& lasting_grad_slots();  ///< the same for gradients that stay there, in host_wire memory
  static const OpDef& slot_memory();     ///< → memory of a slot's type, in no buffer
  static const OpDef& zero();            ///< → the slot of a parameter that was not used
  static const OpDef& cast_gradient();   ///< slot buffers, or a slice → the same in another dtype, in wire memory: what is reduced
  static const OpDef& cast_reduced();    ///< and back: the sum → the gradient
  static const OpDef& quantize_gradient();  ///< addends along an axis, or a sum (−1) → stochastically rounded int8 blocks, in wire memory
  static const OpDef& exchange();        ///< blocks of all ranks' addends, a row from each → all rows, of this rank's part
  static const OpDef& sum_of_blocks();   ///< rows of blocks → their sum
  static const OpDef& gather_blocks();   ///< blocks of sums → those of all ranks, by the lane of reductions
  static const OpDef& reduce_scatter();  ///< slot buffers → shards of the gradient
  static const OpDef& all_reduce();      ///< slot buffers, in place
  static const OpDef& offload_gradient();  ///< a gradient[, the one in the host's memory that it is added to] → there, by the lane of copies
  static const OpDef& complete();        ///< results, what a collective was lent → : it is back

  struct Rows {
    int64_t count;
  };
  /// The result of one of the casts of a buffer.
  static Tensor cast_by(const OpDef& cast, const Tensor& buffer, DType dtype);
  /// The result of an op with one input and one output.
  static Tensor made_by(const OpDef& op, const void* attrs, const Tensor& from, const Type& type);
  /// Discards buffers, on the tape of `recording`, which knows them, if it lives.
  static void discard_buffers(int axis, std::span<const Tensor> buffers, uint64_t recording);
  /// Waits for results of a collective along `axis`: what it was `lent` is back.
  static void complete_results(int axis, std::span<const Tensor> results, std::span<const Tensor> lent);
};

}  // namespace sheaf
