// Sequences of token ids: memory-mapped files and tokenized texts as one type.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/dtype.h"
#include "sheaf/core/file.h"

namespace sheaf::models {

/// Target of a position that does not count.
inline constexpr int32_t kIgnoreIndex = -1;

/// A token of an example: an id and, in the top bit, a flag that it is input only, like a prompt, and not learned as a target.
using MarkedToken = uint32_t;
inline constexpr MarkedToken kReadOnly = 0x80000000;

/// Tokens that Tokens::check_all() hashes in one go.
inline constexpr int64_t kDigestBlock = int64_t{1} << 26;

/// A read-only sequence of token ids, 16 or 32 bits each, in mapped files or in memory. A cheap value; thread-safe.
///
/// Some are sequences of examples, such as prompts with their answers: each ends with the token example_end(), which does not occur
/// elsewhere in it, and some of its tokens are not targets.
class Tokens {
 public:
  Tokens() = default;

  /// Maps a token file, or all files that match a pattern of the shell's (`*`, `?`, `[...]`), one after the other in the
  /// order of their names, byte by byte. A path that exists is not a pattern. The sequence is that of one file with the
  /// tokens of all: what is read may begin in one and end in the next. Formats, all little-endian, which may differ from
  /// file to file:
  ///   llm.c      256 int32 header {20240520, 1, number of tokens, 0...}, then uint16
  ///   llm.c      256 int32 header {20240801, 7, number of tokens, 0...}, then uint32
  ///   nanoGPT    uint16 without header
  ///   examples   256 int32 header {20261124, 1, number of tokens, example_end(), 0...}, then MarkedTokens, which end with one
  /// `vocab` bounds the ids: an id beyond it is a DataError naming file and position when it is read. Throws DataError
  /// if nothing matches, a file is missing, empty, of odd size, or shorter or longer than its header says, or only some hold
  /// examples, or their examples end in different tokens.
  static Tokens open(const std::string& path, int64_t vocab);
  /// Takes ids from memory; every one must be below `vocab`. `name` is for messages.
  static Tokens from_ids(std::span<const int32_t> ids, int64_t vocab, std::string name);
  /// The same for examples, which end with `end`.
  static Tokens from_examples(std::span<const MarkedToken> tokens, int32_t end, int64_t vocab, std::string name);

  int64_t size() const { return size_; }
  int64_t vocab() const { return vocab_; }
  /// The path or pattern it was opened by.
  const std::string& name() const { return name_; }
  /// The token that ends an example; none if these are not examples.
  std::optional<int32_t> example_end() const { return example_end_; }
  /// Number of opened files; tokens from memory count as one.
  int64_t num_files() const;
  /// Copies tokens [begin, begin + count) to `dst`; throws DataError for an id outside the vocabulary.
  void copy(int64_t begin, int64_t count, int32_t* dst) const;
  /// The same as targets: kIgnoreIndex for input-only tokens.
  void copy_targets(int64_t begin, int64_t count, int32_t* dst) const;
  /// Reads all tokens once, on the rank's threads, and returns XXH3-128 of the ids as int32, independent of the number and format of
  /// files; for examples, of MarkedTokens and example_end(). If they are more than `block`, it is that of the blocks' digests. Throws
  /// DataError at an id outside the vocabulary. Releases pages as it goes.
  std::string check_all(int64_t block = kDigestBlock) const;
  /// The tokens [begin, end) as a separate sequence; positions in messages remain those of the file.
  Tokens slice(int64_t begin, int64_t end) const;

 private:
  struct Part;  // a file, or tokens from memory
  /// Calls f(part, first, count) for the parts that hold tokens [begin, begin + count); `first` is relative to the part.
  template <class F>
  void for_each_part(int64_t begin, int64_t count, F f) const;
  enum class Form { ids, targets, marked };
  std::string digest_of(int64_t begin, int64_t count) const;  // check_all() of one block
  static Tokens of(std::vector<Part> parts, int64_t vocab, std::string name);
  void copy_as(Form form, int64_t begin, int64_t count, int32_t* dst) const;

  std::shared_ptr<const std::vector<Part>> parts_;
  std::string name_;
  int64_t size_ = 0, vocab_ = 0;
  int64_t first_ = 0;  // the index of our token 0 in the concatenated parts
  std::optional<int32_t> example_end_;
};

/// The token that ends examples, for the sequences of examples among these; none if there are none. Throws ConfigError if they
/// differ.
std::optional<int32_t> common_example_end(std::span<const Tokens> all);

/// Whether a file has the header of llm.c's, or of a file of examples.
bool is_token_file(const std::string& path);

/// Writes a token file piece by piece: in the llm.c form, uint16 if `vocab` is at most 65,536, else uint32; or a file of examples, if
/// `example_end` is given. It appears at finish(), by a rename, or not at all; leftovers of a killed process are removed. All
/// functions throw IoError.
class TokenFileWriter {
 public:
  /// Throws DataError for an invalid vocabulary.
  TokenFileWriter(const std::string& path, int64_t vocab, std::optional<int32_t> example_end = std::nullopt);

  /// Throws DataError for an id outside the vocabulary.
  void write(std::span<const int32_t> ids);
  /// For a file of examples: writes some whole ones.
  void write_examples(std::span<const MarkedToken> tokens);
  void finish();
  int64_t size() const { return size_; }

 private:
  PendingFile pending_;
  int64_t vocab_, size_ = 0;
  std::optional<int32_t> example_end_;
  FileWriter file_;
};

/// Writes a whole token file.
void write_token_file(const std::string& path, std::span<const int32_t> ids, int64_t vocab);

}  // namespace sheaf::models
