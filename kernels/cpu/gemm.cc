#include "sheaf/kernels/cpu/gemm.h"

#include <algorithm>

#include "sheaf/kernels/cpu/onednn.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/cpu/tile_gemm.h"

namespace sheaf::kernels::cpu {
namespace {

/// One matrix of an operand, and how to step from batch to batch.
struct Side {
  char* data;
  DType dtype;
  int64_t rows, cols, row_stride, col_stride;
  Shape batch_strides;

  Side(const View& v, const Shape& batch)
      : data(v.as<char>()),
        dtype(v.dtype),
        rows(v.shape.dim(-2)),
        cols(v.shape.dim(-1)),
        row_stride(v.strides.dim(-2)),
        col_stride(v.strides.dim(-1)),
        batch_strides(Shape::filled(batch.rank(), 0)) {
    for (int i = batch.rank() - 1, j = v.rank() - 3; j >= 0; --i, --j)
      batch_strides[i] = v.shape[j] == 1 ? 0 : v.strides[j];
  }
  int64_t numel() const { return rows * cols; }
  bool row_major() const {
    return (col_stride == 1 || cols == 1) && (row_stride >= cols || rows == 1);
  }
  bool col_major() const {
    return (row_stride == 1 || rows == 1) && (col_stride >= rows || cols == 1);
  }
  MatrixLayout layout() const { return {rows, cols, row_stride, col_stride, dtype}; }
  MatrixLayout dense(DType d) const { return {rows, cols, cols, 1, d}; }
  char* at(int64_t index, const Shape& batch) const {
    int64_t offset = 0;
    for (int i = batch.rank() - 1; i >= 0; --i)
      offset += index % batch[i] * batch_strides[i], index /= batch[i];
    return data + offset * static_cast<int64_t>(size_of(dtype));
  }
};

/// A product as oneDNN or the f64 loop gets it.
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
    // Batches that share b and lie behind one another are more rows.
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

/// Copies a matrix between any strides, converting between the floating types other than f64.
void copy_matrix(const void* from, const MatrixLayout& f, void* to, const MatrixLayout& t) {
  visit_floating("matmul", f.dtype, [&]<class From>() {
    visit_floating("matmul", t.dtype, [&]<class To>() {
      for (int64_t i = 0; i < f.rows; ++i)
        for (int64_t j = 0; j < f.cols; ++j) {
          const auto x = static_cast<const From*>(from)[i * f.row_stride + j * f.col_stride];
          static_cast<To*>(to)[i * t.row_stride + j * t.col_stride] =
              To(static_cast<ComputeType<To>>(static_cast<ComputeType<From>>(x)));
        }
    });
  });
}

/// Operands that oneDNN cannot take as they lie are copied; f16, and bf16 on machines without it,
/// multiply as f32.
struct OneDnnPlan {
  const Problem& p;
  ProductSpec spec;
  bool copy_a, copy_b, copy_c, copy_bias;
  int64_t slots = 1;
  size_t a_bytes = 0, b_bytes = 0, c_bytes = 0, bias_bytes = 0, bytes_per_slot = 0;
  std::shared_ptr<const Product> kernel;

  explicit OneDnnPlan(const Problem& problem) : p(problem) {
    // oneDNN 2.6.3 on AMX: a depth of 63 gives an illegal instruction or wrong sums, no other does.
    const bool broken = p.depth == 63;
    const DType in = p.a.dtype == kBF16 && has_bf16_products() && !broken ? kBF16 : kF32;
    copy_a = p.a.dtype != in || !(p.a.row_major() || p.a.col_major());
    copy_b = p.b.dtype != in || !(p.b.row_major() || p.b.col_major());
    copy_c = !p.c.row_major() || (p.c.dtype != in && p.c.dtype != kF32);
    spec.a = copy_a ? p.a.dense(in) : p.a.layout();
    spec.b = copy_b ? p.b.dense(in) : p.b.layout();
    spec.c = copy_c ? p.c.dense(p.c.dtype == kF32 ? kF32 : in) : p.c.layout();
    spec.bias = p.g.bias.rank() == 1;
    copy_bias = spec.bias && p.g.bias.dtype != in && p.g.bias.dtype != kF32;
    spec.bias_dtype = copy_bias ? kF32 : p.g.bias.dtype;
    spec.accumulate = p.g.accumulate;
    // Small matrices go one to a thread; large ones are cut among the threads.
    const int threads = num_threads();
    constexpr double kSmall = 4e6;
    if (p.batches > 1 && (p.flops < kSmall || p.batches >= 4 * threads)) {
      slots = slot_count(p.batches, static_cast<int64_t>(1 + 1e5 / std::max(p.flops, 1.0)));
    } else {
      spec.threads = threads;
    }
    spec.pack = p.batches == 1 && packing_pays(spec);
    kernel = product(spec);
    if (copy_a) a_bytes = line_align(static_cast<size_t>(p.a.numel()) * size_of(in));
    if (copy_b) b_bytes = line_align(static_cast<size_t>(p.b.numel()) * size_of(in));
    if (copy_c) c_bytes = line_align(static_cast<size_t>(p.c.numel()) * size_of(spec.c.dtype));
    if (copy_bias) bias_bytes = line_align(static_cast<size_t>(p.cols) * size_of(kF32));
    bytes_per_slot = a_bytes + b_bytes + c_bytes + kernel->workspace();
  }

