#include "sheaf/models/token_file.h"

#include <fcntl.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <type_traits>
#include <utility>

#include "sheaf/core/parallel.h"

namespace sheaf::models {
namespace {

constexpr int64_t kHeaderBytes = 256 * 4;
constexpr int32_t kMagic16 = 20240520, kVersion16 = 1;
constexpr int32_t kMagic32 = 20240801, kVersion32 = 7;
constexpr int32_t kMagicExamples = 20261124, kVersionExamples = 1;
// Scans read this many tokens at a time, and then release their pages: as int32 they stay in a core's cache until they are hashed.
constexpr int64_t kScan = int64_t{1} << 16;

// Copies `count` tokens, as `value(token, id)` of each; returns the index of the first one whose id is not below `vocab`, or `count`.
// The id is the token's bits in `mask`.
template <class T, class F>
int64_t copy_tokens(const std::byte* data, int64_t count, T mask, int64_t vocab, int32_t* dst, F value) {
  // Chunks of a constant length on the stack, and nothing that leaves the inner loop early: compilers use vectors.
  constexpr int64_t kChunk = 256;
  std::array<T, kChunk> tokens{};
  std::array<int32_t, kChunk> out;
  for (int64_t begin = 0; begin < count; begin += kChunk) {
    const auto n = static_cast<size_t>(std::min(kChunk, count - begin));
    std::memcpy(tokens.data(), data + begin * static_cast<int64_t>(sizeof(T)), n * sizeof(T));
    T largest = 0;
    for (size_t i = 0; i < kChunk; ++i) {
      const T id = tokens[i] & mask;
      largest = std::max(largest, id);
      out[i] = value(tokens[i], static_cast<int32_t>(id));
    }
    if (static_cast<int64_t>(largest) >= vocab)
      return begin + (std::ranges::find_if(tokens, [&](T t) { return static_cast<int64_t>(t & mask) >= vocab; }) - tokens.begin());
    std::memcpy(dst + begin, out.data(), n * sizeof(int32_t));
  }
  return count;
}

constexpr auto kId = [](auto, int32_t id) { return id; };

// `name` says whose tokens they are; the first is at position `first`.
template <class T>
void check_ids(std::span<const T> tokens, int64_t vocab, const std::string& name, int64_t first = 0) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    int64_t id = tokens[i];
    if constexpr (std::is_same_v<T, MarkedToken>) id = tokens[i] & ~kReadOnly;
    if (id >= 0 && id < vocab) continue;
    fail<DataError>("[tokens] ", name, ": token ", id, " at position ", first + static_cast<int64_t>(i),
                    " is outside the vocabulary of ", vocab);
  }
}

void check_vocab(int64_t vocab) {
  check<DataError>(vocab >= 1 && vocab <= INT32_MAX, "[tokens] a vocabulary of ", vocab);
}

// In an order that does not depend on a locale.
std::vector<std::string> paths_of(const std::string& pattern) {
  if (pattern.find_first_of("*?[") == std::string::npos || path_exists(pattern)) return {pattern};
  glob_t found{};
  const int status = glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found), error = errno;
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  check<DataError>(status == 0, "[tokens] no file matches '", pattern, "'",
                   status == GLOB_NOMATCH ? "" : ": " + std::generic_category().message(error));
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

struct Tokens::Part {
  std::string name;
  Mapping map;  // one of these three owns
  std::vector<uint16_t> narrow;
  std::vector<uint32_t> wide;
  const std::byte* data = nullptr;
  DType dtype = DType::u16;
  std::optional<int32_t> example_end;
  bool headless = false;
  int64_t size = 0;
  int64_t end = 0;  // of all parts up to here, in tokens

  int64_t width() const { return static_cast<int64_t>(size_of(dtype)); }

