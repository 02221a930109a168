#include "sheaf/models/token_file.h"

#include <algorithm>
#include <cstring>

#include "sheaf/core/file.h"

namespace sheaf::models {
namespace {

constexpr int64_t kHeaderBytes = 256 * 4;
constexpr int32_t kMagic16 = 20240520, kVersion16 = 1;
constexpr int32_t kMagic32 = 20240801, kVersion32 = 7;
// Scans give back what they have read every so many tokens.
constexpr int64_t kScanBlock = int64_t{1} << 20;

// Copies `count` ids; returns the index of the first one not below `vocab`, or `count`.
template <class T>
int64_t copy_ids(const std::byte* data, int64_t count, int64_t vocab, int32_t* dst) {
  for (int64_t i = 0; i < count; ++i) {
    T id;
    std::memcpy(&id, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    if (static_cast<int64_t>(id) >= vocab) return i;
    dst[i] = static_cast<int32_t>(id);
  }
  return count;
}

void check_vocab(int64_t vocab) {
  check<DataError>(vocab >= 1 && vocab <= INT32_MAX, "[tokens] a vocabulary of ", vocab);
}

}  // namespace

struct Tokens::Owner {
  Mapping map;
  std::vector<uint16_t> narrow;
  std::vector<int32_t> wide;
};

Tokens Tokens::open(const std::string& path, int64_t vocab) {
  check_vocab(vocab);
  const File file = File::open<DataError>(path);
  const int64_t bytes = file.size();
  check<DataError>(bytes > 0, "[tokens] '", path, "' is empty");

  int32_t header[3] = {};
  if (bytes >= kHeaderBytes) file.read_at(0, header, sizeof header);
  const bool is16 = header[0] == kMagic16, is32 = header[0] == kMagic32;
  check<DataError>(!is16 || header[1] == kVersion16, "[tokens] '", path, "': unknown version ", header[1]);
  check<DataError>(!is32 || header[1] == kVersion32, "[tokens] '", path, "': unknown version ", header[1]);
  Tokens tokens;
  tokens.name_ = path;
  tokens.vocab_ = vocab;
  tokens.dtype_ = is32 ? DType::u32 : DType::u16;
  const int64_t start = is16 || is32 ? kHeaderBytes : 0;
  const auto width = static_cast<int64_t>(size_of(tokens.dtype_));
  tokens.size_ = (bytes - start) / width;
  check<DataError>((bytes - start) % width == 0, "[tokens] '", path, "': ", bytes - start,
                   " bytes are not a whole number of ", width, "-byte tokens");
  if (start) {
    // The count is an int32; a file of more tokens has it modulo 2^32.
    check<DataError>(static_cast<uint32_t>(header[2]) == static_cast<uint32_t>(tokens.size_), "[tokens] '", path,
                     "': the header says ", static_cast<uint32_t>(header[2]), " tokens, the file holds ", tokens.size_);
  }
  check<DataError>(tokens.size_ > 0, "[tokens] '", path, "' holds no tokens");
  auto owner = std::make_shared<Owner>();
  owner->map = file.map();
  tokens.data_ = owner->map.data() + start;
  tokens.owner_ = std::move(owner);
  return tokens;
}

Tokens Tokens::from_ids(std::span<const int32_t> ids, int64_t vocab, std::string name) {
  check_vocab(vocab);
  for (size_t i = 0; i < ids.size(); ++i) {
    check<DataError>(ids[i] >= 0 && ids[i] < vocab, "[tokens] ", name, ": token ", ids[i], " at position ", i,
                     " is outside the vocabulary of ", vocab);
  }
  auto owner = std::make_shared<Owner>();
  Tokens tokens;
  if (vocab <= 65536) {
    owner->narrow.assign(ids.begin(), ids.end());
    tokens.data_ = reinterpret_cast<const std::byte*>(owner->narrow.data());
  } else {
    owner->wide.assign(ids.begin(), ids.end());
    tokens.data_ = reinterpret_cast<const std::byte*>(owner->wide.data());
    tokens.dtype_ = DType::u32;
  }
  tokens.owner_ = std::move(owner);
  tokens.name_ = std::move(name);
  tokens.size_ = static_cast<int64_t>(ids.size());
  tokens.vocab_ = vocab;
  return tokens;
}

void Tokens::copy(int64_t begin, int64_t count, int32_t* dst) const {
  check<DataError>(begin >= 0 && count >= 0 && begin <= size_ - count, "[tokens] '", name_, "': tokens ", begin, " to ",
                   begin + count, " of ", size_, " asked for");
  const std::byte* from = data_ + begin * static_cast<int64_t>(size_of(dtype_));
  const int64_t good = dtype_ == DType::u16 ? copy_ids<uint16_t>(from, count, vocab_, dst)
                                            : copy_ids<uint32_t>(from, count, vocab_, dst);
  if (good < count) {
    uint32_t id = 0;
    std::memcpy(&id, from + good * static_cast<int64_t>(size_of(dtype_)), size_of(dtype_));
    fail<DataError>("[tokens] '", name_, "': token ", id, " at position ", first_ + begin + good,
                    " is outside the vocabulary of ", vocab_);
  }
}

std::string Tokens::check_all() const {
  ContentHash hash;
  std::vector<int32_t> block(static_cast<size_t>(std::min(size_, kScanBlock)));
  for (int64_t at = 0; at < size_; at += kScanBlock) {
    const int64_t n = std::min(kScanBlock, size_ - at);
    copy(at, n, block.data());
    hash.update(block.data(), n * static_cast<int64_t>(sizeof(int32_t)));
    if (owner_->map.data()) {
      const int64_t offset = data_ - owner_->map.data() + at * static_cast<int64_t>(size_of(dtype_));
      owner_->map.release(offset, offset + n * static_cast<int64_t>(size_of(dtype_)));
    }
  }
  return hash.digest();
}

Tokens Tokens::slice(int64_t begin, int64_t end) const {
  check<DataError>(0 <= begin && begin <= end && end <= size_, "[tokens] '", name_, "': slice ", begin, " to ", end,
                   " of ", size_);
  Tokens part = *this;
  part.data_ += begin * static_cast<int64_t>(size_of(dtype_));
  part.size_ = end - begin;
  part.first_ += begin;
  return part;
}

void write_token_file(const std::string& path, std::span<const int32_t> ids, int64_t vocab) {
  const Tokens tokens = Tokens::from_ids(ids, vocab, str("'", path, "'"));
  const bool narrow = vocab <= 65536;
  int32_t header[256] = {narrow ? kMagic16 : kMagic32, narrow ? kVersion16 : kVersion32,
                         static_cast<int32_t>(ids.size())};
  FileWriter writer(path);
  writer.write(header, sizeof header);
  if (narrow) {
    const std::vector<uint16_t> out(ids.begin(), ids.end());
    writer.write(out.data(), static_cast<int64_t>(out.size() * sizeof(uint16_t)));
  } else {
    writer.write(ids.data(), static_cast<int64_t>(ids.size_bytes()));
  }
  writer.finish();
}

Corpus load_text_corpus(const std::string& path, const std::string& tokenizer, double val_fraction) {
  const std::string origin = str("'", path, "'");
  const std::string text = File::open<DataError>(path).read_all();
  check<DataError>(!text.empty(), "[corpus] ", origin, " is empty");
  Corpus corpus;
  if (tokenizer == "char") {
    corpus.tokenizer = make_char_tokenizer(text, origin);
  } else {
    check<ConfigError>(tokenizer == "byte", "[corpus] unknown tokenizer '", tokenizer, "'; known are char and byte");
    corpus.tokenizer = make_byte_tokenizer();
  }
  corpus.vocab = corpus.tokenizer->vocab_size();
  const Tokens all = Tokens::from_ids(corpus.tokenizer->encode(text, origin), corpus.vocab, path);
  const auto cut = static_cast<int64_t>(static_cast<double>(all.size()) * (1.0 - val_fraction));
  check<DataError>(cut >= 2 && all.size() - cut >= 2, "[corpus] ", origin, ": ", all.size(),
                   " tokens are too few to hold out a share of ", val_fraction);
  corpus.train = all.slice(0, cut);
  corpus.val = all.slice(cut, all.size());
  return corpus;
}

}  // namespace sheaf::models
