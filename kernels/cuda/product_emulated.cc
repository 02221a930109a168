// Products if kernels run on a CPU: the CPU's own, on the emulated GPU's memory, but not with the CPU's bits.
#include <algorithm>
#include <cstring>
#include <vector>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cpu/gemm.h"
#include "sheaf/kernels/cuda/emulation.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/elementwise.h"
#include "sheaf/kernels/fp8.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr const char* kLibrary = "emulated GPU";

ProductChoices& choices() {
  static ProductChoices choices;
  return choices;
}

/// Refuses some products, so that callers are tested with refusals: cuBLASLt itself may refuse misaligned operands.
bool supports(const ProductShape& s) {
  if (s.in == kU8 && s.k == 48) return false;  // it is not documented which FP8 products it has
  return s.alignment[0] == 16 && s.alignment[1] == 16 && s.alignment[2] == 16;
}

void multiply(const Gemm& gemm) {
  struct alignas(128) Line {
    char bytes[128];
  };
  std::vector<Line> scratch(cpu::gemm_workspace(gemm) / sizeof(Line) + 1);
  cpu::gemm(gemm, {scratch.data(), scratch.size() * sizeof(Line)});
}

/// The indices from `begin` on of one dimension, `count` of them.
View part_of(View v, int dim, int64_t begin, int64_t count) {
  v.data = v.as<char>() + begin * v.strides[dim] * static_cast<int64_t>(size_of(v.dtype));
  v.shape[dim] = count;
  return v;
}

/// cuBLASLt adds in an order that depends on the shape and on the algorithm chosen for it. So does this, by computing some sums in
/// two parts, so that no code can rely on a fixed order.
bool in_two_parts(const ProductShape& s, const ProductChoices::Choice& choice) {
  const bool odd = (ProductShapeHash()(s) >> 20 ^ choice.algorithm[0]) & 1;
  return odd && s.k > 1;
}

void multiply(const Gemm& g, bool two_parts) {
  if (!two_parts) return multiply(g);
  if (g.c.dtype == kBF16 || g.c.dtype == kF16) {  // whose sums are f32, rounded once
    std::vector<float> sums(static_cast<size_t>(g.c.numel())),
        bias(static_cast<size_t>(g.bias.numel()));
    Gemm wide = g;
    wide.c = View::dense(sums.data(), kF32, g.c.shape);
    if (g.bias.rank() != 0) {
      wide.bias = View::dense(bias.data(), kF32, g.bias.shape);
      cpu::copy(g.bias, wide.bias);
    }
    multiply(wide, true);
    return cpu::copy(wide.c, g.c);
  }
  const int64_t k = g.b.shape[1], half = (k + 1) / 2;
  multiply({g.who, part_of(g.a, 2, 0, half), part_of(g.b, 1, 0, half), g.c, g.bias, g.accumulate});
  multiply(
      {g.who, part_of(g.a, 2, half, k - half), part_of(g.b, 1, half, k - half), g.c, {}, true});
}

/// sums[.., rows] = the sum of each row of x[.., rows, k]: its product with ones.
void sum_rows(const View& x, void* sums, DType dtype) {
  const int64_t rows = x.shape[1], k = x.shape[2];
  std::vector<char> memory(static_cast<size_t>(k) * size_of(x.dtype));
  const View ones = View::dense(memory.data(), x.dtype, {1, k, 1});
  visit_floating("sums", x.dtype, [&]<class T>() { std::fill_n(ones.as<T>(), k, T(1)); });
  multiply({"sums", x, ones, View::dense(sums, dtype, {1, rows, 1}), {}});
}

/// The values of E4M3 codes [rows, k] with a scale per row, as f32.
View values_of(const void* codes, const float* scales, int64_t rows, int64_t k, int64_t ld,
               std::vector<float>& memory) {
  memory.resize(static_cast<size_t>(rows * k));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < k; ++i)
      memory[static_cast<size_t>(r * k + i)] =
          fp8_value(static_cast<const uint8_t*>(codes)[r * ld + i]) * scales[r];
  return View::dense(memory.data(), kF32, {1, rows, k});
}

