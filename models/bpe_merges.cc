// [Note: the words as an array] Each byte of each word has a place in one array, with one separating place between two words. A
// token's id is at its first place and at its last, so that both neighbours of a token are found in one step. Places never move: a
// pair only needs to know where its left tokens begin. A place is stale once other tokens are there; tokens only grow, so it never
// becomes valid again.
//
// [Note: one pair a token] Until a token is complete, nothing merges across the ends of its bytes; so merges within them are the same
// wherever these bytes occur, and all occurrences become the token in one pass, from one pair. Hence a pair with a new token has all
// of its places at once: from then on its count only decreases, which the queue relies on.
#include "sheaf/models/bpe_merges.h"

#include <algorithm>
#include <array>
#include <queue>
#include <utility>

#include "sheaf/models/byte_alphabet.h"
#include "sheaf/models/pair_index.h"

namespace sheaf::models {
namespace {

constexpr int32_t kNone = -1;
using Places = std::vector<uint32_t>;

/// The words, as their current tokens.
class Words {
 public:
  explicit Words(const WordCounts& counts) {
    size_t bytes = 1;
    counts.for_each([&](std::string_view word, int64_t) { bytes += word.size() + 1; });
    check<DataError>(bytes <= UINT32_MAX, "[bpe] the distinct words have ", bytes, " bytes; 4 GiB are the most");
    places_.reserve(bytes);
    counts_.reserve(static_cast<size_t>(counts.size()));
    std::array<int32_t, 256> ids{};
    for (int32_t id = 0; id < 256; ++id) ids[bytes_in_alphabet()[static_cast<size_t>(id)]] = id;
    put(kNone);
    counts.for_each([&](std::string_view word, int64_t count) {
      for (const char byte : word) put(ids[static_cast<unsigned char>(byte)]);
      counts_.push_back(count);
      put(kNone);
    });
  }

  /// The token that begins at this place, or ends before it; kNone at a word's ends. See [Note: the words as an array].
  int32_t beginning_at(uint32_t place) const { return places_[place].token; }
  int32_t ending_before(uint32_t place) const { return places_[place - 1].token; }
  uint32_t size() const { return static_cast<uint32_t>(places_.size()); }
  /// How often this place's word occurs in the texts.
  int64_t count_at(uint32_t place) const { return counts_[places_[place].word]; }
  /// Prefetches a place that will be read soon.
  void fetch(uint32_t place) const { __builtin_prefetch(&places_[place]); }
  /// Replaces the two tokens that meet at `middle` by one.
  void join(uint32_t begin, uint32_t middle, uint32_t end, int32_t token) {
    places_[middle - 1].token = places_[middle].token = kNone;
    places_[begin].token = places_[end - 1].token = token;
  }

 private:
  struct Place {
    int32_t token;
    uint32_t word;
  };
  void put(int32_t token) { places_.push_back({token, static_cast<uint32_t>(counts_.size())}); }

  std::vector<Place> places_;
  std::vector<int64_t> counts_;  // of words
};

struct Pair {
  BpePair tokens;
  int64_t count;
  Places places;  // ascending; some are stale
};

/// A pair in the queue, with its count when it was inserted.
struct Candidate {
  int64_t count;
  BpePair tokens;
  uint32_t pair;
  bool operator<(const Candidate& o) const { return count != o.count ? count < o.count : tokens > o.tokens; }
};

/// Changes on one side of the new token during a pass, by neighbour.
class Neighbours {
 public:
  struct Found {
    int64_t lost = 0, won = 0;  // of the former pair, and of the one with the new token
    bool any = false;
    Places places;  // of the new one
  };
  Found& of(int32_t token) {
    Found& found = found_[static_cast<size_t>(token)];
    if (!found.any) found.any = true, tokens_.push_back(token);
    return found;
  }
  void add_token() { found_.emplace_back(); }
  /// Calls f(token, found) for each and clears them.
  template <class F>
  void take(F&& f) {
    for (const int32_t token : tokens_) {
      Found& found = found_[static_cast<size_t>(token)];
      f(token, found);
      found.lost = found.won = 0, found.any = false;
      found.places.clear();
    }
    tokens_.clear();
  }

 private:
  std::vector<Found> found_;  // by token
  std::vector<int32_t> tokens_;
};

class Learner {
 public:
  Learner(const WordCounts& counts, const MergeOptions& options)
      : options_(options), least_(std::max<int64_t>(options.min_frequency, 1)), words_(counts) {
    for (const unsigned char byte : bytes_in_alphabet()) add_token(std::string(1, static_cast<char>(byte)));
    count_bytes();
  }

