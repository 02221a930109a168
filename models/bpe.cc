#include "sheaf/models/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "sheaf/core/error.h"
#include "sheaf/core/json.h"

namespace sheaf::models {
namespace {

uint64_t key_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}
uint64_t spread(uint64_t key) { return key * 0x9E3779B97F4A7C15; }

}  // namespace

Bpe::Bpe(std::vector<std::string> tokens, bool may_lack) : tokens_(std::move(tokens)) {
  check<DataError>(!tokens_.empty() && tokens_.size() <= INT32_MAX, "[tokenizer] a vocabulary of ", tokens_.size());
  ids_.reserve(tokens_.size());
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string& token = tokens_[id];
    if (may_lack && token.empty()) continue;
    check<DataError>(!token.empty() && token.size() <= kLongestToken, "[tokenizer] token ", id, " has ", token.size(),
                     " bytes");
    const auto [found, added] = ids_.emplace(token, static_cast<int32_t>(id));
    check<DataError>(added, "[tokenizer] tokens ", found->second, " and ", id, " are the same, ", json_string(token));
  }
}

void Bpe::take_bytes(int64_t ordinary) {
  for (int byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    const int32_t id = id_of({&text, 1});
    check<DataError>(id >= 0 && id < ordinary, "[tokenizer] the byte ", byte, " is not in the vocabulary");
    bytes_[static_cast<size_t>(byte)] = id;
  }
}

int32_t Bpe::id_of(std::string_view bytes) const {
  const auto found = ids_.find(bytes);
  return found == ids_.end() ? -1 : found->second;
}

void Bpe::reserve_joins(size_t count) {
  joins_.assign(std::bit_ceil(2 * count + 2), {});
  shift_ = 64 - std::countr_zero(joins_.size());
}

bool Bpe::add_join(BpePair pair, uint32_t rank, int32_t id) {
  const uint64_t key = key_of(pair.first, pair.second);
  size_t at = spread(key) >> shift_;
  for (; joins_[at].id >= 0; at = (at + 1) & (joins_.size() - 1))
    if (joins_[at].pair == key) return false;
  joins_[at] = {key, rank, id};
  return true;
}

const Bpe::Join& Bpe::find_join(int32_t left, int32_t right) const {
  const uint64_t key = key_of(left, right);
  size_t at = spread(key) >> shift_;
  while (joins_[at].pair != key && joins_[at].id >= 0) at = (at + 1) & (joins_.size() - 1);
  return joins_[at];
}

Bpe Bpe::of_merges(std::vector<std::string> tokens, const std::vector<BpePair>& merges) {
  Bpe bpe(std::move(tokens));
  bpe.take_bytes(static_cast<int64_t>(bpe.tokens_.size()));
  bpe.add_merges(merges);
  return bpe;
}

Bpe Bpe::of_bytes(std::vector<std::string> tokens, const std::vector<BpePair>& merges, bool whole_words) {
  Bpe bpe(std::move(tokens), true);
  bpe.take_bytes(static_cast<int64_t>(bpe.tokens_.size()));
  bpe.add_merges(merges);
  if (!whole_words) return bpe;
  Scratch scratch;
  std::vector<int32_t> parts;
  for (const auto& [token, id] : bpe.ids_) {
    parts.clear();
    bpe.join(token, scratch, parts);
    if (parts.size() != 1) bpe.whole_.emplace(token, id);
  }
  return bpe;
}

Bpe Bpe::of_characters(std::vector<std::string> tokens, const std::vector<BpePair>& merges,
                       const std::array<int32_t, 256>& bytes) {
  Bpe bpe(std::move(tokens), true);
  bpe.bytes_ = bytes;
  bpe.characters_ = true;
  bpe.add_merges(merges);
  return bpe;
}

void Bpe::add_merges(const std::vector<BpePair>& merges) {
  const auto size = static_cast<int64_t>(tokens_.size());
  reserve_joins(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = merges[rank];
    check<DataError>(left >= 0 && left < size && right >= 0 && right < size, "[tokenizer] merge ", rank, " of ", left,
                     " and ", right, " in a vocabulary of ", size);
    const std::string &before = tokens_[static_cast<size_t>(left)], &after = tokens_[static_cast<size_t>(right)];
    check<DataError>(!before.empty() && !after.empty(), "[tokenizer] merge ", rank, " of ", left, " and ", right,
                     ", of which one is no token of words");
    const std::string joined = before + after;
    const int32_t id = id_of(joined);
    check<DataError>(id >= 0, "[tokenizer] merge ", rank, " makes ", json_string(joined), ", which is no token");
    check<DataError>(add_join(merges[rank], static_cast<uint32_t>(rank), id), "[tokenizer] merge ", rank, " of ",
                     json_string(joined), " stands there twice");
  }
}

