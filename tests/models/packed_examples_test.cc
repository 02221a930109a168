// Examples packed into windows: each whole, each once, with only the trained targets set.
#include "sheaf/models/packed_examples.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/training_windows.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int32_t kEnd = 2;
constexpr int64_t kVocab = 100;

template <class F>
std::string data_error(F f) {
  try {
    f();
  } catch (const DataError& e) {
    return e.what();
  }
  return "no error";
}

// The numbers of tokens of a prompt and of an answer, including its end.
struct Sizes {
  int64_t prompt, answer;
};

std::vector<MarkedToken> make_example(const Sizes& s, MarkedToken id) {
  std::vector<MarkedToken> tokens;
  for (int64_t i = 0; i < s.prompt; ++i) tokens.push_back(id | kReadOnly);
  for (int64_t i = 1; i < s.answer; ++i) tokens.push_back(id);
  tokens.push_back(static_cast<MarkedToken>(kEnd) | (s.answer > 0 ? 0 : kReadOnly));
  return tokens;
}

Tokens make_examples(const std::vector<Sizes>& all) {
  std::vector<MarkedToken> tokens;
  MarkedToken id = 10;
  for (const Sizes& s : all) {
    const std::vector<MarkedToken> one = make_example(s, id++);
    tokens.insert(tokens.end(), one.begin(), one.end());
  }
  return Tokens::from_examples(tokens, kEnd, kVocab, "examples");
}

struct Window {
  std::vector<int32_t> inputs, targets;
};
Window window_of(const PackedExamples& packed, int64_t i, int64_t context) {
  Window w{std::vector<int32_t>(static_cast<size_t>(context), 77), std::vector<int32_t>(static_cast<size_t>(context), 77)};
  packed.fill(i, w.inputs.data(), w.targets.data());
  return w;
}

int64_t counted(const std::vector<int32_t>& targets) {
  return std::ranges::count_if(targets, [](int32_t t) { return t != kIgnoreIndex; });
}

TEST(PackedExamples, SideBySideWithTheirTargets) {
  const PackedExamples packed(make_examples({{2, 2}, {1, 5}, {3, 1}}), 11);
  EXPECT_EQ(packed.num_examples(), 3);
  EXPECT_EQ(packed.num_targets(), 2 + 5 + 1);
  EXPECT_EQ(packed.num_tokens(), 4 + 6 + 4);
  ASSERT_EQ(packed.num_windows(), 2);
  const Window first = window_of(packed, 0, 11), second = window_of(packed, 1, 11);
  EXPECT_THAT(first.inputs, ElementsAre(10, 10, 10, kEnd, 11, 11, 11, 11, 11, kEnd, kEnd));
  EXPECT_THAT(first.targets, ElementsAre(-1, 10, kEnd, -1, 11, 11, 11, 11, kEnd, -1, -1));
  EXPECT_THAT(second.inputs, ElementsAre(12, 12, 12, kEnd, kEnd, kEnd, kEnd, kEnd, kEnd, kEnd, kEnd));
  EXPECT_THAT(second.targets, ElementsAre(-1, -1, kEnd, -1, -1, -1, -1, -1, -1, -1, -1));
  EXPECT_EQ(packed.num_targets(0), 7);
  EXPECT_EQ(packed.num_targets(1), 1);
}

// The last token of a window is only a target.
TEST(PackedExamples, AFullWindowHasATokenMoreThanInputs) {
  const PackedExamples packed(make_examples({{1, 2}, {1, 3}}), 6);
  ASSERT_EQ(packed.num_windows(), 1);
  const Window w = window_of(packed, 0, 6);
  EXPECT_THAT(w.inputs, ElementsAre(10, 10, kEnd, 11, 11, 11));
  EXPECT_THAT(w.targets, ElementsAre(10, kEnd, -1, 11, 11, kEnd));
}

TEST(PackedExamples, WhatHasNoPromptIsNotPredictedFromWhatIsBeforeIt) {
  const PackedExamples packed(make_examples({{0, 3}, {0, 3}}), 6);
  const Window w = window_of(packed, 0, 6);
  EXPECT_THAT(w.inputs, ElementsAre(10, 10, kEnd, 11, 11, kEnd));
  EXPECT_THAT(w.targets, ElementsAre(10, kEnd, -1, 11, kEnd, -1));
  EXPECT_EQ(packed.num_targets(), 4);
}

