#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>

#include <immintrin.h>
#include <sys/mman.h>

#include "sheaf/core/error.h"
#include "sheaf/core/parallel.h"
#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/tools/bench/probe.h"

namespace sheaf::bench {
namespace {

// Enough independent accumulators to hide the latency of the additions: two units with four cycles of latency need eight; more do no
// harm.
constexpr int kSums512 = 24, kSums256 = 12;

[[gnu::target("avx512f"), gnu::noinline]] float fma512(int64_t rounds) {
  __m512 sums[kSums512];
  for (int i = 0; i < kSums512; ++i) sums[i] = _mm512_set1_ps(1.0f + 1e-7f * static_cast<float>(i));
  const __m512 b = _mm512_set1_ps(0.999999f), c = _mm512_set1_ps(1e-7f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums512; ++i) sums[i] = _mm512_fmadd_ps(sums[i], b, c);
  }
  float total[16], out = 0;
  for (int i = 0; i < kSums512; ++i) {
    _mm512_storeu_ps(total, sums[i]);
    for (float t : total) out += t;
  }
  return out;
}

[[gnu::target("avx2,fma"), gnu::noinline]] float fma256(int64_t rounds) {
  __m256 sums[kSums256];
  for (int i = 0; i < kSums256; ++i) sums[i] = _mm256_set1_ps(1.0f + 1e-7f * static_cast<float>(i));
  const __m256 b = _mm256_set1_ps(0.999999f), c = _mm256_set1_ps(1e-7f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums256; ++i) sums[i] = _mm256_fmadd_ps(sums[i], b, c);
  }
  float total[8], out = 0;
  for (int i = 0; i < kSums256; ++i) {
    _mm256_storeu_ps(total, sums[i]);
    for (float t : total) out += t;
  }
  return out;
}

// Operations per iteration of the loops above: lanes, times multiply and add.
double fma_flops_per_round() {
  return __builtin_cpu_supports("avx512f") ? kSums512 * 16 * 2.0 : kSums256 * 8 * 2.0;
}

[[gnu::target("avx512f")]] void copy512(const char* from, char* to, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
  _mm_sfence();
}

void copy256(const char* from, char* to, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i)));
  _mm_sfence();
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t columns[16] = {};  // bytes per row
  uint8_t rows[16] = {};
};

// Six accumulator tiles, 16 x 16 in f32, of products of two tiles of 16 x 32 bf16 that stay zero: the unit takes the same time for
// zeros. One round is six products of 16 x 16 x 32.
[[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] void tile_products(int64_t rounds) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) config.columns[t] = 64, config.rows[t] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t r = 0; r < rounds; ++r) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
}
constexpr double kTileFlopsPerRound = 6 * 2.0 * 16 * 16 * 32;

// Products of pairs, in vectors. Without the asm, g++ 12 would move the accumulators between registers.
[[gnu::target("avx512f"), gnu::noinline]] float pair_products(int64_t rounds) {
  __m512 sums[kSums512];
  for (__m512& s : sums) s = _mm512_setzero_ps();
  const __m512i pairs = _mm512_setzero_si512();
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums512; ++i) {
      __m512 sum = sums[i];
      asm("vdpbf16ps %1, %1, %0" : "+v"(sum) : "v"(pairs));
      sums[i] = sum;
    }
  }
  __m512 total = sums[0];
  for (__m512 s : sums) total = _mm512_add_ps(total, s);
  return _mm512_cvtss_f32(total);
}
constexpr double kPairFlopsPerRound = kSums512 * 16 * 4.0;

// One measured piece: `rounds` rounds on every thread.
void fma_piece(int64_t rounds) {
  parallel_for(num_threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      volatile float sink = __builtin_cpu_supports("avx512f") ? fma512(rounds) : fma256(rounds);
      (void)sink;
    }
  });
}

bool has_tiles() { return kernels::cpu::amx::available(); }
bool has_pairs() { return kernels::cpu::dot::available(); }

void bf16_piece(int64_t rounds) {
  parallel_for(num_threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (has_tiles()) {
        tile_products(rounds);
      } else {
        volatile float sink = pair_products(rounds);
        (void)sink;
      }
    }
  });
}

// The number of rounds that take about `seconds`.
template <class F>
int64_t calibrate(double seconds, F&& piece) {
  for (int64_t rounds = 1000;; rounds *= 2) {
    const double begin = now();
    piece(rounds);
    if (now() - begin >= seconds) return rounds;
  }
}

