#include "sheaf/models/parameter_factors.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "sheaf/models/number_words.h"

namespace sheaf::models {
namespace {

struct NamedFactor {
  double factor;
  std::string pattern;
  bool matches(const nn::Parameter& p) const { return fnmatch(pattern.c_str(), p.name().c_str(), 0) == 0; }
};

// The first and the last names, as samples for a user.
std::string some_names(const std::vector<nn::Parameter>& parameters) {
  if (parameters.empty()) return "none";
  return str("'", parameters.front().name(), "' to '", parameters.back().name(), "'");
}

}  // namespace

optim::FactorRule factors_by_name(const char* option, const std::string& text, nn::Module& model, optim::FactorRule otherwise) {
  std::vector<NamedFactor> factors;
  const std::vector<std::string> words = words_of(text);
  const std::vector<nn::Parameter> parameters = model.parameters();
  for (size_t i = 0; i < words.size(); i += 2) {
    NamedFactor next{};
    check<ConfigError>(is_number(words[i], next.factor) && std::isfinite(next.factor) && next.factor >= 0 && i + 1 < words.size(), "[train] ",
                       option, " '", text, "': factors, at least 0, and patterns of parameters in turn, \"0.1 wte.* 2 *.ln*\"; found '",
                       words[i], "'");
    next.pattern = words[i + 1];
    check<ConfigError>(std::ranges::any_of(parameters, [&](const nn::Parameter& p) { return next.matches(p); }), "[train] ", option, " '",
                       text, "': no parameter matches '", next.pattern, "'; they are ", some_names(parameters));
    factors.push_back(std::move(next));
  }
  return [factors = std::move(factors), otherwise = std::move(otherwise)](const nn::Parameter& p) {
    const auto found = std::ranges::find_if(factors, [&](const NamedFactor& f) { return f.matches(p); });
    if (found != factors.end()) return found->factor;
    return otherwise ? otherwise(p) : 1.0;
  };
}

}  // namespace sheaf::models
