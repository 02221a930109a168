#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <cublasLt.h>
#include <cuda_runtime.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/cublaslt_operation.h"
#include "sheaf/kernels/cuda/idle.h"
#include "sheaf/kernels/cuda/library.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/kernels/cuda/slow_notice.h"

#define SHEAF_CUBLASLT(F)                 \
  F(cublasLtCreate)                       \
  F(cublasLtGetStatusName)                \
  F(cublasLtGetStatusString)              \
  F(cublasLtGetVersion)                   \
  F(cublasLtMatmul)                       \
  F(cublasLtMatmulAlgoCheck)              \
  F(cublasLtMatmulAlgoGetHeuristic)       \
  F(cublasLtMatmulDescCreate)             \
  F(cublasLtMatmulDescDestroy)            \
  F(cublasLtMatmulDescSetAttribute)       \
  F(cublasLtMatmulPreferenceCreate)       \
  F(cublasLtMatmulPreferenceDestroy)      \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatrixLayoutCreate)           \
  F(cublasLtMatrixLayoutDestroy)          \
  F(cublasLtMatrixLayoutSetAttribute)
SHEAF_FORWARD_FUNCTIONS(kCublasLt, SHEAF_CUBLASLT)

namespace sheaf::kernels::cuda {
namespace {

constexpr int kCandidates = 8, kTimedRuns = 3;
// For products that take less than this, several runs are timed together, enqueued while the device is idle: otherwise the host would
// be timed.
constexpr float kShortMilliseconds = 0.1f;
constexpr int kShortRuns = 10;
constexpr std::chrono::microseconds kHeadStart{150};

/// Descriptors of one shape and the algorithm chosen for it.
class Prepared {
 public:
  explicit Prepared(const Product& p)
      : operation_(make_operation(p)),
        a_(p.shape.transpose_a
               ? make_layout(p, p.shape.in, p.shape.k, p.shape.m, p.shape.ld_a, p.shape.stride_a)
               : make_layout(p, p.shape.in, p.shape.m, p.shape.k, p.shape.ld_a, p.shape.stride_a)),
        b_(p.shape.transpose_b
               ? make_layout(p, p.shape.in, p.shape.n, p.shape.k, p.shape.ld_b, p.shape.stride_b)
               : make_layout(p, p.shape.in, p.shape.k, p.shape.n, p.shape.ld_b, p.shape.stride_b)),
        d_(make_layout(p, p.shape.out, p.shape.m, p.shape.n, p.shape.ld_d, p.shape.stride_d)) {}