TEST(PackedExamples, TooLongAndInVain) {
  const PackedExamples packed(make_examples({{2, 9}, {9, 2}, {3, 0}, {1, 1}, {4, 2}}), 4);
  EXPECT_EQ(packed.num_examples(), 3);
  EXPECT_EQ(packed.num_shortened(), 2);
  EXPECT_EQ(packed.num_left_out(), 2);  // a prompt that fills the window, and one without an answer
  EXPECT_THAT(window_of(packed, 0, 4).targets, ElementsAre(-1, 10, 10, 10));
  EXPECT_THAT(window_of(packed, 1, 4).targets, ElementsAre(-1, -1, -1, 14));
  EXPECT_THAT(window_of(packed, 2, 4).targets, ElementsAre(kEnd, -1, -1, -1));
  EXPECT_THAT(data_error([] { PackedExamples(make_examples({{9, 2}, {3, 0}}), 4); }),
              HasSubstr("[data] 'examples': in none of 2 examples is anything to learn within a context of 4"));
  EXPECT_THAT(data_error([] { PackedExamples(Tokens::from_ids(std::vector<int32_t>{1, 2, 3}, 9, "text"), 4); }),
              HasSubstr("[data] 'text' holds no examples"));
}

// The loss is divided by this number: targets beyond a shortened example do not count.
TEST(PackedExamples, OfShortenedOnesWhatIsLeftCounts) {
  for (int64_t context = 3; context < 12; ++context) {
    const PackedExamples packed(make_examples({{2, 9}, {1, 12}, {2, 2}, {3, 4}}), context);
    int64_t all = 0;
    for (int64_t w = 0; w < packed.num_windows(); ++w) {
      const int64_t here = counted(window_of(packed, w, context).targets);
      EXPECT_EQ(packed.num_targets(w), here) << context;
      all += here;
    }
    EXPECT_EQ(packed.num_targets(), all) << context;
  }
}

// Tokens are read in blocks of 2^20.
TEST(PackedExamples, MarksBehindAMillionTokensAreTheirOwn) {
  std::vector<MarkedToken> tokens;
  for (int64_t i = 0; i < int64_t{1} << 19; ++i) tokens.insert(tokens.end(), {5 | kReadOnly, kEnd});
  tokens.insert(tokens.end(), {6 | kReadOnly, 6 | kReadOnly, 6 | kReadOnly, kEnd});
  const PackedExamples packed(Tokens::from_examples(tokens, kEnd, kVocab, "examples"), 5);
  EXPECT_EQ(packed.num_examples(), (int64_t{1} << 19) + 1);
  EXPECT_EQ(packed.num_targets(), (int64_t{1} << 19) + 1);
}

TEST(PackedExamples, OfAPartOfASequenceTheLastMayLackItsEnd) {
  const Tokens tokens = Tokens::from_examples(std::vector<MarkedToken>{5 | kReadOnly, 6, 7, kEnd}, kEnd, kVocab, "cut");
  const PackedExamples packed(tokens.slice(0, 3), 4);
  EXPECT_THAT(window_of(packed, 0, 4).inputs, ElementsAre(5, 6, 7, kEnd));
  EXPECT_THAT(window_of(packed, 0, 4).targets, ElementsAre(6, 7, -1, -1));
}

