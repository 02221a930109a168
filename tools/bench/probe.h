// Probe: the peak performance of this machine, measured in the same run as the benchmarks: its fastest arithmetic, and copies larger
// than the caches. A reading well below the run's best means that something else is using the machine.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "sheaf/core/dtype.h"

namespace sheaf::bench {

/// A GPU, and the best readings of the run.
struct GpuMachine {
  std::string name;  ///< as reported by the driver
  int multiprocessors = 0;
  int64_t memory = 0;                                      ///< bytes
  double gflops_bf16 = 0, gflops_f16 = 0, gflops_f32 = 0;  ///< large square products; 0: not measured
  double copy_gbs = 0;                                     ///< read + written
  double datasheet_gflops = 0;                             ///< see datasheet_gflops(); 0: unknown
};

/// The processor's features that the kernel allows.
struct Machine {
  std::string cpu;      ///< as in /proc/cpuinfo
  int model = 0;        ///< model number within its family
  bool avx512 = false;  ///< AVX-512F
  std::string bf16;     ///< the bf16 instructions: "AMX", "AVX512_BF16", or none
  int threads = 1;      ///< compute threads of this rank
  /// Best readings of the run; 0 if the run was on a GPU.
  double fma_gflops = 0, copy_gbs = 0, bf16_gflops = 0;
  std::optional<GpuMachine> gpu;  ///< the GPU of the run
};
Machine this_machine();

struct PeakReading {
  double gflops = 0, copy_gbs = 0;
};

class Probe {
 public:
  virtual ~Probe() = default;

  /// One reading of both peaks: the median of five pieces of each. The best reading is kept.
  PeakReading read() {
    const PeakReading r = measure();
    best_ = {std::max(best_.gflops, r.gflops), std::max(best_.copy_gbs, r.copy_gbs)};
    return r;
  }
  const PeakReading& best() const { return best_; }

  /// The work of run_flops: "FMA peak", "square product".
  virtual std::string_view arithmetic() const = 0;
  /// One measured piece of arithmetic at full speed: flops_per_piece() floating-point operations. On a GPU in `dtype`; on a CPU
  /// always f32 multiply-adds.
  virtual void run_flops(DType dtype) = 0;
  virtual double flops_per_piece(DType dtype) const = 0;
  /// Copies until `bytes` bytes have been read or written.
  virtual void run_copy(size_t bytes) = 0;
  /// The highest rate at which this machine multiplies `dtype`, in GFLOP/s, by the readings so far.
  virtual double peak(DType dtype) = 0;
  /// Writes the best readings to `machine`.
  virtual void describe(Machine& machine) = 0;

 private:
  virtual PeakReading measure() = 0;
  PeakReading best_;
};

/// Uses all threads of the calling rank. `unit_seconds`: approximate duration of one measured piece. `copy_bytes`: size of each of
/// the two buffers copied between. Calibrates immediately.
std::unique_ptr<Probe> make_cpu_probe(double unit_seconds, size_t copy_bytes);
/// The GPU of the calling rank, with memory allocated by it. The arithmetic is products [side, side] x [side, side]. run_* enqueue on
/// the calling rank's stream.
std::unique_ptr<Probe> make_gpu_probe(int64_t side, size_t copy_bytes);

/// The dense bf16 peak in GFLOP/s according to the data sheet of a GPU of this name; 0 for unknown names.
double datasheet_gflops(std::string_view name);

/// Seconds since a fixed moment, the same for all processes of this machine.
double now();
/// The median of five calls of `seconds_of_piece`.
template <class F>
double median_of_five(F&& seconds_of_piece) {
  double seconds[5];
  for (double& s : seconds) s = seconds_of_piece();
  std::nth_element(seconds, seconds + 2, seconds + 5);
  return seconds[2];
}

}  // namespace sheaf::bench
