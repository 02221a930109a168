// Training a byte-pair vocabulary, against Hugging Face's package (bpe_trainer/make) and against the definition.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <random>
#include <set>

#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/models/bpe_merges.h"
#include "sheaf/models/bpe_trainer.h"
#include "sheaf/models/byte_alphabet.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/utf8.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::HasSubstr;

const std::string kFolder = "tests/models/bpe_trainer";
const BpeTrainerOptions kGolden[] = {
    {.vocab = 700, .min_frequency = 2, .pattern = "llama3", .special = {"<|endoftext|>"}},
    {.vocab = 1000, .min_frequency = 1, .pattern = "gpt2", .special = {"<s>", "</s>", "<|im start|>", "<é>"}}};

std::string golden_text() { return File::open(kFolder + "/text.txt").read_all(); }

template <class E>
std::string error(const std::function<void()>& f) {
  return message_of<E>(std::is_same_v<E, ConfigError> ? ExitCode::kConfig : ExitCode::kData, f);
}

// Text of everything that patterns and trainers distinguish, and with `bytes` also invalid UTF-8.
std::string random_text(std::mt19937& random, int pieces, bool bytes) {
  static const std::vector<std::string> kPieces = {
      " ",  "  ", "\n", "\r\n", "\t",   "\u00a0", "'s", "the",  " of", "God", "1",   "23",
      "٣",  "!",  "...", "----", "\u0301", "é",      "你好", "。", "🙂",  "שלום", "aaa", "Z"};
  std::string text;
  for (int i = 0; i < pieces; ++i) {
    if (bytes && random() % 8 == 0) text += static_cast<char>(random());
    else text += kPieces[random() % kPieces.size()];
  }
  return text;
}

TEST(BpeTrainer, WritesTheFileOfItsPeer) {
  for (const auto& options : kGolden) {
    const std::string path = kFolder + "/" + options.pattern + ".json";
    const Json expected = Json::parse(File::open(path).read_all(), path);
    BpeTrainer trainer(options);
    trainer.add(golden_text());
    const Json file = trainer.train();
    EXPECT_EQ(file.at("model").at("merges").dump(), expected.at("model").at("merges").dump());
    EXPECT_TRUE(file == expected) << file.dump().substr(0, 1000);
  }
}

// The definition, word by word and pair by pair.
LearnedMerges learned_slowly(const std::map<std::string, int64_t>& counts, const MergeOptions& options) {
  LearnedMerges out;
  std::map<unsigned char, int32_t> id_of;
  for (const unsigned char byte : bytes_in_alphabet()) {
    id_of[byte] = static_cast<int32_t>(out.tokens.size());
    out.tokens.emplace_back(1, static_cast<char>(byte));
  }
  std::vector<std::pair<std::vector<int32_t>, int64_t>> words;
  for (const auto& [word, count] : counts) {
    words.push_back({{}, count});
    for (const char byte : word) words.back().first.push_back(id_of[static_cast<unsigned char>(byte)]);
  }
  while (static_cast<int64_t>(out.tokens.size()) < options.tokens) {
    std::map<BpePair, int64_t> pairs;
    for (const auto& [tokens, count] : words)
      for (size_t i = 1; i < tokens.size(); ++i) pairs[{tokens[i - 1], tokens[i]}] += count;
    BpePair best;
    int64_t most = 0;
    for (const auto& [pair, count] : pairs) {
      const std::string bytes = out.tokens[static_cast<size_t>(pair.first)] + out.tokens[static_cast<size_t>(pair.second)];
      if (count > most && options.may_be(bytes)) most = count, best = pair;  // the first of several that are equally frequent
    }
    if (most < std::max<int64_t>(options.min_frequency, 1)) break;
    const auto id = static_cast<int32_t>(out.tokens.size());
    out.merges.push_back(best);
    out.tokens.push_back(out.tokens[static_cast<size_t>(best.first)] + out.tokens[static_cast<size_t>(best.second)]);
    for (auto& [tokens, count] : words) {
      std::vector<int32_t> joined;
      for (size_t i = 0; i < tokens.size(); ++i) {
        const bool here = i + 1 < tokens.size() && tokens[i] == best.first && tokens[i + 1] == best.second;
        joined.push_back(here ? id : tokens[i]);
        i += here;
      }
      tokens = joined;
    }
  }
  return out;
}

