// Conversations as tokens: the frames that models of published families were trained with.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sheaf/core/json.h"
#include "sheaf/models/token_file.h"
#include "sheaf/models/tokenizer.h"

namespace sheaf::models {

struct Message {
  std::string role, content;
};
/// The messages in a list of {"role": "...", "content": "..."}. Throws DataError naming the message, also for messages with
/// tool calls.
std::vector<Message> messages_of(const Json& list, std::string_view origin, std::string_view field);

/// How messages follow each other. A frame's special tokens are read as such; the content of messages never makes one.
class ChatFormat {
 public:
  /// "chatml" (Qwen's, SmolLM's and others'), "llama3" (Llama 3's, which trims messages) or "gemma" (Gemma's, which trims them, too,
  /// calls an assistant model, and puts the system's message before the first user message; the other two roles alternate). Throws
  /// ConfigError for another, or if the tokenizer lacks one of the frame's special tokens, DataError if one is not found by its name alone.
  /// `tokenizer` must outlive it.
  ChatFormat(std::string_view name, const Tokenizer& tokenizer);

  /// The tokens of a conversation. Messages of the role "assistant" are learned, with the token that ends a turn; they are encoded
  /// separately, as when generated, and everything else together with the frame around it. Throws DataError, naming the conversation
  /// as `origin`, for a role that the frame does not know.
  std::vector<MarkedToken> encode(std::span<const Message> messages, std::string_view origin = "the conversation") const;
  /// The same up to where an assistant's turn begins, as a prompt.
  std::vector<int32_t> encode_prompt(std::span<const Message> messages, std::string_view origin = "the conversation") const;
  /// Which token ends a turn.
  int32_t end_of_turn() const { return end_of_turn_; }

 private:
  // Texts between special tokens.
  struct Frame {
    std::string_view begin;                     // a special token before all, or none
    std::string_view before_role, behind_role;  // special tokens; the one after the role may be empty
    std::string_view before_content, end_of_turn, behind_turn;
    bool trims;
    std::string_view assistant = "assistant";
    bool alternates = false;  // a system before all, perhaps, then a user and an assistant in turn
  };
  class Writer;
  void check_turns(std::span<const Message> messages, std::string_view origin) const;
  void open_turn(const std::string& role, Writer& out) const;

  const Tokenizer& tokenizer_;
  Frame frame_;
  int32_t end_of_turn_;
};

}  // namespace sheaf::models
