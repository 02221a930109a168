#include "sheaf/models/validation_sets.h"

#include <algorithm>
#include <sstream>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"

namespace sheaf::models {
namespace {

bool is_name(std::string_view text) {
  const auto is_part = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_'; };
  return !text.empty() && std::ranges::all_of(text, is_part);
}

}  // namespace

ValidationSets ValidationSets::open(const std::string& text, int64_t vocab) {
  std::istringstream in(text);
  std::string word;
  const bool named = in >> word && is_name(std::string_view(word).substr(0, word.find('='))) && word.find('=') != std::string::npos;
  if (!named || path_exists(text)) return Tokens::open(text, vocab);
  ValidationSets out;
  out.name_ = text;
  do {
    const size_t at = word.find('=');
    const std::string name = word.substr(0, at);
    check<ConfigError>(at != std::string::npos && is_name(name), "[data] '", text, "': validation sets are names and files, ",
                       "\"web=web_*.bin chat=chat.bin\"; found '", word, "'");
    for (const Set& other : out.sets_)
      check<ConfigError>(other.name != name, "[data] '", text, "': two validation sets have the name '", name, "'");
    out.sets_.push_back({name, Tokens::open(word.substr(at + 1), vocab)});
  } while (in >> word);
  return out;
}

int64_t ValidationSets::size() const {
  int64_t tokens = 0;
  for (const Set& s : sets_) tokens += s.tokens.size();
  return tokens;
}

std::string ValidationSets::check_all() const {
  if (sets_.size() == 1 && sets_[0].name.empty()) return sets_[0].tokens.check_all();
  std::string all;
  for (const Set& s : sets_) all += str(s.name, ' ', s.tokens.size(), ' ', s.tokens.check_all(), '\n');
  return digest_of_text(all).xxh3;
}

std::optional<int32_t> ValidationSets::example_end() const {
  std::vector<Tokens> all;
  for (const Set& s : sets_) all.push_back(s.tokens);
  return common_example_end(all);
}

std::vector<Validation> validations(const ValidationSets& sets, int64_t context, int64_t max_targets) {
  std::vector<Validation> all;
  for (const ValidationSets::Set& s : sets.sets()) all.push_back({s.name, SequentialWindows(s.tokens, context, max_targets)});
  return all;
}

double mean_loss(const std::vector<Validation>& all) {
  if (all.size() == 1) return all[0].loss;
  double sum = 0, count = 0;
  for (const Validation& v : all) {
    const auto targets = static_cast<double>(v.windows.num_targets());
    sum += targets * v.loss, count += targets;
  }
  return sum / count;
}

}  // namespace sheaf::models
