// The harness: what a run of `sheaf bench` was asked for, how a thing is timed against its peer, and the resulting
// lines.
//
// [Note: A B A B] A figure and its peer are measured in turns, sample by sample, so that both meet
// the same machine; what is printed is the median with the 10th and 90th percentile. Before and
// after every line the machine's peaks are probed. At the end of the run a line whose probes fell
// below 90 % of the run's best is marked unsound: somebody else had the cores, or the GPU's clock
// was lower.
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
  int samples = 0;                  ///< of each line; 0: 30, fewer where one takes long
  bool quick = false;               ///< few short samples of small cases: does it work at all?
  std::string json;                 ///< file for the lines and their samples
  std::string markdown;             ///< file for the table, as Markdown
  std::string traces;               ///< folder for the time line of one more step of each case of `step`
  std::string device;               ///< "cpu", "cuda" or "auto"; empty: as SHEAF_DEVICE says
  std::string program;              ///< path of `sheaf` itself, to start ranks with
};

/// What a line's figure says. Rates are better when higher, times and bytes when lower.
enum class Unit { gigabytes_per_second, gigaflops, teraflops, seconds, nanoseconds, bytes };
std::string_view name(Unit unit);
constexpr bool higher_is_better(Unit unit) { return unit <= Unit::teraflops; }

struct Line {
  std::string suite, name;
  Unit unit = Unit::seconds;
  std::vector<double> samples_s;  ///< seconds of each sample
  double value = 0, p10 = 0, p90 = 0;
  std::string peer;        ///< what it was measured against
  double peer_value = 0;   ///< in the same unit
  double ratio = 0;        ///< above 1: ahead of the peer
  double of_peak = 0;      ///< fraction of Probe::peak(arithmetic), where a line names that
  bool by_memory = false;  ///< bound by memory: the copy probe counts for its soundness too
  /// Whose peak a line of floating-point operations reaches a fraction of.
  std::optional<DType> arithmetic;
  double gflops = 0;                                 ///< to be compared with that peak
  std::vector<std::pair<std::string, double>> more;  ///< further figures, by name with unit
  std::string note;                                  ///< such as the communicator that ranks used
  std::string missing;                               ///< why there is no figure
  PeakReading worst;                                 ///< the lower of the readings before and after
  bool sound = true;                                 ///< known at the end of the run
};

/// One thing to time against another; see Session::compare.
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
  bool on_host = false;  ///< also on a GPU: a matter of the host, timed by its clock
  /// Called before anything else; may set `run`, `peer_run` and the amounts. What it throws makes
  /// the line "not available".
  std::function<void()> prepare = {};
  std::vector<std::pair<std::string, double>> more = {};  ///< figures to print next to it
};

class Session {
 public:
  /// Measures on `device`, which is that of the current RankContext.
  explicit Session(const Options& options, Device device = {});

  const Options& options() const { return options_; }
  const Machine& machine() const { return machine_; }
  Device device() const { return device_; }
  bool on_gpu() const { return device_.is_cuda(); }
  /// Where this rank's kernels run.
  Stream stream() const;
  Probe& probe() { return *probe_; }
  /// TFLOP/s on a GPU, else GFLOP/s.
  Unit flops_unit() const { return on_gpu() ? Unit::teraflops : Unit::gigaflops; }

  /// Whether the line is asked for. Suites ask before they build anything.
  bool wants(std::string_view suite, std::string_view name) const;

  /// Times short calls (up to some hundred milliseconds), by Google Benchmark or the GPU's events,
  /// in turns with the peer's, and adds the line. On a GPU calls only enqueue.
  void compare(std::string_view suite, const Comparison& comparison);
  /// The same against the probe's arithmetic in c.arithmetic: sets the peer.
  void compare_with_peak(std::string_view suite, Comparison& c);
  /// Longer measurements, and those that change state from call to call, time themselves: `measure` fills samples_s
  /// and what else it knows. Figures are computed from samples_s (and `amount` per sample) unless it has set `value`;
  /// a sheaf::Error makes the line "not available".
  void line(std::string_view suite, std::string_view name, Unit unit,
            const std::function<void(Line&)>& measure, double amount = 1);

  /// Turns of one sample each, A B A B: seconds of both. `most` samples by default, fewer after
  /// some seconds unless --samples asks for a number.
  using Sample = std::function<double()>;
  std::pair<std::vector<double>, std::vector<double>> turns(const Sample& a, const Sample& b,
                                                            int most = 30) const;

  /// How many samples a line takes that has time for `most`.
  int samples(int most) const;

  const std::vector<Line>& lines() const { return lines_; }
  /// Decides which lines are sound: to be called when all have been added.
  void judge();

  /// Prints progress on standard error.
  void say(const std::string& text) const;

 private:
  Options options_;
  Device device_;
  Machine machine_;
  std::unique_ptr<Probe> probe_;
  std::vector<Line> lines_;
};

/// The figure of a sample of `seconds` in which `amount` was done.
double figure(Unit unit, double amount, double seconds);
/// The value below which a fraction `q` of `values` lies, interpolated.
double quantile(std::vector<double> values, double q);
/// Whether the machine was at 90 % of its `best` around a line, in what the line depends on.
bool is_sound(const Line& line, const PeakReading& best);
/// Sets value, p10, p90 from samples_s.
void set_figures(Line& line, double amount);

/// Seconds per call, by Google Benchmark. `iterations` calls in a row; if 0, as many as take about
/// `min_seconds`, and their number is left there.
double time_small(const std::function<void()>& call, int64_t& iterations, double min_seconds);

}  // namespace sheaf::bench