  static Part open(const std::string& path) {
    for (const char* ending : {".jsonl", ".ndjson", ".json", ".txt", ".parquet"})
      check<DataError>(!path.ends_with(ending), "[tokens] '", path, "' is no token file: `sheaf tokenize` makes one of texts");
    const File file = File::open<DataError>(path);
    const int64_t bytes = file.size();
    check<DataError>(bytes > 0, "[tokens] '", path, "' is empty");

    int32_t header[4] = {};
    file.read_at(0, header, static_cast<size_t>(std::min<int64_t>(bytes, sizeof header)));
    const bool is16 = header[0] == kMagic16, is32 = header[0] == kMagic32, examples = header[0] == kMagicExamples;
    const int32_t version = is16 ? kVersion16 : is32 ? kVersion32 : examples ? kVersionExamples : header[1];
    check<DataError>(bytes >= kHeaderBytes || !(is16 || is32 || examples), "[tokens] '", path, "': ", bytes,
                     " bytes are shorter than its header");
    check<DataError>(header[1] == version, "[tokens] '", path, "': unknown version ", header[1]);
    Part part;
    part.name = path;
    part.dtype = is32 || examples ? DType::u32 : DType::u16;
    if (examples) part.example_end = header[3];
    const int64_t start = is16 || is32 || examples ? kHeaderBytes : 0, width = part.width();
    part.size = (bytes - start) / width;
    check<DataError>((bytes - start) % width == 0, "[tokens] '", path, "': ", bytes - start,
                     " bytes are not a whole number of ", width, "-byte tokens");
    if (start) {
      // The count is an int32; a file of more tokens has it modulo 2^32.
      check<DataError>(static_cast<uint32_t>(header[2]) == static_cast<uint32_t>(part.size), "[tokens] '", path,
                       "': the header says ", static_cast<uint32_t>(header[2]), " tokens, the file holds ", part.size);
    }
    check<DataError>(part.size > 0, "[tokens] '", path, "' holds no tokens");
    part.headless = start == 0;
    part.map = file.map();
    part.data = part.map.data() + start;
    return part;
  }

  void copy(Form form, int64_t first, int64_t count, int64_t vocab, int32_t* dst) const {
    const std::byte* from = data + first * width();
    const uint32_t mask = example_end ? ~kReadOnly : ~uint32_t{0};
    const auto copy = [&](auto value) { return copy_tokens<uint32_t>(from, count, mask, vocab, dst, value); };
    const auto as_target = [](MarkedToken token, int32_t id) { return token & kReadOnly ? kIgnoreIndex : id; };
    const int64_t good = dtype == DType::u16                   ? copy_tokens<uint16_t>(from, count, 0xFFFF, vocab, dst, kId)
                         : !example_end || form == Form::ids   ? copy(kId)
                         : form == Form::targets               ? copy(as_target)
                                                               : copy([](MarkedToken t, int32_t) { return static_cast<int32_t>(t); });
    if (good == count) return;
    uint32_t id = 0;
    std::memcpy(&id, from + good * width(), size_of(dtype));
    fail<DataError>("[tokens] '", name, "': token ", id & mask, " at position ", first + good, " is outside the vocabulary of ",
                    vocab);
  }

  // Truncated examples would continue in another part's.
  void check_end() const {
    if (!example_end) return;
    MarkedToken last = 0;
    if (size > 0) std::memcpy(&last, data + (size - 1) * width(), sizeof last);
    check<DataError>(size > 0 && static_cast<int32_t>(last & ~kReadOnly) == *example_end, "[tokens] '", name,
                     "': its last example does not end with token ", *example_end);
  }

  // Checks parts of one sequence.
  static void check_alike(const Part& a, const Part& b, int64_t vocab) {
    const auto described = [](const Part& p) {
      return str('\'', p.name, "' holds ", p.example_end ? str("examples that end with token ", *p.example_end) : "no examples");
    };
    check<DataError>(a.example_end == b.example_end, "[tokens] ", described(a), ", ", described(b));
    check<DataError>(!b.example_end || (*b.example_end >= 0 && *b.example_end < vocab), "[tokens] ", described(b),
                     ", which is outside the vocabulary of ", vocab);
  }

  // Releases the pages that were read.
  void release(int64_t first, int64_t count) const {
    if (!map.data()) return;
    const int64_t offset = data - map.data() + first * width();
    map.release(offset, offset + count * width());
  }
};

int64_t Tokens::num_files() const { return parts_ ? static_cast<int64_t>(parts_->size()) : 0; }

