// How a node runs, whether recorded, replayed, or prepared to run many times: its device, and where its outputs are placed.
#pragma once

#include <algorithm>
#include <cmath>

#include "sheaf/autograd/op.h"
#include "sheaf/autograd/recording_scopes.h"
#include "sheaf/autograd/tape.h"
#include "sheaf/core/rank_context.h"

namespace sheaf::detail {

/// Coerces `inputs` where that moves no data, and fills in the layouts of `outputs` by the op's placement rule (place.cc).
void place(const OpDef& op, const void* attrs, std::span<const Tensor>& inputs, std::vector<Tensor>& coerced, std::span<OutputSpec> outputs);

/// The device of the inputs (constants on the CPU may be combined with meta inputs); without inputs, that of the memory given for
/// output 0, else the default. ConfigError for inputs on several devices.
Device device_of(const OpDef& op, std::span<const Tensor> inputs, std::span<const OutputSpec> specs);

/// Whether this rank takes part in a node: not if it is computed, or communicated, only among other ranks of an axis.
inline bool runs_here(const OpDef& op, std::span<const Tensor> inputs, std::span<const OutputSpec> specs) {
  const auto here = [](const Type& type) { return !type.layout.is_elsewhere(); };
  if (specs.empty()) return true;
  for (const OutputSpec& spec : specs)
    if (here(spec.type)) return true;
  if (op.lane == Lane::compute) return false;
  for (const Tensor& t : inputs)
    if (here(t.type())) return true;
  return false;
}

/// The inputs of an op as its placement rule wants them, and the types of its outputs.
struct Inferred {
  Inferred(const OpDef& op, const void* attrs, std::span<const Tensor> given);
  Inferred(const Inferred&) = delete;
  std::span<const Tensor> inputs;
  std::span<OutputSpec> specs;

