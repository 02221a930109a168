#include "sheaf/models/chat_format.h"

#include <algorithm>
#include <utility>

#include "sheaf/core/error.h"
#include "sheaf/core/json.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

// Unicode's White_Space and the separators U+001C to U+001F: what Python's strip(), and so templates, remove.
bool is_blank(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string_view trimmed(std::string_view text) {
  size_t begin = text.size(), end = 0;
  for (size_t at = 0; at < text.size();) {
    const int length = std::max(1, utf8_length(text, at));
    if (!is_blank(length > 1 ? code_point(text, at, length) : static_cast<unsigned char>(text[at]))) {
      begin = std::min(begin, at);
      end = at + static_cast<size_t>(length);
    }
    at += static_cast<size_t>(length);
  }
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

}  // namespace

std::vector<Message> messages_of(const Json& list, std::string_view origin, std::string_view field) {
  std::vector<Message> messages;
  try {
    for (const Json& message : list.as_array()) {
      for (const char* call : {"tool_calls", "function_call"})
        if (const Json* made = message.find(call); made && !made->is_null())
          fail<DataError>("it has ", call, ", which no format here writes down");
      messages.push_back({message.at("role").as_string(), message.at("content").as_string()});
    }
  } catch (const DataError& error) {
    fail<DataError>("[chat] ", origin, ", message ", messages.size() + 1, ": ", error.what(), "; ", json_string(field),
                    " is a list of {\"role\": \"...\", \"content\": \"...\"}");
  }
  return messages;
}

// Concatenates special tokens and texts; adjacent texts are encoded as one, if both are learned or neither is.
class ChatFormat::Writer {
 public:
  Writer(const Tokenizer& tokenizer, std::string_view origin) : tokenizer_(tokenizer), origin_(origin) {}
  void special(std::string_view name, MarkedToken mark) {
    if (name.empty()) return;
    flush();
    out_.push_back(static_cast<MarkedToken>(*tokenizer_.special_token(name)) | mark);
    place_ = Tokenizer::Place::behind_token;
  }
  void text(std::string_view text, MarkedToken mark) {
    if (mark != mark_) flush();
    mark_ = mark;
    text_ += text;
  }
  std::vector<MarkedToken> take() {
    flush();
    return std::move(out_);
  }

 private:
  void flush() {
    if (text_.empty()) return;
    const auto ids = tokenizer_.encode_at(text_, place_, origin_);
    for (const int32_t id : ids) out_.push_back(static_cast<MarkedToken>(id) | mark_);
    text_.clear();
    place_ = Tokenizer::Place::within;
  }

  const Tokenizer& tokenizer_;
  std::string_view origin_;
  std::vector<MarkedToken> out_;
  std::string text_;
  MarkedToken mark_ = kReadOnly;
  Tokenizer::Place place_ = Tokenizer::Place::within;
};

ChatFormat::ChatFormat(std::string_view name, const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  if (name == "chatml") {
    frame_ = {"", "<|im_start|>", "", "\n", "<|im_end|>", "\n", false};
  } else if (name == "llama3") {
    frame_ = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "\n\n", "<|eot_id|>", "", true};
  } else if (name == "gemma") {
    frame_ = {"<bos>", "<start_of_turn>", "", "\n", "<end_of_turn>", "\n", true, "model", true};
  } else {
    fail<ConfigError>("[chat] unknown format '", name, "'; known: chatml, llama3, gemma");
  }
  for (const std::string_view token : {frame_.begin, frame_.before_role, frame_.behind_role, frame_.end_of_turn}) {
    if (token.empty()) continue;
    if (!tokenizer.special_token(token))
      fail<ConfigError>("[chat] format ", name, ": the tokenizer (", tokenizer.kind(), ") has no special token ", token);
    tokenizer.encode_special(token, Tokenizer::Place::first, str("format ", name));  // refuses those that are not found by their name alone
  }
  end_of_turn_ = *tokenizer.special_token(frame_.end_of_turn);
}

void ChatFormat::open_turn(const std::string& role, Writer& out) const {
  out.special(frame_.before_role, kReadOnly);
  out.text(role == "assistant" ? frame_.assistant : std::string_view(role), kReadOnly);
  out.special(frame_.behind_role, kReadOnly);
  out.text(frame_.before_content, kReadOnly);
}

void ChatFormat::check_turns(std::span<const Message> messages, std::string_view origin) const {
  // The roles of published templates: a misspelt one would be read but never learned.
  constexpr std::string_view kRoles[] = {"system", "user", "assistant", "tool", "developer", "ipython"};
  for (const auto& [role, content] : messages)
    check<DataError>(std::ranges::find(kRoles, role) != std::end(kRoles), "[chat] ", origin, ": the role ", json_string(role),
                     " is none of system, user, assistant, tool, developer and ipython");
  if (!frame_.alternates) return;
  const size_t first = !messages.empty() && messages[0].role == "system";
  for (size_t i = first; i < messages.size(); ++i)
    check<DataError>(messages[i].role == ((i - first) % 2 == 0 ? "user" : "assistant"), "[chat] ", origin, ": in this format a user and an ",
                     "assistant take turns, after a system message, perhaps; message ", i + 1, " is of the role ", json_string(messages[i].role));
  check<DataError>(first < messages.size() || first == 0, "[chat] ", origin, ": what the system says stands before what a user says, and none does");
}

std::vector<MarkedToken> ChatFormat::encode(std::span<const Message> messages, std::string_view origin) const {
  check_turns(messages, origin);
  Writer out(tokenizer_, origin);
  out.special(frame_.begin, kReadOnly);
  std::string before;  // prepended to the next turn
  for (const auto& [role, content] : messages) {
    if (frame_.alternates && role == "system") {
      before = content + "\n\n";
      continue;
    }
    const MarkedToken mark = role == "assistant" ? 0 : kReadOnly;
    open_turn(role, out);
    out.text(std::exchange(before, {}), mark);
    out.text(frame_.trims ? trimmed(content) : content, mark);
    out.special(frame_.end_of_turn, mark);
    out.text(frame_.behind_turn, kReadOnly);
  }
  return out.take();
}

std::vector<int32_t> ChatFormat::encode_prompt(std::span<const Message> messages, std::string_view origin) const {
  std::vector<int32_t> ids;
  const auto append = [&](const std::vector<MarkedToken>& tokens) {
    for (const MarkedToken token : tokens) ids.push_back(static_cast<int32_t>(token & ~kReadOnly));
  };
  append(encode(messages, origin));
  Writer turn(tokenizer_, origin);
  open_turn("assistant", turn);
  append(turn.take());
  return ids;
}

}  // namespace sheaf::models