Tokens Tokens::of(std::vector<Part> parts, int64_t vocab, std::string name) {
  Tokens tokens;
  for (Part& part : parts) {
    part.end = tokens.size_ += part.size;
    Part::check_alike(parts.front(), part, vocab);
    part.check_end();
  }
  tokens.example_end_ = parts.front().example_end;
  tokens.parts_ = std::make_shared<const std::vector<Part>>(std::move(parts));
  tokens.name_ = std::move(name);
  tokens.vocab_ = vocab;
  return tokens;
}

Tokens Tokens::open(const std::string& path, int64_t vocab) {
  check_vocab(vocab);
  std::vector<Part> parts;
  for (const std::string& file : paths_of(path)) parts.push_back(Part::open(file));
  for (const Part& part : parts)
    if (part.headless && vocab > 65536)
      fail<DataError>("[tokens] '", part.name, "' has no header, so its tokens are of 16 bits, and the vocabulary has ", vocab,
                      ": `sheaf tokenize` writes files with one, of 32");
  return of(std::move(parts), vocab, path);
}

Tokens Tokens::from_ids(std::span<const int32_t> ids, int64_t vocab, std::string name) {
  check_vocab(vocab);
  check_ids(ids, vocab, name);
  Part part;
  part.name = name;
  part.size = static_cast<int64_t>(ids.size());
  if (vocab <= 65536) {
    part.narrow.assign(ids.begin(), ids.end());
    part.data = reinterpret_cast<const std::byte*>(part.narrow.data());
  } else {
    part.wide.assign(ids.begin(), ids.end());
    part.data = reinterpret_cast<const std::byte*>(part.wide.data());
    part.dtype = DType::u32;
  }
  std::vector<Part> parts;
  parts.push_back(std::move(part));
  return of(std::move(parts), vocab, std::move(name));
}

Tokens Tokens::from_examples(std::span<const MarkedToken> marked, int32_t end, int64_t vocab, std::string name) {
  check_vocab(vocab);
  check_ids(marked, vocab, name);
  Part part;
  part.name = name;
  part.size = static_cast<int64_t>(marked.size());
  part.wide.assign(marked.begin(), marked.end());
  part.data = reinterpret_cast<const std::byte*>(part.wide.data());
  part.dtype = DType::u32;
  part.example_end = end;
  std::vector<Part> parts;
  parts.push_back(std::move(part));
  return of(std::move(parts), vocab, std::move(name));
}

template <class F>
void Tokens::for_each_part(int64_t begin, int64_t count, F f) const {
  if (count == 0) return;
  int64_t at = first_ + begin;
  const int64_t end = at + count;
  auto part = std::upper_bound(parts_->begin(), parts_->end(), at, [](int64_t x, const Part& p) { return x < p.end; });
  for (; at < end; ++part) {
    const int64_t n = std::min(end, part->end) - at;
    f(*part, at - (part->end - part->size), n);
    at += n;
  }
}

void Tokens::copy(int64_t begin, int64_t count, int32_t* dst) const { copy_as(Form::ids, begin, count, dst); }
void Tokens::copy_targets(int64_t begin, int64_t count, int32_t* dst) const { copy_as(Form::targets, begin, count, dst); }

void Tokens::copy_as(Form form, int64_t begin, int64_t count, int32_t* dst) const {
  check<DataError>(begin >= 0 && count >= 0 && begin <= size_ - count, "[tokens] '", name_, "': tokens ", begin, " to ",
                   begin + count, " of ", size_, " asked for");
  for_each_part(begin, count, [&](const Part& part, int64_t first, int64_t n) {
    part.copy(form, first, n, vocab_, dst);
    dst += n;
  });
}

std::string Tokens::check_all(int64_t block) const {
  const int64_t blocks = std::max<int64_t>(1, (size_ + block - 1) / block);
  std::vector<std::string> digests(static_cast<size_t>(blocks));
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) digests[static_cast<size_t>(b)] = digest_of(b * block, std::min(block, size_ - b * block));
  });
  if (blocks == 1) return digests[0];
  std::string all;
  for (const std::string& digest : digests) all += digest;
  return digest_of_text(all).xxh3;
}

