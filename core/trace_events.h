// Trace events: what happened when, in rows, as Chrome's trace format, which https://ui.perfetto.dev shows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sheaf {

class TraceEvents {
 public:
  /// A process, and a row of it, by numbers of their own.
  void name_process(int process, std::string_view name);
  void name_row(int process, int row, std::string_view name);
  /// From `begin` on, for `seconds`. Of one row, each lies inside another or beside it.
  void add(int process, int row, std::string_view name, std::string_view module, double begin, double seconds);
  /// A number of the process, drawn as a curve: what it is from then on.
  void add_number(int process, std::string_view name, double begin, int64_t value);

  /// Lines that may be put together with those of others,
  const std::string& lines() const { return lines_; }
  /// and what makes a file of them.
  static std::string document(std::string_view lines);

 private:
  void add_line(const std::string& line);
  std::string lines_;
};

}  // namespace sheaf
