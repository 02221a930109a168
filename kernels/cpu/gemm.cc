#include "sheaf/kernels/cpu/gemm.h"

#include <algorithm>
#include <limits>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/kernels/cpu/blocks.h"
#include "sheaf/kernels/cpu/gemm_bf16.h"
#include "sheaf/kernels/cpu/gemm_part.h"
#include "sheaf/kernels/cpu/lanes.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/kernels/fp8.h"
#include "sheaf/kernels/matrix_batch.h"

namespace sheaf::kernels {

SHEAF_SIMD_DECLARE(gemm_scratch)
SHEAF_SIMD_DECLARE(gemm_part)

namespace cpu {

static bool by_squares(DType dtype) { return dtype == kBF16 && dot::available(); }

size_t gemm_scratch(const GemmPart& p) {
  if (by_squares(p.a.dtype)) return (amx::available() ? amx::gemm_scratch : dot::gemm_scratch)(p);
  return (has_v4() ? v4::gemm_scratch : v3::gemm_scratch)(p);
}

void gemm_part(const GemmPart& p, void* scratch) {
  if (by_squares(p.a.dtype)) return (amx::available() ? amx::gemm : dot::gemm)(p, scratch);
  (has_v4() ? v4::gemm_part : v3::gemm_part)(p, scratch);
}

namespace {

/// One matrix of an operand, and how to step from batch to batch.
struct Side : MatrixBatch {
  using MatrixBatch::MatrixBatch;

  /// Element (i, j) of a matrix of the batch.
  char* at(int64_t index, const Shape& batch, int64_t i, int64_t j) const {
    int64_t offset = i * row_stride + j * col_stride;
    for (int d = batch.rank() - 1; d >= 0; --d)
      offset += index % batch[d] * batch_strides[d], index /= batch[d];
    return data + offset * static_cast<int64_t>(size_of(dtype));
  }
};

/// A product, checked: matrices of a batch that may be broadcast.
struct Problem {
  const Gemm& g;
  Shape batch;
  Side a, b, c;
  int64_t batches, rows, cols, depth;
  double flops;

  explicit Problem(const Gemm& gemm)
      : g(gemm),
        batch(Shape(
            std::span(gemm.c.shape.begin(), static_cast<size_t>(std::max(gemm.c.rank() - 2, 0))))),
        a(check_rank(gemm.a), batch),
        b(check_rank(gemm.b), batch),
        c(check_rank(gemm.c), batch) {
    check<ShapeError>(a.cols == b.rows && c.rows == a.rows && c.cols == b.cols && broadcasts(g.a) &&
                          broadcasts(g.b),
                      "[", g.who, "] shapes ", g.a.shape, " and ", g.b.shape,
                      " do not multiply to ", g.c.shape);
    check<DTypeError>(g.a.dtype == g.b.dtype && is_floating(g.a.dtype) &&
                          (g.c.dtype == g.a.dtype || (g.c.dtype == kF32 && g.a.dtype != kF64)),
                      "[", g.who, "] no product of ", g.a.dtype, " and ", g.b.dtype, " into ",
                      g.c.dtype);
    // Consecutive batches that share b are just more rows.
    while (!batch.empty()) {
      const int last = batch.rank() - 1;
      const bool joins =
          batch[last] == 1 ||
          (b.batch_strides[last] == 0 && a.batch_strides[last] == a.rows * a.row_stride &&
           c.batch_strides[last] == c.rows * c.row_stride && c.row_stride > 0);
      if (!joins) break;
      a.rows *= batch[last], c.rows *= batch[last];
      for (Shape* s : {&batch, &a.batch_strides, &b.batch_strides, &c.batch_strides})
        s->erase(last);
    }
    batches = batch.numel(), rows = c.rows, cols = c.cols, depth = a.cols;
    flops =
        2.0 * static_cast<double>(rows) * static_cast<double>(cols) * static_cast<double>(depth);
  }
  bool empty() const { return batches == 0 || rows == 0 || cols == 0; }

