// Texts that are read in blocks, from files or standard input, and documents in JSON lines.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/file.h"

namespace sheaf::models {

/// A text that may be larger than memory.
class TextReader {
 public:
  /// The first offset from `at` on where a text may be split; its end if there is none (Tokenizer::cut).
  using Cut = std::function<size_t(std::string_view text, size_t at)>;

  /// `path` names a regular file, or is "-", standard input, which is no longer waited for once `stop` returns true: the text then
  /// ends there. Throws DataError if it cannot be opened.
  TextReader(const std::string& path, size_t block, std::function<bool()> stop = [] { return false; });

  /// The next part of the text, about `block` bytes up to an offset where it may be split, or more if there is none; empty at its
  /// end. Valid until the next call. Throws IoError, DataError for compressed data.
  std::string_view next(const Cut& cut);
  /// Bytes before the part that next() returned last.
  int64_t offset() const { return offset_; }
  /// Bytes that next() has returned so far.
  int64_t bytes() const { return offset_ + static_cast<int64_t>(given_); }
  /// The path in quotes, or a description of standard input.
  const std::string& name() const { return name_; }

 private:
  void fill(size_t bytes);
  size_t read_input(char* to, size_t bytes);
  void refuse_compressed() const;

  std::string name_;
  File file_;  // unused for standard input
  bool is_input_, ended_ = false;
  std::function<bool()> stop_;
  size_t block_;
  int64_t offset_ = 0;
  std::string buffer_;  // from offset_ on
  size_t given_ = 0;    // of it, returned by next()
};

/// A line of a text, without its end, and its number.
struct NumberedLine {
  std::string_view text;
  int64_t number;
};
/// The lines of `block` that are not blank; `lines` counts all lines of a text, of which `block` is the next part.
std::vector<NumberedLine> numbered_lines(std::string_view block, int64_t& lines);

/// Concatenated documents, each a JSON object in one line, one member of which is the text: the format that `datasets` writes and
/// Megatron, Dolma and others read (https://jsonlines.org).
class JsonLines {
 public:
  explicit JsonLines(std::string field) : field_(std::move(field)) {}

  /// JSON lines may be split after each line.
  static size_t cut(std::string_view text, size_t at);
  /// Appends the texts in the lines of `block`, which follow those of earlier calls; empty ones and empty lines are skipped. On the
  /// rank's threads. Throws DataError that names the line, of `name`, if it is not an object or has no such string.
  void read(std::string_view block, const std::string& name, std::vector<std::string>& documents);

 private:
  std::string field_;
  int64_t lines_ = 0;  // read so far
};

/// Whether a path has the ending of JSON lines, .jsonl or .ndjson.
bool is_json_lines(std::string_view path);

}  // namespace sheaf::models
