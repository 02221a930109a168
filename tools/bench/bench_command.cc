// `sheaf bench`: runs the suites, prints the table, writes the JSON.
#include "sheaf/tools/bench/bench_command.h"

#include <algorithm>
#include <cstdio>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/tools/bench/report.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

void check_suites(const std::vector<std::string>& names) {
  for (const std::string& name : names)
    check<ConfigError>(std::any_of(std::begin(kSuites), std::end(kSuites),
                                   [&](const Suite& s) { return s.name == name; }),
                       "[bench] unknown suite '", name, "'; known: ", suite_names());
}

}  // namespace

std::string suite_names() {
  std::string names;
  for (const Suite& s : kSuites) names += (names.empty() ? "" : ", ") + std::string(s.name);
  return names;
}

int bench_command(const Options& options) {
  check_suites(options.suites);
  // Nothing is measured for a file that cannot be written in the end.
  if (!options.json.empty() && !path_exists(parent_of(options.json)))
    fail<IoError>("[bench] no folder for '", options.json, "'");
  RankContext& context = RankContext::current();
  if (options.threads > 0) context.threads = options.threads;
  const RankScope scope(context);
  Session session(options);
  for (const Suite& suite : kSuites)
    if (options.suites.empty() ||
        std::find(options.suites.begin(), options.suites.end(), suite.name) != options.suites.end())
      suite.run(session);
  check<ConfigError>(!session.lines().empty(), "[bench] no line's name contains '", options.filter,
                     "'");
  session.judge();
  std::fputs(to_table(session).c_str(), stdout);
  if (!options.json.empty()) replace_file(options.json, to_json(session));
  return 0;
}

}  // namespace sheaf::bench
