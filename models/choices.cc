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

constexpr size_t kBlock = size_t{16} << 20;  // bytes read at a time

struct Texts {
  std::string prompt;
  std::vector<std::string> choices;
  int64_t answer = 0;
};

// Some copies of HellaSwag have their labels as texts.
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
  const auto given = [&](size_t first) {
    return std::ranges::count_if(std::span(members).subspan(first, 3), [](const Json& member) { return !member.is_null(); });
  };
  const size_t first = given(3) > given(0) ? 3 : 0;
  Texts out;
  size_t at = first;
  try {
    for (; at < first + 3; ++at) check<DataError>(!members[at].is_null(), "it is not there, or null");
    at = first;
    out.prompt = members[at].as_string();
    for (const Json& choice : members[++at].as_array()) out.choices.push_back(choice.as_string());
    out.answer = number_of(members[++at]);
  } catch (const DataError& error) {
    fail<DataError>("[choices] ", origin, ": member ", json_string(keys[at]), ": ", error.what(), "; a question is an object with \"prompt\", ",
                    "\"choices\" and \"answer\", or HellaSwag's \"ctx\", \"endings\" and \"label\"");
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

std::vector<ChoiceRow> encoded(const Texts& texts, const Tokenizer& tokenizer, std::span<const int32_t> before,
                               const std::string& origin) {
  const std::string_view whole = texts.prompt;
  size_t end = whole.size();
  while (end > 0 && is_blank(whole[end - 1])) --end;
  const std::string_view blanks = whole.substr(end);
  std::vector<int32_t> prompt(before.begin(), before.end());
  if (end > 0) {
    const std::vector<int32_t> ids = tokenizer.encode(whole.substr(0, end), origin);
    prompt.insert(prompt.end(), ids.begin(), ids.end());
  }
  check<DataError>(!prompt.empty(), "[choices] ", origin, ": the prompt is empty");
  const Tokenizer::Place place = end > 0 ? tokenizer.place_behind(whole.substr(0, end), prompt.back()) : Tokenizer::Place::within;
  std::vector<ChoiceRow> rows;
  for (const std::string& choice : texts.choices) {
    check<DataError>(!choice.empty(), "[choices] ", origin, ": a choice is empty");
    const std::string text = str(!blanks.empty() ? blanks : is_blank(choice.front()) ? "" : " ", choice);
    ChoiceRow row{.tokens = prompt, .begin = std::ssize(prompt), .characters = characters_of(choice)};
    const std::vector<int32_t> more = tokenizer.encode_at(text, place, origin);
    row.tokens.insert(row.tokens.end(), more.begin(), more.end());
    rows.push_back(std::move(row));
  }
  return rows;
}

// If it does not fit, keeps the last tokens. The first one is never predicted.
bool shorten(ChoiceRow& row, int64_t most) {
  const int64_t over = std::ssize(row.tokens) - most;
  if (over <= 0) return false;
  row.tokens.erase(row.tokens.begin(), row.tokens.begin() + over);
  row.begin = std::max<int64_t>(1, row.begin - over);
  return true;
}

}  // namespace

ChoiceQuestions::ChoiceQuestions(std::string name, const std::string& path, const Tokenizer& tokenizer, const Options& options)
    : name_(std::move(name)), path_(path) {
  check<ConfigError>(options.vocab == 0 || tokenizer.least_vocab() <= options.vocab, "[choices] '", path, "': the tokenizer has ",
                     tokenizer.least_vocab(), " tokens, the model ", options.vocab);
  TextReader reader(path, kBlock);
  int64_t lines = 0;
  const auto is_enough = [&] { return options.most > 0 && std::ssize(questions_) >= options.most; };
  for (std::string_view block; !is_enough() && !(block = reader.next(JsonLines::cut)).empty();) {
    std::vector<NumberedLine> found = numbered_lines(block, lines);
    if (options.most > 0) found.resize(std::min(found.size(), static_cast<size_t>(options.most) - questions_.size()));
    std::vector<std::vector<ChoiceRow>> each(found.size());
    std::vector<int64_t> answers(found.size());
    parallel_for(std::ssize(found), 16, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        const std::string origin = str("line ", found[i].number, " of ", reader.name());
        const Texts texts = texts_in(found[i].text, origin);
        each[i] = encoded(texts, tokenizer, options.before, origin);
        answers[i] = texts.answer;
      }
    });
    for (size_t i = 0; i < found.size(); ++i) {
      questions_.push_back({.first = std::ssize(rows_), .count = std::ssize(each[i]), .answer = answers[i], .line = found[i].number});
      for (ChoiceRow& row : each[i]) {
        shortened_ += shorten(row, options.context + 1);
        rows_.push_back(std::move(row));
      }
    }
  }
  check<DataError>(!questions_.empty(), "[choices] ", reader.name(), " has no questions");
}

std::string ChoiceQuestions::digest() const {
  ContentHash hash;
  hash.update(questions_.data(), static_cast<int64_t>(questions_.size() * sizeof(Question)));
  for (const ChoiceRow& row : rows_) {
    const int64_t numbers[] = {std::ssize(row.tokens), row.begin, row.characters};
    hash.update(numbers, sizeof numbers);
    hash.update(row.tokens.data(), static_cast<int64_t>(row.tokens.size() * sizeof(int32_t)));
  }
  return hash.digest();
}

ChoiceAccuracy ChoiceQuestions::accuracy(std::span<const double> log_likelihoods) const {
  check<ShapeError>(std::ssize(log_likelihoods) == std::ssize(rows_), "[choices] ", log_likelihoods.size(), " log-likelihoods of ",
                    rows_.size(), " rows");
  for (const Question& q : questions_)
    for (int64_t row = q.first; row < q.first + q.count; ++row)
      check<NonFiniteError>(!std::isnan(log_likelihoods[static_cast<size_t>(row)]), "[choices] line ", q.line, " of '", path_,
                            "': the likelihood of choice ", row - q.first, " is nan");
  const auto right = [&](const Question& q, const auto& score) {
    const auto of = [&](int64_t choice) { return score(static_cast<size_t>(q.first + choice)); };
    for (int64_t choice = 0; choice < q.count; ++choice)  // the first of several equal ones
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

std::vector<AnsweredQuestions> open_questions(const std::string& text, const Tokenizer& tokenizer,
                                              const ChoiceQuestions::Options& options) {
  std::vector<AnsweredQuestions> out;
  for (const auto& [name, path] : named_files(text, "sets of questions")) out.push_back({ChoiceQuestions(name, path, tokenizer, options)});
  return out;
}

std::string digest_of(const std::vector<AnsweredQuestions>& sets) {
  std::string out;
  for (const AnsweredQuestions& set : sets)
    out += str(out.empty() ? "" : ", ", set.questions.questions().size(), " of '", set.questions.name(), "' with XXH3 ", set.questions.digest());
  return out.empty() ? "none" : out;
}

std::string questions_line(const ChoiceQuestions& q) {
  const auto count = q.questions().size();
  return str(count, count == 1 ? " question" : " questions", q.name().empty() ? "" : " of " + q.name(),
             q.num_shortened() == 0 ? "" : str("; ", q.num_shortened(), " of their ", q.rows().size(),
                                               " choices do not fit into a window, and lose their beginnings"));
}

}  // namespace sheaf::models
