#include "sheaf/core/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include <nlohmann/json.hpp>

namespace sheaf {
namespace {

constexpr size_t kMaxDepth = 32;

// Builds a Json from nlohmann's events. Its own document type would turn -1 into 2^64-1 where an unsigned is read and
// keep the last of two equal keys, so it is not used.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Builder(std::string_view origin) : origin_(origin) {}
  Json take() { return std::move(root_); }

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
  bool start_object(size_t) override { return open(Json(Json::Object{})); }
  bool start_array(size_t) override { return open(Json(Json::Array{})); }
  bool key(string_t& value) override {
    auto& level = stack_.back();
    if (!level.keys.insert(value).second) refuse("duplicate key '" + value + "'");
    level.key = std::move(value);
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    refuse("not valid JSON at byte " + std::to_string(position));
  }

 private:
  struct Level {
    Json value;
    std::string key;
    std::set<std::string> keys;
  };
  [[noreturn]] void refuse(const std::string& reason) const { fail<DataError>("[json] ", origin_, ": ", reason); }
  bool open(Json value) {
    if (stack_.size() == kMaxDepth) refuse("nested too deeply");
    stack_.push_back({std::move(value), {}, {}});
    return true;
  }
  bool close() {
    Json value = std::move(stack_.back().value);
    stack_.pop_back();
    return add(std::move(value));
  }
  bool add(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
    } else if (Level& level = stack_.back(); level.value.is_object()) {
      const_cast<Json::Object&>(level.value.as_object()).emplace_back(std::move(level.key), std::move(value));
    } else {
      const_cast<Json::Array&>(level.value.as_array()).push_back(std::move(value));
    }
    return true;
  }

  std::string_view origin_;
  std::vector<Level> stack_;
  Json root_;
};

void dump_to(std::string& out, const Json& json);

struct Dumper {
  std::string& out;
  void operator()(std::monostate) { out += "null"; }
  void operator()(bool value) { out += value ? "true" : "false"; }
  void operator()(int64_t value) { out += std::to_string(value); }
  void operator()(double value) { out += json_number(value); }
  void operator()(const std::string& value) { out += json_string(value); }
  void operator()(const Json::Array& value) {
    out += '[';
    for (size_t i = 0; i < value.size(); ++i) {
      if (i) out += ',';
      dump_to(out, value[i]);
    }
    out += ']';
  }
  void operator()(const Json::Object& value) {
    out += '{';
    for (size_t i = 0; i < value.size(); ++i) {
      if (i) out += ',';
      out += json_string(value[i].first);
      out += ':';
      dump_to(out, value[i].second);
    }
    out += '}';
  }
};

}  // namespace
