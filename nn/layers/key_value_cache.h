// KeyValueCache: what generation keeps of the tokens that a model has read, so that each new one is computed alone.
//
//   B batch   T tokens read now   S tokens read so far, those included   G heads, of keys or of values or of both   D their width
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "sheaf/core/tensor.h"

namespace sheaf::nn {

/// Keys and values of one sequence (or a batch of equally long ones), for every attention layer of a model. In a pass over
/// T more tokens each layer calls append() once for what it keeps under one name; then the model calls advance(T). What is kept never changes, so
/// a row of attention is what it would be in one pass over all tokens. On one thread.
class KeyValueCache {
 public:
  /// Room for `capacity` tokens; memory is taken where a name first appends.
  explicit KeyValueCache(int64_t capacity) : capacity_(capacity) {}

  /// Tokens read in all passes so far: the position of the next one.
  int64_t length() const { return length_; }
  /// Stores what T tokens have of keys or values, [B, T, G, D], behind that of the tokens before; returns all, [B, S, G, D], a
  /// view. `name` begins with the path of the layer that asks. Throws ShapeError where there is no room or B, G, D, the dtype or the
  /// layout is another than before, LifetimeError in a recording: it works in place.
  Tensor append(const std::string& name, const Tensor& kv_BTGD);
  /// Ends a pass over this many tokens.
  void advance(int64_t tokens) { length_ += tokens; }
  /// Forgets all but the first tokens, and keeps the memory.
  void shorten(int64_t length) { length_ = std::min(length_, length); }
  void clear() { shorten(0); }

 private:
  int64_t capacity_, length_ = 0;
  std::map<std::string, Tensor> kept_;  // [B, capacity, G, D]
};

}  // namespace sheaf::nn
