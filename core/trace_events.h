// Trace events: what happened when, in rows, in Chrome's trace format, which https://ui.perfetto.dev shows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sheaf {

class TraceEvents {
 public:
  /// Names a process, or a row of it; both are identified by numbers.
  void name_process(int process, std::string_view name);
  void name_row(int process, int row, std::string_view name);
  /// An event from `begin` on, for `seconds`. Events of one row must be nested or disjoint.
  void add(int process, int row, std::string_view name, std::string_view module, double begin, double seconds);
  /// A number of the process, drawn as a curve: its value from `begin` on.
  void add_number(int process, std::string_view name, double begin, int64_t value);

  /// The lines, which may be joined with those of other ranks, by kSeparator.
  const std::string& lines() const { return lines_; }
  /// A file is made of such lines between kBegin and kEnd.
  static constexpr std::string_view kBegin = "{\"traceEvents\":[\n", kSeparator = ",\n", kEnd = "\n],\"displayTimeUnit\":\"ms\"}\n";
  static std::string document(std::string_view lines);

 private:
  void add_line(const std::string& line);
  std::string lines_;
};

}  // namespace sheaf
