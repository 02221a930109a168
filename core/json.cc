#include "sheaf/core/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <set>

#include <nlohmann/json.hpp>

namespace sheaf {
namespace {

constexpr size_t kMaxDepth = 32;

// Builds a Json from nlohmann's events. nlohmann's own document type would turn -1 into 2^64-1 where an unsigned is
// read and keep the last of two equal keys, so it is not used.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(std::string_view origin) : origin_(origin) {}
  Json take() { return std::exchange(root_, Json()); }
  // Of what is to be parsed: the parser would skip a byte order mark and take a zero byte for the end.
  void check_text(std::string_view text) const {
    if (text.starts_with("\xEF\xBB\xBF")) refuse("starts with a byte order mark");
    if (text.find('\0') != std::string_view::npos) refuse("contains a zero byte");
  }
  bool is_whole() const { return stack_.empty(); }  // after any event
  [[noreturn]] void refuse(const std::string& reason) const { fail<DataError>("[json] ", origin_, ": ", reason); }

  bool null() override { return add(Json()); }
  bool boolean(bool value) override { return add(Json(value)); }
  bool number_integer(number_integer_t value) override { return add(Json(int64_t{value})); }
  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) refuse("a number is out of range");
    return add(Json(static_cast<int64_t>(value)));
  }
  bool number_float(number_float_t value, const string_t& text) override {
    // An integer too large for 64 bits also arrives here.
    if (text.find_first_of(".eE") == std::string::npos) refuse("a number is out of range");
    return add(Json(value));
  }
  bool string(string_t& value) override { return add(Json(std::move(value))); }
  bool binary(binary_t&) override { refuse("binary value"); }
  bool start_object(size_t) override { return open(true); }
  bool start_array(size_t) override { return open(false); }
  bool key(string_t& value) override {
    if (!stack_.back().keys.insert(value).second) refuse("duplicate key " + json_string(value));
    stack_.back().members.emplace_back(std::move(value), Json());
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) override {
    const bool too_large = dynamic_cast<const nlohmann::json::out_of_range*>(&error) != nullptr;
    refuse((too_large ? "a number beyond f64's at byte " : "not valid JSON at byte ") + std::to_string(position));
  }

 private:
  struct Level {
    bool is_object;
    Json::Object members;
    Json::Array items;
    std::set<std::string> keys;
  };
  bool open(bool is_object) {
    if (stack_.size() == kMaxDepth) refuse("nested too deeply");
    stack_.push_back({is_object, {}, {}, {}});
    return true;
  }
  bool close() {
    Level level = std::move(stack_.back());
    stack_.pop_back();
    return add(level.is_object ? Json(std::move(level.members)) : Json(std::move(level.items)));
  }
  bool add(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
    } else if (stack_.back().is_object) {
      stack_.back().members.back().second = std::move(value);
    } else {
      stack_.back().items.push_back(std::move(value));
    }
    return true;
  }

  std::string_view origin_;
  std::vector<Level> stack_;
  Json root_;
};

// Builds some members of the outermost object and skips the others.
class MemberFinder : public nlohmann::json_sax<nlohmann::json> {
 public:
  MemberFinder(std::span<const std::string> keys, std::string_view origin)
      : keys_(keys), builder_(origin), values_(keys.size()), found_(keys.size()) {}
  [[noreturn]] void refuse(const std::string& reason) const { builder_.refuse(reason); }
  void require_all() const {
    for (size_t i = 0; i < keys_.size(); ++i)
      if (!found_[i]) refuse("no member " + json_string(keys_[i]));
  }
  std::vector<Json> take() { return std::move(values_); }
  void parse(std::string_view text) {
    builder_.check_text(text);
    nlohmann::json::sax_parse(text.begin(), text.end(), this);
  }

  bool null() override { return value([](Builder& b) { b.null(); }); }
  bool boolean(bool x) override { return value([&](Builder& b) { b.boolean(x); }); }
  bool number_integer(number_integer_t x) override { return value([&](Builder& b) { b.number_integer(x); }); }
  bool number_unsigned(number_unsigned_t x) override { return value([&](Builder& b) { b.number_unsigned(x); }); }
  bool number_float(number_float_t x, const string_t& text) override { return value([&](Builder& b) { b.number_float(x, text); }); }
  bool binary(binary_t& x) override { return value([&](Builder& b) { b.binary(x); }); }
  bool string(string_t& x) override { return value([&](Builder& b) { b.string(x); }); }
  bool start_object(size_t n) override { return ++depth_ > 0 && value([&](Builder& b) { b.start_object(n); }); }
  bool start_array(size_t n) override { return ++depth_ > 0 && value([&](Builder& b) { b.start_array(n); }); }
  bool end_object() override { return --depth_ >= 0 && value([](Builder& b) { b.end_object(); }); }
  bool end_array() override { return --depth_ >= 0 && value([](Builder& b) { b.end_array(); }); }
  bool key(string_t& name) override {
    if (here_ != kNone) return builder_.key(name);
    if (depth_ > 1) return true;
    here_ = static_cast<size_t>(std::ranges::find(keys_, name) - keys_.begin());
    if (here_ == keys_.size()) here_ = kNone;
    else if (found_[here_]) refuse("duplicate key " + json_string(name));
    return true;
  }
  bool parse_error(size_t position, const std::string& text, const nlohmann::json::exception& error) override {
    return builder_.parse_error(position, text, error);
  }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);
  template <class F>
  bool value(F f) {
    if (here_ == kNone) return true;
    f(builder_);
    if (!builder_.is_whole()) return true;
    values_[here_] = builder_.take(), found_[here_] = true;
    here_ = kNone;
    return true;
  }

  std::span<const std::string> keys_;
  Builder builder_;
  std::vector<Json> values_;
  std::vector<bool> found_;
  int depth_ = 0;
  size_t here_ = kNone;  // the member whose value is being read
};

}  // namespace

