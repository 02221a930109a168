// Where documents begin in sequences that have several, for recurrent layers.
#pragma once

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

}  // namespace sheaf::kernels::cpu
