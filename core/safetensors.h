// safetensors: named tensors in one file, without code in it. The format is that of
// https://github.com/huggingface/safetensors: an 8-byte little-endian header length, a JSON header
// {"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {string: string}}, then the data.
//
// The reader takes hostile files: it allocates nothing that the file's size does not justify and accepts only headers
// whose tensors cover the data exactly, without gap or overlap.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/dtype.h"
#include "sheaf/core/file.h"
#include "sheaf/core/shape.h"

namespace sheaf {

struct SafetensorsEntry {
  DType dtype = DType::f32;
  Shape shape;
  int64_t begin = 0, end = 0;  ///< byte range from the start of the file
  bool e4m3 = false;           ///< the u8 are codes of FP8 numbers (F8_E4M3), which Sheaf keeps as such
  int64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> tensors;
  std::map<std::string, std::string> metadata;
};

/// Largest header accepted, as in the reference implementation.
inline constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

/// Parses the JSON header of a file of `file_bytes` bytes; `path` is for messages. Throws CheckpointError naming file,
/// tensor and reason. A dtype that Sheaf lacks (F8_E5M2, C64, ...) is named; F8_E4M3 is u8 with a mark.
SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t file_bytes, const std::string& path);

/// An open file. Move-only; reading is thread-safe.
class SafetensorsFile {
 public:
  /// Reads and checks the header. Throws CheckpointError if the file is missing, malformed, or has a tensor that Sheaf
  /// cannot hold; IoError if reading fails.
  static SafetensorsFile open(const std::string& path) { return open(File::open<CheckpointError>(path)); }
  static SafetensorsFile open(File file);

  const std::string& path() const { return file_.path(); }
  const std::map<std::string, SafetensorsEntry, std::less<>>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Throws CheckpointError if there is no such tensor.
  const SafetensorsEntry& at(std::string_view name) const;

  /// Copies elements [begin, end) of the row-major flat index of a tensor; touches no other page of the file.
  void read(std::string_view name, int64_t begin, int64_t end, void* dst) const;
  /// The bytes of a tensor in a map of the file, made at the first call; valid while this object lives. Not aligned to
  /// the element size in files of other writers. Concurrent calls are not safe.
  std::span<const std::byte> data(std::string_view name);

 private:
  File file_;
  SafetensorsHeader header_;
  Mapping map_;
};

/// A tensor to write: `pieces`, laid end to end, are its elements in row-major order. Nothing is copied. If `make` is set, it creates
/// them instead, at the time of writing: so tensors of another layout are converted one at a time.
struct SafetensorsInput {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<std::span<const std::byte>> pieces;
  std::function<std::vector<std::byte>()> make = {};
};

/// Writes and syncs a file. Wider element types come first, so that all data is aligned; names sort within a width.
/// The same inputs give the same bytes. Throws CheckpointError for a duplicate or unusable name or pieces of the wrong
/// size, IoError if writing fails.
FileDigest write_safetensors(const std::string& path, std::vector<SafetensorsInput> tensors,
                             const std::map<std::string, std::string>& metadata = {});

}  // namespace sheaf
