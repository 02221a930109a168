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
using testing::operator+;
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

/// The number of elements of an XML text whose tags match; -1 if they do not.
int elements(const std::string& xml) {
  std::vector<std::string> open;
  int count = 0;
  for (size_t at = xml.find('<'); at != std::string::npos; at = xml.find('<', at + 1)) {
    const size_t end = xml.find('>', at);
    if (end == std::string::npos) return -1;
    const std::string tag = xml.substr(at + 1, end - at - 1), tag_name = tag.substr(0, tag.find(' '));
    if (tag.starts_with('/')) {
      if (open.empty() || '/' + open.back() != tag) return -1;
      open.pop_back();
      continue;
    }
    ++count;
    if (!tag.ends_with('/')) open.push_back(tag_name);
  }
  return open.empty() ? count : -1;
}
int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Tape, SvgDrawsItsMemoryAndUnits) {
  const std::string svg = tape({"--format", "svg"}).out;
  EXPECT_TRUE(svg.starts_with("<svg xmlns")) << svg.substr(0, 100);
  EXPECT_GT(elements(svg), 100);
  EXPECT_EQ(count_of(svg, ": weights are gathered, nodes "), kGathers);
  EXPECT_EQ(count_of(svg, ": its gradients are whole, nodes "), 1 + kBlocks);
  EXPECT_EQ(count_of(svg, ": all_gather, "), kGathers);
  EXPECT_EQ(count_of(svg, ": reduce_scatter, "), 1 + kBlocks);
  for (const char* part : {">forward</text>", ">backward</text>", ">blocks.11</text>", "<title>masters, at most 59.3 MiB</title>", "full_shard"})
    EXPECT_THAT(svg, HasSubstr(part));
  EXPECT_THAT(svg, HasSubstr(" 56.0H")) << "the peak is the top of the frame";
  EXPECT_EQ(count_of(svg, " 55."), 0);
  EXPECT_LT(svg.size(), 300'000u);
  // Rows are in the order in which units compute, also where the backward is the first to name them.
  for (const std::string& drawn : {svg, tape({"--format", "svg", "--sharding.strategy", "replicate"}).out}) {
    const auto row = [&](const std::string& unit) {
      const size_t label = drawn.find(">" + unit + "</text>"), y = drawn.rfind(" y=\"", label);
      return label == std::string::npos ? -1.0 : std::strtod(drawn.c_str() + y + 4, nullptr);
    };
    EXPECT_GT(row("root"), 0);
    EXPECT_LT(row("root"), row("blocks.0"));
    EXPECT_LT(row("blocks.0"), row("blocks.11"));
  }
}

// What a rank of the second stage gathers, reduces and holds, not what the first rank does.
TEST(Tape, IsOfTheRankThatIsAskedFor) {
  for (const int rank : {0, 7}) {
    const Words stages = {"--sharding.pipeline", "2", "--train.micro_batches", "2", "--rank", str(rank)};
    const std::string text = tape(stages).out, collectives = text.substr(text.find("\ncollectives\n")), svg = tape(stages + Words{"--format", "svg"}).out;
    for (int b = 0; b < kBlocks; ++b) {
      const bool here = (b < 8) == (rank == 0);  // the second stage has the head, too
      const auto gathers = [&](const std::string& line) { return line.starts_with(str("blocks.", b, " ")) && line.find("all_gather") != std::string::npos; };
      EXPECT_EQ(std::ranges::any_of(testing::lines_of(collectives), gathers), here) << rank << ' ' << b << collectives;
      EXPECT_EQ(count_of(svg, str(">blocks.", b, ": weights are gathered")) > 0, here) << rank << ' ' << b;
      EXPECT_EQ(count_of(svg, str(">blocks.", b, ": its gradients are whole")) > 0, here) << rank << ' ' << b;
    }
  }
}

/// "3.3 KiB" at that place.
double bytes_at(const std::string& text, size_t at) {
  char* unit = nullptr;
  const double value = std::strtod(text.c_str() + at, &unit);
  return value * (unit[1] == 'K' ? 1024 : unit[1] == 'M' ? 1024 * 1024 : 1);
}

// Of a node with several values, such as codes and their scales, all bytes count, once.
TEST(Tape, PicturesHaveTheBytesOfWholeNodes) {
  const Words small = {"tape", "--model.vocab", "65", "--model.layers", "2", "--world", "2", "--sharding.gather_int8", "true"};
  const Json json = Json::parse(run_sheaf(small + Words{"--format", "json"}).out, "tape");
  const std::string svg = run_sheaf(small + Words{"--format", "svg"}).out, dot = run_sheaf(small + Words{"--format", "dot"}).out;
  int several = 0;
  for (const Json& node : json.at("nodes").as_array()) {
    const int64_t id = node.at("id").as_int();
    const auto bytes = static_cast<double>(node.at("bytes").as_int());
    if (bytes == 0) continue;
    const std::string title = str(", node ", id, "</title>"), edge = str(" -> n", id, " [label=\"%");
    ASSERT_EQ(count_of(svg, title), 1) << id;
    EXPECT_NEAR(bytes_at(svg, svg.rfind(", ", svg.find(title) - 1) + 2), bytes, 0.02 * bytes) << id;
    double on_edges = 0;
    for (size_t at = dot.find(edge); at != std::string::npos; at = dot.find(edge, at + 1))
      if (const size_t label = dot.find("\\n", at); label < dot.find('"', at + edge.size())) on_edges += bytes_at(dot, label + 2);
    EXPECT_NEAR(on_edges, bytes, 0.02 * bytes) << id;
    several += node.at("inputs").as_array().size() > 1;
  }
  EXPECT_GT(several, 0);
}

TEST(Tape, SvgOfLargeStepsIsNotLarger) {
  const std::string svg = tape({"--format", "svg", "--train.batch", "64", "--train.micro_batches", "8", "--sharding.tensor", "2", "--train.recompute", "block"}).out;
  EXPECT_GT(elements(svg), 100);
  EXPECT_GT(count_of(svg, ">blocks.11</text>"), 0);
  EXPECT_EQ(run_sheaf({"tape", "--model.preset", "gpt2-124m", "--format", "svg", "--train.compile", "true"}).code, 64);
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
