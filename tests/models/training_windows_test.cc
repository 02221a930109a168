// The windows that a run trains on: in epochs, at random places, from one sequence or a mixture.
#include "sheaf/models/training_windows.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tokens counting(int64_t n, int32_t from = 0) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), from);
  return Tokens::from_ids(ids, from + n, "counting");
}

// Starts of the first `count` samples from `first` on.
std::vector<int64_t> starts(const TrainingWindows& windows, int64_t count, int64_t first = 0) {
  std::vector<int64_t> all;
  for (int64_t i = first; i < first + count; ++i) all.push_back(windows.start(i));
  return all;
}

TEST(ShuffledWindows, AnEpochHasEachWindowOnce) {
  for (int64_t context : {1, 3, 8}) {
    for (int64_t tokens = context + 1; tokens < 40 * context; tokens += 1 + context / 3) {
      const int64_t n = WindowStarts(tokens, context, 7, WindowOrder::shuffled).windows_per_epoch();
      EXPECT_EQ(n, std::max<int64_t>(1, tokens / context - 1));
      const TrainingWindows windows(counting(tokens), context, 7);
      for (int64_t epoch = 0; epoch < 3; ++epoch) {
        std::vector<int64_t> of_epoch = starts(windows, n, epoch * n);
        std::sort(of_epoch.begin(), of_epoch.end());
        ASSERT_GE(of_epoch.front(), 0);
        ASSERT_LT(of_epoch.front(), context);
        ASSERT_LE(of_epoch.back() + context + 1, tokens);
        for (size_t i = 1; i < of_epoch.size(); ++i) ASSERT_EQ(of_epoch[i] - of_epoch[i - 1], context);
      }
    }
  }
}

TEST(ShuffledWindows, ABatchIsAFunctionOfSeedAndIndexAlone) {
  const TrainingWindows windows(counting(1000), 8, 1337);
  std::vector<int32_t> inputs(12 * 8), targets(12 * 8), part(8), next(8);
  windows.fill(120, 12, inputs.data(), targets.data());  // across the end of an epoch, of 124 windows
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(targets[i], inputs[i] + 1);
  const TrainingWindows other(counting(1000), 8, 1337);
  for (int64_t i = 11; i >= 0; --i) {
    other.fill(120 + i, 1, part.data(), next.data());
    EXPECT_EQ(std::memcmp(part.data(), inputs.data() + i * 8, 32), 0);
    EXPECT_EQ(part[0], windows.start(120 + i));
  }
  // Golden starts: a change here breaks resuming of every run.
  EXPECT_THAT((std::vector<int64_t>{windows.start(0), windows.start(1), windows.start(124), windows.start(1'000'000'007)}),
              ElementsAre(811, 947, 98, 558));
}

// Over many epochs each window comes equally often at each position, and after each other window; offsets are uniform.
TEST(ShuffledWindows, EpochsHaveOrdersOfTheirOwn) {
  constexpr int64_t kWindows = 13, kContext = 8, kEpochs = 20'000;
  const TrainingWindows windows(counting((kWindows + 1) * kContext), kContext, 3);
  std::map<std::pair<int64_t, int64_t>, int> places, pairs;
  std::map<int64_t, int> offsets;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    const std::vector<int64_t> at = starts(windows, kWindows, epoch * kWindows);
    ++offsets[at[0] % kContext];
    for (int64_t i = 0; i < kWindows; ++i) {
      ++places[{i, at[i] / kContext}];
      if (i) ++pairs[{at[i - 1] / kContext, at[i] / kContext}];
    }
  }
  const auto chi2 = [](const auto& counts, double expected) {
    double sum = 0;
    for (const auto& [what, n] : counts) sum += (n - expected) * (n - expected) / expected;
    return sum;
  };
  EXPECT_EQ(places.size(), 169u);  // 144 degrees of freedom
  EXPECT_LT(chi2(places, kEpochs / 13.0), 204);
  EXPECT_EQ(pairs.size(), 156u);  // about 155
  EXPECT_LT(chi2(pairs, kEpochs / 13.0), 217);
  EXPECT_EQ(offsets.size(), 8u);
  EXPECT_LT(chi2(offsets, kEpochs / 8.0), 25);
}

// Large integers: those that are represented exactly, and their neighbours.
TEST(ShuffledWindows, PermutationsOfManyWindows) {
  for (int64_t n : {65'535, 65'536, 65'537, 262'145}) {
    const WindowStarts start(2 * (n + 1), 2, 11, WindowOrder::shuffled);
    ASSERT_EQ(start.windows_per_epoch(), n);
    std::vector<bool> seen(static_cast<size_t>(n));
    int64_t fixed = 0, neighbours = 0, last = -9;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t window = start(i) / 2;
      ASSERT_FALSE(seen[static_cast<size_t>(window)]);
      seen[static_cast<size_t>(window)] = true;
      fixed += window == i, neighbours += window == last + 1;
      last = window;
    }
    EXPECT_LT(fixed, 9);  // one of each is to be expected
    EXPECT_LT(neighbours, 9);
  }
}

TEST(WindowOrder, ByName) {
  EXPECT_EQ(window_order("shuffled"), WindowOrder::shuffled);
  EXPECT_EQ(window_order("random"), WindowOrder::random);
  EXPECT_THROW(window_order("sorted"), ConfigError);
}

TEST(TrainingWindows, TooFewTokens) {
  for (WindowOrder order : {WindowOrder::shuffled, WindowOrder::random}) {
    EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { TrainingWindows(counting(8), 8, 1, order); }),
                HasSubstr("8 tokens are too few for a context of 8"));
    EXPECT_THAT(starts(TrainingWindows(counting(9), 8, 1, order), 20), Each(0));
  }
}

