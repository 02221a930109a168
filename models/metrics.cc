#include "sheaf/models/metrics.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <system_error>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"

namespace sheaf::models {
namespace {

constexpr std::string_view kBegin = "{\"step\":";

// True for a line, with its end, of a step up to `last_step`.
bool is_kept(std::string_view line, int64_t last_step) {
  if (!line.starts_with(kBegin)) return false;
  line.remove_prefix(kBegin.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
  return error == std::errc() && (*end == ',' || *end == '}') && step <= last_step;
}

// The bytes up to the end of the last whole line of a step up to `last_step`. Steps ascend, and what came before a checkpoint was
// synced: so it is found from the end, however long the file has become.
int64_t kept_bytes(std::string_view text, int64_t last_step) {
  size_t end = text.rfind('\n') + 1;  // a last line without its end was truncated, even if the rest of it can be read
  while (end > 0) {
    const size_t begin = text.substr(0, end - 1).rfind('\n') + 1;
    if (is_kept(text.substr(begin, end - begin), last_step)) break;
    end = begin;
  }
  return static_cast<int64_t>(end);
}

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(std::llround(seconds));
  char text[32];
  if (s < 60) {
    std::snprintf(text, sizeof text, "%llds", static_cast<long long>(s));
  } else if (s < 3600) {
    std::snprintf(text, sizeof text, "%lldm%02llds", static_cast<long long>(s / 60), static_cast<long long>(s % 60));
  } else {
    std::snprintf(text, sizeof text, "%lldh%02lldm", static_cast<long long>(s / 3600),
                  static_cast<long long>(s / 60 % 60));
  }
  return text;
}

// 12345 as "12,345".
std::string grouped(double value) {
  std::string digits = std::to_string(std::llround(value));
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > (digits[0] == '-' ? 1 : 0); at -= 3) {
    digits.insert(static_cast<size_t>(at), ",");
  }
  return digits;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::string& path, int64_t last_step) {
  make_folders(parent_of(path));
  if (!path_exists(path)) replace_file(path, "");  // its name survives a crash
  const int64_t kept = kept_bytes(File::open(path).map().text(), last_step);  // refuses a pipe, which the next line would wait for
  file_ = std::make_unique<AppendFile>("metrics", path);
  file_->truncate(kept);
}

void MetricsWriter::write(int64_t step, std::span<const Metric> metrics) {
  std::string line = str(kBegin, step);
  for (const Metric& metric : metrics) {
    line += "," + json_string(metric.name) + ":";
    if (auto* integer = std::get_if<int64_t>(&metric.value)) {
      line += std::to_string(*integer);
      continue;
    }
    const double value = std::get<double>(metric.value);
    line += json_number(value);
    if (!std::isfinite(value)) {
      line += "," + json_string(str(metric.name, "_nonfinite")) + ":";
      line += std::isnan(value) ? "\"nan\"" : value > 0 ? "\"inf\"" : "\"-inf\"";
    }
  }
  line += "}\n";
  file_->write(line);
}

std::string progress_line(const Progress& p) {
  const std::string steps = std::to_string(p.steps);
  char text[200];
  std::snprintf(text, sizeof text, "step %*lld/%s  loss %.4f  lr %.2e  norm %.2f  %s tok/s",
                static_cast<int>(steps.size()), static_cast<long long>(p.step), steps.c_str(), p.loss, p.lr,
                p.grad_norm, grouped(p.tokens_per_second).c_str());
  std::string line = text;
  if (p.seconds_left >= 0) line += "  left " + duration(p.seconds_left);
  if (p.skipped > 0) {
    std::snprintf(text, sizeof text, " skipped, loss scale %.15g", p.loss_scale);
    line += (p.steps_since > 1 ? str("  ", p.skipped, " of ", p.steps_since) : " ") + text;
  }
  return line;
}

}  // namespace sheaf::models
