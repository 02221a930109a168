#include "sheaf/core/safetensors.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "sheaf/core/json.h"

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

namespace sheaf {
namespace {

constexpr size_t kMaxEntries = 1'000'000;
constexpr size_t kMaxName = 4096;
constexpr uint64_t kMaxSize = uint64_t{1} << 48;

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr DTypeName kNames[] = {
    {DType::f64, "F64"}, {DType::f32, "F32"}, {DType::bf16, "BF16"}, {DType::f16, "F16"},
    {DType::i64, "I64"}, {DType::i32, "I32"}, {DType::u32, "U32"},   {DType::u16, "U16"},
    {DType::u8, "U8"},   {DType::i8, "I8"},   {DType::boolean, "BOOL"}};

std::string_view file_name_of(DType dtype) {
  for (const auto& entry : kNames) {
    if (entry.dtype == dtype) return entry.name;
  }
  fail<CheckpointError>("[safetensors] dtype ", name(dtype), " cannot be stored");
}

// For messages: a hostile name must not flood or garble the terminal.
std::string shown(const std::string& name) { return json_string(name.substr(0, 120)); }

bool usable_name(const std::string& name) {
  if (name.empty() || name.size() > kMaxName || name.find('\0') != std::string::npos) return false;
  for (size_t i = 0; i < name.size();) {
    const int length = utf8_length(name, i);
    if (!length) return false;
    i += length;
  }
  return true;
}

// A state machine over the parser's events that accepts only the three levels of a header.
class HeaderParser : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderParser(int64_t data_bytes, const std::string& path) : data_bytes_(data_bytes), path_(path) {}

  [[noreturn]] void refuse(const std::string& reason) const {
    const std::string where = tensor_.empty() ? "" : "tensor " + shown(tensor_) + ": ";
    fail<CheckpointError>("[safetensors] '", path_, "': ", where, reason);
  }

  bool null() override { unexpected("null"); }
  bool boolean(bool) override { unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override {
    unexpected("the number " + text.substr(0, 40) + ", not an unsigned integer");
  }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == State::shape) {
      if (value > kMaxSize) refuse("a size of " + std::to_string(value) + " is too large");
      if (entry_.shape.rank() == kMaxDims) refuse("has more than 8 dimensions");
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else if (state_ == State::offsets) {
      if (num_offsets_ == 2) refuse("data_offsets has more than two numbers");
      if (value > static_cast<uint64_t>(data_bytes_)) {
        refuse("data_offsets " + std::to_string(value) + " lies beyond the data of " + std::to_string(data_bytes_) +
               " bytes");
      }
      (num_offsets_++ ? entry_.end : entry_.begin) = static_cast<int64_t>(value);
    } else {
      unexpected("a number");
    }
    return true;
  }

  bool string(string_t& value) override {
    if (state_ == State::metadata && have_key_) {
      if (!header_.metadata.emplace(std::move(key_), std::move(value)).second) refuse("duplicate key in __metadata__");
      have_key_ = false;
      return true;
    }
    if (state_ != State::tensor || key_ != "dtype") unexpected("a string");
    for (const auto& known : kNames) {
      if (known.name == value) {
        entry_.dtype = known.dtype;
        return true;
      }
    }
    if (value == "F8_E4M3") {
      entry_.dtype = DType::u8, entry_.e4m3 = true;
      return true;
    }
    refuse("unknown dtype " + shown(value));
  }

