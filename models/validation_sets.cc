#include "sheaf/models/validation_sets.h"

#include "sheaf/core/file.h"
#include "sheaf/models/named_files.h"

namespace sheaf::models {

ValidationSets ValidationSets::open(const std::string& text, int64_t vocab) {
  const std::vector<NamedFile> files = named_files(text, "validation sets");
  if (files.size() == 1 && files[0].name.empty()) return Tokens::open(text, vocab);
  ValidationSets out;
  out.name_ = text;
  for (const auto& [name, path] : files) out.sets_.push_back({name, Tokens::open(path, vocab)});
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
