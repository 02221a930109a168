// The interface to Google Benchmark: it determines how often a short call must run to be timed well, and times it. Printing and
// ordering (A B A B) are ours.
#include <benchmark/benchmark.h>

#include "sheaf/core/error.h"
#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {
namespace {

class Collector final : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.error_occurred) error = run.error_message;
      if (run.iterations == 0) continue;
      seconds = run.real_accumulated_time / static_cast<double>(run.iterations);
      iterations = run.iterations;
    }
  }
  double seconds = 0;
  int64_t iterations = 0;
  std::string error;
};

}  // namespace

double time_small(const std::function<void()>& call, int64_t& iterations, double min_seconds) {
  Collector collector;
  benchmark::ClearRegisteredBenchmarks();
  auto* registered = benchmark::RegisterBenchmark("call", [&](benchmark::State& state) {
    for (auto _ : state) call();
  });
  registered->UseRealTime();
  if (iterations > 0)
    registered->Iterations(iterations);
  else
    registered->MinTime(min_seconds);
  benchmark::RunSpecifiedBenchmarks(&collector, "call");
  benchmark::ClearRegisteredBenchmarks();
  check<ConfigError>(collector.iterations > 0,
                     "[bench] Google Benchmark ran nothing: ", collector.error);
  iterations = collector.iterations;
  return collector.seconds;
}

}  // namespace sheaf::bench