TEST(BpeMerges, AreThoseOfTheDefinition) {
  std::mt19937 random(5);
  const std::string alphabets[] = {"a", "ab", "abc", "a-", "=", "aé你", "abcdefgh"};
  int64_t merges = 0, refused = 0;
  for (int trial = 0; trial < 600; ++trial) {
    const std::string& alphabet = alphabets[random() % std::size(alphabets)];
    const int longest = std::array{4, 12, 60}[random() % 3];
    std::string text;
    for (int n = 1 + static_cast<int>(random() % 50); n > 0; --n) {
      if (!text.empty()) text += ' ';
      for (int i = static_cast<int>(random() % static_cast<uint32_t>(longest)); i >= 0; --i)
        text += alphabet[random() % alphabet.size()];
    }
    MergeOptions options{.tokens = 256 + static_cast<int64_t>(random() % 80),
                         .min_frequency = static_cast<int64_t>(random() % 4)};
    if (random() % 3 == 0)
      options.may_be = [&](const std::string& bytes) {
        const bool may = bytes.size() < 5 && bytes != "aa" && bytes != "ab";
        refused += !may;
        return may;
      };
    WordCounts counts(WordPattern::gpt2());
    counts.add(text);
    std::map<std::string, int64_t> words;
    counts.for_each([&](std::string_view word, int64_t count) { words[std::string(word)] = count; });
    const LearnedMerges learned = learn_merges(counts, options), expected = learned_slowly(words, options);
    ASSERT_EQ(learned.merges, expected.merges) << trial << ": " << text;
    ASSERT_EQ(learned.tokens, expected.tokens) << trial << ": " << text;
    const std::set<std::string> distinct(learned.tokens.begin(), learned.tokens.end());
    EXPECT_EQ(distinct.size(), learned.tokens.size()) << "one pair a token";
    merges += static_cast<int64_t>(learned.merges.size());
  }
  EXPECT_GT(merges, 8000);
  EXPECT_GT(refused, 1000);
}

TEST(BpeMerges, OverlapsAndTies) {
  const auto learn = [](const std::string& text, int64_t merges) {
    WordCounts counts(WordPattern::gpt2());
    counts.add(text);
    const LearnedMerges learned = learn_merges(counts, {.tokens = 256 + merges});
    return std::vector<std::string>(learned.tokens.begin() + 256, learned.tokens.end());
  };
  using Tokens = std::vector<std::string>;
  EXPECT_EQ(learn("aaa\nbc", 1), Tokens{"aa"}) << "it stands there twice";
  EXPECT_EQ(learn("aaaaa", 9), (Tokens{"aa", "aaa", "aaaaa"})) << "of aa aa a the smaller right one joins";
  EXPECT_EQ(learn("ababab", 9), (Tokens{"ab", "abab", "ababab"}));
  EXPECT_EQ(learn("cd\nab", 2), (Tokens{"ab", "cd"})) << "as frequent: the smaller left one";
  EXPECT_EQ(learn("ac\nab", 1), Tokens{"ab"}) << "then the smaller right one";
  EXPECT_EQ(learn("x y", 9), (Tokens{" y"})) << "a byte alone joins nothing";
  // The space's character sorts after all of ASCII, a byte of é before it.
  EXPECT_EQ(learn("a\n a\né", 1), (Tokens{"é"}));
}

