// An op and the redistribution of its result, executed as one. See [Note: in pieces] (execute.h).
#include <algorithm>

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/pieces.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/profile.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace detail {
namespace {

int64_t local_rows(const Tensor& t) {
  const Shape& shape = t.local_shape();
  return shape.back() ? shape.numel() / shape.back() : 0;
}

uint64_t row_inputs_of(const OpDef& op, const void* attrs, const Execute& run) {
  return detail::row_inputs_of(op, attrs, run, local_rows(run.output_tensor(0)));
}

// Memory for pieces in flight while the products of the next rows run, whose workspace precedes it.
int64_t bytes_in_flight(const Tensor& y, const Tensor& sent) {
  const int64_t bytes = RedistributionInPieces::workspace(y.type(), sent.type(), y.view_unsynced(), sent.view_unsynced());
  constexpr int64_t kAlign = 256;  // the alignment of GPU allocations: cuBLASLt requires it
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

int64_t workspace_and_redistribute(const OpDef& op, const void* attrs, Execute& run, const Tensor& sent, int64_t parts) {
  run.take_types_alone(true);
  const Tensor& y = run.output_tensor(0);
  const View whole = run.output(0);
  int64_t bytes = op.workspace ? op.workspace(attrs, run) : 0;
  const uint64_t inputs = row_inputs_of(op, attrs, run);
  if (inputs && op.workspace)
    for (const auto& piece : RedistributionInPieces::rows_to_go(y.type(), sent.type(), parts))
      for (const RowBlock& block : piece.blocks) {
        take_rows(op, run, inputs, block, whole.data);
        bytes = std::max(bytes, op.workspace(attrs, run));
      }
  run.take_all();
  run.take_types_alone(false);
  return std::max(bytes + bytes_in_flight(y, sent), Redistribution::workspace(y.type(), sent.type(), whole, sent.view_unsynced()));
}

void execute_and_redistribute(const OpDef& op, const void* attrs, Execute& run, const Tensor& sent, int64_t parts) {
  run.will_execute(op.name);
  run.stream();
  const View y = run.output(0), out = sent.view_unsynced();
  const RedistributionInPieces output_layout(run, run.output_type(0), sent.type());
  const bool meta = run.device().is_meta();
  const uint64_t inputs = row_inputs_of(op, attrs, run);
  for (int i = 0; i < run.num_inputs(); ++i) run.input_tensor(i).storage()->settle();
  if (!inputs || output_layout.takes_own_cores()) {
    if (!meta) op.execute(attrs, run);
    return output_layout.Redistribution::run(y, out, run.workspace.data);
  }
  const Workspace all = run.workspace;
  if (const auto before = static_cast<size_t>(bytes_in_flight(run.output_tensor(0), sent)); all.data)
    run.workspace = {static_cast<char*>(all.data) + before, all.bytes - before};
  output_layout.run(y, out, parts, all.data, [&](const RowBlock& block, void* to) {
    if (meta) return;
    take_rows(op, run, inputs, block, to);
    op.execute(attrs, run);
  });
  run.take_all();
  run.workspace = all;
}

std::pair<Tensor, Tensor> apply_typed_and_redistribute(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, const OutputSpec& product,
                                            const void* output_layout, const Type& sent_type, uint8_t flags) {
  const Device device = device_of(op, inputs, std::span(&product, 1));
  Recording& r = *Recording::current();
  const auto empty = [&](const OpDef& of, const Type& type) {
    r.flag_next(flags);
    const MemoryUse use(r.next_held_for(of), of.name, PathScope::current());
    return Tensor::empty(type, device, of.memory);
  };
  Tensor y = empty(op, product.type), sent = empty(output_in_pieces_op(), sent_type);
  const int64_t parts = static_cast<const OutputInPieces*>(output_layout)->parts;
  Execute run(inputs, std::span(&y, 1));
  std::shared_ptr<Storage> workspace;
  if (const int64_t bytes = workspace_and_redistribute(op, attrs, run, sent, parts); bytes > 0) {
    const MemoryUse use(HeldFor::temporaries, op.name, PathScope::current());
    workspace = Storage::allocate(device, bytes);
    run.workspace = {workspace->data(), static_cast<size_t>(bytes)};
  }
  {
    const ProfileSpan span(Profile::kCompute, op.name, PathScope::current());
    execute_and_redistribute(op, attrs, run, sent, parts);
  }
  workspace = nullptr;
  r.record(op, attrs, inputs, std::span(&y, 1), std::span(&product, 1));
  r.flag_next(flags);
  const OutputSpec spec{.type = sent_type};
  r.record(output_in_pieces_op(), output_layout, std::span(&y, 1), std::span(&sent, 1), std::span(&spec, 1));
  return {y, sent};
}

}  // namespace detail

OutputLayout along(int axis, const Placement& to) {
  return [axis, to](const Type& y) { return axis >= 0 && y.layout.mesh() ? y.layout.with(axis, to) : y.layout; };
}

Tensor redistribute_output(const Tensor& y, const OutputLayout& output_layout) {
  return output_layout ? redistribute(y, output_layout(y.type())) : y;
}

Tensor apply_and_redistribute(const OpDef& op, const void* attrs, std::span<const Tensor> given, const OutputLayout& output_layout) {
  const detail::Inferred inferred(op, attrs, given);
  Recording* const r = Recording::current();
  const Type& type = inferred.specs[0].type;
  const Type to{type.dtype, type.shape, output_layout ? output_layout(type) : type.layout};
  const uint64_t rows = inferred.specs.size() == 1 && !op.saved_outputs ? detail::row_inputs_of(op, attrs, inferred.inputs) : 0;
  // A reduce_scatter sends any rows.
  const bool fits = !(to == type) && (!op.row_parts || Redistribution::move(type.layout, to.layout).exchanges());
  if (fits && rows && r && r->options().overlap) {
    const auto [parts, packs, dim] =
        RedistributionInPieces::going(type, to.layout, detail::least_rows_of(op, attrs, inferred.inputs, r->options().piece_rows));
    if (parts > 0 && detail::are_parts(op, inferred.inputs[0].local_shape(), dim)) {  // the same on all ranks: it must not depend on the
                                                                                      // strides of a rank's inputs
      std::vector<Tensor> inputs(inferred.inputs.begin(), inferred.inputs.end());
      for (size_t i = 0; i < inputs.size(); ++i)
        if (rows >> i & 1) inputs[i] = contiguous(inputs[i]);
      const OutputInPieces in_pieces{to.layout, static_cast<int32_t>(parts), packs};
      return detail::apply_typed_and_redistribute(op, attrs, inputs, inferred.specs[0], &in_pieces, to, 0).second;
    }
  }
  Tensors outputs = execute_node(op, attrs, inferred.inputs, inferred.specs);
  if (r) r->record(op, attrs, inferred.inputs, outputs, inferred.specs);
  return redistribute(outputs[0], to.layout);
}

}  // namespace sheaf
