// `sheaf generate --prompts`, as a user runs it.
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/core/file_lock.h"
#include "sheaf/core/json.h"
#include "sheaf/tests/tools/tiny_run.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

/// With a run on bytes and seven prompts, whose lines have further members.
struct Folder : CorpusFolder {
  Folder() {
    const Outcome trained = run_sheaf(Words{"train"} + kTinyRun + data("run") + Words{"--data.tokenizer", "byte"});
    EXPECT_EQ(trained.code, 0) << trained.err;
    std::string lines;
    for (int i = 0; i < 7; ++i)
      lines += str(R"({"id":)", i, R"(,"prompt":"pr)", std::string(static_cast<size_t>(i), 'o'), R"(mpt"})", i == 3 ? "\n\n" : "\n");
    write_file(*this / "prompts.jsonl", lines);
  }
  Words command(const std::string& out, const Words& more = {}) const {
    return Words{"generate", *this / "run", "--prompts", *this / "prompts.jsonl", "--output", *this / out, "--generate.tokens", "6"} + more;
  }
  Outcome generate(const std::string& out, const Words& more = {}, int world = 1) const { return run_sheaf(on_ranks(world, command(out, more))); }
  std::string text(const std::string& name) const { return File::open(*this / name).read_all(); }
};

TEST(GenerateLines, EachPromptIsContinuedInItsPlace) {
  const Folder f;
  const Outcome r = f.generate("out.jsonl", {"--generate.temperature", "0"});
  ASSERT_EQ(r.code, 0) << r.err;
  EXPECT_THAT(r.out, HasSubstr("7 of 7 continuations, 0.0% ended, "));
  const std::vector<std::string> lines = lines_of(f.text("out.jsonl"));
  ASSERT_EQ(lines.size(), 7u);
  for (int i = 0; i < 7; ++i) {
    const Json line = Json::parse(lines[static_cast<size_t>(i)], "the output");
    EXPECT_EQ(line.at("id").as_int(), i);
    const std::string prompt = line.at("prompt").as_string();
    const Outcome alone = run_sheaf({"generate", f / "run", "--generate.prompt", prompt, "--generate.tokens", "6", "--generate.temperature", "0"});
    EXPECT_EQ(json_string(prompt + line.at("completion").as_string() + "\n"), json_string(alone.out));  // invalid bytes are replaced
    EXPECT_FALSE(line.at("ended").as_bool());
    EXPECT_EQ(line.find("sample"), nullptr);
  }
}

TEST(GenerateLines, RanksAndBatchesChangeNothing) {
  const Folder f;
  ASSERT_EQ(f.generate("one.jsonl", {"--samples", "3"}).code, 0);
  const std::string want = f.text("one.jsonl");
  const std::vector<std::string> lines = lines_of(want);
  ASSERT_EQ(lines.size(), 21u);
  for (size_t i = 0; i < lines.size(); ++i) {
    const Json line = Json::parse(lines[i], "the output");
    EXPECT_EQ(line.at("id").as_int(), static_cast<int64_t>(i / 3));
    EXPECT_EQ(line.at("sample").as_int(), static_cast<int64_t>(i % 3));
  }
  int number = 0;
  for (const auto& [world, more] : std::initializer_list<std::pair<int, Words>>{
           {1, {"--at-once", "2"}}, {2, {}}, {3, {"--at-once", "1"}}, {2, {"--sharding.strategy", "full_shard", "--at-once", "4"}}}) {
    const std::string out = str("other", ++number);
    const Outcome r = f.generate(out, Words{"--samples", "3"} + more, world);
    ASSERT_EQ(r.code, 0) << r.err;
    EXPECT_EQ(f.text(out), want) << world << " ranks, " << ::testing::PrintToString(more);
  }
  const Outcome cut = f.generate("cut.jsonl", {"--sharding.tensor", "2"}, 4);
  ASSERT_EQ(cut.code, 0) << cut.err;
  EXPECT_EQ(lines_of(f.text("cut.jsonl")).size(), 7u);
}

