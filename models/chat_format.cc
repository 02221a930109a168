#include "sheaf/models/chat_format.h"

#include <algorithm>

#include "sheaf/core/error.h"
#include "sheaf/core/json.h"

namespace sheaf::models {
namespace {

void append(const std::vector<int32_t>& ids, MarkedToken mark, std::vector<MarkedToken>& out) {
  for (const int32_t id : ids) out.push_back(static_cast<MarkedToken>(id) | mark);
}

std::string_view trimmed(std::string_view text) {
  constexpr const char* kBlanks = " \t\r\n\f\v";
  const size_t begin = text.find_first_not_of(kBlanks);
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
}

}  // namespace

ChatFormat::ChatFormat(std::string_view name, const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  if (name == "chatml") {
    frame_ = {"", "<|im_start|>", "\n", "<|im_end|>", "\n", false};
  } else if (name == "llama3") {
    frame_ = {"<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "", true};
  } else {
    fail<ConfigError>("[chat] unknown format '", name, "'; known: chatml, llama3");
  }
  for (std::string_view part : {frame_.begin, frame_.before_role, frame_.behind_role, frame_.end_of_turn}) {
    part = trimmed(part);
    if (!part.empty() && !tokenizer.special_token(part))
      fail<ConfigError>("[chat] format ", name, ": the tokenizer (", tokenizer.kind(), ") has no special token ", part);
  }
  end_of_turn_ = *tokenizer.special_token(frame_.end_of_turn);
}

void ChatFormat::open_turn(const std::string& role, std::vector<MarkedToken>& out) const {
  const std::string frame = str(out.empty() ? frame_.begin : "", frame_.before_role, role, frame_.behind_role);
  append(tokenizer_.encode_special(frame, out.empty()), kReadOnly, out);
}

std::vector<MarkedToken> ChatFormat::encode(std::span<const Message> messages, std::string_view origin) const {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  std::vector<MarkedToken> out;
  for (const auto& [role, content] : messages) {
    check<DataError>(!role.empty() && std::ranges::all_of(role, is_letter), "[chat] ", origin, ": the role ", json_string(role),
                     " is not made of letters");
    const MarkedToken mark = role == "assistant" ? 0 : kReadOnly;
    open_turn(role, out);
    append(tokenizer_.encode_more(frame_.trims ? trimmed(content) : content, origin), mark, out);
    out.push_back(static_cast<MarkedToken>(end_of_turn_) | mark);
    if (!frame_.behind_turn.empty()) append(tokenizer_.encode_more(frame_.behind_turn), kReadOnly, out);
  }
  return out;
}

std::vector<int32_t> ChatFormat::encode_prompt(std::span<const Message> messages) const {
  std::vector<MarkedToken> marked = encode(messages);
  open_turn("assistant", marked);
  std::vector<int32_t> ids;
  for (const MarkedToken token : marked) ids.push_back(static_cast<int32_t>(token & ~kReadOnly));
  return ids;
}

}  // namespace sheaf::models
