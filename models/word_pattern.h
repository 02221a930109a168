// WordPattern: the regular expressions by which byte-pair tokenizers split a text into words. Tokens never cross words.
#pragma once

#include <string>
#include <string_view>

namespace sheaf::models {

/// Immutable, so that threads may share one. Letters, numbers and spaces are those of Unicode as PCRE2 knows it.
class WordPattern {
 public:
  static const WordPattern& gpt2();
  static const WordPattern& llama3();
  static const WordPattern& qwen2();
  static const WordPattern& tekken();  ///< Mistral Nemo's
  static const WordPattern& o200k();   ///< GPT-4o's
  /// The one whose expression this is, as a tokenizer.json has it; null if none is.
  static const WordPattern* of_expression(std::string_view expression);
  /// "gpt2", "llama3", "qwen2", "tekken" or "o200k"; null for another name.
  static const WordPattern* of_name(std::string_view name);
  /// The published expression.
  std::string_view published() const;

  WordPattern(const WordPattern&) = delete;
  WordPattern& operator=(const WordPattern&) = delete;

  /// Calls f(word) for the words of `text`, which must be valid UTF-8: consecutive, covering all of it.
  template <class F>
  void for_each_word(std::string_view text, F&& f) const {
    const Match match(*this);
    for (size_t at = 0; at < text.size();) {
      const size_t end = match.end(text, at);
      f(text.substr(at, end - at));
      at = end;
    }
  }

 private:
  explicit WordPattern(const std::string& expression);
  ~WordPattern();

  class Match {  // PCRE2's working memory, of one thread
   public:
    explicit Match(const WordPattern& pattern);
    ~Match();
    Match(const Match&) = delete;
    Match& operator=(const Match&) = delete;
    /// The end of the word that begins at `at`.
    size_t end(std::string_view text, size_t at) const;

   private:
    const WordPattern& pattern_;
    void *data_, *context_;
  };

  void* code_;  // pcre2_code
  bool jit_ = false;
};

/// The first offset from `at` on where a word of all patterns ends, whatever follows: the words of a text are then those of its two
/// parts. text.size() if there is none. It is between a character and a space, or after a line break.
size_t safe_cut(std::string_view text, size_t at);

}  // namespace sheaf::models
