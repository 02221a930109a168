// The subcommand `sheaf bench`.
#pragma once

#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

/// All suites, as "step, gemm, ...".
std::string suite_names();

/// Runs the selected suites and returns the exit code. Throws ConfigError for an unknown suite or a filter that matches no line,
/// IoError where a file cannot be written.
int bench_command(const Options& options);

}  // namespace sheaf::bench
