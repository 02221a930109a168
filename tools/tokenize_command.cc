#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/text_reader.h"
#include "sheaf/models/token_file.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/utf8.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/stop_signals.h"

namespace sheaf::tools {
namespace {

// Bytes of text that each thread encodes at a time: texts may be larger than memory.
constexpr size_t kBlockPerThread = size_t{8} << 20;

// Refuses to overwrite a text, as would happen if OUT was forgotten.
void require_no_text(const std::string& out, const std::vector<std::string>& texts) {
  if (out == "-") fail<ConfigError>("[tokenize] a token file cannot be written to standard output: name the file to write last");
  if (path_exists(out) && !models::is_token_file(out))
    fail<ConfigError>("[tokenize] '", out, "' exists and is no token file: name the file to write last");
  std::error_code absent;
  for (const std::string& text : texts)
    if (std::filesystem::equivalent(out, text, absent)) fail<ConfigError>("[tokenize] '", out, "' is also among the texts");
}

class Tokenizing {
 public:
  Tokenizing(const models::Tokenizer& tokenizer, const std::string& path, const TokenizeArguments& arguments, int threads)
      : tokenizer_(tokenizer),
        texts_(arguments.texts),
        block_(kBlockPerThread * static_cast<size_t>(threads)) {
    if (arguments.are_examples()) {
      models::ExampleOptions options = arguments.examples;
      options.field = texts_.field;
      examples_.emplace(tokenizer, std::move(options));
    }
    out_.emplace(path, tokenizer.vocab_size(), examples_ ? std::optional(examples_->end()) : std::nullopt);
  }

  /// False if a signal requests a stop: then the text is incomplete.
  bool add(const std::string& path) {
    models::TextReader reader(path, block_, [this] { return signals_.asked() != 0; });
    const int64_t before = documents_;
    examples_ ? add_examples(reader) : texts_.in_json_lines(path) ? add_documents(reader) : add_document(reader);
    check<DataError>(reader.bytes() > 0 || signals_.asked(), "[tokenize] ", reader.name(), " is empty");
    check<DataError>(documents_ > before || signals_.asked(), "[tokenize] ", reader.name(), " has no ", examples_ ? "examples" : "documents");
    bytes_ += reader.bytes();
    return !signals_.asked();
  }
  int signal() const { return signals_.asked(); }

  void finish() { out_->finish(); }

  std::string summary(double seconds, int threads) const {
    char speed[64];
    std::snprintf(speed, sizeof speed, "%.1f MB in %.2f s = %.1f MB/s", static_cast<double>(bytes_) / 1e6, seconds,
                  static_cast<double>(bytes_) / 1e6 / seconds);
    const std::string learned = examples_ ? str(examples_->num_learned(), " of them learned, ") : "";
    return str(out_->size(), " tokens (", tokenizer_.kind(), ") of ", counted(documents_, examples_ ? "example" : "document"), ", ", learned,
               speed, " with ", counted(threads, "thread"));
  }
  std::string note() const {
    if (!examples_ || examples_->num_in_vain() == 0) return note_;
    return str("of ", examples_->num_in_vain(), " of ", documents_, " examples nothing is learned: training leaves them out");
  }

 private:
  void add_document(models::TextReader& reader) {
    const auto cut = [&](std::string_view text, size_t at) { return tokenizer_.cut(text, at); };
    for (std::string_view block; !signals_.asked() && !(block = reader.next(cut)).empty();) {
      note_invalid(reader, block);
      out_->write(reader.offset() ? tokenizer_.encode_more(block, reader.name()) : tokenizer_.encode(block, reader.name()));
    }
    if (const auto end = tokenizer_.end_of_text()) out_->write({&*end, 1});
    ++documents_;
  }

  void add_documents(models::TextReader& reader) {
    models::JsonLines lines = texts_.lines();
    std::vector<std::string> documents;
    for (std::string_view block; !signals_.asked() && !(block = reader.next(models::JsonLines::cut)).empty();) {
      documents.clear();
      lines.read(block, reader.name(), documents);
      out_->write(tokenizer_.encode_documents(documents, reader.name()));
      documents_ += static_cast<int64_t>(documents.size());
    }
  }

  void add_examples(models::TextReader& reader) {
    std::vector<models::MarkedToken> tokens;
    int64_t lines = 0;
    for (std::string_view block; !signals_.asked() && !(block = reader.next(models::JsonLines::cut)).empty();) {
      tokens.clear();
      examples_->read(block, reader.name(), lines, tokens);
      out_->write_examples(tokens);
    }
    documents_ = examples_->num_examples();
  }

  // Every byte can be encoded, but training on another encoding would be useless.
  void note_invalid(const models::TextReader& reader, std::string_view block) {
    if (!note_.empty() || tokenizer_.kind() == "byte") return;
    const size_t valid = models::valid_utf8_prefix(block);
    if (valid < block.size())
      note_ = str(reader.name(), " is not UTF-8 at byte ", reader.offset() + static_cast<int64_t>(valid),
                  "; such bytes became tokens one by one");
  }

  StopSignals signals_;
  const models::Tokenizer& tokenizer_;
  std::optional<models::TokenFileWriter> out_;
  const TextArguments& texts_;
  std::optional<models::ExampleLines> examples_;
  size_t block_;
  int64_t bytes_ = 0, documents_ = 0;
  std::string note_;
};

}  // namespace

void TextArguments::check(const std::vector<std::string>& texts) const {
  if (!field.empty() && std::ranges::none_of(texts, [this](const std::string& path) { return in_json_lines(path); }))
    fail<ConfigError>("[text] --field ", field, ": no text is JSON lines; --jsonl says that they are");
}

int tokenize_command(const TokenizeArguments& arguments) {
  std::vector<std::string> texts = arguments.files;
  if (texts.size() < 2) fail<ConfigError>("[tokenize] name at least one text and, last, the file to write");
  const std::string out = texts.back();
  texts.pop_back();
  arguments.texts.check(texts);
  if (arguments.are_examples()) {
    for (const std::string& text : texts)
      if (!arguments.texts.in_json_lines(text))
        fail<ConfigError>("[tokenize] examples are JSON lines, and '", text, "' is not named .jsonl; --jsonl says that it is");
  } else if (arguments.examples.special_tokens || !arguments.examples.end.empty()) {
    fail<ConfigError>("[tokenize] --special-tokens and --end-token are for examples (--prompt-field, --chat)");
  }
  if (arguments.tokenizer == "byte" && !arguments.tokenizer_folder.empty())
    fail<ConfigError>("[tokenize] --tokenizer byte has no files: --tokenizer-folder ", arguments.tokenizer_folder,
                      " is for gpt2, llama3 and huggingface");
  const auto tokenizer = models::open_tokenizer(arguments.tokenizer, arguments.tokenizer_folder);
  require_no_text(out, texts);
  expect_writable_file("tokenize", out);
  const int threads = arguments.threads > 0 ? arguments.threads : threads_per_rank(1);
  RankContext::current().threads = threads;
  const RankScope scope(RankContext::current());
  const auto start = std::chrono::steady_clock::now();
  Tokenizing tokenizing(*tokenizer, out, arguments, threads);
  for (const std::string& text : texts)
    if (!tokenizing.add(text)) {
      warn_on_stderr(str("'", out, "' is not written: signal ", tokenizing.signal(), " asked to stop"));
      return 128 + tokenizing.signal();
    }
  tokenizing.finish();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (!tokenizing.note().empty()) warn_on_stderr(tokenizing.note());
  say(out + ": " + tokenizing.summary(seconds.count(), threads));
  return 0;
}

}  // namespace sheaf::tools
