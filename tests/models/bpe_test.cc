// Byte-pair tokenizers, against ids of two peers (bpe/make_files) and against the definition.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <random>

#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/corpus.h"
#include "sheaf/models/token_file.h"
#include "sheaf/models/utf8.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::HasSubstr;

const std::string kFolder = "tests/models/bpe";

std::string data_error(const std::function<void()>& f) { return message_of<DataError>(ExitCode::kData, f); }

std::vector<std::shared_ptr<const Tokenizer>> both() {
  return {load_gpt2_tokenizer(kFolder), load_llama3_tokenizer(kFolder)};
}

// Text of everything that the patterns distinguish, and with `bytes` also invalid UTF-8.
std::string random_text(std::mt19937& random, int pieces, bool bytes) {
  static const std::vector<std::string> kPieces = {
      " ",  "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "\u180e", "'s", "'LL", "the", " of", "God",
      "1",  "23", "٣",  "Ⅷ",    "!",    "...", "\u0301", "é",     "你好",   "。",     "🙂", "שלום", "a",  "Z",   "-"};
  std::string text;
  for (int i = 0; i < pieces; ++i) {
    if (bytes && random() % 8 == 0) text += static_cast<char>(random());
    else text += kPieces[random() % kPieces.size()];
  }
  return text;
}

TEST(Bpe, GivesTheIdsOfItsPeers) {
  const Json golden = Json::parse(File::open(kFolder + "/golden.json").read_all(), "golden.json");
  for (const auto& tokenizer : both()) {
    for (const Json& entry : golden.as_array()) {
      const std::string& text = entry.at("text").as_string();
      std::vector<int32_t> expected;
      for (const Json& id : entry.at(tokenizer->kind()).as_array()) expected.push_back(static_cast<int32_t>(id.as_int()));
      EXPECT_EQ(tokenizer->encode(text), expected) << tokenizer->kind() << ": " << text;
      EXPECT_EQ(tokenizer->decode(expected), text);
    }
  }
}

TEST(Bpe, SpecialTokensByTheirNames) {
  for (const auto& tokenizer : both()) {
    const int32_t end = *tokenizer->end_of_text();
    const std::string name = tokenizer->decode(std::span(&end, 1));
    const std::string text = "He said" + name + name + " so. <|eot|>";
    std::vector<int32_t> expected = tokenizer->encode("He said");
    expected.insert(expected.end(), {end, end});
    for (const int32_t id : tokenizer->encode(" so. <|eot|>")) expected.push_back(id);
    EXPECT_EQ(tokenizer->encode_special(text), expected);
    EXPECT_NE(tokenizer->encode(text), expected);
    EXPECT_EQ(tokenizer->special_token(name), end);
    EXPECT_EQ(tokenizer->special_token("a"), std::nullopt);
    EXPECT_EQ(tokenizer->special_token("<|eot_id|>").has_value(), tokenizer->kind() == "llama3");
  }
}

TEST(Bpe, LosesNothing) {
  std::mt19937 random(1);
  for (const auto& tokenizer : both()) {
    for (int i = 0; i < 300; ++i) {
      const std::string text = random_text(random, i, true);
      EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
    }
    std::string noise(100'000, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(noise)), noise);
  }
}

// Merges the best pair repeatedly, found by looking at all of them.
TEST(Bpe, JoinsTheBestPairFirst) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  std::mt19937 random(2);
  std::map<BpePair, std::pair<size_t, int32_t>> joins;
  std::vector<BpePair> merges;
  std::map<std::string, int32_t> ids;
  for (char c : {'a', 'b', 'c'}) ids[std::string(1, c)] = c;
  while (merges.size() < 60) {
    const auto any = [&] { return std::next(ids.begin(), static_cast<int64_t>(random() % ids.size()))->second; };
    const BpePair pair = {any(), any()};
    const std::string joined = tokens[static_cast<size_t>(pair.first)] + tokens[static_cast<size_t>(pair.second)];
    if (joined.size() > 12 || joins.contains(pair)) continue;
    if (ids.emplace(joined, static_cast<int32_t>(tokens.size())).second) tokens.push_back(joined);
    joins[pair] = {merges.size(), ids[joined]};
    merges.push_back(pair);
  }
  const auto tokenizer = make_gpt2_tokenizer(tokens, merges);
  for (int i = 0; i < 500; ++i) {
    std::string word;
    for (int n = i % 60; n >= 0; --n) word += static_cast<char>('a' + random() % 3);
    std::vector<int32_t> expected(word.begin(), word.end());
    for (;;) {
      size_t best = SIZE_MAX, at = 0;
      for (size_t k = 0; k + 1 < expected.size(); ++k) {
        const auto join = joins.find({expected[k], expected[k + 1]});
        if (join != joins.end() && join->second.first < best) best = join->second.first, at = k;
      }
      if (best == SIZE_MAX) break;
      expected[at] = joins.at({expected[at], expected[at + 1]}).second;
      expected.erase(expected.begin() + static_cast<int64_t>(at) + 1);
    }
    EXPECT_EQ(tokenizer->encode(word), expected) << word;
  }
}