  LearnedMerges run() {
    while (static_cast<int64_t>(out_.tokens.size()) < options_.tokens && !queue_.empty() && !options_.stop()) {
      const Candidate best = queue_.top();
      queue_.pop();
      Pair& pair = pairs_[best.pair];
      if (pair.count == best.count) join(pair);
      else if (pair.count >= least_) queue_.push({pair.count, pair.tokens, best.pair});
      else pair.places = {};
    }
    return std::move(out_);
  }

 private:
  int32_t add_token(std::string bytes) {
    const auto id = static_cast<int32_t>(out_.tokens.size());
    lengths_.push_back(static_cast<uint32_t>(bytes.size()));
    out_.tokens.push_back(std::move(bytes));
    left_.add_token(), right_.add_token();
    return id;
  }
  uint32_t length(int32_t token) const { return lengths_[static_cast<size_t>(token)]; }

  void count_bytes() {
    std::vector<Neighbours::Found> found(size_t{256} * 256);
    for (uint32_t at = 1; at + 1 < words_.size(); ++at) {
      const int32_t left = words_.beginning_at(at), right = words_.beginning_at(at + 1);
      if (left == kNone || right == kNone) continue;
      Neighbours::Found& pair = found[static_cast<size_t>(256 * left + right)];
      pair.won += words_.count_at(at);
      pair.places.push_back(at);
    }
    for (int32_t i = 0; i < 256 * 256; ++i) {
      put_pair({i / 256, i % 256}, found[static_cast<size_t>(i)]);
      found[static_cast<size_t>(i)].places = {};
    }
  }

  /// A new pair, with all of its places. It will never have more, so one that is too rare is dropped.
  void put_pair(BpePair tokens, const Neighbours::Found& found) {
    if (found.won < least_) return;
    const auto number = static_cast<int32_t>(pairs_.size());
    pairs_.push_back({tokens, found.won, Places(found.places.begin(), found.places.end())});  // without spare capacity
    index_.add(tokens, number);
    queue_.push({found.won, tokens, static_cast<uint32_t>(number)});
  }

  void lose(BpePair tokens, int64_t count) {
    if (const int32_t at = index_.find(tokens); at != kNone) pairs_[static_cast<size_t>(at)].count -= count;
  }

  void join(Pair& pair) {
    const auto [left, right] = pair.tokens;
    const Places places = std::exchange(pair.places, {});
    pair.count = 0;
    std::string bytes = out_.tokens[static_cast<size_t>(left)] + out_.tokens[static_cast<size_t>(right)];
    if (!options_.may_be(bytes)) return;
    out_.merges.push_back(pair.tokens);
    const int32_t token = add_token(std::move(bytes));
    join_places(left, right, token, places);
    left_.take([&](int32_t before, const Neighbours::Found& found) {
      lose({before, left}, found.lost);
      put_pair({before, token}, found);
    });
    right_.take([&](int32_t after, const Neighbours::Found& found) {
      lose({right, after}, found.lost);
      put_pair({token, after}, found);
    });
  }

  /// Merges the two wherever they occur; records the former neighbours and the new ones.
  void join_places(int32_t left, int32_t right, int32_t token, const Places& places) {
    const uint32_t to_middle = length(left), to_end = length(token);
    uint32_t last_end = 0;
    constexpr size_t kAhead = 16;  // most are elsewhere in memory
    for (size_t i = 0; i < places.size(); ++i) {
      if (i + kAhead < places.size()) words_.fetch(places[i + kAhead]);
      const uint32_t begin = places[i];
      const uint32_t middle = begin + to_middle, end = begin + to_end;
      if (words_.beginning_at(begin) != left || words_.beginning_at(middle) != right) continue;
      const int64_t count = words_.count_at(begin);
      const int32_t before = words_.ending_before(begin), after = words_.beginning_at(end);
      words_.join(begin, middle, end, token);
      if (begin == last_end) {  // adjacent to the previous new token: undoes what was recorded on its right
        right_.of(left).won -= count;
        Neighbours::Found& found = left_.of(token);
        found.won += count;
        found.places.push_back(begin - to_end);
      } else if (before != kNone) {
        Neighbours::Found& found = left_.of(before);
        found.lost += count, found.won += count;
        found.places.push_back(begin - length(before));
      }
      if (after != kNone) {
        Neighbours::Found& found = right_.of(after);
        found.lost += count, found.won += count;
        found.places.push_back(begin);
      }
      last_end = end;
    }
  }

  const MergeOptions& options_;
  const int64_t least_;
  Words words_;
  LearnedMerges out_;
  std::vector<uint32_t> lengths_;  // of tokens
  std::vector<Pair> pairs_;        // all that were frequent enough
  PairIndex index_;
  std::priority_queue<Candidate> queue_;
  Neighbours left_, right_;
};

}  // namespace

LearnedMerges learn_merges(const WordCounts& words, const MergeOptions& options) { return Learner(words, options).run(); }

}  // namespace sheaf::models
