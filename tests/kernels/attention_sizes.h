// Sizes of a call of attention, and the shapes of its operands.
#pragma once

#include <string>

#include "sheaf/core/shape.h"

namespace sheaf::testing {

struct AttentionSizes {
  int64_t batch, queries, keys, heads, key_heads, width, value_width = width;
  Shape q() const { return {batch, queries, heads, width}; }
  Shape k() const { return {batch, keys, key_heads, width}; }
  Shape v() const { return {batch, keys, key_heads, value_width}; }
  Shape out() const { return {batch, queries, heads, value_width}; }
  Shape lse() const { return {batch, heads, queries}; }
  std::string to_string() const { return q().to_string() + v().to_string(); }
};

}  // namespace sheaf::testing