// In tiktoken's format any two tokens whose concatenation is a token may be merged; also with a vocabulary that no merges produced.
TEST(Bpe, RanksDecide) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 30; ++trial) {
    std::map<std::string, int32_t> ids;
    std::vector<std::string> tokens;
    const auto add = [&](const std::string& token) {
      if (ids.emplace(token, static_cast<int32_t>(tokens.size())).second) tokens.push_back(token);
    };
    for (int byte = 0; byte < 256; ++byte) add(std::string(1, static_cast<char>(byte)));
    const auto word = [&](int length) {
      std::string text;
      for (int i = 0; i < length; ++i) text += static_cast<char>('a' + random() % 2);
      return text;
    };
    for (int i = 0; i < 80; ++i) add(word(2 + static_cast<int>(random() % 7)));
    const auto tokenizer = make_llama3_tokenizer(tokens);
    for (int i = 0; i < 200; ++i) {
      const std::string text = word(1 + i % 40);
      std::vector<std::string> parts;
      for (char c : text) parts.emplace_back(1, c);
      if (ids.contains(text)) parts = {text};
      for (;;) {
        int32_t best = INT32_MAX;
        size_t at = 0;
        for (size_t k = 0; k + 1 < parts.size(); ++k) {
          const auto id = ids.find(parts[k] + parts[k + 1]);
          if (id != ids.end() && id->second < best) best = id->second, at = k;
        }
        if (best == INT32_MAX) break;
        parts[at] += parts[at + 1];
        parts.erase(parts.begin() + static_cast<int64_t>(at) + 1);
      }
      std::vector<int32_t> expected;
      for (const std::string& part : parts) expected.push_back(ids.at(part));
      ASSERT_EQ(tokenizer->encode(text), expected) << text;
    }
  }
}

TEST(Bpe, TextsMayBeCutAndThreadsDoNotMatter) {
  std::mt19937 random(3);
  for (const auto& tokenizer : both()) {
    for (int i = 0; i < 300; ++i) {
      const std::string text = random_text(random, 60, true);
      const auto whole = tokenizer->encode(text);
      for (size_t at = 0; at < text.size();) {
        at = tokenizer->cut(text, at + 1);
        auto parts = tokenizer->encode(std::string_view(text).substr(0, at));
        const auto rest = tokenizer->encode(std::string_view(text).substr(at));
        parts.insert(parts.end(), rest.begin(), rest.end());
        ASSERT_EQ(parts, whole) << json_string(text) << " at " << at;
      }
    }
    const std::string large = random_text(random, 1'000'000, true);
    RankContext context;
    const RankScope scope(context);
    context.threads = 1;
    const auto alone = tokenizer->encode(large);
    context.threads = 5;
    EXPECT_TRUE(tokenizer->encode(large) == alone);
    EXPECT_TRUE(tokenizer->decode(alone) == large);
  }
}

// The time for a word must not grow with the square of its length, nor the depth of a search with its length.
TEST(Bpe, LongWords) {
  for (const auto& tokenizer : both()) {
    for (const char* piece : {"a", "the", " ", "\n", "\t ", "1", "!", "漢", "\u3000", "\xff"}) {
      std::string text;
      while (text.size() < 2'000'000) text += piece;
      EXPECT_TRUE(tokenizer->decode(tokenizer->encode(text)) == text) << piece;
    }
  }
}

