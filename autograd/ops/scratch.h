// Scratch memory of ops: dense blocks carved out of a workspace, one after another.
#pragma once

#include "sheaf/core/device.h"
#include "sheaf/core/error.h"
#include "sheaf/core/view.h"

namespace sheaf::ops {

/// Bytes of a dense block of x's dtype and shape, padded so that another may follow.
inline int64_t block_bytes(const View& x) { return (x.bytes() + 255) / 256 * 256; }

/// Such a block at `memory`.
inline View block_like(const View& x, void* memory) { return View::dense(memory, x.dtype, x.shape); }

/// Such a block from the front of `w`, which keeps the rest. `op` is for error messages.
inline View take_block(const char* op, Workspace& w, const View& x) {
  const auto bytes = static_cast<size_t>(block_bytes(x));
  check<ShapeError>(w.bytes >= bytes, "[", op, "] workspace too small: ", w.bytes, " bytes");
  const View block = block_like(x, w.data);
  w = {static_cast<char*>(w.data) + bytes, w.bytes - bytes};
  return block;
}

}  // namespace sheaf::ops
