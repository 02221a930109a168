// The subcommand `sheaf bench`.
#pragma once

#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

/// "step, gemm, ...": all suites.
std::string suite_names();

/// Runs what `options` asks for and returns the exit code. Throws ConfigError for an unknown suite or a filter that
/// no line passes, IoError where a file cannot be written.
int bench_command(const Options& options);

}  // namespace sheaf::bench
