// `sheaf tape` quickly shows a step of a large model at a large world, with its collectives and their bytes.
#include <algorithm>
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/json.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::Outcome;
using testing::run_sheaf;

using Words = std::vector<std::string>;

constexpr int kBlocks = 12;
// All units once, and again the blocks except the last two, with which the backward begins.
constexpr int kGathers = 1 + 2 * kBlocks - 2;

Outcome tape(const Words& more) {
  Words words = {"tape", "--model.preset", "gpt2-124m", "--world", "8"};
  words.insert(words.end(), more.begin(), more.end());
  const Outcome r = run_sheaf(words);
  EXPECT_EQ(r.code, 0) << r.err;
  EXPECT_LT(r.cpu_seconds, 10);
  EXPECT_LT(r.resident_peak, 500'000'000);  // the step itself takes more than twice that
  return r;
}

/// How often each unit's op is on the tape, and the bytes of each.
struct Count {
  int nodes = 0;
  int64_t bytes = 0;
};
std::map<std::pair<std::string, std::string>, Count> counts(const Json& tape) {
  std::map<std::pair<std::string, std::string>, Count> out;
  for (const Json& node : tape.at("nodes").as_array()) {
    Count& c = out[{node.at("op").as_string(), node.at("path").as_string()}];
    ++c.nodes;
    c.bytes = node.at("bytes").as_int();
  }
  return out;
}

TEST(Tape, HasDocumentsWhoeverEndsThem) {
  EXPECT_THAT(tape({"--data.separate_documents", "true"}).out, HasSubstr("document_begins"));
}

