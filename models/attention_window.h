// Which blocks of a model have sliding-window attention, or linear attention.
#pragma once

#include <cstdint>

namespace sheaf::models {

/// The window of block i, counted from 0, of a model whose blocks see `window` keys, except blocks N, 2 N, .. counted from 1, which
/// see all, for N = full_attention_every (Gemma 3, https://arxiv.org/abs/2503.19786, has 6, gpt-oss 2). 0: all keys; if N is 0 there
/// is no such block.
inline int64_t window_of_block(int64_t i, int64_t window, int64_t full_attention_every) {
  return full_attention_every > 0 && (i + 1) % full_attention_every == 0 ? 0 : window;
}

/// Whether block i of a model with linear attention uses it: all but those numbered N, 2 N, .. from 1 on (Qwen3-Next's N is 4).
inline bool is_linear(int64_t i, int64_t full_attention_every) { return window_of_block(i, 1, full_attention_every) != 0; }

/// The same for block i of a model or its options, which may have none, and whose blocks after `layers` (those that predict tokens further
/// ahead) have none.
template <class Config>
bool is_linear_block(const Config& c, int64_t i) {
  return c.linear_key_heads > 0 && i < c.layers && is_linear(i, c.full_attention_every);
}

}  // namespace sheaf::models
