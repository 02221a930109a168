#include "sheaf/core/trace_events.h"

#include "sheaf/core/error.h"
#include "sheaf/core/json.h"

namespace sheaf {

void TraceEvents::add_line(const std::string& line) {
  if (!lines_.empty()) lines_ += kSeparator;
  lines_ += line;
}

void TraceEvents::name_process(int process, std::string_view name) {
  add_line(str("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":", process, ",\"args\":{\"name\":", json_string(name), "}}"));
}

void TraceEvents::name_row(int process, int row, std::string_view name) {
  add_line(str("{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":", process, ",\"tid\":", row, ",\"args\":{\"name\":", json_string(name), "}}"));
}

void TraceEvents::add(int process, int row, std::string_view name, std::string_view module, double begin, double seconds) {
  add_line(str("{\"ph\":\"X\",\"name\":", json_string(name), ",\"pid\":", process, ",\"tid\":", row, ",\"ts\":", json_number(begin * 1e6),
               ",\"dur\":", json_number(seconds * 1e6), ",\"args\":{\"module\":", json_string(path_label(module)), "}}"));
}

void TraceEvents::add_number(int process, std::string_view name, double begin, int64_t value) {
  add_line(str("{\"ph\":\"C\",\"name\":", json_string(name), ",\"pid\":", process, ",\"ts\":", json_number(begin * 1e6),
               ",\"args\":{\"value\":", value, "}}"));
}

std::string TraceEvents::document(std::string_view lines) { return str(kBegin, lines, kEnd); }

}  // namespace sheaf