TEST(RandomWindows, ABatchIsAFunctionOfSeedAndIndexAlone) {
  const TrainingWindows windows(counting(1000), 8, 1337, WindowOrder::random);
  std::vector<int32_t> inputs(12 * 8), targets(12 * 8), part(8), next(8);
  windows.fill(36, 12, inputs.data(), targets.data());
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(targets[i], inputs[i] + 1);
  // The same samples one by one, as other ranks or micro-batches would read them, from another object.
  const TrainingWindows other(counting(1000), 8, 1337, WindowOrder::random);
  for (int64_t i = 11; i >= 0; --i) {
    other.fill(36 + i, 1, part.data(), next.data());
    EXPECT_EQ(std::memcmp(part.data(), inputs.data() + i * 8, 32), 0);
    EXPECT_EQ(part[0], windows.start(36 + i));
  }
  // Golden starts: a change here breaks resuming of every run.
  EXPECT_THAT((std::vector<int64_t>{windows.start(0), windows.start(1), windows.start(1'000'000'007)}),
              ElementsAre(44, 948, 663));
}

TEST(RandomWindows, StartsAreUniformAndReachBothEnds) {
  const TrainingWindows windows(counting(108), 8, 3, WindowOrder::random);  // 100 starts
  std::map<int64_t, int> counts;
  for (int64_t i = 0; i < 100'000; ++i) ++counts[windows.start(i)];
  EXPECT_EQ(counts.size(), 100u);
  EXPECT_EQ(counts.begin()->first, 0);
  EXPECT_EQ(counts.rbegin()->first, 99);
  double chi2 = 0;
  for (auto [start, n] : counts) chi2 += (n - 1000.0) * (n - 1000.0) / 1000.0;
  EXPECT_LT(chi2, 149);  // 99 degrees of freedom, p = 0.001
  EXPECT_GT(chi2, 56);
  // Adjacent seeds have no samples in common beyond chance, at any shift.
  const TrainingWindows next(counting(108), 8, 4, WindowOrder::random);
  for (int64_t shift = -3; shift <= 3; ++shift) {
    int equal = 0;
    for (int64_t i = 10; i < 1010; ++i) equal += windows.start(i) == next.start(i + shift);
    EXPECT_LT(equal, 30) << shift;
  }
}

// Any run of consecutive samples has the same mixture, and each source's samples come in order.
TEST(TokenMixture, PlacesFollowTheWeights) {
  for (const std::vector<double>& weights :
       {std::vector<double>{0.7, 0.3}, {1, 1, 1}, {1}, {0.001, 0.999}, {5, 1, 3, 1, 7, 2}, {1e-9, 1e9}, {1, 1e-12, 1}}) {
    std::vector<TokenMixture::Source> sources;
    for (double w : weights) sources.push_back({counting(10), w});
    const TokenMixture mixture(sources);
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int64_t> counts(weights.size());
    std::vector<std::vector<int64_t>> history;
    for (int64_t i = 0; i < 20'000; ++i) {
      const auto [source, index] = mixture.place(i);
      ASSERT_EQ(index, counts[static_cast<size_t>(source)]++) << "sample " << i;
      history.push_back(counts);
      if (i < 500 || i % 97) continue;
      for (size_t s = 0; s < weights.size(); ++s) {
        EXPECT_NEAR(static_cast<double>(counts[s]), weights[s] / sum * static_cast<double>(i + 1), 2) << s << " of " << i;
        EXPECT_NEAR(static_cast<double>(counts[s] - history[static_cast<size_t>(i) - 100][s]), weights[s] / sum * 100, 4);
      }
    }
    for (size_t s = 0; s < weights.size(); ++s) EXPECT_DOUBLE_EQ(mixture.share(static_cast<int>(s)), weights[s] / sum);
  }
}

TEST(TokenMixture, GoldenPlaces) {  // a change here breaks resuming of every run on a mixture
  const TokenMixture mixture({{counting(10), 0.5}, {counting(10), 0.2}, {counting(10), 0.3}});
  std::string sources;
  for (int64_t i = 0; i < 20; ++i) sources += static_cast<char>('a' + mixture.place(i).source);
  EXPECT_EQ(sources, "acabacabacacabacabac");
  const TrainingWindows windows(TokenMixture({{counting(50), 1}, {counting(60, 100), 1}}), 4, 5);
  EXPECT_THAT(starts(windows, 6), ElementsAre(39, 26, 27, 6, 7, 18));
}

TEST(TrainingWindows, OfAMixtureComeFromItsSources) {
  const TrainingWindows windows(TokenMixture({{counting(50), 3}, {counting(60, 100), 1}}), 4, 5);
  std::vector<int32_t> inputs(400 * 4), targets(400 * 4);
  windows.fill(0, 400, inputs.data(), targets.data());
  std::map<bool, std::vector<int32_t>> firsts;
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(targets[i], inputs[i] + 1);
  for (size_t i = 0; i < inputs.size(); i += 4) firsts[inputs[i] >= 100].push_back(inputs[i]);
  EXPECT_EQ(firsts[false].size(), 300u);
  EXPECT_EQ(firsts[true].size(), 100u);
  // Each source has its own epochs, of 11 and of 14 windows, and its own random order.
  for (bool second : {false, true}) {
    const size_t n = second ? 14 : 11;
    for (size_t epoch = 0; epoch < 7; ++epoch) {
      const std::set<int32_t> once(firsts[second].begin() + epoch * n, firsts[second].begin() + (epoch + 1) * n);
      EXPECT_EQ(once.size(), n);
    }
  }
  const TrainingWindows twins(TokenMixture({{counting(50), 1}, {counting(50), 1}}), 4, 5);
  int equal = 0;
  for (int64_t i = 0; i < 200; i += 2) equal += twins.start(i) == twins.start(i + 1);
  EXPECT_LT(equal, 30);
  EXPECT_DOUBLE_EQ(windows.epochs(0, 400), 0.75 * 400 / 11);
  EXPECT_DOUBLE_EQ(windows.epochs(1, 400), 0.25 * 400 / 14);
}

TEST(TrainingWindows, SamplesOfEpochs) {
  const TrainingWindows windows(counting(50), 4, 5);  // 11
  EXPECT_EQ(windows.samples_of(0, 1), 11);
  EXPECT_EQ(windows.samples_of(0, 3), 33);
  EXPECT_EQ(windows.samples_of(0, 0.5), 6);
  EXPECT_EQ(windows.samples_of(0, 1e-9), 0);
  const TrainingWindows ten(counting(45), 4, 5);
  for (int tenths = 1; tenths < 200; ++tenths) EXPECT_EQ(ten.samples_of(0, tenths / 10.0), tenths);
  EXPECT_EQ(ten.samples_of(0, 0.11), 2);
  const TrainingWindows mixed(TokenMixture({{counting(50), 3}, {counting(60, 100), 1}}), 4, 5);
  EXPECT_EQ(mixed.samples_of(1, 1), 4 * 14);
}

TEST(TokenMixture, IsOpenedByWeightsAndPatterns) {
  ScratchFolder folder;
  const auto write = [&](const std::string& name, int32_t first, int64_t count) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    std::iota(ids.begin(), ids.end(), first);
    write_token_file(folder / name, ids, 100);
  };
  write("a_1.bin", 0, 5), write("a_2.bin", 5, 6), write("b.bin", 20, 7);
  const std::string text = str("0.7 ", folder / "a_*.bin", "  3e-1 ", folder / "b.bin");
  const TokenMixture mixture = TokenMixture::open(text, 100);
  ASSERT_EQ(mixture.sources().size(), 2u);
  EXPECT_EQ(mixture.name(), text);
  EXPECT_EQ(mixture.size(), 18);
  EXPECT_EQ(mixture.num_files(), 3);
  EXPECT_EQ(mixture.sources()[1].tokens.size(), 7);
  EXPECT_EQ(mixture.sources()[1].weight, 0.3);
  // The digest of one sequence is that of its tokens; for several, weights and order count, not names.
  EXPECT_EQ(TokenMixture::open(folder / "a_*.bin", 100).check_all(), Tokens::open(folder / "a_*.bin", 100).check_all());
  const auto digest = [&](const std::string& of) { return TokenMixture::open(of, 100).check_all(); };
  EXPECT_EQ(digest(str("0.7 ", folder / "a_?.bin", " 0.3 ", folder / "b.bin")), mixture.check_all());
  EXPECT_NE(digest(str("0.6 ", folder / "a_*.bin", " 0.3 ", folder / "b.bin")), mixture.check_all());
  EXPECT_NE(digest(str("0.3 ", folder / "b.bin", " 0.7 ", folder / "a_*.bin")), mixture.check_all());
  EXPECT_NE(digest(str("0.7 ", folder / "a_1.bin", " 0.3 ", folder / "b.bin")), mixture.check_all());
  // If a file has the pattern as its name, that file is used.
  write("2 b.bin", 40, 3);
  EXPECT_EQ(TokenMixture::open(folder / "2 b.bin", 100).size(), 3);
  EXPECT_EQ(TokenMixture::open(folder / "2 ?.bin", 100).size(), 3);

  const auto error = [&](const std::string& of) {
    return message_of<ConfigError>(ExitCode::kConfig, [&] { TokenMixture::open(of, 100); });
  };
  EXPECT_THAT(error(str("1 ", folder / "b.bin", " 2")), HasSubstr("found '2' at its end"));
  EXPECT_THAT(error(str("1 ", folder / "b.bin", " x ", folder / "b.bin")), HasSubstr("found 'x' where a weight should be"));
  for (const char* bad : {"0", "-1", "inf", "nan"}) {
    EXPECT_THAT(error(str("1 ", folder / "b.bin ", bad, " ", folder / "b.bin")), HasSubstr("not a number above 0"));
  }
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { TokenMixture::open("1 a 1 none_*.bin", 100); }), HasSubstr("'a'"));
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { TokenMixture::open(str(folder / "b.bin", " 1 ", folder / "b.bin"), 100); }),
              AllOf(HasSubstr("No such file"), HasSubstr("a mixture begins with a weight")));
  for (const char* huge : {"1e308", "1e-300"})
    EXPECT_THAT(error(str(huge, " ", folder / "b.bin 1e308 ", folder / "b.bin")), HasSubstr("nothing can be mixed"));
  EXPECT_THROW(TokenMixture(std::vector<TokenMixture::Source>{}), ConfigError);
}

}  // namespace
}  // namespace sheaf::models