  bool start_object(size_t) override {
    if (state_ == State::start) {
      state_ = State::top;
    } else if (state_ == State::top && key_ == "__metadata__") {
      if (std::exchange(seen_metadata_, true)) refuse("duplicate key \"__metadata__\"");
      state_ = State::metadata;
    } else if (state_ == State::top) {
      tensor_ = key_;
      if (tensor_.empty()) refuse("a tensor with an empty name");
      if (!usable_name(tensor_)) refuse("unusable name");
      if (header_.tensors.contains(tensor_)) refuse("appears twice");
      if (header_.tensors.size() == kMaxEntries) refuse("more than a million tensors");
      entry_ = {};
      seen_dtype_ = seen_shape_ = seen_offsets_ = false;
      num_offsets_ = 0;
      state_ = State::tensor;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(string_t& value) override {
    key_ = std::move(value);
    if (state_ == State::metadata) have_key_ = true;
    if (state_ == State::tensor) {
      bool* seen = key_ == "dtype"          ? &seen_dtype_
                   : key_ == "shape"        ? &seen_shape_
                   : key_ == "data_offsets" ? &seen_offsets_
                                            : nullptr;
      if (!seen) refuse("unknown field " + shown(key_));
      if (std::exchange(*seen, true)) refuse("duplicate field " + shown(key_));
    }
    return true;
  }

  bool start_array(size_t) override {
    if (state_ != State::tensor || key_ == "dtype") unexpected("an array");
    state_ = key_ == "shape" ? State::shape : State::offsets;
    return true;
  }
  bool end_array() override {
    state_ = State::tensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::tensor) {
      if (!seen_dtype_ || !seen_shape_ || !seen_offsets_) refuse("lacks dtype, shape or data_offsets");
      if (num_offsets_ != 2) refuse("data_offsets has fewer than two numbers");
      if (entry_.end < entry_.begin) refuse("data_offsets are reversed");
      const auto bytes = byte_size(size_of(entry_.dtype), entry_.shape);
      if (!bytes) refuse("its size overflows");
      if (*bytes != entry_.bytes()) {
        refuse(str(name(entry_.dtype), entry_.shape, " takes ", *bytes, " bytes, data_offsets span ", entry_.bytes()));
      }
      header_.tensors.emplace(std::exchange(tensor_, {}), entry_);
      state_ = State::top;
    } else {
      state_ = state_ == State::metadata ? State::top : State::done;
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    refuse("the header is not valid JSON at byte " + std::to_string(position));
  }

  /// Sorted by offset, each tensor must start where the last one ended, and the last must end with the file.
  SafetensorsHeader finish(int64_t data_start) {
    std::vector<std::pair<const std::string, SafetensorsEntry>*> order;
    for (auto& item : header_.tensors) order.push_back(&item);
    std::sort(order.begin(), order.end(), [](auto* a, auto* b) {
      return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
    });
    int64_t at = 0;
    for (auto* item : order) {
      auto& entry = item->second;
      if (entry.begin != at) {
        tensor_ = item->first;
        refuse(str(entry.begin < at ? "overlaps the tensor before it" : "leaves a gap before it", ": starts at byte ",
                   entry.begin, ", expected ", at));
      }
      at = entry.end;
      entry.begin += data_start;
      entry.end += data_start;
    }
    tensor_.clear();
    if (at != data_bytes_) refuse(str(data_bytes_ - at, " bytes after the last tensor"));
    return std::move(header_);
  }

 private:
  enum class State { start, top, metadata, tensor, shape, offsets, done };

  [[noreturn]] void unexpected(const std::string& what) const {
    switch (state_) {
      case State::start: refuse("the header is not a JSON object");
      case State::top: refuse(shown(key_) + " is not an object");
      case State::metadata: refuse("__metadata__ has a value that is not a string");
      default: refuse("field " + shown(key_) + " has " + what);
    }
  }

  int64_t data_bytes_;
  const std::string& path_;
  SafetensorsHeader header_;
  State state_ = State::start;
  std::string tensor_, key_;
  SafetensorsEntry entry_;
  int num_offsets_ = 0;
  bool have_key_ = false, seen_metadata_ = false, seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view header, int64_t file_bytes, const std::string& path) {
  const int64_t data_start = 8 + static_cast<int64_t>(header.size());
  HeaderParser parser(file_bytes - data_start, path);
  if (file_bytes < data_start) parser.refuse("shorter than its header");
  // The parser would skip a byte order mark and take a zero byte for the end.
  if (header.find('\0') != std::string_view::npos) parser.refuse("the header contains a zero byte");
  const size_t first = header.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos || header[first] != '{') parser.refuse("the header is not a JSON object");
  nlohmann::json::sax_parse(header.begin(), header.end(), &parser);
  return parser.finish(data_start);
}

SafetensorsFile SafetensorsFile::open(File file) {
  SafetensorsFile result;
  result.file_ = std::move(file);
  const std::string& path = result.path();
  const int64_t size = result.file_.size();
  check<CheckpointError>(size >= 8, "[safetensors] '", path, "': ", size, " bytes are no safetensors file");
  uint64_t length = 0;
  result.file_.read_at(0, &length, 8);
  if (length == 0 || length > static_cast<uint64_t>(std::min(size - 8, kMaxSafetensorsHeader))) {
    fail<CheckpointError>("[safetensors] '", path, "' is no safetensors file, or not all of one: a header of ", length, " bytes in a file of ", size);
  }
  std::string header(length, '\0');
  result.file_.read_at(8, header.data(), static_cast<int64_t>(length));
  result.header_ = parse_safetensors_header(header, size, path);
  return result;
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  const auto found = header_.tensors.find(name);
  if (found == header_.tensors.end()) {
    fail<CheckpointError>("[safetensors] '", path(), "' has no tensor ", shown(std::string(name)));
  }
  return found->second;
}

void SafetensorsFile::read(std::string_view name, int64_t begin, int64_t end, void* dst) const {
  const SafetensorsEntry& entry = at(name);
  const auto width = static_cast<int64_t>(size_of(entry.dtype));
  check<CheckpointError>(0 <= begin && begin <= end && end <= entry.bytes() / width, "[safetensors] '", path(),
                         "': elements ", begin, " to ", end, " of ", name, " ", entry.shape, " asked for");
  file_.read_at(entry.begin + begin * width, dst, (end - begin) * width);
}

std::span<const std::byte> SafetensorsFile::data(std::string_view name) {
  const SafetensorsEntry& entry = at(name);
  if (!map_.data()) map_ = file_.map();
  return {map_.data() + entry.begin, static_cast<size_t>(entry.bytes())};
}

FileDigest write_safetensors(const std::string& path, std::vector<SafetensorsInput> tensors,
                             const std::map<std::string, std::string>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::pair(-static_cast<int64_t>(size_of(a.dtype)), std::string_view(a.name)) <
           std::pair(-static_cast<int64_t>(size_of(b.dtype)), std::string_view(b.name));
  });
  std::set<std::string_view> names;
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      header += (header.back() == '{' ? "" : ",") + json_string(key) + ":" + json_string(value);
    }
    header += "}";
  }
  int64_t at = 0;
  for (const auto& tensor : tensors) {
    auto refuse = [&](const std::string& reason) {
      fail<CheckpointError>("[safetensors] '", path, "': tensor ", shown(tensor.name), ": ", reason);
    };
    if (!usable_name(tensor.name) || tensor.name == "__metadata__") refuse("unusable name");
    if (!names.insert(tensor.name).second) refuse("appears twice");
    const int64_t bytes = byte_size(size_of(tensor.dtype), tensor.shape).value_or(-1);
    int64_t held = 0;
    for (const auto& piece : tensor.pieces) held += static_cast<int64_t>(piece.size());
    if (bytes < 0 || (held != bytes && !tensor.make)) {
      refuse(str("its pieces hold ", held, " bytes, not those of ", name(tensor.dtype), tensor.shape));
    }
    if (header.size() > 1) header += ",";
    header += json_string(tensor.name) + ":{\"dtype\":\"" + std::string(file_name_of(tensor.dtype)) + "\",\"shape\":" +
              tensor.shape.to_string() + ",\"data_offsets\":[" + std::to_string(at) + "," +
              std::to_string(at + bytes) + "]}";
    at += bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  check<CheckpointError>(static_cast<int64_t>(header.size()) <= kMaxSafetensorsHeader, "[safetensors] '", path,
                         "': the header would take ", header.size(), " bytes");

  FileWriter writer(path);
  const uint64_t length = header.size();
  writer.write(&length, 8);
  writer.write(header);
  for (const auto& tensor : tensors) {
    for (const auto& piece : tensor.pieces) writer.write(piece.data(), static_cast<int64_t>(piece.size()));
    if (!tensor.make) continue;
    const std::vector<std::byte> made = tensor.make();
    check<CheckpointError>(tensor.pieces.empty() && byte_size(size_of(tensor.dtype), tensor.shape) == std::ssize(made),
                           "[safetensors] '", path, "': tensor ", tensor.name, ": made ", made.size(), " bytes for ",
                           tensor.dtype, tensor.shape);
    writer.write(made.data(), std::ssize(made));
  }
  return writer.finish();
}

}  // namespace sheaf