  /// The best first by cuBLASLt's estimate; none if it does not support the product.
  std::vector<cublasLtMatmulAlgo_t> candidates(cublasLtHandle_t handle, const Product& p) const {
    cublasLtMatmulPreference_t raw = nullptr;
    check_status(cublasLtMatmulPreferenceCreate(&raw), p, "cublasLtMatmulPreferenceCreate");
    const Preference preference(raw, cublasLtMatmulPreferenceDestroy);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, const auto& value) {
      check_status(cublasLtMatmulPreferenceSetAttribute(raw, what, &value, sizeof value), p,
                   "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kProductWorkspace});
    // Partial sums over k are stored separately and added in a second step: in a fixed order, in f32.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    const std::array<uint8_t, 4>& alignment = p.shape.alignment;
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{alignment[0]});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{alignment[1]});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{alignment[2]});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{alignment[2]});
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int count = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, operation_.get(), a_.get(), b_.get(), d_.get(),
                                       d_.get(), raw, kCandidates, found, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
    // Types that an epilogue does not support are invalid values to it.
    if (status == CUBLAS_STATUS_INVALID_VALUE && p.shape.epilogue != Epilogue::none) return {};
    // So, in some versions, are batches of more matrices than a grid's dimension has blocks.
    if (status == CUBLAS_STATUS_INVALID_VALUE && p.shape.batches > 65535) return {};
    // So is FP8 on a GPU without it, or without scales by rows.
    if (p.shape.in == kU8 && passed_over(status)) return {};
    check_status(status, p, "cublasLtMatmulAlgoGetHeuristic");
    std::vector<cublasLtMatmulAlgo_t> out;
    for (int i = 0; i < count; ++i)
      if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= kProductWorkspace)
        out.push_back(found[i].algo);
    return out;
  }

  /// Throws if the algorithm, which may come from a file, is not valid for this product on this device.
  void check_algorithm(cublasLtHandle_t handle, const Product& p,
                       const cublasLtMatmulAlgo_t& algorithm) const {
    cublasLtMatmulHeuristicResult_t result;
    check_status(cublasLtMatmulAlgoCheck(handle, operation_.get(), a_.get(), b_.get(), d_.get(),
                                         d_.get(), &algorithm, &result),
                 p, "cublasLtMatmulAlgoCheck of an imported choice");
    check<CudaError>(result.workspaceSize <= kProductWorkspace, p,
                     ": an imported choice needs more than 32 MiB of workspace");
  }

  void run(cublasLtHandle_t handle, const Stream& stream, const Product& p,
           const cublasLtMatmulAlgo_t& algorithm, void* d, Workspace workspace) {
    check_status(try_run(handle, stream, p, algorithm, d, workspace), p, "cublasLtMatmul");
  }
  cublasStatus_t try_run(cublasLtHandle_t handle, const Stream& stream, const Product& p,
                         const cublasLtMatmulAlgo_t& algorithm, void* d, Workspace workspace) {
    const float one = 1, beta = p.shape.accumulate ? 1.0f : 0.0f;
    const double wide_one = 1, wide_beta = static_cast<double>(beta);
    const bool wide = p.shape.in == kF64;
    const void* const alpha_at = wide ? static_cast<const void*>(&wide_one) : &one;
    const void* const beta_at = wide ? static_cast<const void*>(&wide_beta) : &beta;
    std::lock_guard lock(mutex_);  // the descriptor contains the addresses of scales and the epilogue's memory
    if (p.shape.in == kU8) {
      set(operation_, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.scale_a, p);
      set(operation_, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.scale_b, p);
    }
    if (has_vector(p.shape.epilogue))
      set(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.vector, p);
    if (has_matrix(p.shape.epilogue))
      set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.matrix, p);
    return cublasLtMatmul(handle, operation_.get(), alpha_at, p.a, a_.get(), p.b, b_.get(), beta_at,
                          d, d_.get(), d, d_.get(), &algorithm, workspace.data, kProductWorkspace,
                          static_cast<cudaStream_t>(stream.handle));
  }

  // Written by DeviceProducts alone, before others see it.
  cublasLtMatmulAlgo_t algorithm{};
  bool supported = true, timed = false;
  std::vector<cublasLtMatmulAlgo_t> others;  // to try in this order, if it is refused
  /// Once it has run it is not replaced: another one would give other bits.
  std::atomic<bool> stays = true;

 private:
  std::mutex mutex_;
  Operation operation_;
  MatrixLayout a_, b_, d_;
};

struct Event {
  explicit Event(const Product& p) { check_cuda(cudaEventCreate(&handle), p); }
  ~Event() { cudaEventDestroy(handle); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t handle = nullptr;
};

/// Everything about products that belongs to one device.
class DeviceProducts {
 public:
  explicit DeviceProducts(int device) {
    load_library(SHEAF_SONAME("libcublasLt.so.", CUBLAS_VER_MAJOR), kCublasLt);
    library_ = str("cuBLASLt ", cublasLtGetVersion(), " on ", device_name(device));
  }

  bool is_refused(const ProductShape& shape) const {
    if (shape.in == kU8 && (!kKnowsFp8 || cublasLtGetVersion() < kFirstWithFp8)) return true;
    return choices_.refuses(shape);
  }
  bool run(const Stream& stream, const Product& p, Workspace workspace) {
    check_workspace(p, workspace);
    if (p.shape.in == kU8 && is_refused(p.shape)) return false;
    for (;;) {
      const std::shared_ptr<Prepared> prepared = prepare(stream, p, workspace);
      if (!prepared->supported) {
        tell_of_the_plain_kernel(p);
        return false;
      }
      const cublasStatus_t status =
          prepared->try_run(handle_, stream, p, prepared->algorithm, p.d, workspace);
      if (prepared->stays || !refused(status)) {
        check_status(status, p, "cublasLtMatmul");
        prepared->stays = true;
        return true;
      }
      go_on_after(p, prepared);
    }
  }
  std::string text() const { return choices_.text(library_); }
  int64_t read(std::string_view text) {
    const int64_t count = choices_.read(library_, text);
    std::lock_guard lock(mutex_);
    prepared_.clear();
    return count;
  }

