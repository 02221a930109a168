// KeyValueCache: the state of tokens already read that generation keeps, so that only new tokens are computed.
//
//   B batch   T tokens read now   S tokens read so far, including those   G heads, of keys or of values or of both   D their width
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf::nn {

/// The cache of a recurrent layer: states at some positions, and its inputs for the tokens since then. A state cannot be undone: when
/// the cache is shortened, states after that position are dropped, and tokens are read again.
class RecurrentTail {
 public:
  /// The last position with a state, up to `position`, that of the next token, and that state; at 0 it is undefined. Drops everything
  /// derived from tokens from `position` on. Throws LifetimeError if a needed state was dropped.
  std::pair<int64_t, Tensor> state_at(const std::string& name, int64_t position);
  /// The kept rows of the i-th input, from token first() on, followed by x[B, T, ..], those of the tokens that are read now.
  Tensor rows_and(size_t i, const Tensor& x_BTE) const;
  int64_t first() const { return first_; }
  void keep_state(int64_t position, const Tensor& state) { states_[position] = state; }
  /// Keeps the last two states and, of the result of rows_and(), the rows from `margin` before the first of these on: all rows, as
  /// long as there are fewer than two states.
  void keep_rows(const std::vector<Tensor>& all, int64_t margin);
  /// Calls `f` for every kept tensor.
  void for_each_kept(const std::function<void(Tensor&)>& f);

 private:
  int64_t first_ = 0, length_ = 0;  // rows [first_, first_ + length_)
  std::vector<Tensor> rows_;        // [B, length_ or more, ..]
  std::map<int64_t, Tensor> states_;
};

/// Keys and values of one sequence or of a batch, for every attention layer of a model. In a pass over T more tokens each layer calls
/// append() once for each name that it stores values under; then the model calls advance(T). Stored values never change, so a row of
/// attention equals that of one pass over all tokens. On one thread.
///
/// Sequences of different lengths in a batch end together: set_begins() says where each one begins, and tokens before that are
/// padding. A token's position counts from there, and its bits are those that it has if its sequence is alone (on CPUs, except in
/// linear attention, whose chunks begin at the same positions for all). For a sequence that is done, callers set its beginning to
/// each new token: so it costs little and never gets too long.
class KeyValueCache {
 public:
  /// Room for `capacity` tokens; memory is allocated when a name first appends.
  explicit KeyValueCache(int64_t capacity) : capacity_(capacity) {}

  /// Tokens read in all passes so far: the position of the next one.
  int64_t length() const { return length_; }
  /// Where sequences begin from now on, i32[B], placed as the batch: not after the last token of the next pass, whose tokens before
  /// that are padding. Undefined: all at 0.
  void set_begins(const Tensor& begins_B) { begins_ = begins_B, shown_ = {}; }
  /// The same for each of T tokens that are read now, i32[B, T], 0 for padding; undefined if set_begins() was not
  /// called.
  Tensor begins(int64_t tokens);
  /// Which of them are not padding, bool [B, T]; only after set_begins().
  Tensor is_read(int64_t tokens);
  /// Keeps only these of each rank's sequences, equally many on all ranks.
  void keep_sequences(const std::vector<int64_t>& which);
  /// Stores the keys or values of T tokens, [B, T, G, D], after those of the tokens before; returns all, [B, S, G, D], a view. `name`
  /// begins with the path of the calling layer. Throws ShapeError if there is no room or if B, G, D, the dtype or the layout differs
  /// from before, LifetimeError in a recording: it works in place.
  Tensor append(const std::string& name, const Tensor& kv_BTGD);
  /// The cache of the recurrent layer `name`, in addition or instead. LifetimeError in a recording.
  RecurrentTail& tail(const std::string& name);
  /// Ends a pass over this many tokens.
  void advance(int64_t tokens) { set_length(tokens < 0 ? tokens : length_ + tokens); }
  /// Drops all but the first tokens, and keeps the memory. Recurrent layers can go back to 0, or to 64 tokens before the furthest
  /// that was read since then. Sequences begin where they did.
  void shorten(int64_t length) { set_length(std::min(length_, length)); }
  /// Drops everything, including where sequences begin.
  void clear() { shorten(0), set_begins({}); }

 private:
  void set_length(int64_t length) {
    check<ConfigError>(length >= 0, "[key_value_cache] ", length, " tokens");
    length_ = length, shown_ = {};
  }
  int64_t capacity_, length_ = 0;
  Tensor begins_, shown_;               // [B]; the result of begins() for this pass
  std::map<std::string, Tensor> kept_;  // [B, capacity, G, D]
  std::map<std::string, RecurrentTail> tails_;
};

}  // namespace sheaf::nn
