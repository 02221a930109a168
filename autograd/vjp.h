// Vjp: what an op's derivative sees of one node, and the gradients that it sets.
#pragma once

#include <functional>
#include <utility>

#include "sheaf/core/tensor.h"

namespace sheaf {

class Recording;
class ReversePass;
class Tape;
struct PendingRedistribute;

/// Where an op stores an output: memory given by the caller, or (empty) fresh memory.
struct Into {
  Tensor to;         ///< undefined: allocate
  bool add = false;  ///< output 0 only: the op has kCanAdd and adds to the contents
};

/// The backward of one node: reads saved values and the outputs' gradients, sets the inputs' gradients. Everything it
/// calls is a public op and lands on the tape.
class Vjp {
 public:
  int num_inputs() const;
  const Type& input_type(int i) const;
  const Type& output_type(int i) const;
  bool needs(int i) const;          ///< input i's gradient is needed
  bool has_grad(int output) const;  ///< false if nothing depends on that output
  const Tensor& grad(int output = 0) const;
  Tensor input(int i) const;   ///< must be in kSavedInputs
  Tensor output(int i) const;  ///< must be in kSavedOutputs
  /// input(i) will be read after something else is computed: starts the gather that it needs, if any.
  void will_read(int i);
  /// Where the first contribution to input i's gradient is stored, if it has a fixed place (a parameter's slot in its unit's buffer):
  /// pass it to apply() to store there without a copy. With `may_add`, later contributions too.
  Into into(int i, bool may_add = false) const;
  bool has_place(int i) const;  ///< a fixed place, see into()
  /// The sum of the contributions to the gradient of input i so far, for an op that adds its own in the same pass: the caller takes
  /// it over, and passes the total to set(). Undefined if there is none, if it has a fixed place, or if sums will be differentiated
  /// again.
  Tensor take_sum(int i);
  /// f sets the gradients of the parameters among inputs `first` and later. It runs now; or, if the gradient of input 0, set before,
  /// is sent to other ranks, while that is in flight; or, if weight gradients are deferred (BackwardOptions::defer_weights), in
  /// backward_weights(). f must capture the values that it reads: calling input(), output(), grad() or has_grad() in a deferred f is a
  /// LifetimeError. For the vjp of an op with kDefersWeights.
  template <class F>
  void weight_gradients(int first, F&& f) {
    if (defers_weights_of(first)) return defer_to_backward_weights(first, std::forward<F>(f));
    if (input_gradient_is_communicated(first)) return defer_to_overlap(first, std::forward<F>(f));
    f(*this);
  }
  /// For the vjp of start_redistribute()'s node: the gradient that is sent back, once it has arrived.
  Tensor arrived_gradient();
  /// Of what arrived: the gradient of input 0 is on its way.
  void set_pending(const PendingRedistribute& gradient);
  /// How many rows a piece of its gradient has at least, if input 0 was made row by row, as by products; else 0.
  int64_t rows_of_pieces() const;
  /// Weight gradients that were deferred are to be computed now, while something is in flight: if there are several, all but the last
  /// `left`.
  bool has_overlapped() const;
  void compute_overlapped(size_t left);
  /// The gradient of input i; its type must be the dual of the input's, or that in f32 where the input is bf16 or f16: a sum
  /// accumulated in f32 is not rounded earlier than necessary. Ignored unless needs(i).
  void set(int i, Tensor gradient);

  Vjp(ReversePass& pass, int32_t node, uint64_t needs, bool deferred = false) : pass_(pass), node_(node), needs_(needs), deferred_(deferred) {}
  SmallVector<std::pair<int, Tensor>, 4> gradients;

 private:
  bool defers_weights_of(int first) const;
  void defer_to_backward_weights(int first, std::function<void(Vjp&)> f);
  bool input_gradient_is_communicated(int first) const;
  void defer_to_overlap(int first, std::function<void(Vjp&)> f);
  void expect_now(const char* what) const;
  void expect_index(const char* of, int i, int count) const;
  Recording& recording() const;
  const Tape& tape() const;
  int32_t value_of_input(int i) const;
  int32_t value_of_output(int o) const;
  ReversePass& pass_;
  int32_t node_;
  uint64_t needs_;
  bool deferred_;  // for the function passed to weight_gradients()
};

}  // namespace sheaf
