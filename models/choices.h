// ChoiceQuestions: prompts with several continuations, of which one is right, as in benchmarks of language models.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sheaf/models/tokenizer.h"

namespace sheaf::models {

/// A prompt with one of its continuations.
struct ChoiceRow {
  std::vector<int32_t> tokens;
  int64_t begin = 0;       ///< of the continuation in them, at least 1
  int64_t characters = 0;  ///< of the continuation's text, except a joining space
};

/// How many of the questions a model answers correctly: it chooses the continuation with the largest likelihood.
struct ChoiceAccuracy {
  double accuracy = 0;       ///< by log-likelihoods ("acc" of EleutherAI's lm-evaluation-harness)
  double accuracy_norm = 0;  ///< by log-likelihoods over characters, which does not favour short ones ("acc_norm" there)
};

/// "accuracy of hellaswag 0.2855, norm 0.3112"; without a name "accuracy 0.2855, norm 0.3112".
std::string accuracy_line(const std::string& name, const ChoiceAccuracy& of);

/// Read from JSON lines, each {"prompt": "...", "choices": ["...", ..], "answer": 0}, where the answer counts from 0; or HellaSwag's
/// own (Zellers et al., https://arxiv.org/abs/1905.07830) with "ctx", "endings" and "label", a number or its text.
///
/// A prompt is encoded as a text, without trailing spaces, and a continuation as one that continues it, with them: after one space,
/// unless there are some, or it begins with one. Rows longer than the context and its last target lose their beginning.
class ChoiceQuestions {
 public:
  struct Question {
    int64_t first = 0, count = 0;  ///< its rows
    int64_t answer = 0;            ///< which of them is right
    int64_t line = 0;              ///< of the file, from 1
  };
  struct Options {
    std::vector<int32_t> before = {};  ///< tokens that precede each prompt
    int64_t context = 1024;            ///< tokens that a model reads
    int64_t vocab = 0;                 ///< that it knows; 0: all of the tokenizer's
    int64_t most = 0;                  ///< only this many questions, from the first; 0: all
  };

  /// Reads `path`, or standard input if it is "-". On the rank's threads. Throws DataError that names the malformed line, or if there
  /// are no questions, ConfigError for a tokenizer with more tokens than the model knows.
  ChoiceQuestions(std::string name, const std::string& path, const Tokenizer& tokenizer, const Options& options);

  const std::string& name() const { return name_; }
  const std::vector<ChoiceRow>& rows() const { return rows_; }
  const std::vector<Question>& questions() const { return questions_; }
  int64_t num_shortened() const { return shortened_; }  ///< rows that are longer than a window
  /// XXH3-128 of all rows and answers.
  std::string digest() const;

  /// From one log-likelihood for each row. Throws NonFiniteError if one is NaN.
  ChoiceAccuracy accuracy(std::span<const double> log_likelihoods) const;

 private:
  std::string name_, path_;
  std::vector<ChoiceRow> rows_;
  std::vector<Question> questions_;
  int64_t shortened_ = 0;
};

/// A set, and a model's accuracy on it.
struct AnsweredQuestions {
  ChoiceQuestions questions;
  ChoiceAccuracy accuracy = {};
};

/// Sets by the names in `text`, "hellaswag=hellaswag_val.jsonl arc=arc.jsonl", or one without a name ("").
std::vector<AnsweredQuestions> open_questions(const std::string& text, const Tokenizer& tokenizer,
                                              const ChoiceQuestions::Options& options);
/// A text that is equal on all ranks if their sets are.
std::string digest_of(const std::vector<AnsweredQuestions>& sets);
/// "1000 questions of hellaswag; 3 of their 4000 choices do not fit into a window, and lose their beginnings".
std::string questions_line(const ChoiceQuestions& questions);

}  // namespace sheaf::models
