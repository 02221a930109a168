// The compute and memory traffic of a tape's node on one rank, from types alone: the basis for estimating a step's time before it
// runs (clock.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// Operations are floating-point operations, two for each multiply-add.
struct Work {
  double products = 0;            ///< operations of matrix products
  double smallest = 0;            ///< the smallest of a product's rows, columns and contracted size
  double attention_forward = 0;   ///< operations of attention: two products of a query with each key that it sees
  double attention_backward = 0;  ///< five of them: the scores are recomputed
  double keys = 0, head = 0;      ///< of attention: keys of a sequence or of a window, elements of a head
  bool softcap = false;           ///< scores are capped
  double bytes = 0;               ///< read and written while computing: by default operands once, results once
  double passes = 0;              ///< bytes read and written before or after that, in separate passes
  DType dtype = kF32;             ///< of the products' operands
  bool fp8 = false;               ///< products round their operands to FP8
};

/// A node's operands and results on this rank, passed to its op's `work(const Attrs&, WorkOf&)`, which overrides the defaults in
/// `work`.
class WorkOf {
 public:
  WorkOf(std::span<const Shape> inputs, std::span<const Shape> outputs, const Shape& whole_input)
      : inputs_(inputs), outputs_(outputs), whole_input_(whole_input) {}
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  int num_outputs() const { return static_cast<int>(outputs_.size()); }
  const Shape& input(int i) const { return inputs_[static_cast<size_t>(i)]; }
  const Shape& output(int i) const { return outputs_[static_cast<size_t>(i)]; }
  /// Shape of input 0 over all ranks.
  const Shape& whole_input() const { return whole_input_; }
  /// Products of matrices [rows, inner] and [inner, columns]; `rows` is the total over all `matrices`.
  void multiplies(int64_t rows, int64_t inner, int64_t columns, int64_t matrices = 1) {
    work.products += 2.0 * static_cast<double>(rows) * static_cast<double>(inner) * static_cast<double>(columns);
    work.smallest = static_cast<double>(std::min({rows / std::max<int64_t>(1, matrices), inner, columns}));
  }
  /// The product of x[.., I] and a matrix of this many columns.
  void multiplies(const Shape& x, int64_t columns) {
    multiplies(x.back() ? x.numel() / x.back() : 0, x.back(), columns);
  }
  Work work;

 private:
  std::span<const Shape> inputs_, outputs_;
  const Shape& whole_input_;
};

/// Of node `n` on the rank that recorded the tape. Nothing for nodes of other ranks, views, and communication: of a redistribution only its
/// local copies.
Work work_of(const Tape& tape, const Node& n);
/// Of all ranks together, as if nothing were sharded: the same on every rank.
Work whole_work_of(const Tape& tape, const Node& n);

}  // namespace sheaf
