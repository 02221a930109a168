// WordCounts: how often each word occurs in many texts.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "sheaf/models/word_pattern.h"

namespace sheaf::models {

/// Words as keys of a hash table, in open addressing.
class WordTable {
 public:
  struct Entry {
    uint64_t hash = 0;
    int64_t count = 0;  ///< 0: the entry is free
    std::string_view word;
  };

  static uint64_t hash_of(std::string_view word);  ///< of two bytes or more
  /// The entry of a word; a new one has count 0, which the caller raises, and the caller's bytes.
  Entry& at(std::string_view word, uint64_t hash) {
    if (2 * size_ >= entries_.size()) grow();
    Entry& entry = entries_[place_of(word, hash)];
    if (entry.count == 0) entry.hash = hash, entry.word = word, ++size_;
    return entry;
  }
  int64_t size() const { return static_cast<int64_t>(size_); }

  template <class F>
  void for_each(F&& f) const {
    for (const Entry& entry : entries_)
      if (entry.count > 0) f(entry);
  }

 private:
  size_t place_of(std::string_view word, uint64_t hash) const;
  void grow();

  std::vector<Entry> entries_;  // a power of two, at least half of it free
  size_t size_ = 0;
};

/// Takes memory for the distinct words, whatever the texts' size. Words of one byte are skipped: they have nothing to merge.
class WordCounts {
 public:
  explicit WordCounts(const WordPattern& pattern) : pattern_(pattern), shards_(kShards) {}

  /// Counts the words of a text on the rank's threads. Bytes that are not UTF-8 end a word and belong to none.
  void add(std::string_view text);
  /// Distinct words.
  int64_t size() const;
  /// Calls f(word, count) for all of them, in unspecified order.
  template <class F>
  void for_each(F&& f) const {
    for (const Shard& shard : shards_)
      shard.table.for_each([&](const WordTable::Entry& entry) { f(entry.word, entry.count); });
  }

 private:
  static constexpr int kShardBits = 6, kShards = 1 << kShardBits;  // by hash; each is filled by one thread at a time
  struct Shard {
    std::string_view keep(std::string_view word);
    WordTable table;
    std::vector<std::unique_ptr<char[]>> chunks;  // the words' bytes
    size_t used = 0, room = 0;                    // of the last one
  };
  using Tables = std::vector<WordTable>;

  void count(std::string_view text, Tables& tables) const;

  const WordPattern& pattern_;
  std::vector<Shard> shards_;
};

}  // namespace sheaf::models
