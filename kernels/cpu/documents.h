// Where documents begin in sequences that have several, for recurrent layers: a check, and the runs of tokens that lie in one.
#pragma once

#include <algorithm>

#include "sheaf/core/error.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels::cpu {

/// DataError if begins[B, T] are none: a token's document begins at it, or where that of the one before it does; the first one's may have
/// begun earlier.
inline void check_documents(const char* who, const View& begins) {
  if (!given(begins)) return;
  for (int64_t b = 0; b < begins.shape[0]; ++b) {
    const int32_t* row = begins.as<int32_t>() + b * begins.strides[0];
    for (int64_t t = 0; t < begins.shape[1]; ++t)
      if (t == 0 ? row[t] > 0 : row[t] != t && row[t] != row[t - 1])
        fail<DataError>("[", who, "] begins[", b, ",", t, "] is ", row[t], ": the document of a token ",
                        "begins where that of the one before it does, or with it");
  }
}

/// Calls f(first, count) for runs of up to `most` tokens of sequence b, of T: a document's begin at its first token.
template <class F>
void for_runs(const View& begins, int64_t b, int64_t T, int64_t most, F&& f) {
  const int32_t* row = given(begins) ? begins.as<int32_t>() + b * begins.strides[0] : nullptr;
  for (int64_t first = 0, count; first < T; first += count) {
    count = std::min(most, T - first);
    if (row)
      for (int64_t t = 1; t < count; ++t)
        if (row[first + t] == first + t) count = t;
    f(first, count);
  }
}

/// Whether a document begins at token t.
inline bool begins_at(const View& begins, int64_t b, int64_t t) {
  return t == 0 || (given(begins) && begins.as<int32_t>()[b * begins.strides[0] + t] == t);
}

}  // namespace sheaf::kernels::cpu
