// Checks where documents begin in sequences that contain several.
#pragma once

#include <cstdint>

#include "sheaf/core/error.h"
#include "sheaf/core/view.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels::cpu {

/// DataError if begins[B, T] are invalid: a token's document must begin at it, or where its predecessor's does. The first token is at
/// position `past`, and its document may have begun at `earliest` or later; for recurrent layers there is no bound.
inline void check_documents(const char* who, const View& begins, int64_t past = 0, int64_t earliest = INT32_MIN) {
  if (!given(begins)) return;
  for (int64_t b = 0; b < begins.shape[0]; ++b) {
    const int32_t* row = begins.as<int32_t>() + b * begins.strides[0];
    for (int64_t t = 0; t < begins.shape[1]; ++t)
      if (row[t] != t + past && (t == 0 ? row[t] < earliest || row[t] > past : row[t] != row[t - 1]))
        fail<DataError>("[", who, "] begins[", b, ",", t, "] is ", row[t], ": the document of a token ",
                        "begins where that of the one before it does, or with it");
  }
}

}  // namespace sheaf::kernels::cpu
