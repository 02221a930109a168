// Reads a published config.json, key by key.
#pragma once

#include <string>
#include <utility>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"

namespace sheaf::models {

/// A config.json, where null means the same as absence. Values other than expected are refused by name, CheckpointError.
class ConfigReader {
 public:
  static constexpr int64_t kLargest = 1'000'000'000;  ///< of any size; products of two fit 64 bits

  explicit ConfigReader(const std::string& file) : file_(file) {
    const std::string text = File::open<CheckpointError>(file).read_all();
    try {
      json_ = Json::parse(text, file);
    } catch (const DataError& e) {
      fail<CheckpointError>("[weights] ", e.what());
    }
    if (!json_.is_object()) fail<CheckpointError>("[weights] ", file, " is not a JSON object");
  }

  /// A nested object, whose keys are reported with its own.
  ConfigReader object(const char* key) const {
    const Json* inside = find(key);
    if (!inside || !inside->is_object()) refuse(key, "expected an object");
    return {file_ + ": " + key, *inside};
  }

  const Json* find(const char* key) const {
    const Json* value = json_.find(key);
    return value && !value->is_null() ? value : nullptr;
  }
  bool has(const char* key) const { return json_.find(key) != nullptr; }
  [[noreturn]] void refuse(const char* key, const std::string& reason) const {
    std::string value = json_.find(key) ? json_.find(key)->dump() : "missing";
    if (value.size() > 80) value = value.substr(0, 80) + "...";
    fail<CheckpointError>("[weights] ", file_, ": ", key, " is ", value, ": ", reason);
  }

  int64_t positive(const char* key) const {
    const int64_t value = get(key, int64_t{0}, &Json::as_int);
    if (value <= 0 || value > kLargest) refuse(key, "expected a positive integer, at most 10^9");
    return value;
  }
  int64_t positive(const char* key, int64_t otherwise) const { return find(key) ? positive(key) : otherwise; }
  int64_t layers(const char* key) const {
    const int64_t value = positive(key);
    if (value > 10000) refuse(key, "at most 10,000 layers");  // as of model.layers
    return value;
  }
  int64_t experts(const char* key) const {
    const int64_t value = positive(key);
    if (value > 10000) refuse(key, "at most 10,000 experts");  // as of model.experts
    return value;
  }
  double number(const char* key, double otherwise) const { return get(key, otherwise, &Json::as_double); }
  double at_least(double least, const char* key, double otherwise) const {
    const double value = number(key, otherwise);
    if (!(value >= least)) refuse(key, str("expected at least ", least));
    return value;
  }
  int64_t whole(const char* key, int64_t otherwise) const {
    const int64_t value = get(key, otherwise, &Json::as_int);
    if (value < 0 || value > kLargest) refuse(key, "expected a whole number, at most 10^9");
    return value;
  }
  bool flag(const char* key, bool otherwise) const { return get(key, otherwise, &Json::as_bool); }
  std::string text(const char* key, const char* otherwise) const {
    return get(key, std::string(otherwise), &Json::as_string);
  }

  /// Refuses a key that is present with any value but `harmless`.
  void only(const char* key, const Json& harmless, const char* reason) const {
    if (const Json* value = find(key); value && !(*value == harmless)) refuse(key, reason);
  }

 private:
  ConfigReader(std::string file, Json json) : file_(std::move(file)), json_(std::move(json)) {}

  template <class T, class R>
  T get(const char* key, T otherwise, R (Json::*as)() const) const {
    const Json* value = find(key);
    if (!value) return otherwise;
    try {
      return (value->*as)();
    } catch (const DataError& e) {
      fail<CheckpointError>("[weights] ", file_, ": ", key, ": ", e.what());
    }
  }

  std::string file_;
  Json json_;
};

}  // namespace sheaf::models