/// f32 sums, rounded once where D is narrow.
void multiply_codes(const Product& p) {
  const ProductShape& s = p.shape;
  std::vector<float> a_memory, b_memory, sums(static_cast<size_t>(s.n * s.m));
  const View a = values_of(p.a, p.scale_a, s.m, s.k, s.ld_a, a_memory),
             b = values_of(p.b, p.scale_b, s.n, s.k, s.ld_b, b_memory),
             c = View::dense(sums.data(), kF32, {1, s.n, s.m}),
             d{p.d, s.out, {1, s.n, s.m}, {0, s.ld_d, 1}};
  multiply({p.who, b, transposed(a), c, {}});
  if (s.epilogue == Epilogue::bias)
    visit_floating("bias", s.out, [&]<class T>() {
      for (int64_t i = 0; i < s.n * s.m; ++i)
        sums[static_cast<size_t>(i)] +=
            static_cast<float>(static_cast<const T*>(p.vector)[i % s.m]);
    });
  cpu::copy(c, d);
}

}  // namespace

bool is_refused(const Stream&, const ProductShape& shape) { return choices().refuses(shape); }

bool run_product(const Stream& stream, const Product& product, Workspace workspace) {
  const ProductShape s = product.shape;
  ProductChoices::Choice choice =
      choices().find(s).value_or(ProductChoices::Choice{{1}, supports(s), false});
  if (TuneProducts::active() && !choice.timed) {
    check_can_be_timed(stream, product);
    choice.algorithm[0] += 1, choice.timed = true;  // as if the second candidate were the fastest
  }
  choices().set(s, choice);
  if (!choice.supported) return false;
  check_workspace(product, workspace);
  check<ShapeError>(!has_vector(s.epilogue) || s.alignment[3] == 16, product,
                    ": its vector is not at 16 bytes");  // cuBLASLt would not report it
  if (s.in == kU8) {
    check<ShapeError>(s.transpose_a && !s.transpose_b && !s.accumulate && plain(s.epilogue) &&
                          s.batches == 1 && s.k % 16 == 0 && s.m % 16 == 0 &&
                          (s.epilogue == Epilogue::none || s.out == kBF16 || s.out == kF16),
                      product, ": cuBLASLt has no such product of FP8");
    emulation::enqueue(stream, [=] {
      std::memset(workspace.data, 0xff, 4096);
      multiply_codes(product);
    });
    return true;
  }
  // Column-major D = op(A) op(B) is row-major Dᵀ = op(B)ᵀ op(A)ᵀ.
  const auto operand = [&](const void* data, DType dtype, bool transpose, int64_t ld,
                           int64_t stride, const Shape& shape) {
    return View{const_cast<void*>(data),
                dtype,
                {s.batches, shape[0], shape[1]},
                transpose ? Shape{stride, 1, ld} : Shape{stride, ld, 1}};
  };
  const View a = operand(product.a, s.in, s.transpose_a, s.ld_a, s.stride_a, {s.k, s.m}),
             b = operand(product.b, s.in, s.transpose_b, s.ld_b, s.stride_b, {s.n, s.k}),
             d = operand(product.d, s.out, false, s.ld_d, s.stride_d, {s.n, s.m}),
             matrix{product.matrix, s.out, d.shape, d.strides},
             bias = s.epilogue == Epilogue::bias || s.epilogue == Epilogue::bias_gelu
                        ? View::dense(product.vector, s.out, {s.m})
                        : View{};
  check<ShapeError>(plain(s.epilogue) || s.batches == 1, product, ": many batches");
  emulation::enqueue(stream, [=, who = product.who, sums = product.vector] {
    std::memset(workspace.data, 0xff, 4096);  // it is ours to use; all of it would take long
    const bool gelu = s.epilogue == Epilogue::gelu || s.epilogue == Epilogue::bias_gelu;
    multiply({who, b, a, gelu ? matrix : d, bias, s.accumulate}, in_two_parts(s, choice));
    if (gelu) cpu::unary(UnaryOp::gelu_tanh, matrix, d);
    if (s.epilogue == Epilogue::gelu_gradient) cpu::activation_backward(BackwardOp::gelu_tanh, matrix, d, d);
    if (s.epilogue == Epilogue::sums_of_a) sum_rows(transposed(a), sums, s.out);
    if (s.epilogue == Epilogue::sums_of_b) sum_rows(b, sums, s.out);
  });
  return true;
}

std::string export_product_choices(int) { return choices().text(kLibrary); }
int64_t import_product_choices(int, std::string_view text) {
  return choices().read(kLibrary, text);
}

}  // namespace sheaf::kernels::cuda