 private:
  std::shared_ptr<Prepared> prepare(const Stream& stream, const Product& p, Workspace workspace) {
    std::lock_guard lock(mutex_);
    if (!handle_) check_status(cublasLtCreate(&handle_), p, "cublasLtCreate");
    std::shared_ptr<Prepared>& known = prepared_[p.shape];
    if (known && (known->timed || !TuneProducts::active())) return known;
    const auto made = std::make_shared<Prepared>(p);
    const std::optional<ProductChoices::Choice> choice = choices_.find(p.shape);
    if (choice && (choice->timed || !TuneProducts::active())) {
      std::memcpy(&made->algorithm, choice->algorithm.data(), sizeof made->algorithm);
      made->supported = choice->supported, made->timed = choice->timed;
      if (made->supported) made->check_algorithm(handle_, p, made->algorithm);
    } else {
      const std::vector<cublasLtMatmulAlgo_t> candidates = made->candidates(handle_, p);
      made->timed = TuneProducts::active();
      std::optional<Timed> best;
      if (!candidates.empty())
        best = made->timed ? fastest(stream, p, *made, candidates, workspace)
                           : by_estimate(candidates);
      if (best && best->milliseconds == 0) {
        made->stays = false;
        made->others.assign(candidates.begin() + 1, candidates.end());
      } else if (best && faster_apart(stream, p, best->milliseconds, workspace))
        best.reset();
      made->supported = best.has_value();
      if (best) made->algorithm = best->algorithm;
      choose(p, *made);
    }
    return known = made;
  }

  /// The algorithm was refused when run: replaces it by the next, or, after the last, by none.
  void go_on_after(const Product& p, const std::shared_ptr<Prepared>& refused) {
    std::lock_guard lock(mutex_);
    std::shared_ptr<Prepared>& known = prepared_[p.shape];
    if (known != refused) return;  // another thread has replaced it
    const auto made = std::make_shared<Prepared>(p);
    made->timed = refused->timed, made->stays = false;
    made->supported = !refused->others.empty();
    if (made->supported) {
      made->algorithm = refused->others.front();
      made->others.assign(refused->others.begin() + 1, refused->others.end());
    }
    choose(p, *made);
    known = made;
  }
  void choose(const Product& p, const Prepared& prepared) {
    ProductChoices::Choice chosen{.supported = prepared.supported, .timed = prepared.timed};
    static_assert(sizeof prepared.algorithm == sizeof chosen.algorithm);
    std::memcpy(chosen.algorithm.data(), &prepared.algorithm, sizeof prepared.algorithm);
    choices_.set(p.shape, chosen);
  }

  static void tell_of_the_plain_kernel(const Product& p) {
    const ProductShape& s = p.shape;
    if ((s.in != kBF16 && s.in != kF16) || !plain(s.epilogue) ||
        s.m * s.n * s.k * s.batches < kWorthANotice)
      return;
    slow_notice(str(p, ": cuBLASLt has no algorithm for it, so a slow kernel computes it"));
  }

  struct Timed {
    cublasLtMatmulAlgo_t algorithm;
    float milliseconds;  // 0: not timed
  };
  static Timed by_estimate(const std::vector<cublasLtMatmulAlgo_t>& candidates) {
    return {candidates.front(), 0};
  }

