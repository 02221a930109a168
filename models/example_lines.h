// ExampleLines: prompts with answers, and conversations, in JSON lines.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/models/chat_format.h"
#include "sheaf/models/text_reader.h"

namespace sheaf::models {

struct ExampleOptions {
  std::string prompt_field = {};  ///< of prompts with answers: the member that is the prompt; "": these are conversations
  std::string field = {};         ///< the member that is the answer ("": "completion") or the list of messages ("": "messages")
  std::string chat_format = {};   ///< of conversations: see ChatFormat
  bool special_tokens = false;    ///< prompts and answers may contain special tokens, by their names
  std::string end = {};           ///< the special token that ends an example; "": the tokenizer's end of text
};

/// Each line an object: {"prompt": "...", "completion": "..."}, or {"messages": [{"role": "...", "content": "..."}, ...]}.
///
/// Answers and their ends are learned; in conversations the assistant's messages (ChatFormat), but not the token that ends the
/// example, which only separates it from the next; and never an example's first token. A prompt is encoded as a text, an answer as
/// its continuation.
class ExampleLines {
 public:
  /// Throws ConfigError for options that contradict each other or the tokenizer. `tokenizer` must outlive it.
  ExampleLines(const Tokenizer& tokenizer, ExampleOptions options);

  int32_t end() const { return end_; }
  /// Appends the examples in the lines of `block`; empty lines are skipped. `lines` counts all lines of a text, of which `block` is
  /// the next part. On the rank's threads. Throws DataError that names the line, of `name`.
  void read(std::string_view block, const std::string& name, int64_t& lines, std::vector<MarkedToken>& examples);
  int64_t num_examples() const { return count_; }   ///< that have been read
  int64_t num_learned() const { return learned_; }  ///< tokens in them that are learned
  int64_t num_in_vain() const { return in_vain_; }  ///< examples without anything to learn

 private:
  std::vector<MarkedToken> example(std::string_view line, const std::string& origin) const;
  std::vector<MarkedToken> conversation(std::string_view line, const std::string& origin) const;
  void answer(std::string_view line, const std::string& origin, std::vector<MarkedToken>& out) const;

  const Tokenizer& tokenizer_;
  ExampleOptions options_;
  std::optional<ChatFormat> chat_;
  int32_t end_;
  int64_t count_ = 0, learned_ = 0, in_vain_ = 0;
};

}  // namespace sheaf::models
