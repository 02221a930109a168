// Reading options into their fields: from a TOML file, then from the command line. All functions throw ConfigError, with file and
// line, for unknown options (naming the nearest one) and for values of the wrong type or out of range; the keys that are set are
// added to `given`.
#pragma once

#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "sheaf/tools/config.h"

namespace sheaf::tools {

/// All options of the file, or only the `wanted` ones.
void read_file(const std::string& path, std::vector<ConfigField>& fields, std::set<std::string>& given,
               const std::function<bool(const std::string&)>& wanted = {});
/// "--section.key", "value" or "--section.key=value".
void read_overrides(std::span<const std::string> overrides, std::vector<ConfigField>& fields, std::set<std::string>& given);
/// Copies the value of the same field of another configuration, found at `where`.
void set_value(const std::string& where, ConfigField& field, const ConfigField& from);
/// In TOML syntax.
std::string value_text(const ConfigField& field);

}  // namespace sheaf::tools