TEST(GenerateLines, GoesOnBehindWhatIsThere) {
  const Folder f;
  ASSERT_EQ(f.generate("out.jsonl", {"--samples", "2"}).code, 0);
  const std::string want = f.text("out.jsonl");
  expect_refused(f.generate("out.jsonl", {"--samples", "2"}), 64, "out.jsonl' is there: give --resume");
  EXPECT_EQ(f.text("out.jsonl"), want);
  for (const int world : {1, 2})
    for (const size_t bytes : {size_t{0}, want.size() / 2, want.find('\n') + 1, want.size() - 1, want.size()}) {
      std::filesystem::resize_file(f / "out.jsonl", bytes);
      const Outcome r = f.generate("out.jsonl", {"--samples", "2", "--resume", "--at-once", "1"}, world);
      ASSERT_EQ(r.code, 0) << r.err;
      EXPECT_THAT(r.out, HasSubstr(bytes == want.size() ? "out.jsonl has all 14 lines" : "14 of 14 continuations, 0.0%"));
      EXPECT_EQ(f.text("out.jsonl"), want) << bytes << " bytes, " << world << " ranks";
    }
  {
    const FileLock theirs(f / "out.jsonl");
    expect_refused(f.generate("out.jsonl", {"--samples", "2", "--resume"}), 64, "another `sheaf generate` is writing to");
    EXPECT_EQ(f.text("out.jsonl"), want);
  }
  // Other prompts, and an invalid output.
  write_file(f / "prompts.jsonl", "{\"prompt\": \"another\"}\n");
  expect_refused(f.generate("out.jsonl", {"--resume"}), 65, "has 14 lines, and there are only 1 to write");
  EXPECT_EQ(f.text("out.jsonl"), want);
  const std::string kept[] = {"{\"prompt\": \"another\"}\n", "{\"prompt\": \"another\"}", "x", "{\"prompt\":\"another\",\"completion\":\"\"}\n",
                              "{\"prompt\":\"another\",\"completion\":\"\",\"ended\":true,\"sample\":0}\n"};
  for (const std::string& text : kept) {
    write_file(f / "kept.jsonl", text);
    expect_refused(f.generate("kept.jsonl", {"--resume"}), 65, "is not what follows the prompt that has its place");
    EXPECT_EQ(f.text("kept.jsonl"), text);
  }
  for (const Words& more : {Words{}, Words{"--resume"}}) expect_refused(f.generate("prompts.jsonl", more), 64, "--output is the file of prompts");
  EXPECT_EQ(f.text("prompts.jsonl"), "{\"prompt\": \"another\"}\n");
}

TEST(GenerateLines, SaysWhatIsWrong) {
  const Folder f;
  const auto refused = [&](const std::string& lines, int code, const std::string& what, const Words& more = {}) {
    write_file(f / "prompts.jsonl", lines);
    expect_refused(f.generate("out.jsonl", more), code, what);
    EXPECT_FALSE(std::filesystem::exists(f / "out.jsonl")) << what;
  };
  const std::string good = "{\"prompt\": \"a\"}\n";
  refused(good + "\n{\"prompt\": }\n", 65, "line 3 of '");
  refused(good + "[1]\n", 65, "is no object");
  refused(good + "{\"text\": \"a\"}\n", 65, "has no member \"prompt\"");
  refused(good + "{\"prompt\": 7}\n", 65, "prompts.jsonl': the prompt is neither a text nor a list of messages");
  refused(good + "{\"prompt\": \"\"}\n", 65, "the prompt is empty");
  refused("{\"prompt\": \"seventeen letters\"}\n", 65, "the prompt has 17 tokens, the model's context 16");
  refused("{\"prompt\": \"a\", \"completion\": \"b\"}\n", 65, "has a member \"completion\", which the output's lines have: give --field");
  refused("{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}]}\n", 64, "give generate.chat");
  refused("\n", 65, "has no lines");
  refused("{\"prompt\": \"a\", \"sample\": 1}\n", 65, "has a member \"sample\"", {"--samples", "2"});
  for (const char* field : {"ended", "sample", "prompt", ""}) refused(good, 64, "lines need it for what follows", {"--field", field});
  refused(good, 64, "--sharding.pipeline is not for sampling", {"--sharding.pipeline", "2"});
  refused(good, 64, "sharding.tensor 2: 1 rank cannot be divided", {"--sharding.tensor", "2"});
  refused(good, 64, "--generate.prompt would change nothing", {"--generate.prompt", "x"});
  expect_refused(run_sheaf({"generate", f / "run", "--prompts", f / "prompts.jsonl"}), 64, "wants --output");
  expect_refused(run_sheaf({"generate", f / "run", "--prompts", f / "none", "--output", f / "o"}), 65, "cannot open");
  expect_refused(run_sheaf({"generate", f / "run", "--samples", "3"}), 64, "--samples is for --prompts");
  expect_refused(f.generate("nowhere/out.jsonl"), 74, "nowhere/out.jsonl");
}

}  // namespace
}  // namespace sheaf::testing