TEST(PackedExamples, EachIsWholeInOneWindow) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const auto below = [&](int n) { return static_cast<int64_t>(random() % static_cast<unsigned>(n)); };
    const int64_t context = 3 + below(40), most = 1 + below(static_cast<int>(context));
    std::vector<Sizes> all;
    std::map<std::vector<int32_t>, int> wanted;  // an example's targets, and how often it occurs
    int64_t tokens = 0, targets = 0, count = 1 + below(88), fitting = 0;
    for (MarkedToken id = 10; count-- > 0; ++id) {
      all.push_back({below(static_cast<int>(most)), below(static_cast<int>(most))});
      const std::vector<MarkedToken> one = make_example(all.back(), id);
      if (static_cast<int64_t>(one.size()) > context + 1) {
        all.pop_back(), --id;
        continue;
      }
      std::vector<int32_t> here;
      for (size_t i = 1; i < one.size(); ++i) here.push_back(one[i] & kReadOnly ? -1 : static_cast<int32_t>(one[i]));
      if (counted(here) == 0) continue;
      ++wanted[here], ++fitting;
      tokens += static_cast<int64_t>(one.size()), targets += counted(here);
    }
    if (fitting == 0) continue;
    const PackedExamples packed(make_examples(all), context);
    ASSERT_EQ(packed.num_examples(), fitting);
    ASSERT_EQ(packed.num_targets(), targets);
    ASSERT_EQ(packed.num_shortened(), 0);
    ASSERT_GE(packed.num_windows() * (context + 1), tokens);
    // No two windows would fit into one, as in any greedy packing.
    ASSERT_LE(packed.num_windows(), std::max<int64_t>(1, 2 * tokens / (context + 1) + 1));
    std::map<std::vector<int32_t>, int> found;
    for (int64_t w = 0; w < packed.num_windows(); ++w) {
      const auto [inputs, to] = window_of(packed, w, context);
      ASSERT_EQ(counted(to), packed.num_targets(w));
      ASSERT_GT(counted(to), 0);
      std::vector<int32_t> here;
      for (int64_t t = 0; t < context; ++t) {
        const auto i = static_cast<size_t>(t);
        const bool last = inputs[i] == kEnd;
        if (!last) here.push_back(to[i]);
        if (last || t + 1 == context) {
          ASSERT_TRUE(!last || to[i] == -1);  // nothing is predicted from an end token
          if (!here.empty()) ++found[here];
          here.clear();
        }
        // Each token is predicted only from those of its own example.
        ASSERT_TRUE(last || to[i] == kEnd || to[i] < 0 || to[i] == inputs[i]);
      }
    }
    ASSERT_EQ(found, wanted);
  }
}

TEST(PackedExamples, AnEpochHasEachWindowOnceAndKnowsItsTargets) {
  std::vector<Sizes> all;
  for (int64_t i = 0; i < 60; ++i) all.push_back({1 + i % 4, 1 + i % 7});
  const Tokens tokens = make_examples(all);
  const PackedExamples packed(tokens, 12);
  const int64_t n = packed.num_windows();
  ASSERT_GT(n, 20);
  for (const WindowOrder order : {WindowOrder::shuffled, WindowOrder::random}) {
    const TrainingWindows windows(tokens, 12, 3, order);
    EXPECT_DOUBLE_EQ(windows.epochs(0, 3 * n), 3);
    std::vector<int64_t> orders[2];
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      std::vector<int64_t> seen;
      for (int64_t i = epoch * n; i < (epoch + 1) * n; ++i) {
        seen.push_back(windows.start(i));
        std::vector<int32_t> inputs(12), targets(12);
        windows.fill(i, 1, inputs.data(), targets.data());
        EXPECT_EQ(inputs, window_of(packed, seen.back(), 12).inputs);
        EXPECT_EQ(targets, window_of(packed, seen.back(), 12).targets);
      }
      orders[epoch] = seen;
      std::ranges::sort(seen);
      EXPECT_GE(seen.front(), 0);
      EXPECT_LT(seen.back(), n);
      const bool each_once = std::ranges::adjacent_find(seen) == seen.end();
      EXPECT_EQ(each_once, order == WindowOrder::shuffled);
      EXPECT_EQ(windows.num_targets(epoch * n, n) == packed.num_targets(), each_once);
    }
    EXPECT_NE(orders[0], orders[1]);
    std::vector<int32_t> inputs(7 * 12), targets(7 * 12);
    windows.fill(5, 7, inputs.data(), targets.data());
    EXPECT_EQ(windows.num_targets(5, 7), counted(targets));
  }
}

