// An op and the reduce_scatter of what it gives, executed as one. See [Note: in pieces] (execute.h).
#include <algorithm>

#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/ops/redistribution.h"
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

}  // namespace

int64_t workspace_onward(const OpDef& op, const void* attrs, Execute& run, const Tensor& sent, int64_t parts) {
  run.take_types_alone(true);
  const View y = run.output(0);
  int64_t bytes = std::max(op.workspace ? op.workspace(attrs, run) : 0,
                           Redistribution::workspace(run.output_type(0).layout, sent.layout(), y, sent.view_unsynced()));
  const uint64_t inputs = row_inputs_of(op, attrs, run);
  for (const Redistribution::Sent& piece : Redistribution::sent_pieces(run.output_type(0), sent.type(), inputs && op.workspace ? parts : 0))
    for (const RowBlock& block : piece.blocks) {
      run.take_rows(inputs, block, y.data);
      bytes = std::max(bytes, op.workspace(attrs, run));
    }
  run.take_rows(0, {0, 0});
  run.take_types_alone(false);
  return bytes;
}

void execute_onward(const OpDef& op, const void* attrs, Execute& run, const Tensor& sent, int64_t parts) {
  run.will_execute(op.name);
  run.stream();
  const View y = run.output(0), out = sent.view_unsynced();
  const Redistribution scatter(run, run.output_type(0), sent.type());
  const bool meta = run.device().is_meta();
  const uint64_t inputs = row_inputs_of(op, attrs, run);
  for (int i = 0; i < run.num_inputs(); ++i) run.input_tensor(i).storage()->settle();
  if (!inputs || scatter.takes_own_cores()) {
    if (!meta) op.execute(attrs, run);
    return scatter.run(y, out, run.workspace.data);
  }
  scatter.run_in_pieces(y, out, parts, [&](const RowBlock& block, void* to) {
    if (meta) return;
    run.take_rows(inputs, block, to);
    op.execute(attrs, run);
  });
  run.take_rows(0, {0, 0});
}

std::pair<Tensor, Tensor> apply_typed_onward(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, const OutputSpec& product,
                                            const void* scatter, const Type& sent_type, uint8_t flags) {
  const Device device = device_of(op, inputs, std::span(&product, 1));
  Recording& r = *Recording::current();
  const auto empty = [&](const OpDef& of, const Type& type) {
    r.flag_next(flags);
    const MemoryUse use(r.next_held_for(of), of.name, PathScope::current());
    return Tensor::empty(type, device, of.memory);
  };
  Tensor y = empty(op, product.type), sent = empty(scatter_in_pieces_op(), sent_type);
  const int64_t parts = static_cast<const ScatterInPieces*>(scatter)->parts;
  Execute run(inputs, std::span(&y, 1));
  std::shared_ptr<Storage> workspace;
  if (const int64_t bytes = workspace_onward(op, attrs, run, sent, parts); bytes > 0) {
    const MemoryUse use(HeldFor::temporaries, op.name, PathScope::current());
    workspace = Storage::allocate(device, bytes);
    run.workspace = {workspace->data(), static_cast<size_t>(bytes)};
  }
  {
    const ProfileSpan span(Profile::kCompute, op.name, PathScope::current());
    execute_onward(op, attrs, run, sent, parts);
  }
  workspace = nullptr;
  r.record(op, attrs, inputs, std::span(&y, 1), std::span(&product, 1));
  r.flag_next(flags);
  const OutputSpec spec{sent_type, {}, -1, 0};
  r.record(scatter_in_pieces_op(), scatter, std::span(&y, 1), std::span(&sent, 1), std::span(&spec, 1));
  return {y, sent};
}

}  // namespace detail

Tensor apply_onward(const OpDef& op, const void* attrs, std::span<const Tensor> given, const Onward& onward) {
  const detail::Inferred inferred(op, attrs, given);
  const Type& type = inferred.specs[0].type;
  const bool goes = onward.axis >= 0 && type.layout.mesh();
  const Type to{type.dtype, type.shape, goes ? type.layout.with(onward.axis, onward.to) : type.layout};
  Recording* const r = Recording::current();
  const uint64_t rows = inferred.specs.size() == 1 && !op.saved_outputs ? detail::row_inputs_of(op, attrs, inferred.inputs) : 0;
  if (goes && rows && r && r->options().overlap) {
    const ScatterInPieces scatter{to.layout, static_cast<int32_t>(Redistribution::sent_parts(type, to.layout, r->options().piece_rows))};
    if (scatter.parts > 0) {  // on all ranks alike: it may not depend on how a rank's inputs lie
      std::vector<Tensor> inputs(inferred.inputs.begin(), inferred.inputs.end());
      for (size_t i = 0; i < inputs.size(); ++i)
        if (rows >> i & 1) inputs[i] = contiguous(inputs[i]);
      return detail::apply_typed_onward(op, attrs, inputs, inferred.specs[0], &scatter, to, 0).second;
    }
  }
  Tensors outputs = execute_node(op, attrs, inferred.inputs, inferred.specs);
  if (r) r->record(op, attrs, inferred.inputs, outputs, inferred.specs);
  return redistribute(outputs[0], to.layout);
}

}  // namespace sheaf
