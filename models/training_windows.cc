#include "sheaf/models/training_windows.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "sheaf/core/error.h"

namespace sheaf::models {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits in which every input bit reaches
// every output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// Two rounds, so that runs with neighbouring seeds do not see each other's samples shifted.
uint64_t hash(uint64_t seed, int64_t index) { return mix(mix(mix(seed + kGolden) + static_cast<uint64_t>(index) * kGolden)); }

// Uniform in [0, n), n > 0: the high word of a 128-bit product.
int64_t below(uint64_t random, int64_t n) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(random) * static_cast<uint64_t>(n) >> 64);
}

// Where number i of [0, n) goes in a permutation of [0, n) selected by `key`. A network permutes as many numbers as its bits allow,
// fewer than 4 n or 256: it is applied again until the result is below n. (With fewer than 8 bits, not every order of neighbours
// would be equally likely.)
int64_t permuted(int64_t i, int64_t n, uint64_t key) {
  constexpr int kRounds = 6;
  const int half = std::max(4, static_cast<int>(std::bit_width(static_cast<uint64_t>(n - 1)) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto x = static_cast<uint64_t>(i);
  do {
    uint64_t left = x >> half, right = x & mask;
    for (int round = 0; round < kRounds; ++round) {
      left ^= mix(right + mix(key + static_cast<uint64_t>(round) * kGolden)) & mask;
      std::swap(left, right);
    }
    x = left << half | right;
  } while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

}  // namespace

WindowOrder window_order(std::string_view name) {
  if (name == "shuffled") return WindowOrder::shuffled;
  if (name == "random") return WindowOrder::random;
  fail<ConfigError>("[data] unknown order '", name, "'; known: shuffled, random");
}

WindowStarts::WindowStarts(int64_t tokens, int64_t context, uint64_t seed, WindowOrder order)
    : tokens_(tokens), context_(context), windows_(std::max<int64_t>(1, (tokens - context) / context)), seed_(seed), order_(order) {}

int64_t WindowStarts::operator()(int64_t index) const {
  if (order_ == WindowOrder::random) return below(hash(seed_, index), tokens_ - context_);
  const int64_t epoch = index / windows_;
  const int64_t free = tokens_ - 1 - windows_ * context_;  // tokens that no window has as inputs, after the first offset
  const uint64_t key = hash(seed_, epoch);
  return below(mix(key + kGolden), std::min(context_, free + 1)) + context_ * permuted(index % windows_, windows_, key);
}

TrainingWindows::TrainingWindows(TokenMixture tokens, int64_t context, uint64_t seed, WindowOrder order)
    : tokens_(std::move(tokens)), context_(context) {
  check<ConfigError>(context >= 1, "[data] a context of ", context);
  for (const TokenMixture::Source& source : tokens_.sources()) {
    const uint64_t own = sources_.empty() ? seed : hash(seed, -static_cast<int64_t>(sources_.size()));
    if (source.tokens.example_end()) {
      PackedExamples examples(source.tokens, context);
      const WindowStarts starts = WindowStarts::of_windows(examples.num_windows(), own, order);
      sources_.push_back({starts, std::move(examples)});
      continue;
    }
    const int64_t size = source.tokens.size();
    check<DataError>(size > context, "[data] '", source.tokens.name(), "': ", size, " tokens are too few for a context of ", context,
                     ", which needs ", context + 1);
    sources_.push_back({WindowStarts(size, context, own, order), std::nullopt});
  }
}

double TrainingWindows::epochs(int s, int64_t samples) const {
  return static_cast<double>(samples) * tokens_.share(s) / static_cast<double>(windows_per_epoch(s));
}

int64_t TrainingWindows::samples_of(int s, double epochs) const {
  constexpr double kRounding = 1e-6;  // of 0.1 epochs and the like
  return static_cast<int64_t>(std::ceil((epochs * static_cast<double>(windows_per_epoch(s)) - kRounding) / tokens_.share(s)));
}

int64_t TrainingWindows::start(int64_t index) const {
  const auto [source, own] = tokens_.place(index);
  return sources_[static_cast<size_t>(source)].starts(own);
}

const PackedExamples* TrainingWindows::examples(int s) const {
  const auto& examples = sources_[static_cast<size_t>(s)].examples;
  return examples ? &*examples : nullptr;
}

void TrainingWindows::fill(int64_t first, int64_t count, int32_t* inputs, int32_t* targets) const {
  for (int64_t i = 0; i < count; ++i, inputs += context_, targets += context_) {
    const int source = tokens_.place(first + i).source;
    const int64_t at = start(first + i);
    if (examples(source)) {
      examples(source)->fill(at, inputs, targets);
      continue;
    }
    const Tokens& tokens = tokens_.sources()[static_cast<size_t>(source)].tokens;
    tokens.copy(at, context_, inputs);
    tokens.copy(at + 1, context_, targets);
  }
}

int64_t TrainingWindows::num_targets(int64_t first, int64_t count) const {
  int64_t all = 0;
  for (int64_t i = first; i < first + count; ++i) {
    const PackedExamples* packed = examples(tokens_.place(i).source);
    all += packed ? packed->num_targets(start(i)) : context_;
  }
  return all;
}

}  // namespace sheaf::models
