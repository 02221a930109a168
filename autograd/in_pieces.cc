// See [Note: in pieces] (execute.h).
#include <algorithm>

#include "sheaf/autograd/execute.h"

namespace sheaf::detail {
namespace {

// Its rows are those of the pieces, which are of all that lies there.
bool has_rows_of(const Tensor& t, int64_t rows) {
  const Shape& shape = t.local_shape();
  return shape.rank() >= 2 && shape.numel() == rows * shape.back() && t.is_contiguous();
}
bool is_all_of_its_memory(const Tensor& t) { return t.byte_offset() == 0 && t.storage()->bytes() == t.local_bytes(); }

int64_t last_row(std::span<const RowsToCome> pieces) {
  int64_t rows = 0;
  for (const RowsToCome& piece : pieces) rows = std::max(rows, piece.end);
  return rows;
}

}  // namespace

uint64_t row_inputs_of(const OpDef& op, const void* attrs, std::span<const Tensor> inputs) {
  if (!op.row_inputs) return 0;
  SmallVector<const Type*, 6> types;
  for (const Tensor& t : inputs) types.push_back(&t.type());
  return op.row_inputs(attrs, std::span(types.begin(), types.size()));
}

uint64_t row_inputs_of(const Tape& tape, const Node& n) {
  if (!n.op || !n.op->row_inputs) return 0;
  SmallVector<const Type*, 6> types;
  for (const ValueId v : tape.inputs(n)) types.push_back(&tape.type(v));
  return n.op->row_inputs(tape.attrs(n), std::span(types.begin(), types.size()));
}

uint64_t row_inputs_of(const OpDef& op, const void* attrs, const Execute& run, int64_t rows) {
  const uint64_t inputs = row_inputs_of(op, attrs, run.input_tensors());
  for (int i = 0; i < run.num_inputs(); ++i)
    if ((inputs >> i & 1) && !has_rows_of(run.input_tensor(i), rows)) return 0;
  for (int o = 0; o < run.num_outputs(); ++o)
    if (!has_rows_of(run.output_tensor(o), rows)) return 0;
  return inputs;
}

std::span<const RowsToCome> pieces_of(const OpDef& op, const void* attrs, const Execute& run) {
  if (!op.row_inputs || run.num_inputs() == 0) return {};
  const Tensor& x = run.input_tensor(0);
  const std::span<const RowsToCome> pieces = x.storage()->pieces();
  if (pieces.empty() || !is_all_of_its_memory(x) || !row_inputs_of(op, attrs, run, last_row(pieces))) return {};
  for (int i = 1; i < run.num_inputs(); ++i)  // then all of it is read at once
    if (run.input_tensor(i).storage() == x.storage()) return {};
  return pieces;
}

int64_t workspace_of(const OpDef& op, const void* attrs, Execute& run) {
  run.take_types_alone(true);
  int64_t bytes = op.workspace(attrs, run);
  const std::span<const RowsToCome> pieces = pieces_of(op, attrs, run);
  const uint64_t inputs = pieces.empty() ? 0 : row_inputs_of(op, attrs, run.input_tensors());
  int64_t last = -1;
  for (const RowsToCome& piece : pieces) {
    if (piece.end - piece.begin == last) continue;
    last = piece.end - piece.begin;
    run.take_rows(inputs, {piece.begin, piece.end - piece.begin});
    bytes = std::max(bytes, op.workspace(attrs, run));
  }
  run.take_rows(0, {0, 0});
  run.take_types_alone(false);
  return bytes;
}

void execute(const OpDef& op, const void* attrs, Execute& run) {
  const std::span<const RowsToCome> pieces = pieces_of(op, attrs, run);
  // On the host there may be no more to wait for. On a GPU it must not matter who comes first: see [Note: in pieces].
  const bool all_here = !pieces.empty() && !run.device().is_cuda() && pieces.back().event.ready();
  if (pieces.empty() || all_here) return op.execute(attrs, run);
  const uint64_t inputs = row_inputs_of(op, attrs, run.input_tensors());
  for (int i = 1; i < run.num_inputs(); ++i) run.input_tensor(i).storage()->settle();
  Storage& storage = *run.input_tensor(0).storage();
  for (size_t i = 0; i < pieces.size(); ++i) {
    storage.settle_piece(i);
    run.take_rows(inputs, {pieces[i].begin, pieces[i].end - pieces[i].begin});
    op.execute(attrs, run);
  }
  run.take_rows(0, {0, 0});
  storage.settle();
}

}  // namespace sheaf::detail
