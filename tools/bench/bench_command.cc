// `sheaf bench`: runs the suites, prints the table, and writes it and the JSON to files.
#include "sheaf/tools/bench/bench_command.h"

#include <algorithm>
#include <cstdlib>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/device_choice.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tools/bench/report.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/output.h"

namespace sheaf::bench {
namespace {

bool asked_for(const Options& options, const Suite& suite) {
  return std::find(options.suites.begin(), options.suites.end(), suite.name) !=
         options.suites.end();
}

void check_suites(const Options& options, Device device) {
  for (const std::string& name : options.suites)
    check<ConfigError>(std::any_of(std::begin(kSuites), std::end(kSuites),
                                   [&](const Suite& s) { return s.name == name; }),
                       "[bench] unknown suite '", name, "'; known: ", suite_names());
  for (const Suite& suite : kSuites)
    check<ConfigError>(!device.is_cuda() || suite.on_gpu || !asked_for(options, suite),
                       "[bench] suite '", suite.name, "' measures the CPU: --device cpu runs it");
}

// --device, or else SHEAF_DEVICE, as in `sheaf train`.
Device device_of(const Options& options) {
  const DeviceWish wish = options.device.empty() ? DeviceWish::from([](const char* name) -> const char* { return std::getenv(name); })
                                                 : DeviceWish{options.device, "--device"};
  return choose_device({}, wish).device;
}

// On a GPU each suite gets its own allocator, which releases its memory afterwards.
void run_suite(const Suite& suite, Session& session) {
  if (!session.on_gpu()) return suite.run(session);
  const LocalOptions options{.threads_per_rank = session.machine().threads,
                             .device = session.device()};
  run_local(
      1, [&](World&) { suite.run(session); }, options);
}

}  // namespace

std::string suite_names() {
  std::string names;
  for (const Suite& s : kSuites) names += (names.empty() ? "" : ", ") + std::string(s.name);
  return names;
}

int bench_command(const Options& options) {
  // Before CUDA is initialised: ranks that share a GPU have more streams than it has hardware queues by default.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  const Device device = device_of(options);
  check_suites(options, device);
  for (const std::string& file : {options.json, options.markdown})
    if (!file.empty()) expect_writable_file("bench", file);
  if (!options.traces.empty() && !path_exists(options.traces))
    fail<IoError>("[bench] no folder '", options.traces, "'");
  RankContext& context = RankContext::current();
  if (options.threads > 0) context.threads = options.threads;
  use_device(device, context);
  const RankScope scope(context);
  Session session(options, device);
  for (const Suite& suite : kSuites)
    if (asked_for(options, suite) ||
        (options.suites.empty() && (suite.on_gpu || !device.is_cuda())))
      run_suite(suite, session);
  check<ConfigError>(!session.lines().empty(), "[bench] no line's name contains '", options.filter,
                     "'");
  session.judge();
  if (!options.json.empty()) replace_file(options.json, to_json(session));
  if (!options.markdown.empty()) replace_file(options.markdown, to_markdown(session));
  tools::put(to_table(session));
  return 0;
}

}  // namespace sheaf::bench
