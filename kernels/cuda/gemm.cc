#include "sheaf/kernels/cuda/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cuda/gemm_fp8.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/matrix_batch.h"

namespace sheaf::kernels::cuda {
namespace {

/// One matrix of an operand, and how to step from batch to batch.
struct Side : MatrixBatch {
  using MatrixBatch::MatrixBatch;

  bool col_major() const {
    return (row_stride == 1 || rows == 1) && (col_stride >= rows || cols == 1);
  }
  /// From one row (row_major) or column (col_major) to the next.
  int64_t leading() const {
    return row_major() ? (rows == 1 ? cols : row_stride) : (cols == 1 ? rows : col_stride);
  }

  /// Only what differs from batch to batch: broadcast dimensions have size 1.
  View distinct(const Shape& batch) const {
    View v{data, dtype, {}, {}};
    for (int d = 0; d < batch.rank(); ++d)
      v.shape.push_back(batch_strides[d] == 0 ? 1 : batch[d]),
          v.strides.push_back(batch_strides[d]);
    v.shape.push_back(rows), v.strides.push_back(row_stride);
    v.shape.push_back(cols), v.strides.push_back(col_stride);
    return v;
  }
  /// Row-major memory for distinct(batch), rows at multiples of 16 bytes.
  Side packed(const Shape& batch) const {
    Side out = *this;
    const int64_t step = 16 / static_cast<int64_t>(size_of(dtype));
    out.data = nullptr;
    out.row_stride = (cols + step - 1) / step * step, out.col_stride = 1;
    int64_t size = rows * out.row_stride;
    for (int d = batch.rank() - 1; d >= 0; --d)
      if (batch_strides[d] != 0) out.batch_strides[d] = size, size *= batch[d];
    return out;
  }
  size_t packed_bytes(const Shape& batch) const {
    int64_t size = rows * row_stride;
    for (int d = 0; d < batch.rank(); ++d)
      if (batch_strides[d] != 0) size *= batch[d];
    return line_align(static_cast<size_t>(size) * size_of(dtype));
  }
  char* at(int64_t offset) const { return data + offset * static_cast<int64_t>(size_of(dtype)); }
};

/// SHEAF_FUSED_PRODUCTS=0 leaves work that products could include to our own separate kernels, for comparison.
bool fusing_wanted() {
  const char* const value = std::getenv("SHEAF_FUSED_PRODUCTS");
  return !value || std::string_view(value) != "0";
}

/// A product, checked: a row-major c, batches merged where they can be.
class Plan {
 public:
  explicit Plan(const Gemm& g)
      : g_(g),
        batch_(
            Shape(std::span(g.c.shape.begin(), static_cast<size_t>(std::max(g.c.rank() - 2, 0))))),
        a_(check_rank(g.a), batch_),
        b_(check_rank(g.b), batch_),
        c_(check_rank(g.c), batch_) {
    check<ShapeError>(a_.cols == b_.rows && c_.rows == a_.rows && c_.cols == b_.cols &&
                          broadcasts(g.a) && broadcasts(g.b),
                      "[", g.who, "] shapes ", g.a.shape, " and ", g.b.shape,
                      " do not multiply to ", g.c.shape);
    check<DTypeError>(g.a.dtype == g.b.dtype && is_floating(g.a.dtype) &&
                          (g.c.dtype == g.a.dtype || (g.c.dtype == kF32 && g.a.dtype != kF64)) &&
                          (!g.accumulate || g.c.dtype == kF32 || g.c.dtype == kF64),
                      "[", g.who, "] no product of ", g.a.dtype, " and ", g.b.dtype, " into ",
                      g.c.dtype);
    has_bias_ = g.bias.rank() != 0;
    check<ShapeError>(
        !has_bias_ || (!g.accumulate && g.bias.rank() == 1 && g.bias.shape[0] == c_.cols &&
                       g.bias.dtype == c_.dtype && (g.bias.strides[0] == 1 || c_.cols <= 1)),
        "[", g.who, "] bias ", g.bias.shape, " of ", g.bias.dtype, " must be a dense vector for ",
        g.c.shape, " of ", g.c.dtype);
    merge();
    if (!has_bias_ && !c_.row_major() && c_.col_major()) {  // cᵀ = bᵀ aᵀ
      swapped_ = true;
      std::swap(a_, b_);
      for (Side* s : {&a_, &b_, &c_})
        std::swap(s->rows, s->cols), std::swap(s->row_stride, s->col_stride);
    }
  }

