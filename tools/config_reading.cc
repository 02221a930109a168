#include "sheaf/tools/config_reading.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include <toml++/toml.h>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/model_fields.h"

namespace sheaf::tools {
namespace {

// Edit distance (insert, delete, replace, swap of neighbours) from a to b.
int edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<int>> d(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = static_cast<int>(i + j);
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

std::string join(const std::vector<std::string>& items) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + item;
  return out;
}

[[noreturn]] void unknown_key(const std::string& where, const std::string& key, const std::vector<ConfigField>& fields) {
  const ConfigField* nearest = nullptr;
  int distance = 4;  // beyond three edits, a guess is worse than none
  const std::string name = key.substr(key.find('.') + 1);
  for (const auto& field : fields) {
    // A right name in a wrong section, or a section's name, counts as one typing error.
    const bool same_name = field.key.substr(field.key.find('.') + 1) == name || field.key.starts_with(key + ".");
    const bool renamed = field.key != key && models::earlier_name(field.key) == key;
    const auto longer = std::ssize(key) - std::ssize(field.key);  // at least so many edits
    if (!renamed && !same_name && std::abs(longer) >= distance) continue;
    const int d = renamed ? 0 : same_name ? 1 : edit_distance(key, field.key);
    if (d < distance) {
      distance = d;
      nearest = &field;
    }
  }
  fail<ConfigError>("[config] ", where, ": unknown key ", json_string(key.size() > 100 ? key.substr(0, 100) + "..." : key),
                    nearest ? "; did you mean \"" + nearest->key + "\"?" : "; see --help for all keys");
}

ConfigField& find_field(std::vector<ConfigField>& fields, const std::string& where, const std::string& key) {
  for (auto& field : fields) {
    if (field.key == key) return field;
  }
  unknown_key(where, key, fields);
}

std::string_view type_name(const ConfigField& field) {
  constexpr std::string_view kNames[] = {"true or false", "an integer", "a number", "a string"};
  return kNames[field.target.index()];
}

std::string number_text(double value) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, value).ptr};
}

[[noreturn]] void wrong_type(const std::string& where, const ConfigField& field, const std::string& found) {
  fail<ConfigError>("[config] ", where, ": '", field.key, "' takes ", type_name(field), ", not ", found);
}

void check_range(const std::string& where, const ConfigField& field, double value, const std::string& found) {
  if (value >= field.min && value <= field.max) return;
  const std::string bounds = field.max >= 1e300 ? "at least " + number_text(field.min)
                                                : "in [" + number_text(field.min) + ", " + number_text(field.max) + "]";
  fail<ConfigError>("[config] ", where, ": '", field.key, "' must be ", bounds, ", not ", found);
}

void set(const std::string& where, ConfigField& field, bool value) {
  if (auto** target = std::get_if<bool*>(&field.target)) **target = value;
  else wrong_type(where, field, value ? "true" : "false");
}
void set(const std::string& where, ConfigField& field, int64_t value) {
  if (auto** target = std::get_if<int64_t*>(&field.target)) {
    check_range(where, field, static_cast<double>(value), std::to_string(value));
    **target = value;
  } else if (auto** real = std::get_if<double*>(&field.target)) {
    check_range(where, field, static_cast<double>(value), std::to_string(value));
    **real = static_cast<double>(value);
  } else {
    wrong_type(where, field, std::to_string(value));
  }
}
void set(const std::string& where, ConfigField& field, double value) {
  auto** target = std::get_if<double*>(&field.target);
  if (!target) wrong_type(where, field, std::isfinite(value) ? json_number(value) : number_text(value));  // "1.0", not "1"
  check_range(where, field, value, number_text(value));  // refuses NaN
  **target = value;
}
void set(const std::string& where, ConfigField& field, const std::string& value) {
  auto** target = std::get_if<std::string*>(&field.target);
  if (!target) wrong_type(where, field, json_string(value));
  for (size_t i = 0; i < value.size(); i += static_cast<size_t>(utf8_length(value, i)))
    check<ConfigError>(utf8_length(value, i) > 0, "[config] ", where, ": '", field.key, "' takes UTF-8, not ", json_string(value),
                       " (byte ", i, "): config.toml and checkpoints could not hold it");
  if (std::find(field.later.begin(), field.later.end(), value) != field.later.end()) {
    fail<ConfigError>("[config] ", where, ": '", field.key, "' cannot be ", json_string(value),
                      " yet; it is one of ", join(field.choices));
  }
  if (!field.choices.empty() && std::find(field.choices.begin(), field.choices.end(), value) == field.choices.end()) {
    fail<ConfigError>("[config] ", where, ": '", field.key, "' is one of ", join(field.choices), "; not ",
                      json_string(value));
  }
  **target = value;
}

