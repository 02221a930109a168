// ValidationSets: the sequences that a model is validated on, each separately.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/models/batch_sampler.h"

namespace sheaf::models {

/// One sequence of tokens without a name, or several with names.
class ValidationSets {
 public:
  struct Set {
    std::string name;
    Tokens tokens;
  };

  ValidationSets() = default;
  ValidationSets(Tokens tokens) : name_(tokens.name()), sets_{{"", std::move(tokens)}} {}  // NOLINT: one is a case of several

  /// An argument of Tokens::open or, if no file has that name, names and such patterns, separated by spaces: "web=web_*.bin
  /// chat=chat.bin". Throws DataError as Tokens::open, ConfigError for a name twice, or one with other characters than letters,
  /// digits, - and _.
  static ValidationSets open(const std::string& text, int64_t vocab);

  const std::vector<Set>& sets() const { return sets_; }
  /// As they were opened.
  const std::string& name() const { return name_; }
  /// Tokens of all.
  int64_t size() const;
  /// Tokens::check_all of one sequence; for several, XXH3-128 over names and the sequences'.
  std::string check_all() const;
  /// The token that ends examples in those sets that hold some; none if none does. Throws ConfigError if they differ.
  std::optional<int32_t> example_end() const;

 private:
  std::string name_;
  std::vector<Set> sets_;
};

/// Their windows, and the results.
struct Validation {
  std::string name;
  SequentialWindows windows;
  double loss = 0;  ///< mean over its targets that count
};
/// At most `max_targets` targets of each set (SequentialWindows).
std::vector<Validation> validations(const ValidationSets& sets, int64_t context, int64_t max_targets);
/// The mean over the targets of all sets.
double mean_loss(const std::vector<Validation>& all);

}  // namespace sheaf::models
