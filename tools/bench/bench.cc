#include "sheaf/tools/bench/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <thread>

#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/tools/bench/gpu_time.h"

namespace sheaf::bench {
namespace {

constexpr double kSound = 0.9;  // of the run's best probe reading

// A line with long samples stops after about this many seconds, but not before it has enough samples to distinguish its median from
// its spread.
constexpr double kPatience = 15;
constexpr int kFewest = 7;

std::string short_number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, std::abs(x) >= 100 ? "%.0f" : "%.4g", x);
  return text;
}

}  // namespace

std::string_view name(Unit unit) {
  switch (unit) {
    case Unit::gigabytes_per_second:
      return "GB/s";
    case Unit::gigaflops:
      return "GFLOP/s";
    case Unit::teraflops:
      return "TFLOP/s";
    case Unit::seconds:
      return "s";
    case Unit::nanoseconds:
      return "ns";
    case Unit::bytes:
      return "bytes";
  }
  return "";
}

double figure(Unit unit, double amount, double seconds) {
  if (higher_is_better(unit)) return amount / seconds / (unit == Unit::teraflops ? 1e12 : 1e9);
  return seconds / amount * (unit == Unit::nanoseconds ? 1e9 : 1.0);
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

bool is_sound(const Line& line, const PeakReading& best) {
  if (!line.missing.empty()) return false;
  if (line.unit == Unit::bytes) return true;  // whatever else is running on the machine
  return line.worst.gflops >= kSound * best.gflops &&
         (!line.by_memory || line.worst.copy_gbs >= kSound * best.copy_gbs);
}

void set_figures(Line& line, double amount) {
  std::vector<double> figures;
  for (double s : line.samples_s) figures.push_back(figure(line.unit, amount, s));
  line.value = quantile(figures, 0.5);
  line.p10 = quantile(figures, 0.1);
  line.p90 = quantile(figures, 0.9);
}

Session::Session(const Options& options, Device device)
    : options_(options), device_(device), machine_(this_machine()) {
  constexpr size_t kMiB = size_t{1} << 20;
  // Copies exceed the caches that one core has to itself, or those of a GPU. A product of that size keeps all of a GPU's
  // multiprocessors busy until it ends.
  probe_ = on_gpu() ? make_gpu_probe(options.quick ? 128 : 8192, (options.quick ? 1 : 512) * kMiB)
                    : make_cpu_probe(options.quick ? 5e-4 : 4e-3, (options.quick ? 8 : 128) * kMiB);
  probe_->read();
}

Stream Session::stream() const { return RankContext::current().stream(device_); }

bool Session::wants(std::string_view suite, std::string_view name) const {
  const auto& all = options_.suites;
  if (!all.empty() && std::find(all.begin(), all.end(), suite) == all.end()) return false;
  return (std::string(suite) + "/" + std::string(name)).find(options_.filter) != std::string::npos;
}

void Session::say(const std::string& text) const { std::fprintf(stderr, "%s\n", text.c_str()); }

int Session::samples(int most) const {
  return options_.samples > 0 ? options_.samples : options_.quick ? std::min(3, most) : most;
}

std::pair<std::vector<double>, std::vector<double>> Session::turns(const Sample& a, const Sample& b,
                                                                   int most) const {
  const int samples = this->samples(most);
  const double begin = now();
  std::pair<std::vector<double>, std::vector<double>> seconds;
  for (int i = 0; i < samples; ++i) {
    // A peer's threads may still be spinning: OpenMP threads do so for milliseconds.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    seconds.first.push_back(a());
    seconds.second.push_back(b());
    if (options_.samples == 0 && i + 1 >= kFewest && now() - begin > kPatience) break;
  }
  return seconds;
}

void Session::line(std::string_view suite, std::string_view line_name, Unit unit,
                   const std::function<void(Line&)>& measure, double amount) {
  if (!wants(suite, line_name)) return;
  Line line;
  line.suite = suite;
  line.name = line_name;
  line.unit = unit;
  const PeakReading before = probe_->read();
  try {
    measure(line);
    if (line.value == 0) set_figures(line, amount);
    if (line.peer_value > 0 && line.value > 0)
      line.ratio =
          higher_is_better(unit) ? line.value / line.peer_value : line.peer_value / line.value;
  } catch (const Error& e) {
    line.missing = e.what();
    line.samples_s.clear();
  }
  // Printed before the probe, which aborts the run if the GPU has failed.
  std::string text = line.suite + "/" + line.name + ": ";
  if (!line.missing.empty()) {
    text += "not available: " + line.missing;
  } else {
    text += short_number(line.value) + " " + std::string(bench::name(unit));
    if (!line.peer.empty()) text += " (" + line.peer + " " + short_number(line.peer_value) + ")";
  }
  say(text);
  const PeakReading after = probe_->read();
  line.worst = {std::min(before.gflops, after.gflops), std::min(before.copy_gbs, after.copy_gbs)};
  lines_.push_back(std::move(line));
}

void Session::compare(std::string_view suite, const Comparison& c) {
  line(suite, c.name, c.unit, [&](Line& line) {
    if (c.prepare) c.prepare();
    // The first sample determines how many calls make up one sample.
    const auto time = on_gpu() && !c.on_host ? time_on_gpu : time_small;
    const auto sampler = [&](const std::function<void()>& call) -> Sample {
      return [this, time, call, iterations = int64_t{0}]() mutable {
        return time(call, iterations, options_.quick ? 1e-3 : 2e-2);
      };
    };
    const Sample a = sampler(c.run), b = sampler(c.peer_run);
    for (int warm = options_.quick ? 1 : 2; warm > 0; --warm) a(), b();
    auto [own, peers] = turns(a, b);
    line.samples_s = std::move(own);
    line.by_memory = c.by_memory;
    line.peer = c.peer;
    line.peer_value = figure(c.unit, c.peer_amount, quantile(peers, 0.5));
    line.arithmetic = c.arithmetic;
    line.more = c.more;
    set_figures(line, c.amount);
    if (c.unit == Unit::gigaflops) line.gflops = line.value;
    if (c.unit == Unit::teraflops) line.gflops = 1e3 * line.value;
  });
}

void Session::compare_with_peak(std::string_view suite, Comparison& c) {
  const DType dtype = c.arithmetic.value();
  c.peer = probe_->arithmetic();
  c.peer_run = [this, dtype] { probe_->run_flops(dtype); };
  c.peer_amount = probe_->flops_per_piece(dtype);
  compare(suite, c);
}

void Session::judge() {
  std::map<DType, double> peaks;
  for (Line& line : lines_) {
    line.sound = is_sound(line, probe_->best());
    if (!line.arithmetic || !line.missing.empty()) continue;
    double& peak = peaks[*line.arithmetic];
    if (peak == 0) peak = probe_->peak(*line.arithmetic);
    line.of_peak = line.gflops / peak;
  }
  probe_->describe(machine_);
}

}  // namespace sheaf::bench
