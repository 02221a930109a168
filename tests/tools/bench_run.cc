#include "sheaf/tests/tools/bench_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"
#include "sheaf/tools/bench/bench.h"

namespace sheaf::testing {

using ::testing::HasSubstr;

BenchRun run_bench(const std::string& suite, const std::string& filter,
                   const std::vector<std::string>& more) {
  ScratchFolder folder;
  const std::string path = folder / "bench.json", table = folder / "bench.md";
  std::vector<std::string> words = {"bench",  suite, "--quick",    "--filter", filter,
                                    "--json", path,  "--markdown", table};
  words.insert(words.end(), more.begin(), more.end());
  const Outcome r = run_sheaf(words);
  EXPECT_EQ(r.code, 0) << r.err;
  BenchRun run;
  if (r.code != 0) return run;
  const Json all = Json::parse(File::open<IoError>(path).read_all(), path);
  run.machine = all.at("machine");
  run.markdown = File::open<IoError>(table).read_all();
  EXPECT_FALSE(run.machine.at("cpu").as_string().empty());
  EXPECT_GT(run.machine.at("threads").as_int(), 0);
  run.machine.at("bf16").as_string(), run.machine.at("avx512").as_bool();
  EXPECT_FALSE(all.at("lines").as_array().empty());
  for (const Json& line : all.at("lines").as_array()) {
    const std::string name = line.at("name").as_string();
    SCOPED_TRACE(name);
    EXPECT_EQ(line.at("suite").as_string(), suite);
    EXPECT_THAT(suite + "/" + name, HasSubstr(filter));
    EXPECT_THAT(r.out, HasSubstr(suite + "/" + name + " "));
    EXPECT_THAT(run.markdown, HasSubstr("| " + suite + "/" + name + " | "));
    run.lines.emplace(name, line);
    if (const Json* missing = line.find("missing")) {
      EXPECT_TRUE(line.at("value").is_null());
      EXPECT_THAT(r.out, HasSubstr(missing->as_string()));
      EXPECT_THAT(run.markdown, HasSubstr(missing->as_string()));
      continue;
    }
    const double value = line.at("value").as_double(), peer = line.at("peer_value").as_double();
    EXPECT_GT(value, 0);
    EXPECT_LE(line.at("p10").as_double(), value);
    EXPECT_GE(line.at("p90").as_double(), value);
    EXPECT_FALSE(line.at("peer").as_string().empty());
    EXPECT_GT(peer, 0);
    const bool rate = line.at("unit").as_string().ends_with("/s");
    EXPECT_DOUBLE_EQ(line.at("ratio").as_double(), rate ? value / peer : peer / value);
    line.at("sound").as_bool();
    if (line.at("unit").as_string() != "bytes") {
      EXPECT_GE(line.at("samples_s").as_array().size(), 2u);
    }
    for (const Json& s : line.at("samples_s").as_array()) EXPECT_GT(s.as_double(), 0);
  }
  return run;
}

double work(const Json& line) {
  std::vector<double> seconds;
  for (const Json& s : line.at("samples_s").as_array()) seconds.push_back(s.as_double());
  const double scale = line.at("unit").as_string() == "TFLOP/s" ? 1e12 : 1e9;
  return scale * line.at("value").as_double() * bench::quantile(seconds, 0.5);
}

}  // namespace sheaf::testing