char* map_pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) fail<OutOfMemory>("[bench] cannot map ", bytes, " bytes");
  std::memset(p, 1, bytes);
  return static_cast<char*>(p);
}

template <class F>
double median_seconds(F&& piece) {
  return median_of_five([&] {
    const double begin = now();
    piece();
    return now() - begin;
  });
}

class CpuProbe final : public Probe {
 public:
  CpuProbe(double unit_seconds, size_t copy_bytes) : copy_bytes_(2 * copy_bytes) {
    from_ = map_pages(copy_bytes);
    to_ = map_pages(copy_bytes);
    fma_rounds_ = calibrate(unit_seconds, fma_piece);
    if (has_pairs()) bf16_rounds_ = calibrate(unit_seconds, bf16_piece);
  }
  ~CpuProbe() override {
    munmap(from_, copy_bytes_ / 2);
    munmap(to_, copy_bytes_ / 2);
  }
  CpuProbe(const CpuProbe&) = delete;
  CpuProbe& operator=(const CpuProbe&) = delete;

  std::string_view arithmetic() const override { return "FMA peak"; }
  void run_flops(DType) override { fma_piece(fma_rounds_); }
  double flops_per_piece(DType) const override {
    return fma_flops_per_round() * static_cast<double>(fma_rounds_) * num_threads();
  }

  // With non-temporal stores, on all threads.
  void run_copy(size_t bytes) override {
    constexpr int64_t kBlock = 4096;
    const bool wide = __builtin_cpu_supports("avx512f");
    for (size_t left = bytes / 2; left > 0;) {
      const size_t part = std::min(left, copy_bytes_ / 2);
      const auto blocks = static_cast<int64_t>(part) / kBlock;
      parallel_for(blocks, 16, [&](int64_t begin, int64_t end) {
        const size_t length = static_cast<size_t>((end - begin) * kBlock);
        (wide ? copy512 : copy256)(from_ + begin * kBlock, to_ + begin * kBlock, length);
      });
      if (const size_t tail = part % kBlock)  // the rest of a page
        std::memcpy(to_ + blocks * kBlock, from_ + blocks * kBlock, tail);
      left -= part;
    }
  }

  // For bf16 the peak of its own instructions, if the CPU has any.
  double peak(DType dtype) override {
    if (dtype != kBF16 || bf16_rounds_ == 0) return best().gflops;
    bf16_gflops_ = std::max(bf16_gflops_, read_bf16());
    return bf16_gflops_;
  }
  void describe(Machine& machine) override {
    machine.fma_gflops = best().gflops;
    machine.copy_gbs = best().copy_gbs;
    machine.bf16_gflops = bf16_rounds_ == 0 ? 0 : peak(kBF16);
  }

 private:
  PeakReading measure() override {
    PeakReading r;
    r.gflops = flops_per_piece(kF32) / median_seconds([&] { run_flops(kF32); }) / 1e9;
    r.copy_gbs =
        static_cast<double>(copy_bytes_) / median_seconds([&] { run_copy(copy_bytes_); }) / 1e9;
    return r;
  }
  double read_bf16() const {
    const double flops = has_tiles() ? kTileFlopsPerRound : kPairFlopsPerRound;
    const double seconds = median_seconds([&] { bf16_piece(bf16_rounds_); });
    return flops * static_cast<double>(bf16_rounds_) * num_threads() / seconds / 1e9;
  }

  int64_t fma_rounds_, bf16_rounds_ = 0;
  double bf16_gflops_ = 0;
  size_t copy_bytes_;  // per measured piece: read and written
  char *from_ = nullptr, *to_ = nullptr;
};

}  // namespace

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Machine this_machine() {
  Machine m;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (m.cpu.empty() && line.starts_with("model name")) m.cpu = line.substr(colon + 2);
    if (m.model == 0 && line.starts_with("model\t")) m.model = std::stoi(line.substr(colon + 2));
  }
  m.avx512 = __builtin_cpu_supports("avx512f");
  m.bf16 = has_tiles() ? "AMX" : has_pairs() ? "AVX512_BF16" : "";
  m.threads = num_threads();
  return m;
}

std::unique_ptr<Probe> make_cpu_probe(double unit_seconds, size_t copy_bytes) {
  return std::make_unique<CpuProbe>(unit_seconds, copy_bytes);
}

}  // namespace sheaf::bench
