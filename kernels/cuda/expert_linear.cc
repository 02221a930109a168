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

/// Whether each expert is a part of its own, whose products are of as many rows as any other's.
bool is_alone(const View& rows, const View& counts) { return rows.shape[0] == counts.shape[0]; }

/// Operands that are rounded to FP8, as values.
class RoundedParts {
 public:
  View x, weight;

  RoundedParts(const View& of_x, const View& of_weight)
      : x(View::dense(nullptr, of_x.dtype, of_x.shape)), weight(View::dense(nullptr, of_weight.dtype, of_weight.shape)), from_{of_x, of_weight} {}
  size_t bytes() const {
    return line_align(static_cast<size_t>(x.bytes())) + line_align(static_cast<size_t>(weight.bytes())) + rounding_bytes();
  }
  /// Takes memory for them; returns the rest.
  Workspace place(Workspace workspace) {
    Carver carver(kLinear, workspace);
    x.data = carver.take<char>(x.bytes()), weight.data = carver.take<char>(weight.bytes());
    rounding_ = {carver.take<char>(static_cast<int64_t>(rounding_bytes())), rounding_bytes()};
    return {static_cast<char*>(workspace.data) + bytes(), workspace.bytes - bytes()};
  }
  void round(const Stream& stream) const {
    round_to_fp8(stream, from_[0], x, rounding_);
    round_to_fp8(stream, from_[1], weight, rounding_);
  }

 private:
  size_t rounding_bytes() const {
    return line_align(std::max(round_to_fp8_workspace(from_[0]), round_to_fp8_workspace(from_[1])));
  }
  View from_[2];
  Workspace rounding_ = {};
};

/// weight[E, O, I] beside rows[E, .., P, I]: the groups of an expert share its matrix.
Gemm product(const View& x, const View& weight, const View& y, bool fp8) {
  View shared = weight;
  for (int d = 3; d < x.rank(); ++d) shared.shape.insert(1, 1), shared.strides.insert(1, 0);
  return {.who = kLinear, .a = x, .b = transposed(shared), .c = y, .bias = {}, .fp8 = fp8};
}

/// dyᵀ x over all rows of an expert. Rows that are not evenly spaced are made so first, in the
/// workspace.
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
  /// Rows[E, .., C] as [E, R, C], or rank 0 where no stride says that.
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

size_t expert_linear_workspace(const View& x, const View& weight, const View&, const View& counts, const View& y, bool fp8) {
  if (is_alone(x, counts)) return gemm_workspace(product(x, weight, y, fp8));
  return part_linear_workspace(counts, x) + (fp8 ? RoundedParts(x, weight).bytes() : 0);
}
void expert_linear(const Stream& stream, const View& x, const View& weight, const View& bias, const View& counts,
                   const View& y, Workspace workspace, bool fp8) {
  if (is_alone(x, counts)) {
    gemm(stream, product(x, weight, y, fp8), workspace);
    if (bias.rank()) add_expert_bias(stream, bias, counts, y);
  } else if (fp8) {
    RoundedParts rounded(x, weight);
    const Workspace rest = rounded.place(workspace);
    rounded.round(stream);
    part_linear(stream, rounded.x, rounded.weight, bias, counts, y, rest);
  } else {
    part_linear(stream, x, weight, bias, counts, y, workspace);
  }
}

size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts,
                                        const View& dweight) {
  return is_alone(x, counts) ? Gradient(dy, x, dweight).workspace() : part_weight_gradient_workspace(counts, x);
}
void expert_weight_gradient(const Stream& stream, const View& dy, const View& x, const View& counts,
                            const View& dweight, Workspace workspace) {
  if (is_alone(x, counts)) Gradient(dy, x, dweight).run(stream, workspace);
  else part_weight_gradient(stream, dy, x, counts, dweight, workspace);
}

}  // namespace sheaf::kernels::cuda
