// KeyValueCache: what generation keeps of the tokens that a model has read, so that each new one is computed alone.
//
//   B batch   T tokens read now   S tokens read so far, those included   G key and value heads   D width of a head
#pragma once

#include <map>
#include <string>

#include "sheaf/core/tensor.h"

namespace sheaf::nn {

/// Keys and values of one sequence (or a batch of equally long ones), for every attention layer of a model. In a pass over
/// T more tokens each layer calls append() once; then the model calls advance(T). What has been appended never changes, so
/// a row of attention is what it would be in one pass over all tokens. On one thread.
class KeyValueCache {
 public:
  /// Room for `capacity` tokens; a layer takes its memory when it first appends.
  explicit KeyValueCache(int64_t capacity) : capacity_(capacity) {}

  /// Tokens read in all passes so far: the position of the next one.
  int64_t length() const { return length_; }
  /// Stores T tokens' keys and values, [B, T, 2 G, D], behind those of the tokens before; returns all, [B, S, 2 G, D], a
  /// view. `layer` is the path of the layer that asks. Throws ShapeError where there is no room or B, G, D, the dtype or the
  /// layout is another than before, LifetimeError in a recording: it works in place.
  Tensor append(const std::string& layer, const Tensor& kv_BTGD);
  /// Ends a pass over this many tokens.
  void advance(int64_t tokens) { length_ += tokens; }
  /// Forgets all tokens, but keeps the memory.
  void clear() { length_ = 0; }

 private:
  int64_t capacity_, length_ = 0;
  std::map<std::string, Tensor> layers_;  // [B, capacity, 2 G, D]
};

}  // namespace sheaf::nn
