// Corpus: the data that a model is trained and validated on.
#pragma once

#include <memory>
#include <string>

#include "sheaf/models/token_mixture.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/train_config.h"
#include "sheaf/models/validation_sets.h"

namespace sheaf::models {

/// The sequences for training and for validation.
struct Corpus {
  std::shared_ptr<const Tokenizer> tokenizer;  ///< null if the data came as token files
  TokenMixture train;
  ValidationSets val;
  int64_t vocab = 0;

  /// All sequences, those to train on first.
  std::vector<Tokens> sequences() const;
};

/// Reads a text file and tokenizes it: "char" makes the vocabulary from the whole text, other names are open_tokenizer()'s. The first
/// ⌊n·(1 − val_fraction)⌋ tokens are for training, the rest for validation. Throws DataError if the file is missing, empty, too short
/// to leave two tokens for both, or, for "char", not UTF-8.
Corpus load_text_corpus(const std::string& path, const std::string& tokenizer, double val_fraction,
                        const std::string& tokenizer_folder = "");
/// The same with a given tokenizer.
Corpus load_text_corpus(const std::string& path, std::shared_ptr<const Tokenizer> tokenizer, double val_fraction);

/// All tokens of a text. Throws DataError if it is missing or empty.
Tokens load_text(const std::string& path, const Tokenizer& tokenizer);

/// Reads what [data] describes. `saved`, if not null, is used instead of the tokenizer's files.
Corpus load_corpus(const DataConfig& data, int64_t vocab, std::shared_ptr<const Tokenizer> saved = nullptr);

}  // namespace sheaf::models
