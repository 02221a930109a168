#include "sheaf/models/choices.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <utility>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/core/parallel.h"
#include "sheaf/models/named_files.h"
#include "sheaf/models/text_reader.h"

namespace sheaf::models {
namespace {

struct Texts {
  std::string prompt;
  std::vector<std::string> choices;
  int64_t answer = 0;
};

int64_t number_of(Json& label) {
  const std::string* const text = label.text();
  if (!text) return label.as_int();
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  check<DataError>(error == std::errc() && end == text->data() + text->size(), json_string(*text), " is no number");
  return value;
}

Texts texts_in(std::string_view line, const std::string& origin) {
  static const std::string keys[] = {"prompt", "choices", "answer", "ctx", "endings", "label"};
  std::vector<Json> members = json_members_or_null(line, keys, origin);
  const auto given = [&](size_t i) { return !members[i].is_null(); };
  const size_t first = given(3) || given(4) ? 3 : 0;
  for (size_t i = first; i < first + 3; ++i)
    check<DataError>(given(i), "[choices] ", origin, ": no member ", json_string(keys[i]), "; a question has \"prompt\", \"choices\" and ",
                     "\"answer\", or HellaSwag's \"ctx\", \"endings\" and \"label\"");
  Texts out;
  size_t at = first;
  try {
    out.prompt = members[at].as_string();
    for (const Json& choice : members[++at].as_array()) out.choices.push_back(choice.as_string());
    out.answer = number_of(members[++at]);
  } catch (const DataError& error) {
    fail<DataError>("[choices] ", origin, ": member ", json_string(keys[at]), ": ", error.what());
  }
  check<DataError>(out.choices.size() >= 2, "[choices] ", origin, ": a question has two choices at least, not ", out.choices.size());
  check<DataError>(out.answer >= 0 && out.answer < std::ssize(out.choices), "[choices] ", origin, ": answer ", out.answer, " is none of ",
                   out.choices.size(), " choices, which count from 0");
  return out;
}

bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

int64_t characters_of(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });  // UTF-8
}

struct Encoded {
  std::vector<ChoiceRow> rows;
  int64_t answer = 0;
};

Encoded encoded(const Texts& texts, const Tokenizer& tokenizer, std::span<const int32_t> before, const std::string& origin) {
  std::vector<int32_t> prompt(before.begin(), before.end());
  const std::vector<int32_t> ids = tokenizer.encode(texts.prompt, origin);
  prompt.insert(prompt.end(), ids.begin(), ids.end());
  check<DataError>(!prompt.empty(), "[choices] ", origin, ": the prompt is empty");
  Encoded out{.rows = {}, .answer = texts.answer};
  for (const std::string& choice : texts.choices) {
    check<DataError>(!choice.empty(), "[choices] ", origin, ": a choice is empty");
    const bool apart = is_blank(choice.front()) || (!texts.prompt.empty() && is_blank(texts.prompt.back()));
    ChoiceRow row{.tokens = prompt, .begin = std::ssize(prompt), .characters = characters_of(choice)};
    const std::vector<int32_t> more = tokenizer.encode_more(apart ? choice : " " + choice, origin);
    row.tokens.insert(row.tokens.end(), more.begin(), more.end());
    out.rows.push_back(std::move(row));
  }
  return out;
}

// Of what does not fit the last tokens stay. The first one is never predicted.
bool shorten(ChoiceRow& row, int64_t most) {
  const int64_t over = std::ssize(row.tokens) - most;
  if (over <= 0) return false;
  row.tokens.erase(row.tokens.begin(), row.tokens.begin() + over);
  row.begin = std::max<int64_t>(1, row.begin - over);
  return true;
}

}  // namespace

ChoiceQuestions::ChoiceQuestions(std::string name, const std::string& path, const Tokenizer& tokenizer, std::span<const int32_t> before,
                                 int64_t context, int64_t most)
    : name_(std::move(name)) {
  const std::string text = File::open<DataError>(path).read_all();
  int64_t count = 0;
  std::vector<NumberedLine> lines = numbered_lines(text, count);
  check<DataError>(!lines.empty(), "[choices] '", path, "' has no questions");
  if (most > 0 && most < std::ssize(lines)) lines.resize(static_cast<size_t>(most));
  std::vector<Encoded> each(lines.size());
  parallel_for(std::ssize(lines), 16, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const std::string origin = str("line ", lines[i].number, " of '", path, "'");
      each[i] = encoded(texts_in(lines[i].text, origin), tokenizer, before, origin);
    }
  });
  for (Encoded& question : each) {
    questions_.push_back({.first = std::ssize(rows_), .count = std::ssize(question.rows), .answer = question.answer});
    for (ChoiceRow& row : question.rows) {
      shortened_ += shorten(row, context + 1);
      rows_.push_back(std::move(row));
    }
  }
}

std::string ChoiceQuestions::digest() const {
  std::string all;
  const auto add = [&](const void* data, size_t bytes) { all.append(static_cast<const char*>(data), bytes); };
  for (const Question& q : questions_) add(&q, sizeof q);
  for (const ChoiceRow& row : rows_) {
    const int64_t numbers[] = {std::ssize(row.tokens), row.begin, row.characters};
    add(numbers, sizeof numbers);
    add(row.tokens.data(), row.tokens.size() * sizeof(int32_t));
  }
  return digest_of_text(all).xxh3;
}

ChoiceAccuracy ChoiceQuestions::accuracy(std::span<const double> log_likelihoods) const {
  check<ShapeError>(std::ssize(log_likelihoods) == std::ssize(rows_), "[choices] ", log_likelihoods.size(), " log-likelihoods of ",
                    rows_.size(), " rows");
  for (const Question& q : questions_)
    for (int64_t row = q.first; row < q.first + q.count; ++row)
      check<NonFiniteError>(!std::isnan(log_likelihoods[static_cast<size_t>(row)]), "[choices] question ", &q - questions_.data(),
                            name_.empty() ? "" : " of " + name_, ": the likelihood of choice ", row - q.first, " is nan");
  const auto right = [&](const Question& q, const auto& score) {
    const auto of = [&](int64_t choice) { return score(static_cast<size_t>(q.first + choice)); };
    for (int64_t choice = 0; choice < q.count; ++choice)  // of equals the first one
      if (choice != q.answer && (choice < q.answer ? of(choice) >= of(q.answer) : of(choice) > of(q.answer))) return false;
    return true;
  };
  int64_t by_sum = 0, by_mean = 0;
  for (const Question& q : questions_) {
    by_sum += right(q, [&](size_t row) { return log_likelihoods[row]; });
    by_mean += right(q, [&](size_t row) { return log_likelihoods[row] / static_cast<double>(rows_[row].characters); });
  }
  const auto all = static_cast<double>(questions_.size());
  return {.accuracy = static_cast<double>(by_sum) / all, .accuracy_norm = static_cast<double>(by_mean) / all};
}

std::string accuracy_line(const std::string& name, const ChoiceAccuracy& of) {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, "%.4f, norm %.4f", of.accuracy, of.accuracy_norm);
  return str("accuracy ", name.empty() ? "" : "of " + name + " ", numbers);
}

std::vector<ChoiceQuestions> open_choices(const std::string& text, const Tokenizer& tokenizer, std::span<const int32_t> before,
                                          int64_t context, int64_t most) {
  std::vector<ChoiceQuestions> out;
  for (const auto& [name, path] : named_files(text, "sets of questions")) out.emplace_back(name, path, tokenizer, before, context, most);
  return out;
}

}  // namespace sheaf::models