TEST(PackedExamples, MixWithTextsWhoseTargetsAllCount) {
  std::vector<int32_t> ids(200, 7);
  const Tokens text = Tokens::from_ids(ids, kVocab, "text"), examples = make_examples({{2, 2}, {1, 4}});
  const TokenMixture mixture({{text, 1}, {examples, 1}});
  EXPECT_EQ(mixture.example_end(), kEnd);
  EXPECT_EQ(TokenMixture(text).example_end(), std::nullopt);
  const TrainingWindows windows(mixture, 8, 3);
  EXPECT_EQ(windows.examples(0), nullptr);
  ASSERT_NE(windows.examples(1), nullptr);
  std::vector<int32_t> inputs(10 * 8), targets(10 * 8);
  windows.fill(0, 10, inputs.data(), targets.data());
  EXPECT_EQ(counted(targets), 5 * 8 + 5 * 6);
  EXPECT_EQ(windows.num_targets(0, 10), counted(targets));
  const Tokens others = Tokens::from_examples(std::vector<MarkedToken>{5, 6, 3}, 3, kVocab, "others");
  EXPECT_THAT(message_of<ConfigError>(ExitCode::kConfig, [&] { TokenMixture({{text, 1}, {examples, 1}, {others, 1}}).example_end(); }),
              HasSubstr("the examples of 'examples' end with token 2, those of 'others' with token 3"));
}

TEST(SequentialWindows, OfExamplesCountWhatIsLearned) {
  std::vector<Sizes> all;
  for (int64_t i = 0; i < 40; ++i) all.push_back({1 + i % 3, 1 + i % 6});
  const Tokens tokens = make_examples(all);
  const PackedExamples packed(tokens, 10);
  const SequentialWindows windows(tokens, 10);
  EXPECT_EQ(windows.num_windows(), packed.num_windows());
  EXPECT_EQ(windows.num_targets(), packed.num_targets());
  std::vector<int32_t> inputs(1000 * 10), targets(1000 * 10);
  EXPECT_EQ(windows.fill(0, windows.num_windows() + 3, inputs.data(), targets.data()), packed.num_targets());
  inputs.resize(static_cast<size_t>(windows.num_windows() + 3) * 10), targets.resize(inputs.size());
  EXPECT_EQ(counted(targets), packed.num_targets());
  EXPECT_EQ(std::vector<int32_t>(inputs.end() - 30, inputs.end()), std::vector<int32_t>(30, 0));
  EXPECT_EQ(std::vector<int32_t>(targets.end() - 30, targets.end()), std::vector<int32_t>(30, -1));
  // A part consists of whole windows, at least one.
  const SequentialWindows part(tokens, 10, packed.num_targets() / 2), one(tokens, 10, 1);
  EXPECT_LE(part.num_targets(), packed.num_targets() / 2);
  EXPECT_GT(part.num_targets(), packed.num_targets() / 2 - 10);
  EXPECT_EQ(part.fill(0, part.num_windows() + 2, inputs.data(), targets.data()), part.num_targets());
  const SequentialWindows same(tokens, 10, part.num_targets()), fewer(tokens, 10, part.num_targets() - 1);
  EXPECT_EQ(same.num_windows(), part.num_windows());  // as many as allowed
  EXPECT_EQ(fewer.num_windows(), part.num_windows() - 1);
  EXPECT_EQ(one.num_windows(), 1);
  EXPECT_EQ(one.fill(0, 3, inputs.data(), targets.data()), one.num_targets());
}

