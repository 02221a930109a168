#include "sheaf/models/word_pattern.h"

#include <cstdint>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "sheaf/core/error.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

// Unicode's White_Space, spelled out: PCRE2's \s also has U+180E, which is not white space.
#define SPACE R"(\t-\r\x{85}\p{Z})"
// One that is neither letter nor number nor space.
#define OTHER "[^" SPACE R"(\p{L}\p{N}])"
// The last of several spaces belongs to the word after it.
#define SPACES "[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"

// The words of contractions, letters, numbers and others in the newer patterns; `more` may follow punctuation.
#define CONTRACTION "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define OTHERS(more) "| ?" OTHER "+[\r\n" more "]*|[" SPACE "]*[\r\n]+|" SPACES
#define BEFORE R"([^\r\n\p{L}\p{N}]?)"
#define UPPER R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"
#define LOWER R"([\p{Ll}\p{Lm}\p{Lo}\p{M}])"
#define CASED(end) BEFORE UPPER "*" LOWER "+" end "|" BEFORE UPPER "+" LOWER "*" end

constexpr const char* kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?)" OTHER "+|" SPACES;
constexpr const char* kLlama3 = CONTRACTION "|" BEFORE R"(\p{L}+|\p{N}{1,3})" OTHERS("");
constexpr const char* kQwen2 = CONTRACTION "|" BEFORE R"(\p{L}+|\p{N})" OTHERS("");
constexpr const char* kTekken = CASED("") R"(|\p{N})" OTHERS("/");
constexpr const char* kO200k = CASED(CONTRACTION "?") R"(|\p{N}{1,3})" OTHERS("/");

// As they are published.
constexpr const char* kPublishedGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kPublishedLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kPublishedQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kPublishedTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?)"
    R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kPublishedO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::string reason(int error) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

bool is_space(uint32_t point) {
  return (point >= 0x9 && point <= 0xD) || point == 0x20 || point == 0x85 || point == 0xA0 || point == 0x1680 ||
         (point >= 0x2000 && point <= 0x200A) || point == 0x2028 || point == 0x2029 || point == 0x202F ||
         point == 0x205F || point == 0x3000;
}

// Whether a valid character that is no space begins, or ends, at text[at].
bool solid_from(std::string_view text, size_t at) {
  const int length = utf8_length(text, at);
  return length > 0 && !is_space(code_point(text, at, length));
}
bool solid_until(std::string_view text, size_t at) {
  for (size_t length = 1; length <= 4 && length <= at; ++length) {
    if (utf8_length(text, at - length) == static_cast<int>(length)) return solid_from(text, at - length);
  }
  return false;
}

}  // namespace

const WordPattern& WordPattern::gpt2() {
  static const WordPattern pattern(kGpt2);
  return pattern;
}
const WordPattern& WordPattern::llama3() {
  static const WordPattern pattern(kLlama3);
  return pattern;
}

const WordPattern& WordPattern::qwen2() {
  static const WordPattern pattern(kQwen2);
  return pattern;
}
const WordPattern& WordPattern::tekken() {
  static const WordPattern pattern(kTekken);
  return pattern;
}
const WordPattern& WordPattern::o200k() {
  static const WordPattern pattern(kO200k);
  return pattern;
}

namespace {

struct Known {
  std::string_view name, published;
  const WordPattern& (*pattern)();
};
constexpr Known kKnown[] = {{"gpt2", kPublishedGpt2, WordPattern::gpt2},
                            {"llama3", kPublishedLlama3, WordPattern::llama3},
                            {"qwen2", kPublishedQwen2, WordPattern::qwen2},
                            {"tekken", kPublishedTekken, WordPattern::tekken},
                            {"o200k", kPublishedO200k, WordPattern::o200k}};

}  // namespace

const WordPattern* WordPattern::of_expression(std::string_view expression) {
  for (const Known& known : kKnown)
    if (known.published == expression) return &known.pattern();
  return nullptr;
}
const WordPattern* WordPattern::of_name(std::string_view name) {
  for (const Known& known : kKnown)
    if (known.name == name) return &known.pattern();
  return nullptr;
}
std::string_view WordPattern::published() const {
  for (const Known& known : kKnown)
    if (&known.pattern() == this) return known.published;
  return {};
}

WordPattern::WordPattern(const std::string& expression) {
  int error = 0;
  size_t offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.c_str()), PCRE2_ZERO_TERMINATED,
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, nullptr);
  if (!code) throw Error(ExitCode::kDesync, str("[tokenizer] PCRE2 refuses the pattern at ", offset, ": ", reason(error)));
  code_ = code;
  jit_ = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;
}
WordPattern::~WordPattern() { pcre2_code_free(static_cast<pcre2_code*>(code_)); }

WordPattern::Match::Match(const WordPattern& pattern)
    : pattern_(pattern), data_(pcre2_match_data_create(1, nullptr)), context_(pcre2_match_context_create(nullptr)) {
  if (!data_ || !context_) throw std::bad_alloc();
  // Long runs of spaces take as many steps as they have characters.
  pcre2_set_match_limit(static_cast<pcre2_match_context*>(context_), UINT32_MAX);
}
WordPattern::Match::~Match() {
  pcre2_match_data_free(static_cast<pcre2_match_data*>(data_));
  pcre2_match_context_free(static_cast<pcre2_match_context*>(context_));
}

size_t WordPattern::Match::end(std::string_view text, size_t at) const {
  const auto* code = static_cast<const pcre2_code*>(pattern_.code_);
  auto* data = static_cast<pcre2_match_data*>(data_);
  auto* context = static_cast<pcre2_match_context*>(context_);
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int count = pattern_.jit_ ? pcre2_jit_match(code, subject, text.size(), at, 0, data, context)
                                  : pcre2_match(code, subject, text.size(), at, PCRE2_NO_UTF_CHECK, data, context);
  if (count < 0) throw Error(ExitCode::kDesync, str("[tokenizer] PCRE2 fails at byte ", at, ": ", reason(count)));
  return pcre2_get_ovector_pointer(data)[1];
}

// A space can only be a word's first character, or be among spaces. A single line break ends a word, its own or that of the text
// before it, which in two patterns may continue with slashes.
size_t safe_cut(std::string_view text, size_t at) {
  for (size_t i = at < 2 ? 2 : at; i < text.size(); ++i) {
    if (text[i] == ' ' && solid_until(text, i)) return i;
    if (text[i - 1] == '\n' && text[i] != '/' && solid_from(text, i) && solid_until(text, i - 1)) return i;
  }
  return text.size();
}

}  // namespace sheaf::models
