#include "sheaf/models/published_source.h"

#include <cmath>
#include <cstdint>

namespace sheaf::models {
namespace {

constexpr float kE2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace

void PublishedSource::decode(int64_t begin, int64_t end, float* out) const {
  const int64_t most = std::min(end - begin, kChunk);  // which may begin and end within a byte, and within a block
  std::vector<uint8_t> blocks(static_cast<size_t>(most / 2 + 1)), exponents(static_cast<size_t>(most / kMxfp4Block + 2));
  for (int64_t from = begin, to; from < end; from = to) {
    to = std::min(end, from + most);
    const int64_t byte = from / 2, block = from / kMxfp4Block;
    file->read(name, byte, (to + 1) / 2, blocks.data());
    scales_file->read(scales, block, (to - 1) / kMxfp4Block + 1, exponents.data());
    for (int64_t i = from; i < to;) {
      const float scale = std::ldexp(1.0f, exponents[static_cast<size_t>(i / kMxfp4Block - block)] - 127);
      for (const int64_t last = std::min(to, i / kMxfp4Block * kMxfp4Block + kMxfp4Block); i < last; ++i) {
        const uint8_t two = blocks[static_cast<size_t>(i / 2 - byte)];
        out[i - begin] = kE2m1[i % 2 ? two >> 4 : two & 15] * scale;
      }
    }
  }
}

bool has_mxfp4(const std::map<std::string, const SafetensorsFile*, std::less<>>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.first.ends_with(".experts.gate_up_proj_blocks"); });
}

}  // namespace sheaf::models
