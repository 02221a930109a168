// A quick run of `sheaf bench`, with the checks that hold for all lines.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "sheaf/core/json.h"

namespace sheaf::testing {

struct BenchRun {
  Json machine;
  std::map<std::string, Json> lines;  ///< by name
  std::string markdown;               ///< what --markdown wrote
};
/// Runs one suite's lines that contain `filter`, with --quick.
BenchRun run_bench(const std::string& suite, const std::string& filter,
                   const std::vector<std::string>& more = {});

/// The work, in the unit of its rate (GB/s, GFLOP/s, TFLOP/s), that was done in the median sample.
double work(const Json& line);

}  // namespace sheaf::testing