  size_t bytes() const { return bias_bytes + bytes_per_slot * static_cast<size_t>(slots); }

  void run(Workspace workspace) const {
    check<ShapeError>(workspace.bytes >= bytes(), "[", p.g.who,
                      "] workspace too small: ", workspace.bytes, " bytes");
    char* slot_memory = static_cast<char*>(workspace.data) + bias_bytes;
    const void* bias = spec.bias ? p.g.bias.data : nullptr;
    if (copy_bias) {
      const MatrixLayout from{1, p.cols, p.cols, p.g.bias.strides[0], p.g.bias.dtype},
          to{1, p.cols, p.cols, 1, kF32};
      copy_matrix(bias, from, workspace.data, to);
      bias = workspace.data;
    }
    parallel_slots(p.batches, slots, [&](int64_t slot, int64_t begin, int64_t end) {
      char* scratch = slot_memory + static_cast<size_t>(slot) * bytes_per_slot;
      for (int64_t i = begin; i < end; ++i) {
        char *a = p.a.at(i, p.batch), *b = p.b.at(i, p.batch), *c = p.c.at(i, p.batch), *c_home = c;
        if (copy_a) copy_matrix(a, p.a.layout(), scratch, spec.a), a = scratch;
        if (copy_b) copy_matrix(b, p.b.layout(), scratch + a_bytes, spec.b), b = scratch + a_bytes;
        if (copy_c) c = scratch + a_bytes + b_bytes;
        if (copy_c && spec.accumulate) copy_matrix(c_home, p.c.layout(), c, spec.c);
        kernel->run(a, b, bias, c, scratch + a_bytes + b_bytes + c_bytes);
        if (copy_c) copy_matrix(c, spec.c, c_home, p.c.layout());
      }
    });
  }

 private:
  /// oneDNN reads a row-major f32 b where it lies, 64 columns of every row at a time. Long rows
  /// cost it a page per row, and rows a multiple of 4096 bytes apart fall into the same cache sets.
  /// Measured: packing costs as much as about 45 rows of the product and saves 60 % with such rows,
  /// 30 % with long ones, 15 % otherwise. The bits are the same.
  static bool packing_pays(const ProductSpec& s) {
    if (s.b.dtype != kF32 || s.b.col_stride != 1 || s.b.cols < 64 || s.b.rows < 64) return false;
    if (s.b.row_stride % 1024 == 0) return s.a.rows >= 96;
    return s.b.row_stride >= 2048 ? s.a.rows >= 192
                                  : s.b.rows * s.b.cols >= 1 << 20 && s.a.rows >= 512;
  }
};

/// f64: panels of 64 columns, each copied once and multiplied in register tiles.
struct DoublePlan {
  static constexpr int64_t kPanel = 64, kStrip = 64;
  const Problem& p;
  int64_t panels, items, slots;

  explicit DoublePlan(const Problem& problem) : p(problem) {
    panels = (p.cols + kPanel - 1) / kPanel;
    items = p.batches * panels;
    slots = slot_count(items, static_cast<int64_t>(
                                  1 + 2e5 / std::max(p.flops / static_cast<double>(panels), 1.0)));
  }
  size_t bytes_per_slot() const {
    return static_cast<size_t>((p.depth + kStrip) * kPanel) * sizeof(double);
  }

