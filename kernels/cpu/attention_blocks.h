// Sizes of attention's blocks and of the scratch memory that one slot needs, and which rows form a document; shared by dispatcher and
// kernels.
#pragma once

#include <algorithm>

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/cpu/head_rows.h"
#include "sheaf/kernels/cpu/inline.h"
#include "sheaf/kernels/cpu/rows.h"

namespace sheaf::kernels::cpu {

inline constexpr int64_t kQueryBlock = 64;
inline constexpr int64_t kKeyBlock = 64;

/// Sizes of one attention call.
struct AttentionShape {
  int64_t batch, queries, keys, heads, key_heads, width, value_width;
  AttentionShape(const View& q, const View& k, const View& v)
      : batch(q.shape[0]),
        queries(q.shape[1]),
        keys(k.shape[1]),
        heads(q.shape[2]),
        key_heads(k.shape[2]),
        width(q.shape[3]),
        value_width(v.shape[3]) {}

  int64_t group() const { return heads / key_heads; }
  int64_t query_blocks() const { return (queries + kQueryBlock - 1) / kQueryBlock; }
  int64_t key_blocks() const { return (keys + kKeyBlock - 1) / kKeyBlock; }
  int64_t padded_keys() const { return key_blocks() * kKeyBlock; }
  int64_t padded_width() const { return padded(width); }
  int64_t padded_value_width() const { return padded(value_width); }
  /// Keys that query t sees.
  int64_t visible(int64_t t, bool causal) const {
    return causal ? std::max<int64_t>(0, std::min(keys, t + 1 + keys - queries)) : keys;
  }
  /// The first of them, if there are any, with a window of `window` keys; 0: without one.
  int64_t first_visible(int64_t t, int64_t window) const {
    return window ? std::max<int64_t>(0, t + 1 + keys - queries - std::min(window, keys)) : 0;
  }

  /// The begin of the first block of keys that queries from `first` on see.
  int64_t first_block(int64_t first, int64_t window) const { return first_visible(first, window) / kKeyBlock * kKeyBlock; }

  int64_t forward_items() const { return batch * heads * query_blocks(); }
  int64_t forward_slots() const { return slot_count(forward_items(), 1); }
  /// Transposed keys and values of a head, then blocks of queries, scores and results, and two numbers per row.
  int64_t forward_cells() const {
    return (padded_keys() + kQueryBlock) * (padded_width() + padded_value_width()) +
           kQueryBlock * (kKeyBlock + 2);
  }
  int64_t backward_items() const { return batch * key_heads; }
  int64_t backward_slots() const { return slot_count(backward_items(), 1); }
  /// Keys, transposed keys and values, both gradients of a key head; blocks of queries, their gradient and the
  /// output's, two blocks of scores, and a number per row.
  int64_t backward_cells() const {
    return padded_keys() * (3 * padded_width() + 2 * padded_value_width()) +
           kQueryBlock * (2 * padded_width() + padded_value_width() + 2 * kKeyBlock + 1);
  }
};

/// Rows that attend to each other: all of a sequence, or those of a document.
struct Document {
  int64_t first_query, queries, first_key, keys;
};

/// The sizes for one document at a time, and where it begins.
struct DocumentShape : AttentionShape {
  int64_t first_query = 0, first_key = 0;
  using AttentionShape::AttentionShape;
  void take(const Document& d) {
    first_query = d.first_query, queries = d.queries, first_key = d.first_key, keys = d.keys;
  }
};

/// The documents of each sequence: one, or those of a mask.
class Documents {
 public:
  Documents(const AttentionMask& mask, const AttentionShape& s)
      : begins_(mask.has_documents() && s.queries > 0 ? &mask.begins : nullptr),
        key_begins_(mask.causal ? nullptr : &mask.key_begins),
        past_(s.keys - s.queries),
        whole_{0, s.queries, 0, s.keys} {}
  Documents(AttentionMask&&, const AttentionShape&) = delete;  // it keeps a pointer to the mask's begins