  bool empty() const { return c_.rows == 0 || c_.cols == 0 || batch_.numel() == 0; }
  size_t bytes() const {
    if (empty()) return 0;
    size_t total = a_.cols > 0 ? kProductWorkspace : 0;
    for (const Side* s : {&a_, &b_, &c_})
      if (!fits(*s)) total += s->packed(batch_).packed_bytes(batch_);
    return total + (has_bias_ ? line_align(static_cast<size_t>(g_.bias.bytes())) : 0);
  }

  void run(const Stream& stream, Workspace workspace) const {
    if (empty()) return;
    run(stream, workspace, has_bias_ ? Epilogue::bias : Epilogue::none, nullptr, nullptr);
  }
  bool run_with(const Stream& stream, Fused fused, const View& other, Workspace workspace) const {
    const bool sums = fused == Fused::row_sums;
    const int64_t rows = swapped_ ? c_.cols : c_.rows;
    check<ShapeError>(!g_.accumulate && (!has_bias_ || fused == Fused::gelu) &&
                          (sums ? other.rank() == 1 && g_.c.rank() == 2 && other.shape[0] == rows
                                : other.numel() == g_.c.numel()),
                      "[", g_.who, "] ", other.shape, " with the product ", g_.c.shape);
    if (empty() || !batch_.empty() || a_.cols == 0 || other.dtype != c_.dtype ||
        !other.contiguous() || !at_16_bytes(other) || g_.fp8 || !fusing_wanted())
      return false;
    if (sums)  // the product's B is a, unless they were swapped
      return run(stream, workspace, swapped_ ? Epilogue::sums_of_a : Epilogue::sums_of_b,
                 other.data, nullptr);
    // cuBLASLt does not document the accuracy of its tanh: the rounding of narrow types hides that.
    if (c_.dtype != kBF16 && c_.dtype != kF16) return false;
    // cuBLASLt's rule for columns of `other`, which are rows here.
    if (swapped_ || !g_.c.contiguous() || c_.cols % 8 != 0) return false;
    const Epilogue epilogue = fused == Fused::gelu_gradient ? Epilogue::gelu_gradient
                              : has_bias_                   ? Epilogue::bias_gelu
                                                            : Epilogue::gelu;
    return run(stream, workspace, epilogue, nullptr, other.data);
  }

 private:
  bool run(const Stream& stream, Workspace workspace, Epilogue epilogue, void* sums,
           void* matrix) const {
    // The library's own part comes first, for the workspace's alignment.
    Carver carver(g_.who, workspace);
    const size_t bytes = a_.cols > 0 ? kProductWorkspace : 0;
    const Workspace scratch{carver.take<char>(static_cast<int64_t>(bytes)), bytes};
    const Side a = input(stream, a_, carver), b = input(stream, b_, carver);
    Side c = c_;
    if (!fits(c_)) {
      c = place(c_, carver);
      if (g_.accumulate) copy(stream, c_.distinct(batch_), c.distinct(batch_));
    }
    void* const vector = has_bias_ ? bias(stream, carver) : sums;
    const bool done = multiply(stream, a, b, c, epilogue, vector, matrix, scratch);
    if (done && !fits(c_)) copy(stream, c.distinct(batch_), c_.distinct(batch_));
    return done;
  }

  /// cuBLASLt cannot be told the alignment of an epilogue's vector, and its kernels access 16 bytes at a time.
  static bool at_16_bytes(const View& v) { return reinterpret_cast<uintptr_t>(v.data) % 16 == 0; }
  void* bias(const Stream& stream, Carver& carver) const {
    if (at_16_bytes(g_.bias)) return g_.bias.data;
    void* const data = carver.take<char>(g_.bias.bytes());
    copy(stream, g_.bias, View::dense(data, g_.bias.dtype, g_.bias.shape));
    return data;
  }

  bool fits(const Side& s) const {
    return s.row_major() || (&s != &c_ && s.col_major()) || s.cols == 0 || s.rows == 0;
  }
  Side place(const Side& s, Carver& carver) const {
    Side out = s.packed(batch_);
    out.data = carver.take<char>(static_cast<int64_t>(out.packed_bytes(batch_)));
    return out;
  }
  /// The operand in place, or a copy that cuBLASLt can read.
  Side input(const Stream& stream, const Side& s, Carver& carver) const {
    if (fits(s)) return s;
    const Side out = place(s, carver);
    copy(stream, s.distinct(batch_), out.distinct(batch_));
    return out;
  }

