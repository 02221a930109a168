// Texts in blocks, from files and standard input, and the documents in JSON lines.
#include "sheaf/models/text_reader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "sheaf/core/rank_context.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/word_pattern.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

size_t nowhere(std::string_view text, size_t) { return text.size(); }

// Lines of growing length, 700 KB in all: more than is read ahead.
std::string a_text() {
  std::string text;
  for (int i = 0; text.size() < 700'000; ++i) text += str("line ", i, ' ', std::string(static_cast<size_t>(i % 1000), 'x'), '\n');
  return text + "the end";
}

std::vector<std::string> blocks(TextReader& reader, const TextReader::Cut& cut) {
  std::vector<std::string> all;
  int64_t at = 0;
  for (std::string_view block; !(block = reader.next(cut)).empty();) {
    EXPECT_EQ(reader.offset(), at);
    at += static_cast<int64_t>(block.size());
    EXPECT_EQ(reader.bytes(), at);
    all.emplace_back(block);
  }
  EXPECT_EQ(reader.bytes(), at);
  return all;
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

TEST(TextReader, BlocksAreTheTextAndEndWhereItMayBeCut) {
  ScratchFolder folder;
  const std::string text = a_text();
  write_file(folder / "a.txt", text);
  for (size_t block : {size_t{1}, size_t{100}, size_t{65'536}, size_t{300'000}, text.size() - 1, text.size(), size_t{1} << 20}) {
    TextReader lines(folder / "a.txt", block), whole(folder / "a.txt", block), words(folder / "a.txt", block);
    const std::vector<std::string> parts = blocks(lines, JsonLines::cut);
    EXPECT_EQ(joined(parts), text);
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      EXPECT_EQ(parts[i].back(), '\n');
      EXPECT_GE(parts[i].size(), block);
      EXPECT_LT(parts[i].size(), block + 1100);
    }
    EXPECT_THAT(blocks(whole, nowhere), ElementsAre(text));
    EXPECT_EQ(joined(blocks(words, safe_cut)), text);
  }
  EXPECT_EQ(TextReader(folder / "a.txt", 10).name(), "'" + (folder / "a.txt") + "'");
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { TextReader(folder / "none", 10); }), HasSubstr("No such file"));
  write_file(folder / "empty", "");
  TextReader empty(folder / "empty", 10);
  EXPECT_EQ(empty.next(nowhere), "");
  EXPECT_EQ(empty.bytes(), 0);
}

