#include "sheaf/models/published_source.h"

#include <cmath>
#include <cstdint>
#include <utility>

#include "sheaf/kernels/fp8.h"

namespace sheaf::models {
namespace {

constexpr float kE2m1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace

void PublishedSource::decode_mxfp4(int64_t begin, int64_t end, float* out) const {
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

void PublishedSource::decode_fp8(int64_t begin, int64_t end, float* out) const {
  const Shape& shape = tensor.shape;  // matrices [rows, columns], one or one of each expert
  const int64_t columns = shape[shape.rank() - 1], rows = shape[shape.rank() - 2];
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  const int64_t row_scales = blocks(columns, fp8.columns), matrix_scales = blocks(rows, fp8.rows) * row_scales;
  std::vector<uint8_t> codes(static_cast<size_t>(std::min(end - begin, kChunk)));
  std::vector<float> row(static_cast<size_t>(row_scales));  // the scales of a row
  int64_t read = -1;                                        // and their first index
  for (int64_t from = begin, to; from < end; from = to) {
    to = std::min(end, from + kChunk);
    file->read(name, from, to, codes.data());
    for (int64_t i = from; i < to;) {
      const int64_t r = i / columns, first = r / rows * matrix_scales + r % rows / fp8.rows * row_scales;
      if (std::exchange(read, first) != first) read_scales(first, row);
      const int64_t c = i % columns, block = c / fp8.columns, last = std::min(to, i - c + std::min(columns, (block + 1) * fp8.columns));
      for (const float scale = row[static_cast<size_t>(block)]; i < last; ++i)
        out[i - begin] = kernels::fp8_value(codes[static_cast<size_t>(i - from)]) * scale;
    }
  }
}

void PublishedSource::read_scales(int64_t first, std::vector<float>& row) const {
  visit_floating("weights", scales_file->at(scales).dtype, [&]<class S>() {
    std::vector<S> there(row.size());
    scales_file->read(scales, first, first + std::ssize(row), there.data());
    for (size_t i = 0; i < row.size(); ++i) row[i] = nn::converted<float>(there[i]);
  });
}

}  // namespace sheaf::models
