#include "sheaf/models/word_counts.h"

#include <algorithm>
#include <cstring>

#include "sheaf/core/parallel.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

// If the size is not a multiple of eight bytes, the last part overlaps the one before it.
uint64_t WordTable::hash_of(std::string_view word) {
  const char *const begin = word.data(), *const end = begin + word.size();
  uint64_t hash = word.size();
  const auto mix = [&](uint64_t part) {
    hash = (hash ^ part) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 29;
  };
  if (word.size() >= 8) {
    for (const char* at = begin; at < end - 8; at += 8) mix(load<uint64_t>(at));
    mix(load<uint64_t>(end - 8));
  } else if (word.size() >= 4) {
    mix(load<uint32_t>(begin) | uint64_t{load<uint32_t>(end - 4)} << 32);
  } else if (word.size() >= 2) {
    mix(load<uint16_t>(begin) | uint64_t{load<uint16_t>(end - 2)} << 32);
  }
  return hash * 0xC2B2AE3D27D4EB4F;
}

size_t WordTable::place_of(std::string_view word, uint64_t hash) const {
  const size_t mask = entries_.size() - 1;
  size_t at = (hash ^ hash >> 32) & mask;
  while (entries_[at].count != 0 && (entries_[at].hash != hash || entries_[at].word != word)) at = (at + 1) & mask;
  return at;
}

void WordTable::grow() {
  std::vector<Entry> old(std::max<size_t>(2 * entries_.size(), 64));
  old.swap(entries_);
  for (const Entry& entry : old)
    if (entry.count != 0) entries_[place_of(entry.word, entry.hash)] = entry;
}

std::string_view WordCounts::Shard::keep(std::string_view word) {
  constexpr size_t kChunk = size_t{64} << 10;
  if (word.size() > room - used) {
    room = std::max(word.size(), kChunk), used = 0;
    chunks.push_back(std::make_unique_for_overwrite<char[]>(room));
  }
  char* const to = chunks.back().get() + used;
  std::memcpy(to, word.data(), word.size());
  used += word.size();
  return {to, word.size()};
}

void WordCounts::count(std::string_view text, Tables& tables) const {
  while (!text.empty()) {
    const size_t valid = valid_utf8_prefix(text);
    pattern_.for_each_word(text.substr(0, valid), [&](std::string_view word) {
      if (word.size() < 2) return;
      const uint64_t hash = WordTable::hash_of(word);
      ++tables[hash >> (64 - kShardBits)].at(word, hash).count;
    });
    text.remove_prefix(std::min(valid + 1, text.size()));
  }
}

// Each thread counts the words of its part alone, in tables that fit in its cache; then each shard collects its own words.
void WordCounts::add(std::string_view text) {
  constexpr size_t kSmallPart = size_t{64} << 10;
  const size_t part = std::max(text.size() / static_cast<size_t>(num_threads()) + 1, kSmallPart);
  std::vector<size_t> ends;
  for (size_t at = 0; at < text.size();) ends.push_back(at = safe_cut(text, at + part));
  std::vector<Tables> parts(ends.size(), Tables(kShards));
  parallel_for(static_cast<int64_t>(parts.size()), 1, [&](int64_t first, int64_t last) {
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i) {
      const size_t begin = i ? ends[i - 1] : 0;
      count(text.substr(begin, ends[i] - begin), parts[i]);
    }
  });
  parallel_for(kShards, 1, [&](int64_t first, int64_t last) {
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i)
      for (const Tables& tables : parts)
        tables[i].for_each([&](const WordTable::Entry& found) {
          WordTable::Entry& entry = shards_[i].table.at(found.word, found.hash);
          if (entry.count == 0) entry.word = shards_[i].keep(found.word);
          entry.count += found.count;
        });
  });
}

int64_t WordCounts::size() const {
  int64_t size = 0;
  for (const Shard& shard : shards_) size += shard.table.size();
  return size;
}

}  // namespace sheaf::models
