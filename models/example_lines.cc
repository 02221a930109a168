#include "sheaf/models/example_lines.h"

#include <algorithm>
#include <utility>

#include "sheaf/core/json.h"
#include "sheaf/core/parallel.h"

namespace sheaf::models {
namespace {

int32_t end_of(const Tokenizer& tokenizer, const std::string& name) {
  const auto end = name.empty() ? tokenizer.end_of_text() : tokenizer.special_token(name);
  if (!end)
    fail<ConfigError>("[examples] the tokenizer (", tokenizer.kind(), ") has no special token ", name.empty() ? "for the end of a text" : name,
                      ", by which examples are kept apart");
  return *end;
}

}  // namespace

ExampleLines::ExampleLines(const Tokenizer& tokenizer, ExampleOptions options)
    : tokenizer_(tokenizer), options_(std::move(options)), end_(end_of(tokenizer, options_.end)) {
  const bool asks = !options_.prompt_field.empty(), talks = !options_.chat_format.empty();
  if (asks == talks) fail<ConfigError>("[examples] they are either prompts with answers or conversations");
  if (talks && options_.special_tokens)
    fail<ConfigError>("[examples] what is said in a conversation makes no special tokens: its format does");
  if (options_.field.empty()) options_.field = talks ? "messages" : "completion";
  if (talks) chat_.emplace(options_.chat_format, tokenizer);
  if (talks && chat_->end_of_turn() == end_)
    fail<ConfigError>("[examples] the token that ends a turn of format ", options_.chat_format, " is also that which keeps examples apart");
}

void ExampleLines::read(std::string_view block, const std::string& name, int64_t& lines, std::vector<MarkedToken>& examples) {
  const std::vector<NumberedLine> found = numbered_lines(block, lines);
  std::vector<std::vector<MarkedToken>> each(found.size());
  const auto bytes_of_line = static_cast<int64_t>(block.size() / (found.size() + 1));
  parallel_for(static_cast<int64_t>(found.size()), std::clamp<int64_t>(16'384 / (bytes_of_line + 1), 1, 16), [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
      each[i] = example(found[i].text, str("line ", found[i].number, " of ", name));
  });
  for (const std::vector<MarkedToken>& one : each) {
    examples.insert(examples.end(), one.begin(), one.end());
    const int64_t learned = std::ranges::count_if(one, [](MarkedToken t) { return !(t & kReadOnly); });
    learned_ += learned, in_vain_ += learned == 0;
  }
  count_ += static_cast<int64_t>(each.size());
}

std::vector<MarkedToken> ExampleLines::example(std::string_view line, const std::string& origin) const {
  std::vector<MarkedToken> out;
  if (chat_) {
    out = conversation(line, origin);
    out.push_back(static_cast<MarkedToken>(end_) | kReadOnly);
  } else {
    answer(line, origin, out);
  }
  out[0] |= kReadOnly;
  for (size_t i = 0; i + 1 < out.size(); ++i)
    if ((out[i] & ~kReadOnly) == static_cast<MarkedToken>(end_))
      fail<DataError>("[examples] ", origin, ": the token ", json_string(tokenizer_.decode({&end_, 1})), ", by which examples are kept ",
                      "apart, is inside of this one");
  return out;
}

void ExampleLines::answer(std::string_view line, const std::string& origin, std::vector<MarkedToken>& out) const {
  const auto append = [&](const std::string& text, Tokenizer::Place place, MarkedToken mark) {
    const std::vector<int32_t> ids =
        options_.special_tokens ? tokenizer_.encode_special(text, place, origin) : tokenizer_.encode_at(text, place, origin);
    for (const int32_t id : ids) out.push_back(static_cast<MarkedToken>(id) | mark);
  };
  const std::string fields[] = {options_.prompt_field, options_.field};
  const std::vector<std::string> texts = json_text_members(line, fields, origin);
  append(texts[0], Tokenizer::Place::first, kReadOnly);
  append(texts[1], out.empty() ? Tokenizer::Place::first : tokenizer_.place_behind(texts[0], static_cast<int32_t>(out.back() & ~kReadOnly)), 0);
  if (out.empty() || out.back() != static_cast<MarkedToken>(end_)) out.push_back(static_cast<MarkedToken>(end_));
}

std::vector<MarkedToken> ExampleLines::conversation(std::string_view line, const std::string& origin) const {
  const std::vector<Json> member = json_members(line, {&options_.field, 1}, origin);
  return chat_->encode(messages_of(member[0], origin, options_.field), origin);
}

}  // namespace sheaf::models
