#include "sheaf/kernels/cuda/gemm_fp8.h"

#include <algorithm>

#include "sheaf/kernels/cuda/code_loading.h"
#include "sheaf/kernels/cuda/fp8.h"
#include "sheaf/kernels/cuda/gemm.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/cuda/slow_notice.h"
#include "sheaf/kernels/cuda/workspace.h"

namespace sheaf::kernels::cuda {
namespace {

int64_t rows_in(const View& v) { return v.shape.back() ? v.numel() / v.shape.back() : 0; }
size_t code_bytes(const View& v) {
  return line_align(static_cast<size_t>(rows_in(v) * fp8_pitch(v.shape.back())));
}
size_t scale_bytes(const View& v) {
  return line_align(static_cast<size_t>(rows_in(v)) * sizeof(float));
}
bool at_16_bytes(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

/// The workspace is requested before it is known whether cuBLASLt accepts the product, so it suffices for both variants; values need
/// more than codes. The library's part comes first, for the workspace's alignment.
class Fp8Product {
 public:
  explicit Fp8Product(const Gemm& g) : g_(g), rounded_(g, /*keep_columns=*/false), values_(rounded_.product(g)) {}

  size_t bytes() const {
    return line_align(gemm_workspace(values_)) + rounding_bytes() +
           std::max(rounded_.bytes(), of_codes_bytes());
  }

  void run(const Stream& stream, Workspace workspace) {
    if (g_.c.numel() == 0) return;
    Carver carver(g_.who, workspace);
    const size_t bytes = gemm_workspace(values_);
    const Workspace library{carver.take<char>(static_cast<int64_t>(bytes)), bytes};
    const Workspace rounding{carver.take<char>(static_cast<int64_t>(rounding_bytes())),
                             rounding_bytes()};
    const size_t taken = line_align(bytes) + rounding_bytes();
    check<ShapeError>(workspace.bytes >= taken + rounded_.bytes(), "[", g_.who,
                      "] workspace too small: ", workspace.bytes, " bytes");
    rounded_.place(static_cast<char*>(workspace.data) + taken);
    const auto to_values = [&] {
      round_to_fp8(stream, rounded_.from_a, rounded_.a, rounding);
      round_to_fp8(stream, rounded_.from_b, rounded_.b, rounding);
    };
    if (of_codes(stream, carver, library, rounding)) {
      if (!TuneProducts::active()) return;
      const CodeLoading loading;  // another rank's choice, adopted later, may use values
      return to_values();
    }
    tell_of_values();
    to_values();
    gemm(stream, rounded_.product(g_), library);
  }

 private:
  size_t rounding_bytes() const {
    return std::max(round_to_fp8_workspace(rounded_.from_a),
                    round_to_fp8_workspace(rounded_.from_b));
  }
  size_t of_codes_bytes() const {
    size_t bytes = 0;
    for (const View* v : {&rounded_.from_a, &rounded_.from_b})
      bytes += code_bytes(*v) + scale_bytes(*v);
    return bytes;
  }

  /// The number of products of codes: one, or one for each matrix of b along the first dimension of a batch; 0 if
  /// cuBLASLt would not accept those.
  int64_t products() const {
    const View& b = rounded_.from_b;
    int64_t count = 1;
    for (int d = 0; d + 2 < b.rank(); ++d) {
      if (b.shape[d] == 1) continue;
      if (d > 0 || b.rank() != g_.c.rank() || g_.a.rank() != g_.c.rank()) return 0;
      count = b.shape[0];
    }
    // All of a's rows are c's, in order.
    if (rows_in(rounded_.from_a) != rows_in(g_.c)) return 0;
    const View c = matrix_of_c(0, count);
    const int64_t depth = rounded_.from_a.shape.back(), columns = g_.c.shape.back();
    const auto size = static_cast<int64_t>(size_of(g_.c.dtype));
    const bool whole = depth > 0 && columns % 16 == 0 && c.rank() == 2 && c.strides[1] == 1 &&
                       c.strides[0] >= columns && c.strides[0] * size % 16 == 0 &&
                       (count == 1 || (g_.c.strides[0] * size % 16 == 0 && c.shape[0] % 4 == 0)) &&
                       at_16_bytes(c.data);
    // cuBLASLt's biases have 16 bits.
    const bool bias = g_.bias.rank() == 0 ||
                      ((g_.c.dtype == kBF16 || g_.c.dtype == kF16) && g_.bias.dtype == g_.c.dtype &&
                       g_.bias.strides[0] == 1 && at_16_bytes(g_.bias.data));
    return whole && bias && !g_.accumulate && can_round_to_fp8(rounded_.from_a) &&
                   can_round_to_fp8(rounded_.from_b)
               ? count
               : 0;
  }
  View matrix_of_c(int64_t i, int64_t count) const {
    View c = g_.c;
    if (count > 1) {
      c.data = c.as<char>() + i * c.strides[0] * static_cast<int64_t>(size_of(c.dtype));
      c.shape.erase(0), c.strides.erase(0);
    }
    return as_matrix(c);
  }

  void tell_of_values() const {
    const int64_t rows = rows_in(g_.c), columns = g_.c.shape.back(), depth = g_.a.shape.back();
    if (rows * columns * depth < kWorthANotice) return;
    slow_notice(str('[', g_.who, "] product in FP8 ", g_.a.dtype, '[', rows, ',', depth, "] x [",
                    depth, ',', columns, "] into ", g_.c.dtype, g_.bias.rank() ? " with bias" : "",
                    ": cuBLASLt does not take it, so what is rounded is multiplied in ",
                    g_.a.dtype, ", which is slower"));
  }

  /// False if nothing has been stored.
  bool of_codes(const Stream& stream, Carver& carver, Workspace library, Workspace rounding) const {
    const int64_t count = products();
    if (count == 0) return false;
    const View &a = rounded_.from_a, &b = rounded_.from_b;
    auto *const a_codes = carver.take<uint8_t>(static_cast<int64_t>(code_bytes(a))),
               *const b_codes = carver.take<uint8_t>(static_cast<int64_t>(code_bytes(b)));
    auto *const a_scales = carver.take<float>(rows_in(a)),
               *const b_scales = carver.take<float>(rows_in(b));
    const int64_t pitch = fp8_pitch(a.shape.back()), a_rows = rows_in(a) / count,
                  b_rows = rows_in(b) / count;
    for (int64_t i = 0; i < count; ++i) {
      const View c = matrix_of_c(i, count);
      // Row-major c[M, N] is column-major D[N, M], and row-major operands are already transposed.
      Product p{.who = g_.who,
                .shape = {.in = kU8,
                          .out = c.dtype,
                          .transpose_a = true,
                          .epilogue = g_.bias.rank() ? Epilogue::bias : Epilogue::none,
                          .m = b_rows,
                          .n = a_rows,
                          .k = pitch,
                          .ld_a = pitch,
                          .ld_b = pitch,
                          .ld_d = c.strides[0]},
                .a = b_codes + i * b_rows * pitch,
                .b = a_codes + i * a_rows * pitch,
                .d = c.data,
                .vector = g_.bias.rank() ? g_.bias.data : nullptr,
                .scale_a = b_scales + i * b_rows,
                .scale_b = a_scales + i * a_rows};
      p.set_alignment();
      if (i == 0) {
        if (is_refused(stream, p.shape)) return false;
        to_fp8_codes(stream, a, a_codes, a_scales, rounding);
        to_fp8_codes(stream, b, b_codes, b_scales, rounding);
      }
      if (!run_product(stream, p, library)) {
        check<CudaError>(i == 0, p, ": refused after others of the same shape");
        return false;
      }
    }
    return true;
  }

  const Gemm& g_;
  RoundedOperands rounded_;
  Gemm values_;
};

}  // namespace

size_t gemm_fp8_workspace(const Gemm& g) { return Fp8Product(g).bytes(); }
void gemm_fp8(const Stream& stream, const Gemm& g, Workspace workspace) {
  Fp8Product(g).run(stream, workspace);
}

}  // namespace sheaf::kernels::cuda
