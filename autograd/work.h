// What a node of a tape computes and what it moves through memory, on one rank, from types alone: what a step's time is
// estimated from before it runs (clock.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "sheaf/autograd/tape.h"

namespace sheaf {

/// Operations are floating-point ones, two for each multiply-add.
struct Work {
  double products = 0;            ///< of matrix products
  double smallest = 0;            ///< rows, columns or what is added up: of which a product has fewest
  double attention_forward = 0;   ///< of attention: two products of a query with each key that it sees
  double attention_backward = 0;  ///< five of them: the scores are computed again
  double keys = 0, head = 0;      ///< of attention: keys of a sequence or of a window, elements of a head
  bool softcap = false;           ///< of that, whose scores are capped
  double bytes = 0;               ///< read and written while computing: by default operands once, results once
  double passes = 0;              ///< bytes read and written before or after that, one pass behind the other
  DType dtype = kF32;             ///< what the products are of
  bool fp8 = false;               ///< of that, rounded
};

/// A node's operands and results as they are on this rank, given to its op's `work(const Attrs&, WorkOf&)`, which says what
/// differs from the default in `work`.
class WorkOf {
 public:
  WorkOf(std::span<const Shape> inputs, std::span<const Shape> outputs, const Shape& whole_input)
      : inputs_(inputs), outputs_(outputs), whole_input_(whole_input) {}
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  int num_outputs() const { return static_cast<int>(outputs_.size()); }
  const Shape& input(int i) const { return inputs_[static_cast<size_t>(i)]; }
  const Shape& output(int i) const { return outputs_[static_cast<size_t>(i)]; }
  /// Input 0 on all ranks together.
  const Shape& whole_input() const { return whole_input_; }
  /// Products of matrices [rows, inner] and [inner, columns]: of so many rows of that many matrices together.
  void multiplies(int64_t rows, int64_t inner, int64_t columns, int64_t matrices = 1) {
    work.products += 2.0 * static_cast<double>(rows) * static_cast<double>(inner) * static_cast<double>(columns);
    work.smallest = static_cast<double>(std::min({rows / std::max<int64_t>(1, matrices), inner, columns}));
  }
  /// Of x[.., I], each row with so many columns.
  void multiplies(const Shape& x, int64_t columns) {
    multiplies(x.back() ? x.numel() / x.back() : 0, x.back(), columns);
  }
  Work work;

 private:
  std::span<const Shape> inputs_, outputs_;
  const Shape& whole_input_;
};

/// Of node `n` on this rank; for a mesh that it has not joined, or no longer, on the mesh's first rank. Nothing for what is
/// computed elsewhere, for views, and for what travels between ranks: of a redistribution its copies here.
Work work_of(const Tape& tape, const Node& n);
/// Of all ranks together, as if no axis cut anything: the same on every rank.
Work whole_work_of(const Tape& tape, const Node& n);

}  // namespace sheaf