TEST(Examples, InFiles) {
  const ScratchFolder folder;
  const std::string a = folder / "a.bin", b = folder / "b.bin";
  const std::vector<MarkedToken> first = {5 | kReadOnly, 6, kEnd}, second = {9, 99 | kReadOnly, 8, kEnd | kReadOnly};
  for (const auto& [path, tokens] : {std::pair(a, first), {b, second}}) {
    TokenFileWriter writer(path, kVocab, kEnd);
    writer.write_examples(tokens);
    EXPECT_THAT(data_error([&] { writer.write_examples(std::vector<MarkedToken>{100 | kReadOnly}); }),
                HasSubstr("token 100 at position " + std::to_string(tokens.size()) + " is outside the vocabulary of 100"));
    writer.finish();
    EXPECT_TRUE(is_token_file(path));
  }
  const Tokens both = Tokens::open(folder / "*.bin", kVocab);
  EXPECT_EQ(both.example_end(), kEnd);
  std::vector<int32_t> ids(7), targets(7);
  both.copy(0, 7, ids.data());
  both.copy_targets(0, 7, targets.data());
  EXPECT_THAT(ids, ElementsAre(5, 6, kEnd, 9, 99, 8, kEnd));
  EXPECT_THAT(targets, ElementsAre(-1, 6, kEnd, 9, -1, 8, -1));
  // Marks are data, too.
  std::vector<MarkedToken> all = first;
  all.insert(all.end(), second.begin(), second.end());
  EXPECT_EQ(both.check_all(), Tokens::from_examples(all, kEnd, kVocab, "memory").check_all());
  all[0] ^= kReadOnly;
  EXPECT_NE(both.check_all(), Tokens::from_examples(all, kEnd, kVocab, "memory").check_all());
  EXPECT_THAT(data_error([&] { Tokens::open(b, 99).check_all(); }), HasSubstr("b.bin': token 99 at position 1 is outside the vocabulary of 99"));
  // Nor does the checksum ignore how examples end: here with the same tokens.
  const std::vector<MarkedToken> twice = {5, 2, 3, 2};
  EXPECT_NE(Tokens::from_examples(twice, 2, kVocab, "memory").check_all(),
            Tokens::from_ids(std::vector<int32_t>{5, 2, 3, 2}, kVocab, "memory").check_all());
  EXPECT_THAT(data_error([&] { Tokens::from_examples(twice, 3, kVocab, "memory"); }),
              HasSubstr("'memory': its last example does not end with token 3"));
  EXPECT_THAT(data_error([&] { Tokens::from_examples(std::vector<MarkedToken>{}, 3, kVocab, "memory"); }), HasSubstr("does not end"));
  EXPECT_THAT(data_error([&] { Tokens::from_examples(std::vector<MarkedToken>{100 | kReadOnly, 3}, 3, kVocab, "memory"); }),
              HasSubstr("memory: token 100 at position 0 is outside the vocabulary of 100"));
  TokenFileWriter examples(folder / "c.bin", kVocab, kEnd), plain(folder / "d.bin", kVocab);
  EXPECT_THROW(examples.write(std::vector<int32_t>{1}), ConfigError);
  EXPECT_THROW(plain.write_examples(twice), ConfigError);
  // In texts all tokens are targets.
  const Tokens text = Tokens::from_ids(std::vector<int32_t>{1, 2, 3}, 9, "text");
  EXPECT_EQ(text.example_end(), std::nullopt);
  text.copy_targets(0, 3, targets.data());
  EXPECT_THAT(std::vector<int32_t>(targets.begin(), targets.begin() + 3), ElementsAre(1, 2, 3));
}

TEST(Examples, FilesThatDoNotBelongTogether) {
  const ScratchFolder folder;
  for (const int32_t end : {kEnd, 3}) {
    TokenFileWriter writer(folder / ("e" + std::to_string(end) + ".bin"), kVocab, end);
    writer.write_examples(std::vector<MarkedToken>{5 | kReadOnly, 6, static_cast<MarkedToken>(end)});
    writer.finish();
  }
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "e*.bin", kVocab); }),
              HasSubstr("e2.bin' holds examples that end with token 2, '" + folder / "e3.bin" + "' holds examples that end with token 3"));
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "e3.bin", 3); }), HasSubstr("which is outside the vocabulary of 3"));
  write_token_file(folder / "e4.bin", std::vector<int32_t>{1, 2}, kVocab);
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "e[24].bin", kVocab); }), HasSubstr("e4.bin' holds no examples"));
  std::string bytes = File::open(folder / "e2.bin").read_all();
  bytes[4] = 2;
  write_file(folder / "later.bin", bytes);
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "later.bin", kVocab); }), HasSubstr("later.bin': unknown version 2"));
  bytes[4] = 1;
  write_file(folder / "short.bin", std::string_view(bytes).substr(0, bytes.size() - 4));
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "short.bin", kVocab); }), HasSubstr("the header says 3 tokens, the file holds 2"));
  bytes[8] = 2;
  write_file(folder / "open.bin", std::string_view(bytes).substr(0, bytes.size() - 4));
  EXPECT_THAT(data_error([&] { Tokens::open(folder / "open.bin", kVocab); }), HasSubstr("open.bin': its last example does not end with token 2"));
}

}  // namespace
}  // namespace sheaf::models
