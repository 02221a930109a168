// The benchmark harness: options of a `sheaf bench` run, the timing of code against its peer, and the resulting lines.
//
// [Note: A B A B] A benchmark and its peer are measured alternately, sample by sample, so that both see the same machine state;
// reported are the median and the 10th and 90th percentiles. The machine's peaks are probed before and after every line. At the end
// of the run a line whose probes fell below 90 % of the run's best is marked unsound: something else used the cores, or the GPU's
// clock was lower.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sheaf/core/device.h"
#include "sheaf/core/dtype.h"
#include "sheaf/tools/bench/probe.h"

namespace sheaf::bench {

struct Options {
  std::vector<std::string> suites;  ///< empty: all
  std::string filter;               ///< only lines whose "suite/name" contains it
  int threads = 0;                  ///< compute threads; 0: all cores
  int samples = 0;                  ///< per line; 0: 30, fewer where a sample takes long
  bool quick = false;               ///< few short samples of small cases: a smoke test
  std::string json;                 ///< file for the lines and their samples
  std::string markdown;             ///< file for the table, as Markdown
  std::string traces;               ///< folder for the timeline of one more step of each case of `step`
  std::string device;               ///< "cpu", "cuda" or "auto"; empty: as given by SHEAF_DEVICE
  std::string program;              ///< path of `sheaf` itself, used to start ranks
};

/// The unit of a line's figure. For rates higher is better, for times and bytes lower.
enum class Unit { gigabytes_per_second, gigaflops, teraflops, seconds, nanoseconds, bytes };
std::string_view name(Unit unit);
constexpr bool higher_is_better(Unit unit) { return unit <= Unit::teraflops; }

struct Line {
  std::string suite, name;
  Unit unit = Unit::seconds;
  std::vector<double> samples_s;  ///< seconds per sample
  double value = 0, p10 = 0, p90 = 0;
  std::string peer;        ///< what it is compared with
  double peer_value = 0;   ///< in the same unit
  double ratio = 0;        ///< above 1: faster than the peer
  double of_peak = 0;      ///< fraction of Probe::peak(arithmetic), where `arithmetic` is set
  bool by_memory = false;  ///< memory-bound: the copy probe counts for its soundness too
  /// The dtype whose peak `of_peak` refers to.
  std::optional<DType> arithmetic;
  double gflops = 0;                                 ///< compared with that peak
  std::vector<std::pair<std::string, double>> more;  ///< further figures, by name with unit
  std::string note;                                  ///< such as the communicator used by the ranks
  std::string missing;                               ///< why there is no figure
  PeakReading worst;                                 ///< the lower of the readings before and after
  bool sound = true;                                 ///< decided at the end of the run
};

/// A benchmark and its peer; see Session::compare.
struct Comparison {
  std::string name;
  Unit unit = Unit::seconds;
  /// Bytes, floating-point or other operations of one call of `run` and of `peer_run`.
  double amount = 1, peer_amount = 1;
  std::function<void()> run = {};
  std::string peer = {};  ///< name of what `peer_run` does
  std::function<void()> peer_run = {};
  bool by_memory = false;                ///< see Line
  std::optional<DType> arithmetic = {};  ///< see Line
  bool on_host = false;                  ///< on a GPU too this measures the host, by the host's clock
  /// Called before anything else; may set `run`, `peer_run` and the amounts. An exception makes the line "not available".
  std::function<void()> prepare = {};
  std::vector<std::pair<std::string, double>> more = {};  ///< figures to print in addition
};

class Session {
 public:
  /// Measures on `device`, which must be that of the current RankContext.
  explicit Session(const Options& options, Device device = {});

  const Options& options() const { return options_; }
  const Machine& machine() const { return machine_; }
  Device device() const { return device_; }
  bool on_gpu() const { return device_.is_cuda(); }
  /// The stream of this rank's kernels.
  Stream stream() const;
  Probe& probe() { return *probe_; }
  /// TFLOP/s on a GPU, otherwise GFLOP/s.
  Unit flops_unit() const { return on_gpu() ? Unit::teraflops : Unit::gigaflops; }

  /// Whether the line is selected. Suites check this before they build anything.
  bool wants(std::string_view suite, std::string_view name) const;

  /// Times short calls (up to some hundred milliseconds) with Google Benchmark or GPU events, alternating with the peer, and adds the
  /// line. On a GPU calls only enqueue.
  void compare(std::string_view suite, const Comparison& comparison);
  /// The same against the probe's arithmetic in c.arithmetic, which becomes the peer.
  void compare_with_peak(std::string_view suite, Comparison& c);
  /// For longer measurements, and those that change state from call to call: `measure` does the timing and fills samples_s and
  /// whatever else it knows. Figures are computed from samples_s (and `amount` per sample) unless it has set `value`; a sheaf::Error
  /// makes the line "not available".
  void line(std::string_view suite, std::string_view name, Unit unit,
            const std::function<void(Line&)>& measure, double amount = 1);

  /// Alternates single samples, A B A B, and returns the seconds of both. `most` samples by default, fewer after some seconds unless
  /// --samples gives a number.
  using Sample = std::function<double()>;
  std::pair<std::vector<double>, std::vector<double>> turns(const Sample& a, const Sample& b,
                                                            int most = 30) const;

  /// The number of samples to take: `most`, unless the options say otherwise.
  int samples(int most) const;

  const std::vector<Line>& lines() const { return lines_; }
  /// Decides which lines are sound; call it when all have been added.
  void judge();

  /// Prints progress to standard error.
  void say(const std::string& text) const;

 private:
  Options options_;
  Device device_;
  Machine machine_;
  std::unique_ptr<Probe> probe_;
  std::vector<Line> lines_;
};

/// The figure of a sample that did `amount` in `seconds`.
double figure(Unit unit, double amount, double seconds);
/// The `q` quantile of `values`, interpolated.
double quantile(std::vector<double> values, double q);
/// Whether the peaks that the line depends on were at 90 % of `best` around the line.
bool is_sound(const Line& line, const PeakReading& best);
/// Computes value, p10 and p90 from samples_s.
void set_figures(Line& line, double amount);

/// Seconds per call, by Google Benchmark, over `iterations` consecutive calls; if 0, as many as take about `min_seconds`, and
/// `iterations` is set to that number.
double time_small(const std::function<void()>& call, int64_t& iterations, double min_seconds);

}  // namespace sheaf::bench