  /// Calls f(document) for all of sequence b, in order. Keys that no query sees are in documents without queries.
  template <class F>
  void for_each(int64_t b, F&& f) const {
    if (!begins_) return f(whole_);
    if (key_begins_) {
      for (int64_t key = 0; key < whole_.keys;) {
        const Document d = from_key(b, key);
        f(d);
        key = d.first_key + d.keys;
      }
      if (const Document none = from_key(b, whole_.keys); none.queries > 0) f(none);
      return;
    }
    if (const int64_t unseen = at(b, 0).first_key; unseen > 0) f(Document{0, 0, 0, unseen});
    for (int64_t t = 0; t < whole_.queries;) {
      const Document d = at(b, t);
      f(d);
      t = d.first_query + d.queries;
    }
  }

  /// Calls f(document, n) for the blocks of kQueryBlock queries that begin in block i of sequence b, n being the block's number
  /// in its document: together, all blocks of all documents.
  template <class F>
  void for_each_block(int64_t b, int64_t i, F&& f) const {
    if (!begins_) return f(whole_, i);
    const int64_t end = std::min((i + 1) * kQueryBlock, whole_.queries);
    for (int64_t t = i * kQueryBlock; t < end;) {
      const Document d = at(b, t);
      const int64_t first = d.first_query, behind = first + d.queries;
      for (int64_t n = (t - first + kQueryBlock - 1) / kQueryBlock; first + n * kQueryBlock < std::min(end, behind); ++n) f(d, n);
      t = behind;
    }
  }

 private:
  static const int32_t* row(const View& begins, int64_t b) { return begins.as<int32_t>() + b * begins.strides[0]; }
  /// The document of query t, from there on.
  SHEAF_INLINE Document at(int64_t b, int64_t t) const {
    const int32_t* begins = row(*begins_, b);
    const int64_t begin = begins[t];
    if (key_begins_) return from_key(b, begin);
    while (t < whole_.queries && begins[t] == begin) ++t;
    const int64_t first = std::max<int64_t>(begin - past_, 0);
    return {first, t - first, begin, t + past_ - begin};
  }
  /// The document that begins at this key, without a causal mask.
  SHEAF_INLINE Document from_key(int64_t b, int64_t key) const {
    const int32_t *queries = row(*begins_, b), *keys = row(*key_begins_, b);
    const auto [first, behind] = std::equal_range(queries, queries + whole_.queries, static_cast<int32_t>(key));
    return {first - queries, behind - first, key, std::upper_bound(keys + key, keys + whole_.keys, static_cast<int32_t>(key)) - keys - key};
  }

  const View* begins_;      // of queries
  const View* key_begins_;  // null with a causal mask
  int64_t past_;            // keys before the first query's own
  Document whole_;
};

/// Calls head.load_keys(b, g, document) and head.run(b, h, block) for the items [begin, end) of a
/// forward pass: batch by batch, key head by key head, so that a slot loads the keys of few heads.
template <class Head>
void run_forward_items(const AttentionShape& s, const Documents& documents, int64_t begin,
                       int64_t end, Head& head) {
  const int64_t blocks = s.query_blocks(), per_key_head = s.group() * blocks;
  for (int64_t item = begin, loaded = -1, loaded_from = 0; item < end; ++item) {
    const int64_t pair = item / per_key_head, b = pair / s.key_heads, g = pair % s.key_heads,
                  rest = item % per_key_head;
    documents.for_each_block(b, rest % blocks, [&](const Document& d, int64_t block) {
      if (pair != loaded || d.first_key != loaded_from)
        head.load_keys(b, g, d), loaded = pair, loaded_from = d.first_key;
      head.run(b, g * s.group() + rest / blocks, block);
    });
  }
}

}  // namespace sheaf::kernels::cpu
