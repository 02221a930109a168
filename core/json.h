// JSON for our own small files (manifests, tokenizers, metrics), read strictly: anything ambiguous is refused.
// Integers stay integers, duplicate keys, bad UTF-8, trailing bytes and deep nesting are errors.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "sheaf/core/error.h"

namespace sheaf {

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;  ///< in the order of the file

  Json() = default;  ///< null
  Json(bool value) : value_(value) {}
  Json(int value) : value_(int64_t{value}) {}
  Json(int64_t value) : value_(value) {}
  Json(double value) : value_(value) {}
  Json(const char* value) : value_(std::string(value)) {}
  Json(std::string value) : value_(std::move(value)) {}
  Json(std::string_view value) : value_(std::string(value)) {}
  Json(Array value) : value_(std::move(value)) {}
  Json(Object value) : value_(std::move(value)) {}

  /// Parses one document; throws DataError "[json] <origin>: <reason>". Numbers with fraction or exponent are doubles,
  /// others must fit int64_t; depth at most 32.
  static Json parse(std::string_view text, std::string_view origin);
  /// Compact text in one line. Doubles are the shortest text that reads back to the same bits; NaN and infinities,
  /// which JSON lacks, become null.
  std::string dump() const;

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }
  // Each throws DataError if the value is of another type. An integer is accepted as a double.
  bool as_bool() const;
  int64_t as_int() const;
  double as_double() const;
  const std::string& as_string() const;
  std::string* text() { return std::get_if<std::string>(&value_); }  ///< null if it is not a string
  const Array& as_array() const;
  const Object& as_object() const;

  /// The member `key` of an object, null if there is none.
  const Json* find(std::string_view key) const;
  /// The member `key` of an object; throws DataError.
  const Json& at(std::string_view key) const;
  /// Sets a member of an object (a null becomes one); returns the object.
  Json& set(std::string key, Json value);

  bool operator==(const Json&) const = default;

 private:
  template <class T>
  const T& as(const char* what) const;
  void dump_to(std::string& out) const;
  std::variant<std::monostate, bool, int64_t, double, std::string, Array, Object> value_;
};

/// The members `keys` of the object in `text`. Its other members may be any JSON, at any depth, with integers of more than 64
/// bits, but with no number beyond a double's range. Throws DataError "[json] <origin>: <reason>".
std::vector<Json> json_members(std::string_view text, std::span<const std::string> keys, std::string_view origin);
/// The same, with null for missing members.
std::vector<Json> json_members_or_null(std::string_view text, std::span<const std::string> keys, std::string_view origin);
/// json_members() that must be strings.
std::vector<std::string> json_text_members(std::string_view text, std::span<const std::string> keys, std::string_view origin);

/// Shortest decimal text that reads back to the same double, with a decimal point or an exponent; "null" for NaN and
/// infinities.
std::string json_number(double value);
/// `text` in quotes, escaped. Bytes that are not UTF-8 are replaced by U+FFFD.
std::string json_string(std::string_view text);

/// Bytes of the valid UTF-8 character at text[at] (1 to 4), 0 if there is none (truncated, overlong, surrogate).
int utf8_length(std::string_view text, size_t at);

}  // namespace sheaf
