#include "sheaf/core/block_format.h"

#include "sheaf/core/error.h"

namespace sheaf {

BlockFormat block_format_from(std::string_view who, std::string_view text) {
  for (const BlockFormat f : {BlockFormat::int8, BlockFormat::nf4})
    if (text == name(f)) return f;
  fail<ConfigError>("[", who, "] unknown block format '", text, "'; known: int8, nf4");
}

Shape blocks_shape(const Shape& values, BlockFormat format) {
  check<ShapeError>(values.rank() > 0 && values.back() % kBlockSize == 0, "[blocks] ", values, ": rows in blocks (",
                    name(format), ") are multiples of ", kBlockSize, " elements");
  Shape out = values;
  out[out.rank() - 1] = out.back() / kBlockSize * block_bytes(format);
  return out;
}

Shape values_shape(const Shape& blocks, BlockFormat format) {
  check<ShapeError>(blocks.rank() > 0 && blocks.back() % block_bytes(format) == 0, "[blocks] ", blocks,
                    ": rows of bytes are no whole ", name(format), " blocks of ", block_bytes(format));
  Shape out = blocks;
  out[out.rank() - 1] = out.back() / block_bytes(format) * kBlockSize;
  return out;
}

}  // namespace sheaf
