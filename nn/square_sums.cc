#include "sheaf/nn/square_sums.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/interned.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/sum_of_squares.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf::nn {
namespace {

using kernels::cpu::kSquareLimbs;

// Inputs: a shard [, limbs so far]; output: limbs i64 [24]. The limbs of a shard are Partial.
struct SumOfSquares {
  static constexpr const char* kName = "sum_of_squares";
  using Attrs = NoAttrs;
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), sum_of_squares, c.input(0));
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), sum_of_squares, c.input(0), c.output(0), c.workspace);
    if (c.num_inputs() == 2) SHEAF_ON_DEVICE(c.stream(), add_into, c.output(0), c.input(1));
  }
};

// The same in rows: limbs i64 [rows, 24]. The table has for each piece of a parameter its row, its offset in the shard, and its
// elements.
struct SumsOfSquares {
  static constexpr const char* kName = "sums_of_squares";
  struct Attrs { const std::vector<int64_t>* pieces; };
  static constexpr int64_t kRowBytes = 256;  // of one piece, aligned as workspaces are
  static_assert(kRowBytes >= kSquareLimbs * static_cast<int64_t>(sizeof(int64_t)));
  static int64_t workspace(const Attrs&, const Execute& c) {
    return kRowBytes + SHEAF_WORKSPACE(c.device(), sum_of_squares, c.input(0));
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View shard = c.input(0), out = c.output(0), limbs = View::dense(c.workspace.data, kI64, {kSquareLimbs});
    const Workspace rest{static_cast<char*>(c.workspace.data) + kRowBytes, c.workspace.bytes - kRowBytes};
    if (c.num_inputs() == 2) SHEAF_ON_DEVICE(stream, copy, c.input(1), out);
    else SHEAF_ON_DEVICE(stream, fill, out, 0.0);
    const std::vector<int64_t>& pieces = *a.pieces;
    for (size_t i = 0; i < pieces.size(); i += 3) {
      char* const begin = shard.as<char>() + pieces[i + 1] * static_cast<int64_t>(size_of(shard.dtype));
      SHEAF_ON_DEVICE(stream, sum_of_squares, View::dense(begin, shard.dtype, {pieces[i + 2]}), limbs, rest);
      SHEAF_ON_DEVICE(stream, add_into, View::dense(out.as<int64_t>() + pieces[i] * kSquareLimbs, kI64, {kSquareLimbs}), limbs);
    }
  }
};

// Buffers whose limbs can be added before they are reduced: the same placement on the same mesh.
struct Group {
  Layout layout;
  Tensor limbs;
};

// Each rank's addend, from its shard.
Layout addends(Layout layout) {
  for (int a = 0; a < layout.num_axes(); ++a)
    if (layout[a].is_shard()) layout[a] = Placement::partial();
  return layout;
}

// Added to `limbs`, if there are some.
Tensor squares_of(const Tensor& values, const Tensor& limbs) {
  const OutputSpec spec{.type = {kI64, {kSquareLimbs}, addends(values.layout())}};
  const Tensor inputs[] = {values, limbs};
  return apply_typed(op_def<SumOfSquares>(), nullptr, std::span(inputs, limbs ? 2 : 1), std::span(&spec, 1))[0];
}

const std::vector<int64_t>* pieces_by_row(const Unit& unit, const FlatBuffer& b, const SquareRows& rows) {
  std::vector<int64_t> table;
  for (const LocalPiece& piece : unit.pieces(b))
    if (const int64_t row = rows.of(unit, piece.leaf); row >= 0 && piece.runs.numel() > 0)
      table.insert(table.end(), {row, piece.shard_offset, piece.runs.numel()});
  return interned(table);
}

}  // namespace

void keep_squares(FlatBuffer& b) {
  if (Recording* r = Recording::current()) r->leaf(b.grad, "gradient of " + b.name);
  b.squares = squares_of(b.grad, {});
}

std::vector<Tensor> square_sums(std::span<const std::shared_ptr<Unit>> units, FlatValues of, const SquareRows& rows) {
  if (of == FlatValues::gradients) reduce_waiting(units);
  if (of == FlatValues::gradients && rows.of)
    for (const auto& unit : units) unit->expect_not_consumed("grad_norms");
  std::vector<Group> groups;
  for (const auto& unit : units) {
    const PathScope path(unit->name());
    for (const FlatBuffer& b : unit->buffers()) {
      const Tensor& values = of == FlatValues::masters ? b.shard : b.squares ? b.squares : b.grad;
      if (!b.has_slope() || !values) continue;
      const Layout layout = addends(values.layout());
      auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.layout == layout; });
      if (group == groups.end()) group = groups.insert(group, {layout, {}});
      if (Recording* r = Recording::current()) r->leaf(values, of == FlatValues::gradients ? "gradient of " + b.name : b.name);
      if (rows.of) {
        const Tensor inputs[] = {values, group->limbs};
        const std::span<const Tensor> given(inputs, group->limbs ? 2 : 1);
        const OutputSpec spec{.type = {kI64, {rows.rows, kSquareLimbs}, layout}};
        const SumsOfSquares::Attrs attrs{pieces_by_row(*unit, b, rows)};
        group->limbs = apply_typed(op_def<SumsOfSquares>(), &attrs, given, std::span(&spec, 1))[0];
      } else if (b.squares && of == FlatValues::gradients) {
        group->limbs = group->limbs ? add(group->limbs, b.squares) : b.squares;
      } else {
        group->limbs = squares_of(values, group->limbs);
      }
    }
  }
  std::vector<Tensor> limbs;
  for (const Group& g : groups) {
    Layout whole = g.layout;
    for (int a = 0; a < whole.num_axes(); ++a)
      if (whole[a].is_partial()) whole[a] = Placement::invariant();
    limbs.push_back(redistribute(g.limbs, whole));
  }
  return limbs;
}

View sum_of_limbs(const Execute& c, int64_t count, void* scratch) {
  if (count == 1) return c.input(0);
  const Stream stream = c.stream();
  const View total = View::dense(scratch, kI64, c.input(0).shape);
  SHEAF_ON_DEVICE(stream, copy, c.input(0), total);
  for (int i = 1; i < count; ++i) SHEAF_ON_DEVICE(stream, add_into, total, c.input(i));
  return total;
}

}  // namespace sheaf::nn
