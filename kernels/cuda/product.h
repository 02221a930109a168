// One matrix product in cuBLASLt's terms: column-major, strided batches, with optional additional work (an epilogue). gemm.h
// expresses the same in views.
//
// cuBLASLt has several algorithms for a product. The choice is made once for every ProductShape and device, by cuBLASLt's heuristics
// or, under TuneProducts, by timing, and then stays: the same process computes the same bits at every call. An algorithm chosen by
// estimate that is refused at the first call is replaced by the next. Algorithms whose results depend on the order in which blocks
// finish are never chosen.
#pragma once

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "sheaf/core/device.h"
#include "sheaf/core/dtype.h"

namespace sheaf::kernels::cuda {

/// A product's additional work, with a vector or a matrix of D's dtype. A matrix is stored like D, in columns of a multiple of 8
/// elements, 16-byte aligned.
enum class Epilogue : uint8_t {
  none,
  bias,           ///< adds vector[m] to each column of D
  sums_of_a,      ///< stores vector[m] = op(A) summed over k: the gradient of a bias
  sums_of_b,      ///< stores vector[n] = op(B) summed over k
  gelu,           ///< stores the product in the matrix, its gelu (tanh form) in D
  bias_gelu,      ///< the same with vector[m] added first
  gelu_gradient,  ///< D = the product * gelu'(matrix)
};
/// The epilogues of run_plain_product; the others take only one batch.
constexpr bool plain(Epilogue e) { return e == Epilogue::none || e == Epilogue::bias; }
constexpr bool sums_rows(Epilogue e) {
  return e == Epilogue::sums_of_a || e == Epilogue::sums_of_b;
}
constexpr bool has_vector(Epilogue e) {
  return e == Epilogue::bias || e == Epilogue::bias_gelu || sums_rows(e);
}
constexpr bool has_matrix(Epilogue e) { return e >= Epilogue::gelu; }
/// The product's epilogue if our own kernels do the rest.
constexpr Epilogue without_kernels(Epilogue e) {
  return e == Epilogue::bias_gelu ? Epilogue::bias : plain(e) ? e : Epilogue::none;
}

/// An algorithm is chosen for each of these: D[m, n] = op(A)[m, k] op(B)[k, n] (+ bias[m]) (+ D), once for
/// each of `batches` (see Epilogue). Strides in elements.
struct ProductShape {
  DType in = kF32, out = kF32;  ///< in: u8 for E4M3 codes, of A transposed and B not
  bool transpose_a = false, transpose_b = false, accumulate = false;
  Epilogue epilogue = Epilogue::none;
  /// Alignment of A, B, D and the vector, in bytes: a power of two, at most 16. More would not help, and would make
  /// the choice depend on the addresses of memory.
  std::array<uint8_t, 4> alignment{16, 16, 16, 16};
  int64_t m = 0, n = 0, k = 0, batches = 1;
  int64_t ld_a = 0, ld_b = 0, ld_d = 0, stride_a = 0, stride_b = 0, stride_d = 0;

  bool operator==(const ProductShape&) const = default;
  /// One line of words, as in the text of choices.
  std::string to_string() const;
  /// Reads to_string() back; nothing if it is not one.
  static std::optional<ProductShape> parse(std::string_view text);
};
struct ProductShapeHash {
  size_t operator()(const ProductShape& s) const;
};

struct Product {
  const char* who = "";
  ProductShape shape;
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  void* vector = nullptr;  ///< of the epilogue
  void* matrix = nullptr;
  const float* scale_a = nullptr;  ///< of E4M3 codes: [m], of the rows of op(A)
  const float* scale_b = nullptr;  ///< [n], of the columns of op(B)

  /// Derives shape.alignment from the pointers and strides.
  void set_alignment();
  /// "bf16[n,k] x [k,m] into f32", in the order of the op's views.
  std::string to_string() const;
};

/// Bytes of scratch memory that run_product needs: NVIDIA's advice for Hopper.
constexpr size_t kProductWorkspace = size_t{32} << 20;
/// And its alignment in bytes.
constexpr size_t kProductWorkspaceAlignment = 256;
/// True if run_product() is known to return false for it, so that nothing needs to be prepared.
bool is_refused(const Stream& stream, const ProductShape& shape);
/// Enqueues the product. False if the library has no algorithm for it with this epilogue, or none faster than a product without it
/// plus a kernel for the rest; then D is undefined. If a large product of bf16 or f16 is left to run_plain_product, a line on stderr
/// says so.
bool run_product(const Stream& stream, const Product& product, Workspace workspace);
/// The same, for plain() epilogues, by our own kernel: any strides, alignment and depth, and slow. Terms are added in the order of k.
void run_plain_product(const Stream& stream, const Product& product);

/// While one lives, products of this thread whose algorithm was not yet chosen by timing are timed with the first
/// few candidates when they run: a training step under it tunes its products, and whether they use an epilogue or
/// leave its work to a kernel after them. The host waits for the GPU; not allowed while a graph is captured.
/// Products that add to their result allocate memory for the trials; if there is none left they keep cuBLASLt's
/// first candidate.
class TuneProducts {
 public:
  TuneProducts() { ++depth_; }
  ~TuneProducts() { --depth_; }
  TuneProducts(const TuneProducts&) = delete;
  TuneProducts& operator=(const TuneProducts&) = delete;
  static bool active() { return depth_ > 0; }

 private:
  static inline thread_local int depth_ = 0;
};

/// Throws ShapeError unless it is what run_product needs: cuBLASLt does not check its alignment.
void check_workspace(const Product& product, Workspace workspace);

/// Bytes that a kernel reads and writes if it does an epilogue's work after the product.
int64_t bytes_of_epilogue(const ProductShape& shape);

/// Throws CudaError while `stream` is captured.
void check_can_be_timed(const Stream& stream, const Product& product);

/// The choices made so far for a device, as text, so that all ranks and a resumed run compute with
/// the same algorithms. First line: "sheaf products 1 <library, its version, device>". Then one line per choice,
/// sorted: the words of ProductShape::to_string, ":" and 128 hexadecimal digits, cuBLASLt's own description, or
/// "plain" for a product that it has no algorithm for, or a slow one.
std::string export_product_choices(int device);
/// Adopts choices, which then count as timed. Returns how many: 0 for text of another library,
/// version or kind of device, whose choices would mean something else. Throws DataError for text
/// that is damaged. Choices the library then refuses are a CudaError when they are used.
int64_t import_product_choices(int device, std::string_view text);

/// The choices of one device, by shape. Thread-safe.
class ProductChoices {
 public:
  struct Choice {
    std::array<uint64_t, 8> algorithm{};
    bool supported = true;  ///< by the library
    bool timed = false;
  };
  std::optional<Choice> find(const ProductShape& shape) const;
  /// Whether is_refused(): known to be unsupported, and not to be timed now.
  bool refuses(const ProductShape& shape) const;
  void set(const ProductShape& shape, const Choice& choice);
  std::string text(const std::string& library) const;
  int64_t read(const std::string& library, std::string_view text);

 private:
  mutable std::mutex mutex_;
  std::unordered_map<ProductShape, Choice, ProductShapeHash> choices_;
};

}  // namespace sheaf::kernels::cuda
