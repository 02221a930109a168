// ChoiceQuestions: prompts with several continuations, of which one is right, as tests of what a language model knows have them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sheaf/models/tokenizer.h"

namespace sheaf::models {

/// A prompt with one of its continuations.
struct ChoiceRow {
  std::vector<int32_t> tokens;
  int64_t begin = 0;       ///< of the continuation in them, at least 1
  int64_t characters = 0;  ///< of the continuation's text
};

/// How many of the questions a model answers right: it chooses the continuation of the largest likelihood.
struct ChoiceAccuracy {
  double accuracy = 0;       ///< by log-likelihoods ("acc" of EleutherAI's lm-evaluation-harness)
  double accuracy_norm = 0;  ///< by log-likelihoods over characters, which does not favour short ones ("acc_norm" there)
};

/// "accuracy of hellaswag 0.2855, norm 0.3112"; without a name "accuracy 0.2855, norm 0.3112".
std::string accuracy_line(const std::string& name, const ChoiceAccuracy& of);

/// Read from JSON lines, each {"prompt": "...", "choices": ["...", ..], "answer": 0}, where the answer counts from 0; or HellaSwag's
/// own (Zellers et al., https://arxiv.org/abs/1905.07830) with "ctx", "endings" and "label", a number or its text.
///
/// A prompt is encoded as a text, a continuation as one that goes on behind a blank, unless one of the two has one there. Of what is
/// longer than the context and its last target the beginning is left out.
class ChoiceQuestions {
 public:
  struct Question {
    int64_t first = 0, count = 0;  ///< its rows
    int64_t answer = 0;            ///< which of them is right
  };

  /// The first `most` questions in `path`, or all if it is 0; `before` stands before each prompt. On the rank's threads. Throws
  /// DataError that names the line for what is malformed, and where there are no questions.
  ChoiceQuestions(std::string name, const std::string& path, const Tokenizer& tokenizer, std::span<const int32_t> before,
                  int64_t context, int64_t most = 0);

  const std::string& name() const { return name_; }
  const std::vector<ChoiceRow>& rows() const { return rows_; }
  const std::vector<Question>& questions() const { return questions_; }
  int64_t num_shortened() const { return shortened_; }  ///< rows that are
  /// XXH3-128 of all rows and answers.
  std::string digest() const;

  /// Of one log-likelihood for each row. Throws NonFiniteError where one is NaN.
  ChoiceAccuracy accuracy(std::span<const double> log_likelihoods) const;

 private:
  std::string name_;
  std::vector<ChoiceRow> rows_;
  std::vector<Question> questions_;
  int64_t shortened_ = 0;
};

/// Sets of them by the names in `text`, "hellaswag=hellaswag_val.jsonl arc=arc.jsonl", or one without a name ("").
std::vector<ChoiceQuestions> open_choices(const std::string& text, const Tokenizer& tokenizer, std::span<const int32_t> before,
                                          int64_t context, int64_t most = 0);

}  // namespace sheaf::models
