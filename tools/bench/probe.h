// Probe: what this machine can do at most, asked of the machine itself and in the same run as what
// is compared with it: fused multiply-adds, copies past the caches and, where there are tiles,
// bf16 products. A reading well below the run's best says that somebody else has the cores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace sheaf::bench {

/// What the processor has and the kernel allows.
struct Machine {
  std::string cpu;      ///< as /proc/cpuinfo names it
  int model = 0;        ///< model number within its family
  bool avx512 = false;  ///< AVX-512F
  bool amx = false;     ///< AMX tiles with bf16, and leave to use them
  int threads = 1;      ///< compute threads of this rank
  double fma_gflops = 0, copy_gbs = 0, amx_gflops = 0;  ///< best readings of the run
};
Machine this_machine();

struct PeakReading {
  double fma_gflops = 0, copy_gbs = 0;
};

class Probe {
 public:
  /// `unit_seconds`: about how long one measured piece takes. `copy_bytes`: size of each of the two
  /// buffers copied between. Calibrates at once.
  Probe(double unit_seconds, size_t copy_bytes);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  /// One reading of both peaks: the median of five pieces of each. The best so far is kept.
  PeakReading read();
  const PeakReading& best() const { return best_; }
  /// bf16 products in tiles, GFLOP/s, median of five pieces; 0 without AMX.
  double read_amx();

  /// One piece of f32 multiply-adds on all threads: flops_per_piece() floating-point operations.
  void run_fma();
  double flops_per_piece() const;
  /// Copies with non-temporal stores on all threads until `bytes` bytes were read or written.
  void run_copy(size_t bytes);
  size_t copy_bytes() const { return copy_bytes_; }  ///< of a piece: read and written

 private:
  int64_t fma_rounds_, amx_rounds_ = 0;
  size_t copy_bytes_;
  char *from_ = nullptr, *to_ = nullptr;
  PeakReading best_;
};

/// Seconds since some fixed moment, the same for all processes of this machine.
double now();

}  // namespace sheaf::bench