TEST(BpeTrainer, ThreadsAndOrderDoNotMatter) {
  std::mt19937 random(3);
  std::vector<std::string> texts = {golden_text()};
  for (int i = 0; i < 4; ++i) texts.push_back(random_text(random, 60'000, true));
  const BpeTrainerOptions options{.vocab = 900};
  std::string expected;
  RankContext context;
  const RankScope scope(context);
  for (const int threads : {1, 2, 5}) {
    context.threads = threads;
    for (int order = 0; order < 2; ++order) {
      BpeTrainer trainer(options);
      for (const std::string& text : texts)
        for (size_t at = 0; at < text.size();) {  // in parts, as a large file is read
          const size_t end = safe_cut(text, at + (order ? 50'000 : text.size()));
          trainer.add(std::string_view(text).substr(at, end - at));
          at = end;
        }
      const std::string file = trainer.train().dump();
      if (expected.empty()) expected = file;
      EXPECT_TRUE(file == expected) << threads << " threads, order " << order;
      std::reverse(texts.begin(), texts.end());
    }
  }
}

TEST(WordTable, TellsWordsOfOneHashApart) {
  WordTable table;
  for (int i = 0; i < 3; ++i)
    for (const char* word : {"ab", "cd", "abc"}) ++table.at(word, 7).count;
  std::map<std::string_view, int64_t> found;
  table.for_each([&](const WordTable::Entry& entry) { found[entry.word] = entry.count; });
  EXPECT_EQ(found, (std::map<std::string_view, int64_t>{{"ab", 3}, {"abc", 3}, {"cd", 3}}));
}

TEST(WordCounts, AreThoseOfAMap) {
  std::mt19937 random(4);
  RankContext context;
  const RankScope scope(context);
  for (const char* name : {"gpt2", "llama3", "qwen2", "tekken", "o200k"}) {
    const WordPattern& pattern = *WordPattern::of_name(name);
    EXPECT_EQ(WordPattern::of_expression(pattern.published()), &pattern);
    for (const int threads : {1, 3}) {
      context.threads = threads;
      WordCounts counts(pattern);
      std::map<std::string, int64_t, std::less<>> expected, found;
      for (int i = 0; i < 3; ++i) {
        std::string text = random_text(random, 100'000, true);
        text += std::string(100'000 + i, 'w');  // longer than a block of the words' memory
        counts.add(text);
        for (std::string_view rest = text; !rest.empty();) {
          const size_t valid = valid_utf8_prefix(rest);
          pattern.for_each_word(rest.substr(0, valid), [&](std::string_view word) {
            if (word.size() > 1) ++expected[std::string(word)];
          });
          rest.remove_prefix(std::min(valid + 1, rest.size()));
        }
      }
      counts.for_each([&](std::string_view word, int64_t count) { EXPECT_TRUE(found.emplace(word, count).second); });
      EXPECT_TRUE(found == expected) << name << ", " << threads << " threads";
      EXPECT_EQ(counts.size(), static_cast<int64_t>(expected.size()));
      EXPECT_GT(counts.size(), 3000);
    }
  }
}

TEST(BpeTrainer, ItsTokenizerEncodes) {
  for (auto options : kGolden) {
    options.special = {"<|endoftext|>", "<|im_start|>", "he"};
    BpeTrainer trainer(options);
    trainer.add(golden_text());
    const auto tokenizer = make_huggingface_tokenizer(trainer.train(), "trained");
    EXPECT_EQ(tokenizer->vocab_size(), options.vocab);
    EXPECT_EQ(tokenizer->end_of_text(), 0);
    const std::vector<int32_t> ids = tokenizer->encode(golden_text());
    EXPECT_EQ(tokenizer->decode(ids), golden_text());
    EXPECT_LT(ids.size(), golden_text().size() / 2);
    EXPECT_GE(*std::min_element(ids.begin(), ids.end()), 3) << "special ones are never made from a text";
    std::mt19937 random(6);
    const std::string noise = random_text(random, 1000, true);
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(noise)), noise);
  }
}

// As in encoding: invalid bytes end a word, and are never merged.
TEST(BpeTrainer, BytesThatAreNotUtf8) {
  BpeTrainer with({.vocab = 258, .min_frequency = 1}), without({.vocab = 258, .min_frequency = 1});
  with.add("\xff\xff" "ab\xff\xff\xff" "cd\xff");
  without.add("ab");
  without.add("cd");
  EXPECT_TRUE(with.train() == without.train());
  EXPECT_EQ(with.words(), 2);
}

// The time for a word must not grow with the square of its length; names in the file must not exceed what readers accept.
TEST(BpeTrainer, LongWords) {
  std::mt19937 random(7);
  std::string letters;
  while (letters.size() < 1'000'000) letters += static_cast<char>('a' + random() % 4);
  for (const std::string& text : {std::string(3'000'000, 'a'), std::string(3'000'000, ' '), letters}) {
    BpeTrainer trainer({.vocab = 257 + 8});
    trainer.add(text);
    const auto tokenizer = make_huggingface_tokenizer(trainer.train(), "trained");
    EXPECT_TRUE(tokenizer->decode(tokenizer->encode(text)) == text);
  }
  BpeTrainer trainer({.vocab = 257 + 1000, .min_frequency = 5});
  trainer.add(letters);
  const auto start = std::chrono::steady_clock::now();
  trainer.train();
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 20);
  BpeTrainer spaces({.vocab = 257 + 40});
  spaces.add(std::string(3'000'000, ' '));
  EXPECT_THAT(error<DataError>([&] { spaces.train(); }), HasSubstr("make a vocabulary of 268 tokens, not of 297"))
      << "2^11 spaces are the longest";
}

TEST(BpeTrainer, SaysWhatIsWrong) {
  const auto refused = [](BpeTrainerOptions options) { return error<ConfigError>([&] { BpeTrainer trainer(options); }); };
  EXPECT_THAT(refused({.vocab = 256}),
              HasSubstr("a vocabulary of 256 tokens: 256 bytes and 1 special token are 257 already"));
  EXPECT_THAT(refused({.vocab = int64_t{1} << 31}), HasSubstr("2147483647 the most"));
  EXPECT_THAT(refused({.min_frequency = 0}), HasSubstr("a minimal frequency of 0"));
  EXPECT_THAT(refused({.pattern = "bert"}),
              HasSubstr("unknown pattern 'bert'; known are gpt2, llama3, qwen2, tekken and o200k"));
  EXPECT_THAT(refused({.special = {"<s>", "<s>"}}), HasSubstr("\"<s>\" stands there twice"));
  EXPECT_THAT(refused({.special = {"a"}}), HasSubstr("\"a\" stands there twice, or is what a byte is called"));
  EXPECT_THAT(refused({.special = {"\xff"}}), HasSubstr("is text of 1 to 4096 bytes"));
  EXPECT_THAT(refused({.special = {""}}), HasSubstr("is text of 1 to 4096 bytes"));
  EXPECT_THAT(refused({.special = {std::string(5000, 'x')}}), HasSubstr("is text of 1 to 4096 bytes"));
  BpeTrainer small({.vocab = 300});
  small.add("the the");
  EXPECT_THAT(error<DataError>([&] { small.train(); }),
              HasSubstr("make a vocabulary of 259 tokens, not of 300: in their 2 distinct words no pair is left that "
                        "stands there at least 2 times"));
  BpeTrainer bytes({.vocab = 256, .special = {}});
  EXPECT_EQ(make_huggingface_tokenizer(bytes.train(), "bytes")->vocab_size(), 256) << "of no text at all";
}

TEST(BpeTrainer, Stops) {
  BpeTrainer trainer({.vocab = 700});
  trainer.add(golden_text());
  int asked = 0;
  EXPECT_TRUE(trainer.train([&] { return ++asked == 100; }).is_null());
  EXPECT_EQ(asked, 100);
}

}  // namespace
}  // namespace sheaf::models