 private:
  const View& check_rank(const View& v) const {
    check<ShapeError>(v.rank() >= 2 && v.rank() <= g.c.rank(), "[", g.who, "] cannot multiply ",
                      g.a.shape, " and ", g.b.shape, " into ", g.c.shape);
    return v;
  }
  bool broadcasts(const View& v) const {
    for (int i = batch.rank() - 1, j = v.rank() - 3; j >= 0; --i, --j)
      if (v.shape[j] != 1 && v.shape[j] != batch[i]) return false;
    return true;
  }
};

/// The numbers of parts into which the rows and the columns of one product are divided.
struct Cut {
  int64_t rows = 1, cols = 1;
};

/// A product as parts for the threads. Each thread gets whole batches if there are enough of them; else every batch is divided into a
/// grid. A part that cannot write c in place writes a separate dense copy.
class Plan {
 public:
  explicit Plan(const Problem& problem) : p_(problem) {
    compute_ = p_.a.dtype == kF64 ? kF64 : kF32;
    copy_c_ = !p_.c.row_major() || (p_.c.dtype != compute_ && !by_squares(p_.c.dtype));
    constexpr double kGrain = 3e5;  // multiply-adds for which waking a thread pays off
    const int64_t useful = static_cast<int64_t>(static_cast<double>(p_.batches) * p_.flops / 2 / kGrain);
    const int64_t threads = std::clamp<int64_t>(useful, 1, num_threads());
    if (p_.batches < threads) cut_ = best_cut((threads + p_.batches - 1) / p_.batches);
    items_ = p_.batches * cut_.rows * cut_.cols;
    slots_ = std::min(items_, threads);
    // A smaller part may be divided into larger blocks.
    for (int64_t i = 0; i < cut_.rows * cut_.cols; ++i) slot_bytes_ = std::max(slot_bytes_, scratch_bytes(part(i)));
  }

  size_t bytes() const { return slot_bytes_ * static_cast<size_t>(slots_); }

  void run(Workspace workspace) const {
    check<ShapeError>(workspace.bytes >= bytes(), "[", p_.g.who, "] workspace too small: ", workspace.bytes, " bytes");
    parallel_slots(items_, slots_, [&](int64_t slot, int64_t begin, int64_t end) {
      char* scratch = static_cast<char*>(workspace.data) + static_cast<size_t>(slot) * slot_bytes_;
      for (int64_t i = begin; i < end; ++i) run_part(part(i), scratch);
    });
  }

 private:
  // Parts consist of whole tiles, except for the strips of 6 rows on machines without AVX-512: squares, or panels of 96 columns.
  static constexpr int64_t kRowUnit = 32;
  int64_t col_unit() const { return by_squares(p_.a.dtype) ? 32 : 96; }

  /// The division into `parts` with the least work on the largest part. Each thread itself packs its columns of b, and its rows of a
  /// unless these are dense: that costs about as much as multiplying 16 rows.
  Cut best_cut(int64_t parts) const {
    Cut best;
    double least = std::numeric_limits<double>::infinity();
    for (int64_t r = 1; r <= parts; ++r) {
      const Cut cut{std::min(r, units(p_.rows, kRowUnit)), std::min(parts / r, units(p_.cols, col_unit()))};
      const double rows = static_cast<double>(share(p_.rows, kRowUnit, cut.rows, 0).size()),
                   cols = static_cast<double>(share(p_.cols, col_unit(), cut.cols, 0).size());
      constexpr double kPacking = 16;
      const double work = (rows + kPacking) * (cols + (p_.a.row_major() ? 0 : kPacking));
      if (work < least) least = work, best = cut;
    }
    return best;
  }