  /// Row-major c[M, N] is column-major D[N, M]: cuBLASLt's A is b, its B is a, and row-major operands are already
  /// transposed. False if the library does not have the epilogue.
  bool multiply(const Stream& stream, const Side& a, const Side& b, const Side& c,
                Epilogue epilogue, void* vector, void* matrix, Workspace workspace) const {
    // cuBLASLt handles one dimension of the batch; we loop over the others.
    int inner = -1;
    for (int d = 0; d < batch_.rank(); ++d)
      if (inner < 0 || batch_[d] > batch_[inner]) inner = d;
    const auto stride = [&](const Side& s) { return inner < 0 ? 0 : s.batch_strides[inner]; };
    Product p{.who = g_.who,
              .shape = {.in = a.dtype,
                        .out = c.dtype,
                        .transpose_a = !b.row_major(),
                        .transpose_b = !a.row_major(),
                        .accumulate = g_.accumulate,
                        .epilogue = epilogue,
                        .m = c.cols,
                        .n = c.rows,
                        .k = a.cols,
                        .batches = inner < 0 ? 1 : batch_[inner],
                        .ld_a = b.leading(),
                        .ld_b = a.leading(),
                        .ld_d = c.leading(),
                        .stride_a = stride(b),
                        .stride_b = stride(a),
                        .stride_d = stride(c)},
              .vector = vector,
              .matrix = matrix};
    const int64_t outer = batch_.numel() / p.shape.batches;
    for (int64_t i = 0; i < outer; ++i) {
      int64_t index = i, at_a = 0, at_b = 0, at_c = 0;
      for (int d = batch_.rank() - 1; d >= 0; --d) {
        if (d == inner) continue;
        const int64_t step = index % batch_[d];
        index /= batch_[d];
        at_a += step * a.batch_strides[d], at_b += step * b.batch_strides[d],
            at_c += step * c.batch_strides[d];
      }
      p.a = b.at(at_b), p.b = a.at(at_a), p.d = c.at(at_c);
      p.set_alignment();
      if (p.shape.k > 0 && run_product(stream, p, workspace)) continue;
      if (!plain(epilogue)) return false;
      run_plain_product(stream, p);
    }
    return true;
  }

  const View& check_rank(const View& v) const {
    check<ShapeError>(v.rank() >= 2 && v.rank() <= g_.c.rank(), "[", g_.who, "] cannot multiply ",
                      g_.a.shape, " and ", g_.b.shape, " into ", g_.c.shape);
    return v;
  }
  bool broadcasts(const View& v) const {
    for (int i = batch_.rank() - 1, j = v.rank() - 3; j >= 0; --i, --j)
      if (v.shape[j] != 1 && v.shape[j] != batch_[i]) return false;
    return true;
  }
  void erase_batch(int d) {
    for (Shape* s : {&batch_, &a_.batch_strides, &b_.batch_strides, &c_.batch_strides}) s->erase(d);
  }
  void merge() {
    for (int d = batch_.rank() - 1; d >= 0; --d)
      if (batch_[d] == 1) erase_batch(d);
    // Consecutive batches that share b are just more rows.
    while (!batch_.empty()) {
      const int last = batch_.rank() - 1;
      if (b_.batch_strides[last] != 0 || a_.batch_strides[last] != a_.rows * a_.row_stride ||
          c_.batch_strides[last] != c_.rows * c_.row_stride || c_.row_stride == 0)
        break;
      a_.rows *= batch_[last], c_.rows *= batch_[last];
      erase_batch(last);
    }
    // Two dimensions are merged if all operands have one stride across both.
    for (int d = batch_.rank() - 2; d >= 0; --d) {
      bool even = true;
      for (const Side* s : {&a_, &b_, &c_})
        even = even && s->batch_strides[d] == batch_[d + 1] * s->batch_strides[d + 1];
      if (!even) continue;
      batch_[d + 1] *= batch_[d];
      erase_batch(d);
    }
  }

  const Gemm& g_;
  Shape batch_;
  Side a_, b_, c_;
  bool has_bias_ = false, swapped_ = false;
};

}  // namespace

View dense_matrix(void* data, const View& v) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < v.rank(); ++i) rows *= v.shape[i];
  return View::dense(data, v.dtype, {rows, v.shape.back()});
}

size_t gemm_workspace(const Gemm& g) {
  const Plan plan(g);
  return g.fp8 && g.a.shape.back() > 0 ? gemm_fp8_workspace(g) : plan.bytes();
}
void gemm(const Stream& stream, const Gemm& g, Workspace workspace) {
  const Plan plan(g);
  g.fp8 && g.a.shape.back() > 0 ? gemm_fp8(stream, g, workspace) : plan.run(stream, workspace);
}
bool gemm_with(const Stream& stream, const Gemm& g, Fused fused, const View& other,
               Workspace workspace) {
  return Plan(g).run_with(stream, fused, other, workspace);
}

}  // namespace sheaf::kernels::cuda
