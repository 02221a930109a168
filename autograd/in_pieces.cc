// See [Note: in pieces] (execute.h).
#include <algorithm>
#include <utility>

#include "sheaf/autograd/execute.h"

namespace sheaf::detail {
namespace {

// Whether t is dense and has exactly the rows that the pieces cover.
bool has_rows_of(const Tensor& t, int64_t rows) {
  const Shape& shape = t.local_shape();
  return shape.rank() >= 2 && shape.numel() == rows * shape.back() && t.is_contiguous();
}
bool is_all_of_its_memory(const Tensor& t) { return t.byte_offset() == 0 && t.storage()->bytes() == t.local_bytes(); }

RowBlock block_of(const IncomingRows& piece) { return {piece.begin, piece.end - piece.begin}; }

int64_t last_row(std::span<const IncomingRows> pieces) {
  int64_t rows = 0;
  for (const IncomingRows& piece : pieces) rows = std::max(rows, piece.end);
  return rows;
}

struct Types {
  SmallVector<const Type*, 6> all;

  explicit Types(std::span<const Tensor> inputs) {
    for (const Tensor& t : inputs) all.push_back(&t.type());
  }
  Types(const Tape& tape, const Node& n) {
    for (const ValueId v : tape.inputs(n)) all.push_back(&tape.type(v));
  }
  operator InputTypes() const { return std::span(all.begin(), all.size()); }
};

int64_t least_rows_of(const OpDef& op, const void* attrs, const Types& inputs, int64_t piece_rows) {
  if (!op.row_inputs || !op.row_inputs(attrs, inputs)) return 0;
  return least_rows(piece_rows, op.products ? op.products(attrs, inputs) : 1);
}

// OpDef::row_parts applied to input 0.
struct RowParts {
  const PartDims* dims;
  int64_t each = 1, all = 1;  // rows of a part, and the number of parts

  RowParts(const OpDef& op, const Shape& x) : dims(op.row_parts(x)) {
    if (!dims) return;
    all = x[dims->inputs[0]];
    for (int d = dims->inputs[0] + 1; d < x.rank() - 1; ++d) each *= x[d];
  }
  bool are(const RowBlock& block) const { return dims && each > 0 && block.groups == 1 && block.begin % each == 0 && block.rows % each == 0; }
};

// For a rank whose local part has no dimension with several indices.
bool is_all(const RowBlock& block, const Tensor& x) {
  return block.begin == 0 && block.groups == 1 && block.rows * x.local_shape().back() == x.local_shape().numel();
}

}  // namespace

uint64_t row_inputs_of(const OpDef& op, const void* attrs, std::span<const Tensor> inputs) {
  return op.row_inputs ? op.row_inputs(attrs, Types(inputs)) : 0;
}
uint64_t row_inputs_of(const Tape& tape, const Node& n) {
  return n.op && n.op->row_inputs ? n.op->row_inputs(tape.attrs(n), Types(tape, n)) : 0;
}

uint64_t row_inputs_of(const OpDef& op, const void* attrs, const Execute& run, int64_t rows) {
  const uint64_t inputs = row_inputs_of(op, attrs, run.input_tensors());
  for (int i = 0; i < run.num_inputs(); ++i)
    if ((inputs >> i & 1) && !has_rows_of(run.input_tensor(i), rows)) return 0;
  for (int o = 0; o < run.num_outputs(); ++o)
    if (!has_rows_of(run.output_tensor(o), rows)) return 0;
  return inputs;
}

int64_t least_rows_of(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, int64_t piece_rows) {
  return least_rows_of(op, attrs, Types(inputs), piece_rows);
}
int64_t least_rows_of(const Tape& tape, const Node& n, int64_t piece_rows) {
  return n.op ? least_rows_of(*n.op, tape.attrs(n), Types(tape, n), piece_rows) : 0;
}

bool are_parts(const OpDef& op, Shape local_shape, int dim) {
  if (!op.row_parts) return true;
  local_shape[dim] = 2;  // several, as another rank may have even if this one does not
  const PartDims* const dims = op.row_parts(local_shape);
  return dims && dims->inputs[0] == dim;
}

bool can_take(const OpDef& op, const Execute& run, const RowBlock& block) {
  return !op.row_parts || RowParts(op, run.input_tensor(0).local_shape()).are(block);
}
void take_rows(const OpDef& op, Execute& run, uint64_t inputs, const RowBlock& block, void* to) {
  if (!op.row_parts) return run.take_rows(inputs, block, to);
  const RowParts parts(op, run.input_tensor(0).local_shape());  // where the output is sent in pieces, rows are read in place
  if (!parts.dims && is_all(block, run.input_tensor(0))) return run.take_all();
  if (!parts.are(block))
    fail<ShapeError>("[", op.name, "] rows from ", block.begin, " on, ", block.rows, " of them, of ", run.input_type(0), " are no whole parts");
  run.take_parts(parts.dims, {block.begin / parts.each, block.rows / parts.each}, parts.all);
}

namespace {

// Of input 0, if this op can be executed piece by piece; else none.
std::span<const IncomingRows> incoming_rows(const OpDef& op, const void* attrs, const Execute& run) {
  if (!op.row_inputs || run.num_inputs() == 0) return {};
  const Tensor& x = run.input_tensor(0);
  const std::span<const IncomingRows> pieces = x.storage()->pieces();
  if (pieces.empty() || pieces[0].of_heads || !is_all_of_its_memory(x) || !row_inputs_of(op, attrs, run, last_row(pieces))) return {};
  for (int i = 1; i < run.num_inputs(); ++i)  // then all of it is read at once
    if (run.input_tensor(i).storage() == x.storage()) return {};
  for (const IncomingRows& piece : pieces)
    if (!can_take(op, run, block_of(piece))) return {};
  return pieces;
}

// The same for input 1, keys, and input 2, values, which are adjacent in the received [.., keys, values, D], and make up all of it.
std::span<const IncomingRows> incoming_heads(const OpDef& op, const Execute& run) {
  if (!op.heads) return {};
  const Tensor &keys = run.input_tensor(1), &values = run.input_tensor(2);
  const std::span<const IncomingRows> pieces = keys.storage()->pieces();
  if (pieces.empty() || !pieces[0].of_heads || keys.storage() != values.storage()) return {};
  const View k = keys.view_unsynced(), v = values.view_unsynced();
  const int64_t heads = pieces.back().end, width = k.shape[3];
  const bool as_they_come = k.shape == v.shape && k.strides == v.strides && k.shape[2] == heads && k.strides[2] == width &&
                            k.strides[1] == 2 * heads * width && keys.byte_offset() == 0 &&
                            values.byte_offset() == heads * width * static_cast<int64_t>(size_of(k.dtype)) &&
                            run.input_tensor(0).local_shape()[2] % heads == 0;
  return as_they_come ? pieces : std::span<const IncomingRows>();
}

// The pieces that an op is executed for, one after another.
struct Pieces {
  std::span<const IncomingRows> come;
  bool of_heads = false;

