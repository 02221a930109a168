#include <map>

#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/linear.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/gpu_time.h"
#include "sheaf/tools/bench/probe.h"

namespace sheaf::bench {
namespace {

// y[n, n] = x[n, n] W[n, n]ᵀ as a linear layer computes it, with the algorithm found fastest.
class SquareProduct {
 public:
  SquareProduct(DType dtype, int64_t side, Device device)
      : x_(Array(dtype, {side, side}).on(device)),
        w_(Array(dtype, {side, side}).on(device)),
        y_(Array(dtype, {side, side}).on(device)),
        scratch_(static_cast<size_t>(SHEAF_WORKSPACE(device, linear, x_, w_, View{}, y_)), device) {
    const kernels::cuda::TuneProducts tune;
    run();
  }
  void run() const {
    const Stream stream = RankContext::current().stream(RankContext::current().device);
    SHEAF_ON_DEVICE(stream, linear, x_, w_, View{}, y_, scratch_);
  }

 private:
  Array x_, w_, y_;
  Scratch scratch_;
};

class GpuProbe final : public Probe {
 public:
  GpuProbe(int64_t side, size_t copy_bytes)
      : context_(RankContext::current()),
        device_(context_.device),
        side_(side),
        from_(Array(kF32, {static_cast<int64_t>(copy_bytes / 4)}).on(device_)),
        to_(Array(kF32, {static_cast<int64_t>(copy_bytes / 4)}).on(device_)) {
    product(kBF16);
  }

  std::string_view arithmetic() const override { return "square product"; }
  void run_flops(DType dtype) override { product(dtype).run(); }
  double flops_per_piece(DType) const override {
    const auto n = static_cast<double>(side_);
    return 2 * n * n * n;
  }
  void run_copy(size_t bytes) override {
    Gpu& gpu = RankContext::current().gpu_of(device_);
    const View from = from_, to = to_;
    for (size_t left = bytes / 2; left > 0;) {
      const size_t part = std::min(left, static_cast<size_t>(from.bytes()));
      gpu.copy(gpu.compute(), to.data, from.data, part, Gpu::Copy::on_device);
      left -= part;
    }
  }
  double peak(DType dtype) override {
    double& best = best_of_[dtype];
    if (dtype == kBF16) best = std::max(best, this->best().gflops);
    best = std::max(best, gflops(dtype));
    return best;
  }
  void describe(Machine& machine) override {
    if constexpr (kernels::kHasCuda) {
      GpuMachine m;
      m.name = RankContext::current().gpu_of(device_).name();
      m.multiprocessors = kernels::cuda::multiprocessors(device_.index);
      m.memory = static_cast<int64_t>(kernels::cuda::memory_info().total);
      m.gflops_bf16 = std::max(best().gflops, best_of_[kBF16]);
      m.gflops_f16 = best_of_[kF16];
      m.gflops_f32 = best_of_[kF32];
      m.copy_gbs = best().copy_gbs;
      m.datasheet_gflops = datasheet_gflops(m.name);
      machine.gpu = std::move(m);
    }
  }

 private:
  // After an idle period the clock takes some milliseconds to rise: warm up first.
  PeakReading measure() override {
    for (int warm = 0; warm < 8; ++warm) run_flops(kBF16);
    const size_t bytes = 2 * static_cast<size_t>(from_.view().bytes());
    const double seconds = median_of_five([&] { return gpu_seconds([&] { run_copy(bytes); }); });
    return {gflops(kBF16), static_cast<double>(bytes) / seconds / 1e9};
  }
  double gflops(DType dtype) {
    const SquareProduct& p = product(dtype);
    return flops_per_piece(dtype) / median_of_five([&] { return gpu_seconds([&] { p.run(); }); }) /
           1e9;
  }
  const SquareProduct& product(DType dtype) {
    std::unique_ptr<SquareProduct>& p = products_[dtype];
    if (!p) {
      // Allocate in the probe's own rank context, whichever rank asks first: otherwise the asking rank's memory could not be returned
      // to the GPU.
      const RankScope own(context_);
      p = std::make_unique<SquareProduct>(dtype, side_, device_);
      Gpu& gpu = context_.gpu_of(device_);
      gpu.sync(gpu.compute());
    }
    return *p;
  }

  RankContext& context_;
  const Device device_;
  const int64_t side_;
  const Array from_, to_;
  std::map<DType, std::unique_ptr<SquareProduct>> products_;
  std::map<DType, double> best_of_;
};

}  // namespace

std::unique_ptr<Probe> make_gpu_probe(int64_t side, size_t copy_bytes) {
  return std::make_unique<GpuProbe>(side, copy_bytes);
}

// H100 SXM and H200: 989.4 TFLOP/s ("NVIDIA H100 Tensor Core GPU Architecture", table of peak rates, dense bf16 with f32
// accumulation; the H200's data sheet gives 1,979 with sparsity, twice as much). PCIe cards, NVLink pairs and MIG slices have other
// clocks or fewer units.
double datasheet_gflops(std::string_view name) {
  for (std::string_view other : {"PCIe", "NVL", "MIG"})
    if (name.find(other) != name.npos) return 0;
  for (std::string_view known : {"NVIDIA H100 80GB HBM3", "NVIDIA H200"})
    if (name.starts_with(known)) return 989.4e3;
  return 0;
}

}  // namespace sheaf::bench