  struct Range {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
  };
  static int64_t units(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
  /// The first shares are the larger ones.
  static Range share(int64_t n, int64_t unit, int64_t count, int64_t i) {
    const int64_t all = units(n, unit), each = all / count, larger = all % count;
    auto at = [&](int64_t k) { return std::min(n, (k * each + std::min(k, larger)) * unit); };
    return {at(i), at(i + 1)};
  }

  GemmPart part(int64_t item) const {
    const int64_t grid = cut_.rows * cut_.cols, batch = item / grid;
    const Range rows = share(p_.rows, kRowUnit, cut_.rows, item % grid / cut_.cols),
                cols = share(p_.cols, col_unit(), cut_.cols, item % grid % cut_.cols);
    auto operand = [&](const Side& s, int64_t i, int64_t j) {
      // The stride of a dimension of size 1 is meaningless.
      return MatrixOperand{s.at(batch, p_.batch, i, j), s.dtype, s.rows == 1 ? s.cols : s.row_stride,
                           s.cols == 1 ? 1 : s.col_stride};
    };
    const View& bias = p_.g.bias;
    GemmPart out{.rows = rows.size(), .cols = cols.size(), .depth = p_.depth,
                 .a = operand(p_.a, rows.begin, 0), .b = operand(p_.b, 0, cols.begin),
                 .c = operand(p_.c, rows.begin, cols.begin), .bias = {}, .accumulate = p_.g.accumulate};
    if (bias.rank() == 1)
      out.bias = {bias.as<char>() + cols.begin * bias.strides[0] * static_cast<int64_t>(size_of(bias.dtype)), bias.dtype,
                  0, bias.strides[0]};
    return out;
  }

  size_t scratch_bytes(const GemmPart& part) const {
    return line_align(gemm_scratch(part)) +
           (copy_c_ ? line_align(static_cast<size_t>(part.rows * part.cols) * size_of(compute_)) : 0);
  }

  void run_part(GemmPart part, char* scratch) const {
    check<ShapeError>(scratch_bytes(part) <= slot_bytes_, "[", p_.g.who, "] a part of ", part.rows, " x ", part.cols,
                      " needs more scratch memory than was asked for");
    if (!copy_c_) return gemm_part(part, scratch);
    const MatrixOperand home = part.c;
    char* const copy = scratch + line_align(gemm_scratch(part));
    part.c = {copy, compute_, part.cols, 1};
    const auto home_row = [&](int64_t i) { return home.data + i * home.row_stride * static_cast<int64_t>(size_of(home.dtype)); };
    visit_compute(compute_, [&]<class C>() {
      C* const rows = reinterpret_cast<C*>(copy);
      if (part.accumulate)
        for (int64_t i = 0; i < part.rows; ++i) load_run(home.dtype, home_row(i), home.col_stride, part.cols, rows + i * part.cols);
      gemm_part(part, scratch);
      for (int64_t i = 0; i < part.rows; ++i) store_run(home.dtype, home_row(i), home.col_stride, part.cols, rows + i * part.cols);
    });
  }

  const Problem& p_;
  DType compute_;
  bool copy_c_;
  Cut cut_;
  int64_t items_ = 1, slots_ = 1;
  size_t slot_bytes_ = 0;
};

/// K = 0: the bias or zero.
void fill_without_product(const Gemm& g) {
  if (g.accumulate) return;
  if (g.bias.rank() == 0) return fill(g.c, 0);
  View rows{g.bias.data, g.bias.dtype, g.c.shape, Shape::filled(g.c.rank(), 0)};
  rows.strides[g.c.rank() - 1] = g.bias.strides[0];
  copy(rows, g.c);
}

void gemm_of_rounded(const Gemm& g, Workspace workspace) {
  RoundedOperands rounded(g, /*keep_columns=*/true);
  const size_t bytes = rounded.bytes();
  check<ShapeError>(workspace.bytes >= bytes, "[", g.who, "] workspace too small: ", workspace.bytes, " bytes");
  rounded.place(workspace.data);
  round_to_fp8(rounded.from_a, rounded.a);
  round_to_fp8(rounded.from_b, rounded.b);
  gemm(rounded.product(g), {static_cast<char*>(workspace.data) + bytes, workspace.bytes - bytes});
}

}  // namespace

size_t gemm_workspace(const Gemm& g) {
  const Problem p(g);
  if (g.fp8) {
    const RoundedOperands rounded(g, /*keep_columns=*/true);
    return rounded.bytes() + gemm_workspace(rounded.product(g));
  }
  return p.empty() || p.depth == 0 ? 0 : Plan(p).bytes();
}

void gemm(const Gemm& g, Workspace workspace) {
  const Problem p(g);
  if (p.empty()) return;
  if (p.depth == 0) return fill_without_product(g);
  if (g.fp8) return gemm_of_rounded(g, workspace);
  Plan(p).run(workspace);
}

}  // namespace cpu
}  // namespace sheaf::kernels