  void run(Workspace workspace) const {
    check<ShapeError>(workspace.bytes >= bytes_per_slot() * static_cast<size_t>(slots), "[",
                      p.g.who, "] workspace too small: ", workspace.bytes, " bytes");
    parallel_slots(items, slots, [&](int64_t slot, int64_t begin, int64_t end) {
      double* panel = static_cast<double*>(workspace.data) + slot * (p.depth + kStrip) * kPanel;
      double* strip = panel + p.depth * kPanel;
      for (int64_t item = begin; item < end; ++item) {
        const int64_t index = item / panels, first = item % panels * kPanel,
                      width = std::min(kPanel, p.cols - first);
        const double* a = reinterpret_cast<const double*>(p.a.at(index, p.batch));
        const double* b =
            reinterpret_cast<const double*>(p.b.at(index, p.batch)) + first * p.b.col_stride;
        double* c = reinterpret_cast<double*>(p.c.at(index, p.batch)) + first * p.c.col_stride;
        const double* bias =
            p.g.bias.rank() == 1 ? p.g.bias.as<double>() + first * p.g.bias.strides[0] : nullptr;
        const int64_t padded = (width + kLanes - 1) / kLanes * kLanes;
        for (int64_t k = 0; k < p.depth; ++k)
          for (int64_t j = 0; j < padded; ++j)
            panel[k * kPanel + j] = j < width ? b[k * p.b.row_stride + j * p.b.col_stride] : 0.0;
        for (int64_t row = 0; row < p.rows; row += kStrip) {
          const int64_t height = std::min(kStrip, p.rows - row);
          tile_gemm<double>(height, padded, p.depth, a + row * p.a.row_stride, p.a.row_stride,
                            p.a.col_stride, panel, kPanel, strip, kPanel, false);
          for (int64_t i = 0; i < height; ++i)
            for (int64_t j = 0; j < width; ++j) {
              double& out = c[(row + i) * p.c.row_stride + j * p.c.col_stride];
              const double x = strip[i * kPanel + j] + (bias ? bias[j * p.g.bias.strides[0]] : 0.0);
              out = p.g.accumulate ? out + x : x;
            }
        }
      }
    });
  }
};

/// K = 0: the bias or zero.
void fill_without_product(const Problem& p) {
  if (p.g.accumulate) return;
  visit_floating(p.g.who, p.c.dtype, [&]<class T>() {
    for (int64_t index = 0; index < p.batches; ++index) {
      T* c = reinterpret_cast<T*>(p.c.at(index, p.batch));
      for (int64_t i = 0; i < p.rows; ++i)
        for (int64_t j = 0; j < p.cols; ++j)
          c[i * p.c.row_stride + j * p.c.col_stride] =
              p.g.bias.rank() == 1 ? p.g.bias.as<T>()[j * p.g.bias.strides[0]] : T(0.0f);
    }
  });
}

}  // namespace

View transposed(View v) {
  const int n = v.rank();
  std::swap(v.shape[n - 1], v.shape[n - 2]);
  std::swap(v.strides[n - 1], v.strides[n - 2]);
  return v;
}

View as_matrix(const View& v) {
  int64_t rows = 1, stride = 0;
  for (int i = v.rank() - 2; i >= 0; --i) {
    if (v.shape[i] == 1) continue;
    if (rows == 1) {
      stride = v.strides[i];
    } else if (v.strides[i] != rows * stride && v.numel() != 0) {
      return {};
    }
    rows *= v.shape[i];
  }
  if (rows == 1) stride = v.shape.back();
  return {v.data, v.dtype, Shape{rows, v.shape.back()}, Shape{stride, v.strides.back()}};
}

size_t gemm_workspace(const Gemm& g) {
  const Problem p(g);
  if (p.empty() || p.depth == 0) return 0;
  if (p.a.dtype == kF64) {
    const DoublePlan plan(p);
    return plan.bytes_per_slot() * static_cast<size_t>(plan.slots);
  }
  return OneDnnPlan(p).bytes();
}

void gemm(const Gemm& g, Workspace workspace) {
  const Problem p(g);
  if (p.empty()) return;
  if (p.depth == 0) return fill_without_product(p);
  if (p.a.dtype == kF64) return DoublePlan(p).run(workspace);
  OneDnnPlan(p).run(workspace);
}

}  // namespace sheaf::kernels::cpu
