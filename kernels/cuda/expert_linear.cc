#include <algorithm>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/expert_products.h"
#include "sheaf/kernels/cuda/fp8.h"
#include "sheaf/kernels/cuda/gemm.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/experts.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr const char *kLinear = "expert_linear", *kGradient = "expert_weight_gradient";

/// Whether the library computes the product, which requires equally many rows for each expert.
bool by_library(const View& rows, const View& counts, bool mostly_empty) { return rows.shape[0] == counts.shape[0] && !mostly_empty; }

/// Operands in the form that our own kernel accepts: dense rows and, with fp8, rounded values; otherwise copies are made.
class OwnOperands {
 public:
  View rows, other;  ///< other: a weight, of any strides, or rows, too

  OwnOperands(const View& first, const View& second, bool second_is_rows, bool fp8)
      : rows(first), other(second), from_{first, second}, fp8_(fp8),
        copies_{fp8 || !first.contiguous(), fp8 || (second_is_rows && !second.contiguous())} {
    if (copies_[0]) rows = View::dense(nullptr, first.dtype, first.shape);
    if (copies_[1]) other = View::dense(nullptr, second.dtype, second.shape);
  }
  size_t bytes() const {
    return (copies_[0] ? line_align(static_cast<size_t>(rows.bytes())) : 0) +
           (copies_[1] ? line_align(static_cast<size_t>(other.bytes())) : 0) + rounding_bytes();
  }
  /// Makes the copies, in part of the workspace; returns the rest.
  Workspace make(const Stream& stream, Workspace workspace) {
    Carver carver(kLinear, workspace);
    if (copies_[0]) rows.data = carver.take<char>(rows.bytes());
    if (copies_[1]) other.data = carver.take<char>(other.bytes());
    const Workspace rounding{carver.take<char>(static_cast<int64_t>(rounding_bytes())), rounding_bytes()};
    const View* const made[] = {&rows, &other};
    for (int i = 0; i < 2; ++i) {
      if (!copies_[i]) continue;
      if (fp8_) round_to_fp8(stream, from_[i], *made[i], rounding);
      else copy(stream, from_[i], *made[i]);
    }
    return {static_cast<char*>(workspace.data) + bytes(), workspace.bytes - bytes()};
  }

 private:
  size_t rounding_bytes() const {
    return fp8_ ? line_align(std::max(round_to_fp8_workspace(from_[0]), round_to_fp8_workspace(from_[1]))) : 0;
  }
  View from_[2];
  bool fp8_, copies_[2];
};

/// For weight[E, O, I] and rows[E, .., R, I]: the groups of an expert share its matrix.
Gemm product(const View& x, const View& weight, const View& y, bool fp8) {
  View shared = weight;
  for (int d = 3; d < x.rank(); ++d) shared.shape.insert(1, 1), shared.strides.insert(1, 0);
  return {.who = kLinear, .a = x, .b = transposed(shared), .c = y, .bias = {}, .fp8 = fp8};
}

/// dyᵀ x over all rows of an expert. Rows that are not evenly spaced are first copied to the workspace.
class Gradient {
 public:
  Gradient(const View& dy, const View& x, const View& dweight)
      : given_{dy, x}, even_{by_expert(dy), by_expert(x)}, dweight_(dweight) {
    for (int i = 0; i < 2; ++i) {
      copies_[i] = even_[i].rank() == 0;
      if (copies_[i]) even_[i] = by_expert(View::dense(nullptr, given_[i].dtype, given_[i].shape));
    }
  }
  size_t workspace() const {
    size_t bytes = line_align(gemm_workspace(gemm()));
    for (int i = 0; i < 2; ++i)
      if (copies_[i]) bytes += line_align(static_cast<size_t>(given_[i].bytes()));
    return bytes;
  }
  void run(const Stream& stream, Workspace workspace) {
    Carver carver(kGradient, workspace);
    const size_t bytes = gemm_workspace(gemm());
    const Workspace scratch{carver.take<char>(static_cast<int64_t>(bytes)), bytes};
    for (int i = 0; i < 2; ++i) {
      if (!copies_[i]) continue;
      even_[i].data = carver.take<char>(given_[i].bytes());
      copy(stream, given_[i], View::dense(even_[i].data, given_[i].dtype, given_[i].shape));
    }
    cuda::gemm(stream, gemm(), scratch);
  }

 private:
  Gemm gemm() const { return {kGradient, transposed(even_[0]), even_[1], dweight_, {}}; }
  /// Rows[E, .., C] as [E, R, C], or rank 0 if no stride describes that.
  static View by_expert(const View& v) {
    View out{v.data, v.dtype, {v.shape[0], 1, v.shape.back()}, {v.strides[0], 0, v.strides.back()}};
    for (int d = v.rank() - 2; d > 0; --d) {
      if (v.shape[d] == 1) continue;
      if (out.shape[1] == 1) out.strides[1] = v.strides[d];
      else if (v.strides[d] != out.shape[1] * out.strides[1]) return {};
      out.shape[1] *= v.shape[d];
    }
    return out;
  }

  View given_[2], even_[2], dweight_;
  bool copies_[2];
};

}  // namespace

size_t expert_linear_workspace(const View& x, const View& weight, const View&, const View& counts, const View& y,
                               const ExpertProduct& how) {
  if (by_library(x, counts, how.mostly_empty)) return gemm_workspace(product(x, weight, y, how.fp8));
  return OwnOperands(x, weight, false, how.fp8).bytes() + part_linear_workspace(counts, x);
}
void expert_linear(const Stream& stream, const View& x, const View& weight, const View& bias, const View& counts,
                   const View& y, Workspace workspace, const ExpertProduct& how) {
  if (by_library(x, counts, how.mostly_empty)) {
    gemm(stream, product(x, weight, y, how.fp8), workspace);
    if (bias.rank()) add_expert_bias(stream, bias, counts, y);
    return;
  }
  OwnOperands own(x, weight, false, how.fp8);
  const Workspace rest = own.make(stream, workspace);
  part_linear(stream, own.rows, own.other, bias, counts, y, rest);
}

size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts, const View& dweight, bool mostly_empty) {
  if (by_library(x, counts, mostly_empty)) return Gradient(dy, x, dweight).workspace();
  return OwnOperands(dy, x, true, false).bytes() + part_weight_gradient_workspace(counts, x);
}
void expert_weight_gradient(const Stream& stream, const View& dy, const View& x, const View& counts,
                            const View& dweight, Workspace workspace, bool mostly_empty) {
  if (by_library(x, counts, mostly_empty)) return Gradient(dy, x, dweight).run(stream, workspace);
  OwnOperands own(dy, x, true, false);
  const Workspace rest = own.make(stream, workspace);
  part_weight_gradient(stream, own.rows, own.other, counts, dweight, rest);
}

size_t expert_bias_gradient_workspace(const View& dy, const View& counts, const View& dbias) {
  return OwnOperands(dy, dbias, false, false).bytes() + part_bias_gradient_workspace(counts, dy);
}
void expert_bias_gradient(const Stream& stream, const View& dy, const View& counts, const View& dbias, Workspace workspace) {
  OwnOperands own(dy, dbias, false, false);
  const Workspace rest = own.make(stream, workspace);
  part_bias_gradient(stream, own.rows, counts, dbias, rest);
}

}  // namespace sheaf::kernels::cuda