// What was searched for a cut in vain is not searched again.
TEST(TextReader, LookingForACutTakesTheTimeOfReading) {
  ScratchFolder folder;
  write_file(folder / "a.txt", std::string(3'000'000, 'x'));
  TextReader reader(folder / "a.txt", 100'000);
  size_t most = 0;
  const auto cut = [&](std::string_view text, size_t at) {
    most = std::max(most, text.size() - at);
    return text.size();
  };
  EXPECT_EQ(reader.next(cut).size(), 3'000'000u);
  EXPECT_LT(most, 300'000u);
}

// Input that arrives in pieces is cut as a file is.
TEST(TextReader, StandardInput) {
  ScratchFolder folder;
  const std::string text = a_text();
  write_file(folder / "a.txt", text);
  TextReader file(folder / "a.txt", 50'000);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int kept = dup(STDIN_FILENO);
  dup2(ends[0], STDIN_FILENO);
  std::thread writer([&] {
    for (size_t at = 0; at < text.size(); at += 4'999)
      EXPECT_GT(write(ends[1], &text[at], std::min<size_t>(4'999, text.size() - at)), 0);
    close(ends[1]);
  });
  TextReader reader("-", 50'000);
  const std::vector<std::string> parts = blocks(reader, JsonLines::cut);
  writer.join();
  dup2(kept, STDIN_FILENO);
  close(kept), close(ends[0]);
  EXPECT_EQ(parts, blocks(file, JsonLines::cut));
  EXPECT_EQ(reader.name(), "standard input");
}

TEST(TextReader, StandardInputOfWhichNothingComesMayBeLeft) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int kept = dup(STDIN_FILENO);
  dup2(ends[0], STDIN_FILENO);
  ASSERT_EQ(write(ends[1], "so far", 6), 6);
  int asked = 0;
  TextReader reader("-", 100, [&] { return ++asked > 2; });
  EXPECT_EQ(reader.next(nowhere), "so far");
  EXPECT_EQ(reader.next(nowhere), "");
  dup2(kept, STDIN_FILENO);
  close(kept), close(ends[0]), close(ends[1]);
}

volatile std::sig_atomic_t signalled = 0;

// A signal arrives while it waits, and `stop` returns true: nothing else would end the wait before the pipe is closed.
TEST(TextReader, ASignalEndsTheWaitingForStandardInput) {
  struct sigaction noting = {}, before = {};
  noting.sa_handler = [](int) { signalled = 1; };
  noting.sa_flags = SA_RESTART;
  ASSERT_EQ(sigaction(SIGUSR1, &noting, &before), 0);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int kept = dup(STDIN_FILENO);
  dup2(ends[0], STDIN_FILENO);
  std::atomic<bool> asked = false, ended = false, left = false;
  std::thread other([&, reading = pthread_self()] {
    while (!asked) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // it waits now
    pthread_kill(reading, SIGUSR1);
    for (int i = 0; i < 1'000 && !ended; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    left = ended.load();
    close(ends[1]);
  });
  TextReader reader("-", 100, [&] { return asked = true, signalled != 0; });
  EXPECT_EQ(reader.next(nowhere), "");
  ended = true;
  other.join();
  EXPECT_TRUE(left) << "only the end of the pipe ended it";
  dup2(kept, STDIN_FILENO);
  close(kept), close(ends[0]);
  sigaction(SIGUSR1, &before, nullptr);
}

TEST(TextReader, CompressedTextsAreRefused) {
  ScratchFolder folder;
  for (const auto& [magic, name] : {std::pair<std::string, const char*>{"\x1f\x8b\x08", "gzip"}, {"\x28\xb5\x2f\xfd-", "zstd"},
                                    {"PAR1", "Parquet"}}) {
    write_file(folder / "a.jsonl", magic + "rest");
    TextReader reader(folder / "a.jsonl", 100);
    EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { reader.next(nowhere); }),
                HasSubstr(str("a.jsonl' is ", name, ", no text")));
  }
}

std::vector<std::string> documents(const std::string& text, const std::string& field = "text") {
  std::vector<std::string> all;
  JsonLines lines(field);
  lines.read(text, "a.jsonl", all);
  return all;
}

TEST(JsonLines, AMemberOfEachIsADocument) {
  EXPECT_THAT(documents("{\"text\":\"a\\nb\"}\n \t\n{\"id\":123456789012345678901, \"x\":{\"text\":[{\"text\":1}]}, \"text\" : "
                        "\"\\u00e9\"} \r\n{\"text\":\"\"}\n{\"text\":\"end\"}"),
              ElementsAre("a\nb", "é", "end"));
  EXPECT_THAT(documents("{\"text\":1,\"content\":\"c\"}\n", "content"), ElementsAre("c"));
  // Line numbers continue from block to block.
  JsonLines lines("text");
  std::vector<std::string> all;
  lines.read("{\"text\":\"a\"}\n\n", "a.jsonl", all);
  lines.read("{\"text\":\"b\"}\n", "a.jsonl", all);
  EXPECT_THAT(all, ElementsAre("a", "b"));
  const auto error = [&](const std::string& line) {
    return message_of<DataError>(ExitCode::kData, [&] { JsonLines(lines).read(line, "'a.jsonl'", all); });
  };
  EXPECT_THAT(error("{\"text\":5}"), HasSubstr("line 4 of 'a.jsonl': member \"text\" is not a string"));
  EXPECT_THAT(error("{\"text\":{\"text\":\"a\"}}"), HasSubstr("member \"text\" is not a string"));
  EXPECT_THAT(error("{\"text\":[\"a\"]}"), HasSubstr("member \"text\" is not a string"));
  EXPECT_THAT(error("{\"text\":null}"), HasSubstr("member \"text\" is not a string"));
  EXPECT_THAT(error("{\"a\":{\"text\":\"a\"}}"), HasSubstr("no member \"text\""));
  EXPECT_THAT(error("[{\"text\":\"a\"}]"), HasSubstr("no member \"text\""));
  EXPECT_THAT(error("\"text\""), HasSubstr("no member \"text\""));
  EXPECT_THAT(error("{\"text\":\"a\",\"text\":\"b\"}"), HasSubstr("duplicate key \"text\""));
  EXPECT_THAT(error("{\"id\":1e999,\"text\":\"a\"}"), HasSubstr("a number beyond f64's"));
  EXPECT_THAT(error("{\"text\":\"a\"} x"), HasSubstr("not valid JSON at byte"));
  EXPECT_THAT(error("{\"text\":\"a"), HasSubstr("not valid JSON at byte"));
  EXPECT_THAT(error("{\"text\":\"\xff\"}"), HasSubstr("not valid JSON at byte"));
  EXPECT_THAT(error(std::string("{\"text\":\"a\"}\0", 13)), HasSubstr("contains a zero byte"));
  EXPECT_THAT(error("\xEF\xBB\xBF{\"text\":\"a\"}"), HasSubstr("starts with a byte order mark"));
  EXPECT_TRUE(is_json_lines("a/b.jsonl"));
  EXPECT_TRUE(is_json_lines("a/b.ndjson"));
  EXPECT_FALSE(is_json_lines("a/b.json"));
}

// Many small documents and large ones: the tokens of each, followed by its end.
TEST(Tokenizer, DocumentsAreThoseOfTheirTexts) {
  std::vector<std::string> texts = {"", "one", a_text(), "", "two words", a_text() + a_text()};
  for (int i = 0; i < 3'000; ++i)
    texts.push_back(str("document ", i, " of many, \xff café ", std::string(static_cast<size_t>(i % 700), 'y')));
  texts.push_back("last");
  std::vector<std::shared_ptr<const Tokenizer>> tokenizers = {make_byte_tokenizer(), load_gpt2_tokenizer("tests/models/bpe"),
                                                              load_llama3_tokenizer("tests/models/bpe")};
  for (const std::string name : {"always", "llama2", "mistral"}) {  // each of them puts a space before texts in its own way
    const std::string file = "tests/models/huggingface/" + name + ".json";
    tokenizers.push_back(make_huggingface_tokenizer(Json::parse(File::open(file).read_all(), file), file));
  }
  for (const auto& tokenizer : tokenizers) {
    std::vector<int32_t> expected;
    for (const std::string& text : texts) {
      const std::vector<int32_t> ids = tokenizer->encode(text);
      expected.insert(expected.end(), ids.begin(), ids.end());
      if (tokenizer->end_of_text()) expected.push_back(*tokenizer->end_of_text());
    }
    for (int threads : {1, 3}) {
      RankContext context;
      context.threads = threads;
      const RankScope scope(context);
      EXPECT_TRUE(tokenizer->encode_documents(texts) == expected) << tokenizer->kind() << ' ' << threads;
    }
    EXPECT_TRUE(tokenizer->encode_documents({}).empty());
    // The parts into which one call cuts a text are one text: only the first one is its beginning.
    const std::string_view large = texts[5];
    const size_t at = tokenizer->cut(large, large.size() / 2);
    std::vector<int32_t> both = tokenizer->encode(large.substr(0, at));
    const std::vector<int32_t> rest = tokenizer->encode_more(large.substr(at));
    both.insert(both.end(), rest.begin(), rest.end());
    EXPECT_TRUE(tokenizer->encode(large) == both) << tokenizer->kind();
  }
}

}  // namespace
}  // namespace sheaf::models
