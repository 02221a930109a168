// Mixtures of experts: which experts a token is routed to, rows on their way to experts and back, and products with each expert's
// matrix.
//
//   B sequences   T tokens of one   K choices of a token   E experts   C, I, O widths
//   N groups of a sequence's tokens: group n has tokens [T n / N, T (n + 1) / N)
//   Q parts of the experts: part q has experts [E q / Q, E (q + 1) / Q)
//   R rows of a part for a group: those of its experts one after another, from the first on
//
// Rows of C, I or O elements are dense, and so are the operands of top_k() and route(). A choice's place is its index among the
// choices of its expert in its group, tokens in order and the choices of a token in order: so no later choice affects which ones are
// dropped for lack of places.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::kernels {

/// How experts are divided into parts.
struct ExpertParts {
  int64_t experts, parts;

  constexpr int64_t first_of(int64_t part) const { return experts * part / parts; }
  constexpr int64_t part_of(int64_t expert) const { return ((expert + 1) * parts - 1) / experts; }
};

/// How a product with the experts' matrices is computed.
struct ExpertProduct {
  bool fp8 = false;
  /// Most rows are empty: on a GPU our own kernel, which skips them, is faster than the library, which does not. It is used for parts
  /// of several experts in any case. CPUs always skip them.
  bool mostly_empty = false;
};

/// The assumed time per used row of our own GPU kernel, as a multiple of the library's per row: it is slower, and multiplies FP8 only
/// as wider values. Not measured.
constexpr int own_cost(bool fp8) { return fp8 ? 4 : 2; }

/// The sizes that all operands share, and where rows are. Copied to the kernels of both devices.
struct Routing {
  int64_t sequences, tokens, choices, parts, groups, room;  ///< room: R
  int64_t first_part = 0;  ///< the first of the parts whose rows are present; slots count the rows of all parts

  // constexpr: for the host and for kernels alike.
  constexpr int64_t first_of(int64_t group) const { return tokens * group / groups; }
  constexpr int64_t group_of(int64_t token) const { return ((token + 1) * groups - 1) / tokens; }
  /// The index of a row in [Q, B, N, R].
  constexpr int64_t row(int64_t part, int64_t sequence, int64_t group, int64_t place) const {
    return ((part * sequences + sequence) * groups + group) * room + place;
  }
  constexpr int64_t rows() const { return parts * sequences * groups * room; }
  /// Whether the row of this slot is present: neither dropped nor in an absent part.
  constexpr bool has(int64_t slot) const { return slot >= first_part * room && slot < (first_part + parts) * room; }
  /// That row, for choice `choice` (of all B·T·K).
  constexpr int64_t row_at(int64_t choice, int64_t slot) const {
    const int64_t token = choice / choices;
    return row(slot / room - first_part, token / tokens, group_of(token % tokens), slot % room);
  }
  /// The choice that fills row `row` with this source.
  constexpr int64_t choice_at(int64_t row, int64_t source) const {
    const int64_t group = row / room % groups, sequence = row / room / groups % sequences;
    return (sequence * tokens + first_of(group)) * choices + source;
  }

  /// From slots[.., T, K] and rows[Q, .., N, R(, more)], those of the parts from `first_part` on.
  static Routing of(const View& slots, const View& rows, int more, int64_t first_part = 0) {
    const int rank = slots.rank();
    check<ShapeError>(rank >= 2 && rows.rank() == rank + 1 + more, "[route] choices ", slots.shape,
                      " and rows ", rows.shape);
    Routing r{1, slots.shape[rank - 2], slots.shape[rank - 1],
              rows.shape[0], rows.shape[rank - 1], rows.shape[rank], first_part};
    for (int d = 0; d < rank - 2; ++d) {
      check<ShapeError>(slots.shape[d] == rows.shape[d + 1], "[route] choices ", slots.shape,
                        " and rows ", rows.shape);
      r.sequences *= slots.shape[d];
    }
    return r;
  }
};

