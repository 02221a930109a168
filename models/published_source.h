// Reads elements of ours from published files: contiguous, every second one, in MXFP4, or in FP8.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "sheaf/core/safetensors.h"
#include "sheaf/models/published_config.h"
#include "sheaf/models/published_names.h"
#include "sheaf/nn/fill_pieces.h"

namespace sheaf::models {

/// MXFP4 (OCP Microscaling Formats 1.0), as in gpt-oss's published weights: 32 consecutive values of a row are 16 bytes of "_blocks",
/// each with two numbers of four bits (E2M1), the first in its low half, and a byte of "_scales": all are multiplied by 2 to the
/// power of that byte minus 127.
inline constexpr int64_t kMxfp4Block = 32;

/// The location of a tensor of the table, or of a part of one.
struct PublishedSource {
  PublishedTensor tensor;
  const SafetensorsFile* file = nullptr;
  std::string name;     ///< in the file; in MXFP4 that of the blocks
  DType dtype = kF32;   ///< of values after reading; f32 for MXFP4 and FP8
  const SafetensorsFile* scales_file = nullptr;  ///< in MXFP4 and FP8
  std::string scales = {};
  Fp8Block fp8 = {};  ///< in FP8

  /// Reads elements [begin, end) of ours, in their order in the file, as our values.
  template <class T>
  void read(int64_t begin, int64_t end, T* out) const {
    const PublishedTensor& t = tensor;
    if (t.run == 1) {
      read_every(t.step, t.first + begin * t.step, end - begin, out);
    } else {
      for (int64_t at = begin, count; at < end; at += count) {
        count = std::min(end - at, t.run - at % t.run);
        read_every(1, t.place(at), count, out + at - begin);
      }
    }
    if (!t.above_one) return;
    for (T* x = out; x != out + (end - begin); ++x) *x = nn::converted<T>(as_computed(*x) + 1);
  }

  /// The bytes that this many elements take in the files, in FP8 without the scales, which are few.
  int64_t bytes(int64_t elements) const {
    if (tensor.mxfp4) return elements * (kMxfp4Block / 2 + 1) / kMxfp4Block;
    return is_fp8() ? elements : elements * static_cast<int64_t>(size_of(dtype));
  }

 private:
  static constexpr int64_t kChunk = 1 << 16;  // elements decoded at a time

  template <class S>
  static auto as_computed(S x) {
    if constexpr (std::is_same_v<S, double>) return x;
    else return static_cast<float>(x);
  }

  /// Elements at `first`, first + step, .. of the tensor's flat index.
  template <class T>
  void read_every(int64_t step, int64_t first, int64_t count, T* out) const {
    nn::read_values(dtype, first, step, count, out, [this](int64_t begin, int64_t end, void* to) { fetch(begin, end, to); });
  }

  /// Elements [begin, end) of the tensor's flat index, as `dtype`.
  void fetch(int64_t begin, int64_t end, void* out) const {
    if (tensor.mxfp4) decode_mxfp4(begin, end, static_cast<float*>(out));
    else if (is_fp8()) decode_fp8(begin, end, static_cast<float*>(out));
    else file->read(name, begin, end, out);
  }
  bool is_fp8() const { return scales_file && !tensor.mxfp4; }
  void decode_mxfp4(int64_t begin, int64_t end, float* out) const;
  void decode_fp8(int64_t begin, int64_t end, float* out) const;
  void read_scales(int64_t first, std::vector<float>& row) const;
};

}  // namespace sheaf::models
