// The subcommand `sheaf bench`.
#pragma once

#include "sheaf/tools/bench/bench.h"

namespace sheaf::bench {

/// "step, gemm, ...": what there is.
std::string suite_names();

/// Runs what `options` asks for and returns the exit code. Throws ConfigError for a suite that is
/// not there and a filter that no line passes, IoError where a file cannot be written.
int bench_command(const Options& options);

}  // namespace sheaf::bench
