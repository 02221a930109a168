// The output of `sheaf bench`: a table for people, as text and as Markdown, and JSON for programs.
#pragma once

#include <string>

#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

/// The machine with its peaks, then a row per line.
std::string to_table(const Session& session);
/// The same as Markdown.
std::string to_markdown(const Session& session);
/// {"machine": {...}, "lines": [{...}]}; see docs/benchmarks/README.md for the fields.
std::string to_json(const Session& session);

}  // namespace sheaf::bench
