// Execute: one call of an op's kernel.
#pragma once

#include <cstdint>
#include <span>

#include "sheaf/core/tensor.h"

namespace sheaf {

/// For an op that processes parts of its operands independently, such as heads of attention or sequences of experts' rows: the
/// dimension of each operand that indexes parts; -1: none. An operand with more indices, such as query heads, has a multiple of them,
/// in the same order.
struct PartDims {
  int8_t inputs[9], outputs[4];
};

/// Rows of a value as [rows, last dimension]: `rows` of them from `begin` on, repeated every `stride` rows, `groups` times.
struct RowBlock {
  int64_t begin, rows, groups = 1, stride = 0;
  int64_t all() const { return rows * groups; }
};

/// The arguments of a kernel call: local views, workspace, stream. On meta data pointers are null: there only workspace(),
/// collectives and discards are called.
class Execute {
 public:
  Execute(std::span<const Tensor> inputs, std::span<const Tensor> outputs) : inputs_(inputs), outputs_(outputs) {}
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  int num_outputs() const { return static_cast<int>(outputs_.size()); }
  View input(int i) const {
    if (unasked_) [[unlikely]] fail_unasked();
    if (row_inputs_ >> i & 1) return rows_of(inputs_[i]);
    if (parts_) return parts_of(inputs_[i], parts_->inputs[i]);
    return types_alone_ ? inputs_[i].view_unsynced() : inputs_[i].view();
  }
  View output(int i) const {
    if (unasked_) [[unlikely]] fail_unasked();
    if (parts_) return parts_of(outputs_[i], parts_->outputs[i]);
    return row_inputs_ ? output_rows(i) : outputs_[i].view_unsynced();
  }
  const Type& input_type(int i) const { return inputs_[i].type(); }    ///< global
  const Type& output_type(int i) const { return outputs_[i].type(); }  ///< global
  const Tensor& output_tensor(int i) const { return outputs_[i]; }
  const Tensor& input_tensor(int i) const { return inputs_[i]; }
  std::span<const Tensor> input_tensors() const { return inputs_; }
  /// The rank's stream, on a GPU. An execute() asks for it before it takes a view there: one that does not must be for CPU memory
  /// only, and fails with a ConfigError on a GPU.
  Stream stream() const {
    unasked_ = false;
    return device().is_cuda() ? gpu_stream() : Stream{device()};
  }
  void will_execute(const char* op) { op_ = op, unasked_ = device().is_cuda(); }
  const char* op_name() const { return op_; }
  Device device() const { return (outputs_.empty() ? inputs_[0] : outputs_[0]).device(); }
  Workspace workspace;
  /// Output 0 adds to what its memory holds instead of storing (asked for by the caller, for ops with kCanAdd).
  bool add = false;
  /// A program runs the op: memory is assigned to values ahead, in the order of the tape.
  bool in_program = false;
  /// Makes the op's further work wait for `event`: on a GPU on its stream, otherwise on the host.
  void join(const Event& event) const;
  /// Another lane fills the outputs; their readers wait for `event`.
  void completes_with(const Event& event);
  /// Until take_all(), these inputs and all outputs, which are dense, are seen as the given rows of them. With `to`, output 0 is written
  /// there. Rows still arriving (IncomingRows) are not waited for.
  void take_rows(uint64_t inputs, const RowBlock& block, void* to = nullptr) { row_inputs_ = inputs, block_ = block, to_ = to; }
  /// The same of parts [block.begin, block.begin + block.rows) of `all`, of every operand that has them.
  void take_parts(const PartDims* dims, const RowBlock& block, int64_t all) { parts_ = dims, block_ = block, all_parts_ = all; }
  /// Inputs and outputs are the whole tensors again.
  void take_all() { row_inputs_ = 0, parts_ = nullptr, to_ = nullptr; }
  /// With `alone`, nothing is waited for: workspace() looks at shapes only.
  void take_types_alone(bool alone) { types_alone_ = alone; }

 private:
  View rows_of(const Tensor& t) const;
  View output_rows(int i) const;
  View parts_of(const Tensor& t, int dim) const;
  Stream gpu_stream() const;
  [[noreturn]] void fail_unasked() const;
  std::span<const Tensor> inputs_, outputs_;
  const char* op_ = "";
  mutable bool unasked_ = false;  // on a GPU, until the op has asked for the stream
  bool types_alone_ = false;
  uint64_t row_inputs_ = 0;  // nonzero: a subset of rows is selected
  const PartDims* parts_ = nullptr;
  int64_t all_parts_ = 0;
  RowBlock block_ = {0, 0};
  void* to_ = nullptr;
};

}  // namespace sheaf