TEST(Bpe, SpecialTokensAreNotMadeFromText) {
  const auto gpt2 = load_gpt2_tokenizer(kFolder), llama3 = load_llama3_tokenizer(kFolder);
  EXPECT_EQ(gpt2->vocab_size(), 957);
  EXPECT_EQ(gpt2->end_of_text(), 956);
  EXPECT_EQ(llama3->vocab_size(), 956 + 256);
  EXPECT_EQ(llama3->end_of_text(), 957);  // after <|begin_of_text|>
  for (const auto& tokenizer : {gpt2, llama3}) {
    for (int32_t id = 956; id < tokenizer->vocab_size(); ++id) {
      const std::string name = tokenizer->decode({&id, 1});
      EXPECT_THAT(name, AllOf(::testing::StartsWith("<|"), ::testing::EndsWith("|>")));
      const auto ids = tokenizer->encode(name);
      EXPECT_GT(ids.size(), 1u);
      EXPECT_EQ(tokenizer->decode(ids), name);
    }
    const int32_t beyond = static_cast<int32_t>(tokenizer->vocab_size());
    EXPECT_THAT(data_error([&] { tokenizer->decode({&beyond, 1}); }), HasSubstr("outside the vocabulary of"));
  }
  EXPECT_EQ(llama3->decode(std::vector<int32_t>{956, 957, 956 + 9, 956 + 255}),
            "<|begin_of_text|><|end_of_text|><|eot_id|><|reserved_special_token_250|>");
  EXPECT_FALSE(make_byte_tokenizer()->end_of_text());
}

TEST(Bpe, ReadsBackItsJson) {
  std::mt19937 random(4);
  const std::string text = random_text(random, 3000, true);
  for (const auto& tokenizer : both()) {
    const std::string json = tokenizer->to_json().dump();
    EXPECT_LT(json.size(), 16'000u);
    const auto again = tokenizer_from_json(Json::parse(json, "t"));
    EXPECT_EQ(again->to_json().dump(), json);
    EXPECT_EQ(again->kind(), tokenizer->kind());
    EXPECT_EQ(again->encode(text), tokenizer->encode(text));
    EXPECT_EQ(again->vocab_size(), tokenizer->vocab_size());
    EXPECT_EQ(again->end_of_text(), tokenizer->end_of_text());
  }
}

TEST(Bpe, TrainsACorpusAndTokenFiles) {
  ScratchFolder folder;
  write_file(folder / "a.txt", "In the beginning God created the heaven and the earth.\n");
  const Corpus corpus = load_text_corpus(folder / "a.txt", "gpt2", 0.3, kFolder);
  EXPECT_EQ(corpus.vocab, 957);
  EXPECT_EQ(corpus.train.size() + corpus.val.size(),
            static_cast<int64_t>(load_gpt2_tokenizer(kFolder)->encode(File::open(folder / "a.txt").read_all()).size()));
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { load_text_corpus(folder / "a.txt", "gpt2", 0.3); }),
              HasSubstr("needs a folder with its published files: encoder.json and vocab.bpe"));
}

TEST(Utf8, CharactersThatComeInPieces) {
  const std::string text = "é€🙂a";
  for (size_t i = 0; i <= text.size(); ++i) {
    for (size_t j = i; j <= text.size(); ++j) {
      Utf8Assembler assembler;
      std::string shown = assembler.add(text.substr(0, i));
      EXPECT_EQ(valid_utf8_prefix(shown), shown.size());
      shown += assembler.add(text.substr(i, j - i));
      shown += assembler.add(text.substr(j));
      EXPECT_EQ(shown + assembler.finish(), text);
    }
  }
  const std::map<std::string, std::string> cases = {
      {"a\xff" "b", "a\ufffdb"}, {"\xe2\x82", "\ufffd\ufffd"}, {"\xe2\x82" "a", "\ufffd\ufffda"},
      {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"}, {"\xf4\x90", "\ufffd\ufffd"}, {"\xc0\x80", "\ufffd\ufffd"}, {"\xf0\x9f\x99", "\ufffd\ufffd\ufffd"}};
  for (const auto& [bytes, shown] : cases) {
    Utf8Assembler assembler;
    std::string out;
    for (char byte : bytes) out += assembler.add({&byte, 1});
    EXPECT_EQ(out + assembler.finish(), shown) << json_string(bytes);
  }
}

}  // namespace
}  // namespace sheaf::models
