// Probe: what this machine can do at most, measured on the machine itself in the same run as what is compared with
// it: arithmetic at its fastest, and copies past the caches. A reading well below the run's best means that something
// else is using the machine.
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
  std::string name;  ///< as the driver gives it
  int multiprocessors = 0;
  int64_t memory = 0;                                      ///< bytes
  double gflops_bf16 = 0, gflops_f16 = 0, gflops_f32 = 0;  ///< large square products; 0: not asked
  double copy_gbs = 0;                                     ///< read + written
  double datasheet_gflops = 0;                             ///< see datasheet_gflops(); 0: not known
};

/// What the processor has and the kernel allows.
struct Machine {
  std::string cpu;      ///< as /proc/cpuinfo names it
  int model = 0;        ///< model number within its family
  bool avx512 = false;  ///< AVX-512F
  std::string bf16;     ///< what multiplies bf16: "AMX", "AVX512_BF16", or nothing of its own
  int threads = 1;      ///< compute threads of this rank
  /// Best readings of the run; 0 if the run was on a GPU.
  double fma_gflops = 0, copy_gbs = 0, bf16_gflops = 0;
  std::optional<GpuMachine> gpu;  ///< which the run was on
};
Machine this_machine();

struct PeakReading {
  double gflops = 0, copy_gbs = 0;
};

class Probe {
 public:
  virtual ~Probe() = default;

  /// One reading of both peaks: the median of five pieces of each. The best so far is kept.
  PeakReading read() {
    const PeakReading r = measure();
    best_ = {std::max(best_.gflops, r.gflops), std::max(best_.copy_gbs, r.copy_gbs)};
    return r;
  }
  const PeakReading& best() const { return best_; }

  /// What run_flops does: "FMA peak", "square product".
  virtual std::string_view arithmetic() const = 0;
  /// One piece of arithmetic as fast as possible: flops_per_piece() floating-point operations. On a GPU, of that
  /// dtype; a CPU's are multiply-adds in f32, whatever is asked for.
  virtual void run_flops(DType dtype) = 0;
  virtual double flops_per_piece(DType dtype) const = 0;
  /// Copies until `bytes` bytes were read or written.
  virtual void run_copy(size_t bytes) = 0;
  /// The fastest rate at which this machine multiplies `dtype`, in GFLOP/s, by the readings so far.
  virtual double peak(DType dtype) = 0;
  /// Writes the best readings to `machine`.
  virtual void describe(Machine& machine) = 0;

 private:
  virtual PeakReading measure() = 0;
  PeakReading best_;
};

/// All threads of the calling rank. `unit_seconds`: about how long one measured piece takes.
/// `copy_bytes`: size of each of the two buffers copied between. Calibrates at once.
std::unique_ptr<Probe> make_cpu_probe(double unit_seconds, size_t copy_bytes);
/// The GPU of the calling rank, with memory from it. The arithmetic is products [side, side] x [side, side]. What
/// run_* enqueue is on the stream of the calling rank.
std::unique_ptr<Probe> make_gpu_probe(int64_t side, size_t copy_bytes);

/// The dense bf16 peak that the maker's data sheet gives a GPU of this name, in GFLOP/s; 0 for
/// names that are not known.
double datasheet_gflops(std::string_view name);

/// Seconds since some fixed moment, the same for all processes of this machine.
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
