// The ops of units. They are ordinary ops with given types, so a tape that contains them replays like any other.
#pragma once

#include "sheaf/autograd/op.h"

namespace sheaf {

struct UnitOps {
  struct Attrs {
    Attrs(int axis, size_t buffers) : axis(axis), buffers(static_cast<int32_t>(buffers)) {}
    int32_t axis;
    int32_t buffers;  ///< number of inputs that are buffers; the outputs begin with as many
  };
  static const OpDef& resting();             ///< → a shard at rest, in wire memory, zeroed
  static const OpDef& resting_alone();       ///< the same in memory that is not gathered from
  static const OpDef& resting_on_host();     ///< the same in host memory, for a GPU
  static const OpDef& quantize_shard();      ///< a shard → its int8 blocks, in wire memory: the input of a gather
  static const OpDef& unpack();              ///< gathered buffers, some in blocks → buffers for compute, then the parameters inside
  static const OpDef& cast_shard();          ///< a shard → the same in another dtype, in wire memory: the input of a gather
  static const OpDef& onload_shard();        ///< a shard in host memory → the same in the GPU's, in any dtype, by the copy lane
  static const OpDef& onload_values();       ///< the same for a single rank, which sends it to no other
  static const OpDef& all_gather();          ///< shards → landing buffers, then the parameters inside them
  static const OpDef& gather_copies();       ///< the same without parameters, into wire memory: the buffers are gathered again from there
  static const OpDef& open();                ///< all_gather() without communication: the shards are the buffers
  static const OpDef& discard();             ///< buffers →
  static const OpDef& grad_slots();          ///< → buffers in wire memory, then the slots inside them; padding is zeroed
  static const OpDef& lasting_grad_slots();  ///< the same for gradients that stay there, in host_wire memory
  static const OpDef& slot_memory();         ///< → memory of a slot's type, outside of any buffer
  static const OpDef& zero();                ///< → the slot of a parameter that was not used
  static const OpDef& cast_gradient();       ///< slot buffers, or a slice → the same in another dtype, in wire memory: the input of a reduction
  static const OpDef& cast_reduced();        ///< and back: the sum → the gradient
  static const OpDef& quantize_gradient();   ///< addends along an axis, or a sum (−1) → stochastically rounded int8 blocks, in wire memory
  static const OpDef& exchange();            ///< blocks of all ranks' addends, a row from each → all rows, of this rank's part
  static const OpDef& sum_of_blocks();       ///< rows of blocks → their sum
  static const OpDef& gather_blocks();       ///< blocks of sums → those of all ranks, by the reduce lane
  static const OpDef& reduce_scatter();      ///< slot buffers → shards of the gradient
  static const OpDef& all_reduce();          ///< slot buffers, in place
  static const OpDef& offload_gradient();    ///< a gradient[, the one in host memory that it is added to] → host memory, by the copy lane
  static const OpDef& complete();            ///< results, and what a collective was lent → nothing: returns it

  struct Rows {
    int64_t count;
  };
  /// The result of one of the casts of a buffer.
  static Tensor cast_by(const OpDef& cast, const Tensor& buffer, DType dtype);
  /// The result of an op with one input and one output.
  static Tensor made_by(const OpDef& op, const void* attrs, const Tensor& from, const Type& type);
  /// Discards buffers, on the tape of `recording`, which knows them, if it is alive.
  static void discard_buffers(int axis, std::span<const Tensor> buffers, uint64_t recording);
  /// Waits for results of a collective along `axis`: the `lent` memory is returned.
  static void complete_results(int axis, std::span<const Tensor> results, std::span<const Tensor> lent);
};

}  // namespace sheaf