  Pieces(const OpDef& op, const void* attrs, const Execute& run) : come(incoming_rows(op, attrs, run)) {
    if (come.empty()) come = incoming_heads(op, run), of_heads = !come.empty();
  }
  bool empty() const { return come.empty(); }
  int input() const { return of_heads ? 1 : 0; }  // the input that they are pieces of
  template <class F>
  void each(const OpDef& op, const void* attrs, Execute& run, F&& f) const {
    const uint64_t rows = of_heads ? 0 : row_inputs_of(op, attrs, run.input_tensors());
    for (size_t i = 0; i < come.size(); ++i) {
      const RowBlock block = block_of(come[i]);
      of_heads ? run.take_parts(op.heads, block, come.back().end) : take_rows(op, run, rows, block);
      f(i, block);
    }
    run.take_all();
  }
};

}  // namespace

int64_t workspace_of(const OpDef& op, const void* attrs, Execute& run) {
  run.take_types_alone(true);
  int64_t bytes = op.workspace(attrs, run);
  if (const Pieces pieces(op, attrs, run); !pieces.empty()) {
    int64_t last = -1;
    pieces.each(op, attrs, run, [&](size_t, const RowBlock& block) {
      if (std::exchange(last, block.rows) != block.rows) bytes = std::max(bytes, op.workspace(attrs, run));
    });
  }
  run.take_types_alone(false);
  return bytes;
}

void execute(const OpDef& op, const void* attrs, Execute& run) {
  const Pieces pieces(op, attrs, run);
  // On the host all pieces may have arrived already. On a GPU the order of arrival must not matter: see [Note: in pieces].
  const bool all_here = !pieces.empty() && !run.device().is_cuda() && pieces.come.back().event.ready();
  if (pieces.empty() || all_here) return op.execute(attrs, run);
  Storage& storage = *run.input_tensor(pieces.input()).storage();
  for (const Tensor& t : run.input_tensors())
    if (t.storage().get() != &storage) t.storage()->settle();
  pieces.each(op, attrs, run, [&](size_t i, const RowBlock&) {
    storage.settle_piece(i);
    op.execute(attrs, run);
  });
  storage.settle();
}

}  // namespace sheaf::detail
