// Mixtures of experts: which experts a token goes to, rows on their way to experts and back, and
// products with the matrix of each expert.
//
//   B sequences   T tokens of one   K choices of a token   E experts   C, I, O widths
//   N groups of a sequence's tokens: group n has tokens [T n / N, T (n + 1) / N)
//   P places: rows that an expert has for a group
//
// Rows of widths are dense, and so is what top_k() and route() read and write. A choice's place is
// its rank among the choices of its expert in its group, tokens in order and the choices of a token
// in order: what a token gets depends on no later one. Choices behind the last place are dropped.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// The sizes that all operands share, and where things lie. Kernels of both devices have a copy.
struct Routing {
  int64_t sequences, tokens, choices, experts, groups, places;

  // constexpr: for the host and for kernels alike.
  constexpr int64_t first_of(int64_t group) const { return tokens * group / groups; }
  constexpr int64_t group_of(int64_t token) const { return ((token + 1) * groups - 1) / tokens; }
  /// A row on its way: [E, B, N, P].
  constexpr int64_t row(int64_t expert, int64_t sequence, int64_t group, int64_t place) const {
    return ((expert * sequences + sequence) * groups + group) * places + place;
  }
  constexpr int64_t rows() const { return experts * sequences * groups * places; }
  /// The row of choice `choice` (of all B·T·K) that has this slot.
  constexpr int64_t row_at(int64_t choice, int64_t slot) const {
    const int64_t token = choice / choices;
    return row(slot / places, token / tokens, group_of(token % tokens), slot % places);
  }
  /// The choice that fills row `row` with this source.
  constexpr int64_t choice_at(int64_t row, int64_t source) const {
    const int64_t group = row / places % groups, sequence = row / places / groups % sequences;
    return (sequence * tokens + first_of(group)) * choices + source;
  }

  /// slots[.., T, K], of rows[E, .., N, P(, more)].
  static Routing of(const View& slots, const View& rows, int more) {
    const int rank = slots.rank();
    check<ShapeError>(rank >= 2 && rows.rank() == rank + 1 + more, "[route] choices ", slots.shape,
                      " and rows ", rows.shape);
    Routing r{1, slots.shape[rank - 2], slots.shape[rank - 1],
              rows.shape[0], rows.shape[rank - 1], rows.shape[rank]};
    for (int d = 0; d < rank - 2; ++d) {
      check<ShapeError>(slots.shape[d] == rows.shape[d + 1], "[route] choices ", slots.shape,
                        " and rows ", rows.shape);
      r.sequences *= slots.shape[d];
    }
    return r;
  }
};

namespace cpu {

/// out[.., K]: positions of the K largest of x[.., E], the largest first, of equal ones the first
/// first; NaN is larger than all. out is i64.
void top_k(const View& x, const View& out);
/// Of choices[.., T, K] (i64, in [0, E); DataError else): slots[.., T, K], each the expert times P
/// plus the place, or -1 if dropped; sources[E, .., N, P], each row's choice counted from the first
/// of its group, or -1; counts[E, .., N], the places taken. All three are i32.
void route(const View& choices, const View& slots, const View& sources, const View& counts);
/// rows[E, .., N, P, C] = x[.., T, C] where a row has a source, times weights[.., T, K] if there
/// are any (View{}: none), else zeros. Weights are of the type in which x is computed.
void to_experts(const View& x, const View& weights, const View& slots, const View& sources,
              const View& rows);
/// y[.., T, C] = sum over a token's choices, in order, of their rows times their weights.
void from_experts(const View& rows, const View& weights, const View& slots, const View& y);
/// out[.., T, K] = row · y of its token, 0 for what was dropped.
void choice_dots(const View& rows, const View& y, const View& slots, const View& out);

/// y[E, .., P, O] = x[E, .., P, I] weight[E, O, I]ᵀ, weights of any strides. Of each group of P rows
/// the first counts[E, ..] are used, the rest of x is zero: it is skipped where that is faster.
size_t expert_linear_workspace(const View& x, const View& weight, const View& counts,
                               const View& y, bool fp8 = false);
void expert_linear(const View& x, const View& weight, const View& counts, const View& y,
                   Workspace workspace, bool fp8 = false);
/// dweight[E, O, I] = dyᵀ x over the rows in use, or in f32 for narrow types. Rows that are not in
/// use are zero in both. Groups are added in order.
size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts,
                                        const View& dweight);
void expert_weight_gradient(const View& dy, const View& x, const View& counts, const View& dweight,
                            Workspace workspace);

}  // namespace cpu

/// The same on a GPU. A choice that is no expert is dropped. Products are of all rows, zeros
/// included: nothing tells the host how many are in use.
namespace cuda {

void top_k(const Stream& stream, const View& x, const View& out);
void route(const Stream& stream, const View& choices, const View& slots, const View& sources,
           const View& counts);
void to_experts(const Stream& stream, const View& x, const View& weights, const View& slots,
              const View& sources, const View& rows);
void from_experts(const Stream& stream, const View& rows, const View& weights, const View& slots,
             const View& y);
void choice_dots(const Stream& stream, const View& rows, const View& y, const View& slots,
                 const View& out);
size_t expert_linear_workspace(const View& x, const View& weight, const View& counts,
                               const View& y, bool fp8 = false);
void expert_linear(const Stream& stream, const View& x, const View& weight, const View& counts,
                   const View& y, Workspace workspace, bool fp8 = false);
size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts,
                                        const View& dweight);
void expert_weight_gradient(const Stream& stream, const View& dy, const View& x,
                            const View& counts, const View& dweight, Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