Bpe Bpe::of_ranks(std::vector<std::string> tokens, int64_t ordinary) {
  Bpe bpe(std::move(tokens));
  check<DataError>(ordinary >= 0 && ordinary <= static_cast<int64_t>(bpe.tokens_.size()), "[tokenizer] ", ordinary,
                   " ordinary tokens");
  bpe.take_bytes(ordinary);
  std::vector<std::pair<BpePair, int32_t>> found;
  for (int32_t id = 0; id < ordinary; ++id) {
    const std::string_view token = bpe.tokens_[static_cast<size_t>(id)];
    for (size_t cut = 1; cut < token.size(); ++cut) {
      const int32_t left = bpe.id_of(token.substr(0, cut)), right = left < 0 ? -1 : bpe.id_of(token.substr(cut));
      if (right >= 0 && left < ordinary && right < ordinary) found.push_back({{left, right}, id});
    }
  }
  const auto join_all = [&](const std::vector<std::pair<BpePair, int32_t>>& pairs) {
    bpe.reserve_joins(pairs.size());
    for (const auto& [pair, id] : pairs) bpe.add_join(pair, static_cast<uint32_t>(id), id);
  };
  join_all(found);
  // Until a token is complete, merges within its bytes do not depend on the surrounding text. So of the pairs whose merge gives it,
  // only one ever occurs, and the others would only slow down the table. If none occurs, the token arises from whole words alone.
  std::vector<std::pair<BpePair, int32_t>> last;
  Scratch scratch;
  std::vector<int32_t> parts;
  for (int32_t id = 0; id < ordinary; ++id) {
    const std::string_view token = bpe.tokens_[static_cast<size_t>(id)];
    if (token.size() == 1) continue;
    parts.clear();
    const BpePair pair = bpe.join(token, scratch, parts);
    if (parts.size() == 1 && parts[0] == id) last.push_back({pair, id});
    else bpe.whole_.emplace(token, id);
  }
  join_all(last);
  return bpe;
}

void Bpe::encode(std::string_view word, Scratch& s, std::vector<int32_t>& out) const {
  if (!whole_.empty()) {
    if (const auto found = whole_.find(word); found != whole_.end()) return out.push_back(found->second);
  }
  join(word, s, out);
}

int32_t Bpe::take_apart(std::string_view word, Scratch& s) const {
  check<DataError>(word.size() < INT32_MAX, "[tokenizer] a word of ", word.size(), " bytes");
  s.parts.resize(word.size() + 1);
  Scratch::Part* parts = s.parts.data();
  int32_t count = 0;
  const auto put = [&](int32_t id) { parts[count] = {id, count + 1, count - 1, kNever}, ++count; };
  for (size_t at = 0; at < word.size();) {
    const int length = characters_ ? std::max(utf8_length(word, at), 1) : 1;
    const int32_t id = characters_ ? id_of(word.substr(at, static_cast<size_t>(length))) : -1;
    if (id >= 0) put(id);
    else for (int i = 0; i < length; ++i) put(bytes_[static_cast<unsigned char>(word[at + static_cast<size_t>(i)])]);
    at += static_cast<size_t>(length);
  }
  return count;
}

BpePair Bpe::join(std::string_view word, Scratch& s, std::vector<int32_t>& out) const {
  const int32_t size = take_apart(word, s);
  s.queue.clear();
  Scratch::Part* parts = s.parts.data();
  const auto rank_at = [&](int32_t i) {
    const int32_t next = parts[i].next;
    return parts[i].rank = next < size ? find_join(parts[i].id, parts[next].id).rank : kNever;
  };
  const auto entry = [](uint32_t rank, int32_t i) { return static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(i); };
  for (int32_t i = 0; i < size; ++i)
    if (const uint32_t rank = rank_at(i); rank != kNever) s.queue.push_back(entry(rank, i));
  std::make_heap(s.queue.begin(), s.queue.end(), std::greater());
  const auto push = [&](int32_t i) {
    if (const uint32_t rank = rank_at(i); rank != kNever) {
      s.queue.push_back(entry(rank, i));
      std::push_heap(s.queue.begin(), s.queue.end(), std::greater());
    }
  };
  BpePair last;
  while (!s.queue.empty()) {
    const uint64_t best = s.queue.front();
    std::pop_heap(s.queue.begin(), s.queue.end(), std::greater());
    s.queue.pop_back();
    const auto i = static_cast<int32_t>(best & UINT32_MAX);
    Scratch::Part& part = parts[i];
    if (part.rank != best >> 32) continue;  // merged with another part in the meantime
    Scratch::Part& next = parts[part.next];
    last = {part.id, next.id};
    part.id = find_join(part.id, next.id).id;
    next.rank = kNever;
    part.next = next.next;
    if (part.next < size) parts[part.next].previous = i;
    push(i);
    if (part.previous >= 0) push(part.previous);
  }
  for (int32_t i = 0; i < size; i = parts[i].next) out.push_back(parts[i].id);
  return last;
}

}  // namespace sheaf::models