std::string Tokens::digest_of(int64_t begin, int64_t count) const {
  ContentHash hash;
  std::vector<int32_t> ids(static_cast<size_t>(std::min(count, kScan)));
  for_each_part(begin, count, [&](const Part& part, int64_t first, int64_t of_part) {
    for (int64_t done = 0; done < of_part; done += kScan) {
      const int64_t n = std::min(kScan, of_part - done);
      part.copy(Form::marked, first + done, n, vocab_, ids.data());
      hash.update(ids.data(), n * static_cast<int64_t>(sizeof(int32_t)));
      part.release(first + done, n);
    }
  });
  if (example_end_) hash.update(&*example_end_, sizeof(int32_t));
  return hash.digest();
}

Tokens Tokens::slice(int64_t begin, int64_t end) const {
  check<DataError>(0 <= begin && begin <= end && end <= size_, "[tokens] '", name_, "': slice ", begin, " to ", end,
                   " of ", size_);
  Tokens part = *this;
  part.size_ = end - begin;
  part.first_ += begin;
  return part;
}

std::optional<int32_t> common_example_end(std::span<const Tokens> all) {
  const Tokens* first = nullptr;
  for (const Tokens& tokens : all) {
    if (!tokens.example_end()) continue;
    if (!first) first = &tokens;
    if (*tokens.example_end() != *first->example_end())
      fail<ConfigError>("[data] the examples of '", first->name(), "' end with token ", *first->example_end(), ", those of '",
                        tokens.name(), "' with token ", *tokens.example_end());
  }
  return first ? first->example_end() : std::nullopt;
}

bool is_token_file(const std::string& path) {
  const File file = File::open(path);
  int32_t magic = 0;
  if (file.size() < kHeaderBytes) return false;
  file.read_at(0, &magic, sizeof magic);
  return magic == kMagic16 || magic == kMagic32 || magic == kMagicExamples;
}

TokenFileWriter::TokenFileWriter(const std::string& path, int64_t vocab, std::optional<int32_t> example_end)
    : pending_((check_vocab(vocab), path)), vocab_(vocab), example_end_(example_end), file_(pending_.name()) {
  const int32_t header[256] = {};
  file_.write(header, sizeof header);
}

void TokenFileWriter::write(std::span<const int32_t> ids) {
  check<ConfigError>(!example_end_, "[tokens] '", pending_.path(), "' is a file of examples");
  check_ids(ids, vocab_, str('\'', pending_.path(), '\''), size_);
  if (vocab_ <= 65536) {
    const std::vector<uint16_t> narrow(ids.begin(), ids.end());
    file_.write(narrow.data(), static_cast<int64_t>(narrow.size() * sizeof(uint16_t)));
  } else {
    file_.write(ids.data(), static_cast<int64_t>(ids.size_bytes()));
  }
  size_ += static_cast<int64_t>(ids.size());
}

void TokenFileWriter::write_examples(std::span<const MarkedToken> tokens) {
  check<ConfigError>(example_end_.has_value(), "[tokens] '", pending_.path(), "' is no file of examples");
  check_ids(tokens, vocab_, str('\'', pending_.path(), '\''), size_);
  file_.write(tokens.data(), static_cast<int64_t>(tokens.size_bytes()));
  size_ += static_cast<int64_t>(tokens.size());
}

void TokenFileWriter::finish() {
  file_.finish();
  // Now that the count is known.
  const bool narrow = vocab_ <= 65536;
  const int32_t header[4] = {example_end_ ? kMagicExamples : narrow ? kMagic16 : kMagic32,
                             example_end_ ? kVersionExamples : narrow ? kVersion16 : kVersion32, static_cast<int32_t>(size_),
                             example_end_.value_or(0)};
  const int file = ::open(pending_.name().c_str(), O_WRONLY | O_CLOEXEC);
  const bool written = file >= 0 && pwrite(file, header, sizeof header, 0) == sizeof header && fsync(file) == 0;
  const int error = errno;
  if (file >= 0) close(file);
  if (!written) fail<IoError>("[tokens] cannot write '", pending_.path(), "': ", std::generic_category().message(error));
  pending_.commit();
}

void write_token_file(const std::string& path, std::span<const int32_t> ids, int64_t vocab) {
  TokenFileWriter writer(path, vocab);
  writer.write(ids);
  writer.finish();
}

}  // namespace sheaf::models