namespace cpu {

/// out[.., K]: positions of the K largest of x[.., E], largest first, equal ones in order; NaN is larger than all.
/// out is i64.
void top_k(const View& x, const View& out);
/// From choices[.., T, K] (i64, in [0, E); else DataError): slots[.., T, K], each the part of its expert times R
/// plus its row there, or -1 if dropped; sources[Q, .., N, R], each row's choice counted from the first of its
/// group, or -1; counts[E, .., N], the rows of each expert: per group at most `places`, and no more than its part
/// has left. All three are i32.
void route(const View& choices, int64_t places, const View& slots, const View& sources, const View& counts);
/// rows[Q, .., N, R, C] = x[.., T, C] if a row has a source, times weights[.., T, K] if given (View{}: none), else zeros. Weights
/// have x's compute type.
void to_experts(const View& x, const View& weights, const View& slots, const View& sources,
              const View& rows);
/// y[.., T, C] = sum over a token's choices, in order, of their rows times their weights. Rows may be those of some parts only, from
/// `first_part` on: the others add nothing.
void from_experts(const View& rows, const View& weights, const View& slots, const View& y, int64_t first_part = 0);
/// out[.., T, K] = row · y of its token; 0 for choices that were dropped or are in absent parts.
void choice_dots(const View& rows, const View& y, const View& slots, const View& out, int64_t first_part = 0);

/// y[Q, .., R, O] = x[Q, .., R, I] weight[E, O, I]ᵀ + bias[E, O] with each row's expert, given by counts[E, ..] (as far as parts have
/// rows). Weights may have any strides; View{} for no bias. Rows after the used ones are skipped, and zero in y.
size_t expert_linear_workspace(const View& x, const View& weight, const View& bias, const View& counts,
                               const View& y, const ExpertProduct& how = {});
void expert_linear(const View& x, const View& weight, const View& bias, const View& counts, const View& y,
                   Workspace workspace, const ExpertProduct& how = {});
/// dweight[E, O, I] = dyᵀ x over the used rows, or in f32 for narrow types. Groups are added in order.
size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts,
                                        const View& dweight, bool mostly_empty = false);
void expert_weight_gradient(const View& dy, const View& x, const View& counts, const View& dweight,
                            Workspace workspace, bool mostly_empty = false);
/// dbias[E, O], dense: the sums of dy's used rows, in order, or in f32 for narrow types.
void expert_bias_gradient(const View& dy, const View& counts, const View& dbias);

}  // namespace cpu

/// The same on a GPU. A choice that is not an expert is dropped. If each part is one expert and not mostly empty, products cover all
/// rows: the host does not know how many are used. Unused rows must then be zero in dy and finite in x, and are computed like any
/// other in y. Otherwise the blocks of a kernel determine which expert's rows they have (expert_products.h).
namespace cuda {

void top_k(const Stream& stream, const View& x, const View& out);
void route(const Stream& stream, const View& choices, int64_t places, const View& slots, const View& sources,
           const View& counts);
void to_experts(const Stream& stream, const View& x, const View& weights, const View& slots,
              const View& sources, const View& rows);
void from_experts(const Stream& stream, const View& rows, const View& weights, const View& slots, const View& y,
                  int64_t first_part = 0);
void choice_dots(const Stream& stream, const View& rows, const View& y, const View& slots, const View& out, int64_t first_part = 0);
size_t expert_linear_workspace(const View& x, const View& weight, const View& bias, const View& counts,
                               const View& y, const ExpertProduct& how = {});
void expert_linear(const Stream& stream, const View& x, const View& weight, const View& bias, const View& counts,
                   const View& y, Workspace workspace, const ExpertProduct& how = {});
size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts,
                                        const View& dweight, bool mostly_empty = false);
void expert_weight_gradient(const Stream& stream, const View& dy, const View& x, const View& counts,
                            const View& dweight, Workspace workspace, bool mostly_empty = false);
size_t expert_bias_gradient_workspace(const View& dy, const View& counts, const View& dbias);
void expert_bias_gradient(const Stream& stream, const View& dy, const View& counts, const View& dbias, Workspace workspace);

}  // namespace cuda
}  // namespace sheaf::kernels