std::vector<Json> json_members(std::string_view text, std::span<const std::string> keys, std::string_view origin) {
  MemberFinder finder(keys, origin);
  finder.parse(text);
  finder.require_all();
  return finder.take();
}

std::vector<Json> json_members_or_null(std::string_view text, std::span<const std::string> keys, std::string_view origin) {
  MemberFinder finder(keys, origin);
  finder.parse(text);
  return finder.take();
}

std::vector<std::string> json_text_members(std::string_view text, std::span<const std::string> keys, std::string_view origin) {
  std::vector<std::string> texts;
  for (Json& value : json_members(text, keys, origin)) {
    std::string* const member = value.text();
    if (!member) fail<DataError>("[json] ", origin, ": member ", json_string(keys[texts.size()]), " is not a string");
    texts.push_back(std::move(*member));
  }
  return texts;
}

Json Json::parse(std::string_view text, std::string_view origin) {
  Builder builder(origin);
  builder.check_text(text);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string Json::dump() const {
  std::string out;
  dump_to(out);
  return out;
}

void Json::dump_to(std::string& out) const {
  if (auto* items = std::get_if<Array>(&value_)) {
    out += '[';
    for (size_t i = 0; i < items->size(); ++i) {
      if (i) out += ',';
      (*items)[i].dump_to(out);
    }
    out += ']';
  } else if (auto* members = std::get_if<Object>(&value_)) {
    out += '{';
    for (size_t i = 0; i < members->size(); ++i) {
      if (i) out += ',';
      out += json_string((*members)[i].first);
      out += ':';
      (*members)[i].second.dump_to(out);
    }
    out += '}';
  } else if (auto* text = std::get_if<std::string>(&value_)) {
    out += json_string(*text);
  } else if (auto* integer = std::get_if<int64_t>(&value_)) {
    out += std::to_string(*integer);
  } else if (auto* number = std::get_if<double>(&value_)) {
    out += json_number(*number);
  } else if (auto* flag = std::get_if<bool>(&value_)) {
    out += *flag ? "true" : "false";
  } else {
    out += "null";
  }
}

template <class T>
const T& Json::as(const char* what) const {
  const T* value = std::get_if<T>(&value_);
  if (!value) {
    std::string text = dump();
    if (text.size() > 40) text = text.substr(0, 40) + "...";
    fail<DataError>("[json] expected ", what, ", found ", text);
  }
  return *value;
}
bool Json::as_bool() const { return as<bool>("true or false"); }
int64_t Json::as_int() const { return as<int64_t>("an integer"); }
double Json::as_double() const { return is_int() ? static_cast<double>(as_int()) : as<double>("a number"); }
const std::string& Json::as_string() const { return as<std::string>("a string"); }
const Json::Array& Json::as_array() const { return as<Array>("an array"); }
const Json::Object& Json::as_object() const { return as<Object>("an object"); }

const Json* Json::find(std::string_view key) const {
  for (const auto& [name, value] : as_object()) {
    if (name == key) return &value;
  }
  return nullptr;
}

const Json& Json::at(std::string_view key) const {
  const Json* value = find(key);
  if (!value) fail<DataError>("[json] lacks the field '", key, "'");
  return *value;
}

Json& Json::set(std::string key, Json value) {
  if (is_null()) value_ = Object{};
  auto* members = std::get_if<Object>(&value_);
  if (!members) fail<DataError>("[json] set '", key, "' on something that is not an object");
  for (auto& [name, old] : *members) {
    if (name == key) {
      old = std::move(value);
      return *this;
    }
  }
  members->emplace_back(std::move(key), std::move(value));
  return *this;
}

std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  std::string text(buffer, end);
  // Keep it a floating-point number for readers that tell 1 from 1.0.
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const int length = utf8_length(text, i);
    if (byte == '"' || byte == '\\') {
      out += '\\';
      out += text[i];
    } else if (byte == '\n') {
      out += "\\n";
    } else if (byte == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      char buffer[8];
      std::snprintf(buffer, sizeof buffer, "\\u%04x", byte);
      out += buffer;
    } else if (length == 0) {
      out += "\xEF\xBF\xBD";
    } else {
      out += text.substr(i, length);
    }
    i += length ? length : 1;
  }
  return out + '"';
}

int utf8_length(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
  auto continues = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned lead = byte(0), second = byte(1);
  if (at >= text.size()) return 0;
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    const bool overlong = lead == 0xE0 && second < 0xA0, surrogate = lead == 0xED && second >= 0xA0;
    return continues(1) && continues(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool overlong = lead == 0xF0 && second < 0x90, beyond = lead == 0xF4 && second >= 0x90;
    return continues(1) && continues(2) && continues(3) && !overlong && !beyond ? 4 : 0;
  }
  return 0;
}

}  // namespace sheaf
