// Products with the matrix of each expert, of the rows that are in use.
#include <algorithm>
#include <cstring>

#include "sheaf/kernels/cpu/gemm.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/experts.h"

namespace sheaf::kernels::cpu {
namespace {

// Rows in use are multiplied in pieces of whole units: a piece has one of a few sizes, so that the
// workspace for the largest is found without the counts. What a unit has besides are zeros.
constexpr int64_t kPiece = 512, kUnit = 32;
constexpr const char *kLinear = "expert_linear", *kGradient = "expert_weight_gradient";

/// Rows[E, .., P, C] by group, of which counts[E, ..] are in use. Any strides.
class Groups {
 public:
  Groups(const char* who, const View& rows, const View& counts)
      : rows_(rows), counts_(counts), places_(rows.shape.dim(-2)), used_(who, counts) {
    Shape all = counts.shape;
    all.push_back(places_), all.push_back(rows.shape.back());
    check<ShapeError>(rows.shape == all, "[", who, "] rows ", rows.shape, " for counts ",
                      counts.shape);
  }
  int64_t count() const { return used_.count(); }
  int64_t places() const { return places_; }
  int64_t expert_of(int64_t group) const { return group * counts_.shape[0] / count(); }
  int64_t used(int64_t group) const { return used_[group]; }
  /// Rows [first, first + rows) of a group.
  View rows(int64_t group, int64_t first, int64_t rows) const {
    int64_t offset = first * rows_.strides.dim(-2);
    for (int d = counts_.rank() - 1; d >= 0; --d)
      offset += group % counts_.shape[d] * rows_.strides[d], group /= counts_.shape[d];
    const auto bytes = offset * static_cast<int64_t>(size_of(rows_.dtype));
    return {rows_.data ? rows_.as<char>() + bytes : nullptr, rows_.dtype,
            {rows, rows_.shape.back()}, {rows_.strides.dim(-2), rows_.strides.back()}};
  }
  /// f(rows) for all sizes of pieces.
  template <class F>
  void sizes(F&& f) const {
    for (int64_t rows = kUnit; rows < std::min(kPiece, places_) + kUnit; rows += kUnit)
      f(std::min({rows, kPiece, places_}));
    if (places_ % kPiece != 0) f(places_ % kPiece);
  }
  /// f(first row of the piece, rows) for a group's rows in use.
  template <class F>
  void pieces(int64_t group, F&& f) const {
    const int64_t all = used(group);
    for (int64_t at = 0; at < all; at += kPiece)
      f(at, std::min({(all - at + kUnit - 1) / kUnit * kUnit, kPiece, places_ - at}));
  }

 private:
  View rows_, counts_;
  int64_t places_;
  Elements<int32_t> used_;
};

/// The matrix of one expert.
View weight_of(View v, int64_t expert) {
  const auto offset = expert * v.strides[0] * static_cast<int64_t>(size_of(v.dtype));
  if (v.data) v.data = v.as<char>() + offset;
  v.shape.erase(0), v.strides.erase(0);
  return v;
}

/// Products that add up are made in the type of computation.
struct Gradient {
  View dweight, sum;  // of one expert
  bool copies;

  Gradient(const View& all, DType computed, int64_t expert, void* scratch)
      : dweight(weight_of(all, expert)), sum(dweight), copies(all.dtype != computed) {
    if (copies) sum = View::dense(scratch, computed, dweight.shape);
  }
  size_t bytes() const { return copies ? line_align(static_cast<size_t>(sum.bytes())) : 0; }
};
DType computed_in(DType d) { return d == kF64 ? kF64 : kF32; }

template <class F>
void for_elements(const View& v, F&& f) {
  for (int64_t i = 0; i < v.shape[0]; ++i)
    for (int64_t j = 0; j < v.shape[1]; ++j) f(i * v.strides[0] + j * v.strides[1], i * v.shape[1] + j);
}

void store(const Gradient& g) {
  visit_floating(kGradient, g.dweight.dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, double>)
      for_elements(g.dweight, [&](int64_t to, int64_t from) {
        g.dweight.as<T>()[to] = T(g.sum.as<float>()[from]);
      });
  });
}

}  // namespace

size_t expert_linear_workspace(const View& x, const View& weight, const View& counts,
                               const View& y) {
  if (y.numel() == 0) return 0;
  const Groups from(kLinear, x, counts), to(kLinear, y, counts);
  size_t most = 0;
  from.sizes([&](int64_t rows) {
    most = std::max(most, gemm_workspace({kLinear, from.rows(0, 0, rows), transposed(weight_of(weight, 0)),
                                          to.rows(0, 0, rows), {}}));
  });
  return most;
}

void expert_linear(const View& x, const View& weight, const View& counts, const View& y,
                   Workspace workspace) {
  if (y.numel() == 0) return;
  check<ShapeError>(y.contiguous(), "[", kLinear, "] the result must be dense");
  const Groups from(kLinear, x, counts), to(kLinear, y, counts);
  const auto row_bytes = static_cast<size_t>(y.shape.back()) * size_of(y.dtype);
  for (int64_t group = 0; group < from.count(); ++group) {
    int64_t done = 0;
    from.pieces(group, [&](int64_t at, int64_t rows) {
      gemm({kLinear, from.rows(group, at, rows), transposed(weight_of(weight, from.expert_of(group))),
            to.rows(group, at, rows), {}},
           workspace);
      done = at + rows;
    });
    std::memset(to.rows(group, done, 0).data, 0,
                static_cast<size_t>(from.places() - done) * row_bytes);
  }
}

size_t expert_weight_gradient_workspace(const View& dy, const View& x, const View& counts,
                                        const View& dweight) {
  if (dweight.numel() == 0) return 0;
  const Gradient gradient(dweight, computed_in(x.dtype), 0, nullptr);
  size_t most = 0;
  if (x.numel() > 0) {
    const Groups rows_of_dy(kGradient, dy, counts), rows_of_x(kGradient, x, counts);
    rows_of_x.sizes([&](int64_t rows) {
      for (const bool accumulate : {false, true})
        most = std::max(most, gemm_workspace({kGradient, transposed(rows_of_dy.rows(0, 0, rows)),
                                              rows_of_x.rows(0, 0, rows), gradient.sum, {}, accumulate}));
    });
  }
  return gradient.bytes() + most;
}

void expert_weight_gradient(const View& dy, const View& x, const View& counts, const View& dweight,
                            Workspace workspace) {
  if (dweight.numel() == 0) return;
  const Groups rows_of_dy(kGradient, dy, counts), rows_of_x(kGradient, x, counts);
  const int64_t experts = dweight.shape[0], groups = rows_of_x.count() / experts;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const Gradient gradient(dweight, computed_in(x.dtype), expert, workspace.data);
    const size_t bytes = gradient.bytes();
    check<ShapeError>(workspace.bytes >= bytes, "[", kGradient, "] workspace too small");
    const Workspace rest{static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes};
    bool begun = false;
    for (int64_t group = expert * groups; group < (expert + 1) * groups; ++group)
      rows_of_x.pieces(group, [&](int64_t at, int64_t rows) {
        gemm({kGradient, transposed(rows_of_dy.rows(group, at, rows)), rows_of_x.rows(group, at, rows),
              gradient.sum, {}, begun},
             rest);
        begun = true;
      });
    if (!begun)
      visit_floating(kGradient, gradient.sum.dtype, [&]<class T>() {
        for_elements(gradient.sum, [&](int64_t at, int64_t) { gradient.sum.as<T>()[at] = T(0.0f); });
      });
    if (gradient.copies) store(gradient);
  }
}

}  // namespace sheaf::kernels::cpu
