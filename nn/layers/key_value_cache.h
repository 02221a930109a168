// KeyValueCache: what generation keeps of the tokens that a model has read, so that each new one is computed alone.
//
//   B batch   T tokens read now   S tokens read so far, those included   G heads, of keys or of values or of both   D their width
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sheaf/core/tensor.h"

namespace sheaf::nn {

/// What a layer keeps that reads tokens into a state: states at some positions, and what it is given for the tokens since then. A
/// state cannot be taken back, so those behind a position to which the cache was shortened are forgotten, and tokens read again.
class RecurrentTail {
 public:
  /// The last position up to `position`, which is where the next token stands, that has a state; 0 has one, which is undefined. Forgets
  /// all that came of tokens from `position` on. Throws LifetimeError if what lies before is forgotten.
  std::pair<int64_t, Tensor> state_at(const std::string& name, int64_t position);
  /// What is kept of the i-th thing, from token first() on, and behind it x[B, T, ..], of the tokens that are read now.
  Tensor rows_and(size_t i, const Tensor& x_BTE) const;
  int64_t first() const { return first_; }
  void keep_state(int64_t position, const Tensor& state) { states_[position] = state; }
  /// Keeps the last two states and, of what rows_and() has given, rows from `margin` before the first of these on.
  void keep_rows(const std::vector<Tensor>& all, int64_t margin);
  /// `f` of all that is kept.
  void for_each_kept(const std::function<void(Tensor&)>& f);

 private:
  int64_t first_ = 0, length_ = 0;  // rows [first_, first_ + length_)
  std::vector<Tensor> rows_;        // [B, length_ or more, ..]
  std::map<int64_t, Tensor> states_;
};

/// Keys and values of one sequence or of a batch, for every attention layer of a model. In a pass over
/// T more tokens each layer calls append() once for what it keeps under one name; then the model calls advance(T). What is kept never changes, so
/// a row of attention is what it would be in one pass over all tokens. On one thread.
///
/// Sequences of a batch that are not equally long end together: set_begins() says where each one begins, and what is read of it before
/// is padding. A token stands at its position less that, and has the bits that it has where its sequence is alone (on CPUs, but for linear attention, whose
/// chunks begin where they do for all). Where a sequence is done, whoever goes on with the others lets it begin anew with each token: so it
/// costs little and never is too long.
class KeyValueCache {
 public:
  /// Room for `capacity` tokens; memory is taken where a name first appends.
  explicit KeyValueCache(int64_t capacity) : capacity_(capacity) {}

  /// Tokens read in all passes so far: the position of the next one.
  int64_t length() const { return length_; }
  /// Where sequences begin from now on, i32[B], placed as the batch: none behind the last token of the next pass, in which what is
  /// before is padding. Undefined: all at 0.
  void set_begins(const Tensor& begins_B) { begins_ = begins_B, shown_ = {}; }
  /// The same of each of T tokens that are read now, i32[B, T], padding at 0; undefined if it is 0 for all.
  Tensor begins(int64_t tokens);
  /// Which of those are no padding, bool [B, T].
  Tensor is_read(int64_t tokens);
  /// Of what each rank has of the batch only these sequences are read further, as many on all ranks.
  void keep_sequences(const std::vector<int64_t>& which);
  /// Stores what T tokens have of keys or values, [B, T, G, D], behind that of the tokens before; returns all, [B, S, G, D], a
  /// view. `name` begins with the path of the layer that asks. Throws ShapeError where there is no room or B, G, D, the dtype or the
  /// layout is another than before, LifetimeError in a recording: it works in place.
  Tensor append(const std::string& name, const Tensor& kv_BTGD);
  /// What the layer `name` keeps beside that, or in place of it, if it is recurrent. LifetimeError in a recording.
  RecurrentTail& tail(const std::string& name);
  /// Ends a pass over this many tokens.
  void advance(int64_t tokens) { length_ += tokens, shown_ = {}; }
  /// Forgets all but the first tokens, and keeps the memory. Recurrent layers can go back to 0, or to 64
  /// tokens before the furthest that was read since then. Sequences begin where they did.
  void shorten(int64_t length) { length_ = std::min(length_, length), shown_ = {}; }
  /// Forgets all, also where sequences begin.
  void clear() { shorten(0), set_begins({}); }

 private:
  int64_t capacity_, length_ = 0;
  Tensor begins_, shown_;  // [B]; what begins() gave for the tokens of this pass
  std::map<std::string, Tensor> kept_;  // [B, capacity, G, D]
  std::map<std::string, RecurrentTail> tails_;
};

}  // namespace sheaf::nn
