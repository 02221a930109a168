#include "sheaf/nn/block_piece.h"

#include <cstring>
#include <utility>

#include "sheaf/core/error.h"
#include "sheaf/core/transfer.h"
#include "sheaf/kernels/quantize.h"

namespace sheaf::nn {

BlockPiece::BlockPiece(std::string name, BlockFormat format, const Runs& bytes)
    : name_(std::move(name)), format_(format), bytes_(bytes) {
  if (bytes.numel() == 0) return;
  const int64_t each = block_bytes(format), first = bytes.begin / each, end = (bytes.begin + bytes.size + each - 1) / each;
  check<ShapeError>(bytes.is_interval() || bytes.stride % each == 0, "[quantize] '", name_, "': runs of bytes ", bytes.stride,
                    " apart begin inside of their ", sheaf::name(format), " blocks at different places");
  elements_ = {first * kBlockSize, (end - first) * kBlockSize, bytes.count, bytes.stride / each * kBlockSize};
  values_.resize(static_cast<size_t>(elements_.numel()));
}

void BlockPiece::fill(const std::function<void(int64_t begin, std::span<float> out)>& read) {
  for (int64_t k = 0; k < elements_.count; ++k)
    read(elements_[k].begin, std::span(values_).subspan(static_cast<size_t>(k * elements_.size), static_cast<size_t>(elements_.size)));
}

void BlockPiece::store(Device device, void* to) {
  if (bytes_.numel() == 0) return;
  const int64_t each = block_bytes(format_), whole = elements_.size / kBlockSize * each, skipped = bytes_.begin % each;
  std::vector<uint8_t> blocks(static_cast<size_t>(whole * elements_.count));
  check<NonFiniteError>(kernels::cpu::quantize(values_, format_, blocks.data()), "[quantize] '", name_,
                        "' has a value that is infinite or no number: it cannot rest in ", sheaf::name(format_), " blocks");
  for (int64_t k = 0; k < bytes_.count; ++k)  // to the front, past other ranks' bytes of the first block
    std::memmove(blocks.data() + k * bytes_.size, blocks.data() + k * whole + skipped, static_cast<size_t>(bytes_.size));
  transfer(device, to, Device::cpu(), blocks.data(), static_cast<size_t>(bytes_.numel()));
}

}  // namespace sheaf::nn