TEST(Tape, JsonHasTheCollectivesOfFullSharding) {
  const Json json = Json::parse(tape({"--format", "json"}).out, "tape");
  auto found = counts(json);
  int64_t parameters = 0;
  for (int b = -1; b < kBlocks; ++b) {
    const std::string unit = b < 0 ? "" : str("blocks.", b);
    const bool twice = b >= 0 && b < kBlocks - 2;
    EXPECT_EQ((found[{"all_gather", unit}].nodes), twice ? 2 : 1) << unit;
    EXPECT_EQ((found[{"reduce_scatter", unit}].nodes), 1) << unit;
    EXPECT_EQ((found[{"discard", unit}].nodes), twice ? 2 : 1) << unit;
    EXPECT_EQ((found[{"all_gather", unit}].bytes), (found[{"reduce_scatter", unit}].bytes)) << unit;
    parameters += found[{"all_gather", unit}].bytes * 8 / 7 / 4;  // 7 of 8 parts come from others
  }
  EXPECT_GE(parameters, 124'439'808);
  EXPECT_LT(parameters, 124'439'808 + 10'000 * 13);  // padding
  int gathers = 0;
  for (const auto& [key, count] : found) gathers += key.first == "all_gather" ? count.nodes : 0;
  EXPECT_EQ(gathers, kGathers);
}

TEST(Tape, TextShowsThemWithBytes) {
  const Outcome r = tape({});
  for (const char* part : {" = all_gather %", " = reduce_scatter ", "discard %", "blocks.11",
                           "Shard(flat)→Replicate@data", "prefetched",
                           "parameters 124439808, ranks 8, rank 0, threads ", ": peak "})
    EXPECT_THAT(r.out, HasSubstr(part));
  int gathers = 0;
  for (const std::string& line : testing::lines_of(r.out)) {
    if (line.find(" = all_gather %") == std::string::npos) continue;
    ++gathers;
    EXPECT_THAT(line, HasSubstr(" MiB"));
  }
  EXPECT_EQ(gathers, kGathers);
}

// Columns begin at the same positions in all lines of a phase, except after a cell that is longer than most terminals' lines.
TEST(Tape, TextHasColumns) {
  for (const Words& more :
       {Words{}, Words{"--sharding.tensor", "2", "--sharding.context", "2", "--sharding.pipeline", "2", "--train.micro_batches", "2"}}) {
    const std::string out = tape(more).out;
    std::map<std::string, std::set<size_t>> begins;  // by modules and types of a phase
    std::string phase;
    int rows = 0;
    for (const std::string& line : testing::lines_of(out.substr(0, out.find("\ncollectives\n")))) {
      if (!line.starts_with("  ")) {
        phase = line;
        continue;
      }
      const size_t end = line.find("  ", 2), module = line.find_first_not_of(' ', end);
      ASSERT_NE(module, std::string::npos) << line;
      if (end - 2 > 64) continue;
      ++rows;
      begins[phase + " modules"].insert(module);
      const size_t type = line.find_first_not_of(' ', line.find("  ", module));
      if (type != std::string::npos) begins[phase + " types"].insert(type);
    }
    EXPECT_GT(rows, 300);
    for (const auto& [what, places] : begins) EXPECT_EQ(places.size(), 1u) << what << " of\n" << out;
  }
}

double number_before(const std::string& line) { return std::strtod(line.c_str(), nullptr); }

// The table of uses adds up to the peak, and the largest holders are among them.
TEST(Tape, TextSaysWhatThePeakIsHeldFor) {
  for (const Words& more : {Words{}, Words{"--train.compile", "true"}, Words{"--train.recompute", "block", "--train.dtype", "bf16"}}) {
    const Outcome r = tape(more);
    const double mebibytes = std::strtod(r.out.c_str() + r.out.find(" bytes (", r.out.find(": peak ")) + 8, nullptr);
    const std::vector<std::string> lines = testing::lines_of(r.out);
    const auto uses = std::ranges::find(lines, "       MiB      %  held for"), takers = std::find_if(uses, lines.end(), [](const auto& line) {
      return line.ends_with("by what took it");
    });
    ASSERT_TRUE(takers != lines.end()) << r.out;
    double sum = 0;
    for (auto line = uses + 1; line != takers; ++line) sum += number_before(*line);
    EXPECT_NEAR(sum, mebibytes, 0.05) << r.out;
    for (const char* part : {"activations\n", "masters\n", "optimizer state\n", "gathered weights\n", "masters: resting of ",
                             " of blocks.*", "it came to that when "})
      EXPECT_THAT(r.out, HasSubstr(part));
    EXPECT_EQ(r.out.find("idle in the program's memory") != std::string::npos, more == Words({"--train.compile", "true"}));
  }
}

TEST(Tape, DotIsAGraph) {
  const Outcome r = tape({"--format", "dot", "--rank", "7"});
  EXPECT_TRUE(r.out.starts_with("digraph"));
  EXPECT_THAT(r.out, HasSubstr("all_gather"));
  EXPECT_THAT(r.out, HasSubstr("reduce_scatter"));
  EXPECT_EQ(std::count(r.out.begin(), r.out.end(), '{'),
            std::count(r.out.begin(), r.out.end(), '}'));
}

TEST(Tape, OtherStrategies) {
  auto kept = counts(
      Json::parse(tape({"--format", "json", "--sharding.strategy", "shard_grad_op"}).out, "tape"));
  EXPECT_EQ((kept[{"all_gather", "blocks.3"}].nodes), 1);
  EXPECT_EQ((kept[{"reduce_scatter", "blocks.3"}].nodes), 1);
  auto replicated = counts(
      Json::parse(tape({"--format", "json", "--sharding.strategy", "replicate"}).out, "tape"));
  EXPECT_EQ((replicated[{"all_gather", "blocks.3"}].nodes), 0);
  EXPECT_EQ((replicated[{"all_reduce", "blocks.3"}].nodes), 1);
}

/// "... on a GPU: peak N bytes": N.
int64_t peak_in(const std::string& text) {
  const std::string word = ": peak ";
  return std::stoll(text.substr(text.rfind(word) + word.size()));
}

TEST(Tape, ForAGpuThatIsNotHere) {
  if constexpr (!kernels::kHasCuda) {
    const Outcome r = run_sheaf({"tape", "--model.preset", "gpt2-124m", "--device", "cuda"});
    EXPECT_EQ(r.code, 64);
    EXPECT_THAT(r.err, HasSubstr("this build has no CUDA"));
  } else {
    const Outcome r = tape({"--device", "cuda"});
    EXPECT_THAT(r.out, HasSubstr("ranks 8, rank 0, on a GPU: peak "));
    EXPECT_THAT(r.out, HasSubstr("cuDNN"));
    EXPECT_NE(peak_in(r.out), peak_in(tape({}).out));
  }
  const Outcome wrong = run_sheaf({"tape", "--model.preset", "gpt2-124m", "--device", "gpu"});
  EXPECT_EQ(wrong.code, 64);
  EXPECT_THAT(wrong.err, HasSubstr("[tape] unknown device 'gpu'; known: cpu, cuda"));
}

}  // namespace
}  // namespace sheaf