  /// True if a product without the epilogue and our own kernel would take less: few algorithms support an epilogue, and those that
  /// compute sums may not divide a sum over a long k among blocks.
  bool faster_apart(const Stream& stream, const Product& p, float milliseconds,
                    Workspace workspace) {
    if (plain(p.shape.epilogue)) return false;
    Product apart = p;
    apart.shape.epilogue = without_kernels(p.shape.epilogue);
    if (!has_vector(apart.shape.epilogue)) apart.vector = nullptr, apart.shape.alignment[3] = 16;
    Prepared prepared(apart);
    const std::vector<cublasLtMatmulAlgo_t> candidates = prepared.candidates(handle_, apart);
    if (candidates.empty()) return false;
    const std::optional<Timed> best = fastest(stream, apart, prepared, candidates, workspace);
    return best && best->milliseconds > 0 &&
           best->milliseconds + kernel_milliseconds(stream, p) < milliseconds;
  }
  /// The approximate time of our own kernels that do the epilogue's work: their launches, and their bytes at two thirds of the memory's
  /// bandwidth. A bias's gradient takes two, of which the second adds up the first one's sums in a few blocks, for about as long as a launch.
  static float kernel_milliseconds(const Stream& stream, const Product& p) {
    constexpr float kLaunch = 0.004f, kShare = 2.0f / 3;
    const float launches = sums_rows(p.shape.epilogue) ? 3 : 1;
    int kilohertz = 0, bits = 0;
    const int device = stream.device.index;
    check_cuda(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device), p);
    check_cuda(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device), p);
    const float bytes_per_millisecond =  // two transfers a clock
        2.0f * static_cast<float>(kilohertz) * static_cast<float>(bits) / 8 * kShare;
    // If that is unknown the product does the work: it moves less.
    if (bytes_per_millisecond <= 0) return std::numeric_limits<float>::infinity();
    return launches * kLaunch + static_cast<float>(bytes_of_epilogue(p.shape)) / bytes_per_millisecond;
  }

  /// None if all are refused when run: offered algorithms do not always work.
  std::optional<Timed> fastest(const Stream& stream, const Product& p, Prepared& prepared,
                               const std::vector<cublasLtMatmulAlgo_t>& candidates,
                               Workspace workspace) {
    check_can_be_timed(stream, p);
    const ProductShape& s = p.shape;
    const auto free_after_use = [&stream](void* memory) {  // the fill at least, if every candidate is refused
      cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle));
      cuda::free(memory);
    };
    std::unique_ptr<void, decltype(free_after_use)> trial(nullptr, free_after_use);
    if (s.accumulate) {  // adding several times would corrupt the result
      const int64_t cells = (s.batches - 1) * s.stride_d + (s.n - 1) * s.ld_d + s.m;
      const size_t bytes = static_cast<size_t>(cells) * size_of(s.out);
      try {
        trial.reset(allocate(bytes));
      } catch (const OutOfMemory&) {  // no room to try: use the estimate
        return by_estimate(candidates);
      }
      fill_bytes(stream, trial.get(), 0, bytes);
    }
    void* const d = trial ? trial.get() : p.d;
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    const Event begin(p), end(p);
    const auto time = [&](const cublasLtMatmulAlgo_t& candidate, int runs) {
      if (runs > 1) idle(stream, kHeadStart);
      check_cuda(cudaEventRecord(begin.handle, handle), p);
      for (int n = 0; n < runs; ++n)
        prepared.run(handle_, stream, p, candidate, d, workspace);
      check_cuda(cudaEventRecord(end.handle, handle), p);
      check_cuda(cudaEventSynchronize(end.handle), p);
      float milliseconds = 0;
      check_cuda(cudaEventElapsedTime(&milliseconds, begin.handle, end.handle), p);
      return milliseconds / static_cast<float>(runs);
    };
    std::vector<Timed> timed;
    for (const cublasLtMatmulAlgo_t& candidate : candidates) {
      // Loads its code.
      const cublasStatus_t status = prepared.try_run(handle_, stream, p, candidate, d, workspace);
      if (passed_over(status)) continue;
      check_status(status, p, "cublasLtMatmul");
      timed.push_back({candidate, time(candidate, 1)});
    }
    // In turns: the clock of an idle device rises while they run, and the last ones would look best.
    for (int n = 0; n < kTimedRuns; ++n)
      for (Timed& t : timed)
        t.milliseconds = std::min(t.milliseconds, time(t.algorithm, t.milliseconds < kShortMilliseconds ? kShortRuns : 1));
    const auto best = std::ranges::min_element(timed, {}, &Timed::milliseconds);
    return best == timed.end() ? std::nullopt : std::optional(*best);
  }

  std::string library_;
  ProductChoices choices_;
  mutable std::mutex mutex_;
  cublasLtHandle_t handle_ = nullptr;
  std::unordered_map<ProductShape, std::shared_ptr<Prepared>, ProductShapeHash> prepared_;
};

DeviceProducts& products_of(int device) {
  // Never freed: at exit the driver may be gone before us.
  static auto* const mutex = new std::mutex;
  static auto* const devices = new std::map<int, std::unique_ptr<DeviceProducts>>;
  std::lock_guard lock(*mutex);
  std::unique_ptr<DeviceProducts>& out = (*devices)[device];
  if (!out) out = std::make_unique<DeviceProducts>(device);
  return *out;
}

}  // namespace

bool is_refused(const Stream& stream, const ProductShape& shape) {
  return products_of(stream.device.index).is_refused(shape);
}
bool run_product(const Stream& stream, const Product& product, Workspace workspace) {
  return products_of(stream.device.index).run(stream, product, workspace);
}
std::string export_product_choices(int device) { return products_of(device).text(); }
int64_t import_product_choices(int device, std::string_view text) {
  return products_of(device).read(text);
}

}  // namespace sheaf::kernels::cuda
