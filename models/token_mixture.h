// TokenMixture: the sequences that a model trains on, each with its share of the samples.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/models/token_file.h"

namespace sheaf::models {

/// One sequence of tokens, or several with weights. The source of a sample is a pure function of the sample's number: there is no
/// position that could be lost. Any run of consecutive samples has each source's share to within a few samples, so every batch has
/// the same mixture.
class TokenMixture {
 public:
  struct Source {
    Tokens tokens;
    double weight = 1;  ///< above 0; shares are weights over their sum
  };
  /// A sample: the `index`-th one from sources()[source], both from 0.
  struct Place {
    int source;
    int64_t index;
  };

  TokenMixture() = default;
  TokenMixture(Tokens tokens);  // NOLINT: one sequence is a mixture, implicit by design
  /// Throws ConfigError for no sources, or a weight that is not a finite number above 0.
  explicit TokenMixture(std::vector<Source> sources);

  /// An argument of Tokens::open or, if no file has that name, weights and such patterns alternating, separated by spaces: "0.7
  /// web_*.bin 0.3 code_*.bin". Throws DataError as Tokens::open, ConfigError for weights without a pattern.
  static TokenMixture open(const std::string& text, int64_t vocab);

  const std::vector<Source>& sources() const { return sources_; }
  /// Of source s, in (0, 1].
  double share(int s) const;
  /// The source of sample number `sample` of a run.
  Place place(int64_t sample) const;

  /// The token that ends examples in those sources that hold some; none if none does. Throws ConfigError if they differ.
  std::optional<int32_t> example_end() const;
  /// Tokens of all sources.
  int64_t size() const;
  int64_t num_files() const;
  /// As it was opened.
  const std::string& name() const { return name_; }
  /// Tokens::check_all of one sequence; for several, XXH3-128 over the weights and the sequences'.
  std::string check_all() const;

 private:
  std::string name_;
  std::vector<Source> sources_;
  std::vector<uint64_t> splits_;  // this source's share of the samples that no earlier source takes, in units of 2^-64
};

}  // namespace sheaf::models
