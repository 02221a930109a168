// `sheaf train --output.trace_step`: the measured timeline of a step.
#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

struct Folder : CorpusFolder {
  Words train(int ranks, const std::string& out, const Words& more = {}) const {
    return on_ranks(ranks, Words{"train", "--data.corpus", *this / "corpus.txt", "--output.folder", *this / out, "--train.steps", "4",
                                 "--generate.tokens", "2"} + more);
  }
};

TEST(Trace, HasAllRanksOfTheStep) {
  const Folder f;
  const Outcome r = run_sheaf(f.train(2, "run", {"--output.trace_step", "3"}));
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("step 3 took rank 0 0."));
  EXPECT_THAT(r.out, HasSubstr(f / "run/trace.json"));
  const Json trace = Json::parse(File::open<DataError>(f / "run/trace.json").read_all(), "trace");
  std::set<std::string> names;
  std::set<int64_t> ranks;
  for (const Json& e : trace.at("traceEvents").as_array()) {
    ranks.insert(e.at("pid").as_int());
    names.insert(e.at("ph").as_string() == "M" ? e.at("args").at("name").as_string() : e.at("name").as_string());
  }
  EXPECT_EQ(ranks, (std::set<int64_t>{0, 1}));
  for (const char* name : {"rank 0", "rank 1", "compute", "linear_weight_gradient", "all_gather", "reduce_scatter", "adamw"})
    EXPECT_THAT(names, Contains(name));
}

TEST(Trace, IsNoPartOfWhatARunIs) {
  const Folder f;
  ASSERT_EQ(run_sheaf(f.train(1, "with", {"--output.trace_step", "2"})).code, 0);
  const Outcome without = run_sheaf(f.train(1, "without"));
  ASSERT_EQ(without.code, 0) << without.err;
  EXPECT_THAT(without.out, Not(HasSubstr("trace.json")));
  EXPECT_EQ(read_metrics(f / "with/metrics.jsonl").at(4).at("loss"), read_metrics(f / "without/metrics.jsonl").at(4).at("loss"));
  // A resumed run may trace another step.
  const Outcome resumed = run_sheaf({"train", "--resume", "--output.folder", f / "without", "--output.trace_step", "4"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
}

TEST(Trace, ThatCannotBeWrittenIsAWarning) {
  const Folder f;
  std::filesystem::create_directories(f / "run/trace.json");
  const Outcome r = run_sheaf(f.train(2, "run", {"--output.trace_step", "2"}));
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.err, HasSubstr("training goes on without it"));
}

}  // namespace
}  // namespace sheaf::testing