// A value from the command line, read as the field's type.
void set_from_text(const std::string& where, ConfigField& field, const std::string& text) {
  const auto number = [&]<class T>(T value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) wrong_type(where, field, json_string(text));
    set(where, field, value);
  };
  if (std::holds_alternative<std::string*>(field.target)) return set(where, field, text);
  if (std::holds_alternative<int64_t*>(field.target)) return number(int64_t{0});
  if (std::holds_alternative<double*>(field.target)) return number(0.0);
  if (text != "true" && text != "false") wrong_type(where, field, json_string(text));
  set(where, field, text == "true");
}

// toml++ calls itself for each part of a dotted key, and would end with the stack.
void refuse_deep_keys(const std::string& path, std::string_view text) {
  constexpr int64_t kMostDots = 100;
  for (int64_t line = 1; !text.empty(); ++line) {
    const std::string_view one = text.substr(0, text.find('\n')), before = one.substr(0, one.find('='));
    text.remove_prefix(std::min(text.size(), one.size() + 1));
    const bool has_key = before.size() < one.size() || one.starts_with('[');
    if (has_key && std::ranges::count(before, '.') > kMostDots && !one.starts_with('#'))
      fail<ConfigError>("[config] ", path, ":", line, ": a key of more than ", kMostDots, " parts");
  }
}

}  // namespace

void read_file(const std::string& path, std::vector<ConfigField>& fields, std::set<std::string>& given,
               const std::function<bool(const std::string&)>& wanted) {
  const std::string text = File::open<ConfigError>(path).read_all();
  refuse_deep_keys(path, text);
  toml::table document;
  try {
    document = toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    fail<ConfigError>("[config] ", path, ":", static_cast<int64_t>(error.source().begin.line), ": ",
                      error.description());
  }
  const auto line_of = [&](const toml::node& node) {
    return str(path, ":", static_cast<int64_t>(node.source().begin.line));
  };
  const auto is_section = [&](const std::string& prefix) {
    return std::any_of(fields.begin(), fields.end(), [&](const auto& field) { return field.key.starts_with(prefix + "."); });
  };
  // [model] has a section of its own, [model.rope_scaling].
  const auto read_section = [&](const auto& self, const std::string& prefix, const toml::node& node) -> void {
    const toml::table* table = node.as_table();
    if (!table) fail<ConfigError>("[config] ", line_of(node), ": [", prefix, "] is a section, not a value");
    for (const auto& [name, value] : *table) {
      const std::string where = line_of(value), key = prefix + "." + std::string(name.str());
      if (is_section(key)) {
        self(self, key, value);
        continue;
      }
      if (wanted && !wanted(key)) continue;
      ConfigField& field = find_field(fields, where, key);
      if (auto* flag = value.as_boolean()) set(where, field, flag->get());
      else if (auto* integer = value.as_integer()) set(where, field, integer->get());
      else if (auto* real = value.as_floating_point()) set(where, field, real->get());
      else if (auto* string = value.as_string()) set(where, field, string->get());
      else wrong_type(where, field, value.is_array() ? "an array" : value.is_table() ? "a table" : "a date");
      given.insert(key);
    }
  };
  for (const auto& [section, node] : document) {
    const std::string prefix(section.str());
    if (wanted && !is_section(prefix)) continue;
    if (!is_section(prefix)) unknown_key(line_of(node), node.is_table() ? "[" + prefix + "]" : prefix, fields);
    read_section(read_section, prefix, node);
  }
}

void read_overrides(std::span<const std::string> overrides, std::vector<ConfigField>& fields,
                    std::set<std::string>& given) {
  const std::string where = "command line";
  for (size_t i = 0; i < overrides.size(); ++i) {
    const std::string& argument = overrides[i];
    const size_t equals = argument.find('=');
    const std::string key = argument.substr(std::min<size_t>(2, argument.size()), equals - 2);
    if (!argument.starts_with("--") || key.empty()) {
      const std::string before = i >= 2 ? overrides[i - 2] : "";
      fail<ConfigError>("[config] ", where, ": expected --section.key, found ", json_string(argument),
                        before == "--data.train_file" || before == "--data.val_file"
                            ? str("; a pattern of several files needs quotes to keep the shell from it: ", before, " 'name_*.bin'")
                            : "");
    }
    ConfigField& field = find_field(fields, where, key);
    if (equals != std::string::npos) {
      set_from_text(where, field, argument.substr(equals + 1));
    } else {
      if (++i == overrides.size()) fail<ConfigError>("[config] ", where, ": --", key, " lacks a value");
      set_from_text(where, field, overrides[i]);
    }
    given.insert(key);
  }
}

void set_value(const std::string& where, ConfigField& field, const ConfigField& from) {
  std::visit([&](const auto* value) { set(where, field, *value); }, from.target);
}

std::string value_text(const ConfigField& field) {
  if (auto* flag = std::get_if<bool*>(&field.target)) return **flag ? "true" : "false";
  if (auto* integer = std::get_if<int64_t*>(&field.target)) return std::to_string(**integer);
  if (auto* real = std::get_if<double*>(&field.target)) return json_number(**real);
  return json_string(**std::get_if<std::string*>(&field.target));
}

}  // namespace sheaf::tools