 private:
  Infer infer_;
  std::vector<Tensor> coerced_;
};

/// [Note: in pieces] A value that is received from a lane in pieces (Storage::filled_in_pieces) need not be complete before a product
/// of its rows starts: an op with row_inputs() is executed for the rows of each piece on its arrival. So a rank multiplies rows that
/// it has while others are in flight (Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition,
/// https://doi.org/10.1145/3567955.3567959). Other readers wait for all pieces. If the result of such an op is passed to a
/// reduce_scatter, or to an all_to_all from rows to columns, the two nodes are executed as one: rows are sent while the next are
/// computed (output_in_pieces.cc). The tape has the same nodes, and a CPU's products the same bits. Those of a GPU depend on how many
/// rows are multiplied at once, which is the same for a row on all ranks, so they agree. Gathered keys and values arrive a few heads
/// at a time (redistribute_in_heads()): attention, forward and backward, is executed for the heads that have arrived (OpDef::heads).
/// Rows of experts arrive from one rank after another, and are sent back likewise: whole sequences, or whole experts, of them are
/// multiplied (OpDef::row_parts).

/// OpDef::row_inputs(); 0 where it is null.
uint64_t row_inputs_of(const OpDef& op, const void* attrs, std::span<const Tensor> inputs);
uint64_t row_inputs_of(const Tape& tape, const Node& n);
/// The same for an op executed here, whose outputs have `rows` rows on this rank; also 0 if they or its inputs are not dense.
uint64_t row_inputs_of(const OpDef& op, const void* attrs, const Execute& run, int64_t rows);
/// Execute::take_rows() of these inputs, in the form OpDef::row_parts requires, for an op that can_take() them.
void take_rows(const OpDef& op, Execute& run, uint64_t inputs, const RowBlock& block, void* to = nullptr);
bool can_take(const OpDef& op, const Execute& run, const RowBlock& block);
/// Whether indices of dimension `dim` of input 0 are whole parts in the sense of OpDef::row_parts: the same on all ranks of an axis
/// that cuts it.
bool are_parts(const OpDef& op, Shape local_shape, int dim);
/// The minimum rows of a piece so that each of the `products` products that share it gets RecordingOptions::piece_rows; 0: nothing is
/// communicated in pieces.
inline int64_t least_rows(int64_t piece_rows, double products) {
  constexpr double kNever = 1e15;
  return piece_rows ? std::max<int64_t>(1, static_cast<int64_t>(std::min(kNever, std::ceil(static_cast<double>(piece_rows) * products)))) : 0;
}
/// The same for the products that an op consists of; also 0 if it has no row_inputs().
int64_t least_rows_of(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, int64_t piece_rows);
int64_t least_rows_of(const Tape& tape, const Node& n, int64_t piece_rows);
/// Bytes of its workspace, whether or not it waits for all pieces first.
int64_t workspace_of(const OpDef& op, const void* attrs, Execute& run);
void execute(const OpDef& op, const void* attrs, Execute& run);

/// Runs `f`; adds the module and the rank to its errors. Those of collectives name them more precisely.
template <class F>
auto located(F&& f) {
  try {
    return f();
  } catch (const CommError&) {
    throw;
  } catch (Error& e) {
    e.locate(PathScope::current(), RankContext::current().rank, RankContext::current().world);
    throw;
  }
}

/// Followed by the redistribution of its output to `sent`, in `parts` parts.
int64_t workspace_and_redistribute(const OpDef& op, const void* attrs, Execute& run, const Tensor& sent, int64_t parts);
void execute_and_redistribute(const OpDef& op, const void* attrs, Execute& run, const Tensor& sent, int64_t parts);
/// Places the outputs of both nodes, executes and records them, with these flags. If the output of the first is to be reduced, its
/// rows are in the order in which they are sent.
std::pair<Tensor, Tensor> apply_typed_and_redistribute(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, const OutputSpec& product,
                          const void* output_layout, const Type& sent, uint8_t flags);

/// For an op with alias(): the input that output o views. With several inputs, outputs view the last ones; with one, all outputs are
/// parts of it.
inline size_t viewed_input(size_t inputs, size_t outputs, size_t o) { return inputs == 1 ? 0 : inputs - outputs + o; }

/// The outputs of a node, placed: a view of an input (then `views` is set, and there is nothing to execute), the memory that its spec
/// names, or what fresh(type, device, MemoryKind) returns.
template <class Fresh>
Tensors place_outputs(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, std::span<const OutputSpec> specs,
                      Device device, bool& views, Fresh&& fresh) {
  Tensors outputs;
  outputs.reserve(specs.size());
  views = false;
  if (op.alias && std::ranges::any_of(specs, [](const OutputSpec& s) { return !s.type.layout.is_elsewhere(); })) {
    for (size_t o = 0; o < specs.size(); ++o) {
      const OutputSpec& spec = specs[o];
      const Tensor& input = inputs[viewed_input(inputs.size(), specs.size(), o)];
      char* const base = reinterpret_cast<char*>(size_t{1} << 20);  // only differences of addresses are used
      View in = input.view_unsynced(), out;
      in.data = base;
      out.dtype = spec.type.dtype;
      out.shape = spec.type.local_shape();
      if (!op.alias(attrs, static_cast<int>(o), in, out)) break;
      outputs.push_back(Tensor::over(input.storage(), input.byte_offset() + (static_cast<char*>(out.data) - base), spec.type,
                                     out.shape, out.strides));
    }
    views = outputs.size() == specs.size();
    if (views) return outputs;
    outputs.clear();
  }
  for (const OutputSpec& spec : specs) {
    if (spec.within >= 0) outputs.push_back(Tensor::view_into(outputs[spec.within], spec.type, spec.byte_offset));
    else if (!spec.into) outputs.push_back(fresh(spec.type, device, op.memory));
    else if (spec.into.type() == spec.type) outputs.push_back(spec.into.alias());
    else outputs.push_back(Tensor::view_into(spec.into, spec.type, 0));
  }
  return outputs;
}

}  // namespace sheaf::detail
