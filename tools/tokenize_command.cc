#include <chrono>
#include <cstdio>

#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/token_file.h"
#include "sheaf/models/tokenizer.h"
#include "sheaf/models/utf8.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/stop_signals.h"

namespace sheaf::tools {
namespace {

// Text that is encoded at a time and thread: texts may be larger than memory.
constexpr int64_t kBlockPerThread = int64_t{8} << 20;

// A forgotten OUT would cost the last text its content.
void require_no_text(const std::string& path) {
  if (path_exists(path) && !models::is_token_file(path))
    fail<ConfigError>("[tokenize] '", path, "' exists and is no token file: name the file to write last");
}

class Tokenizing {
 public:
  Tokenizing(const models::Tokenizer& tokenizer, const std::string& path, int threads)
      : tokenizer_(tokenizer), out_(path, tokenizer.vocab_size()), block_(kBlockPerThread * threads) {}

  /// False if a signal asks to stop: then the document is not whole.
  bool add_document(const std::string& path) {
    const File file = File::open<DataError>(path);
    check<DataError>(file.size() > 0, "[tokenize] '", path, "' is empty");
    const Mapping map = file.map();
    const std::string_view text = map.text();
    for (size_t at = 0; at < text.size();) {
      const size_t end = tokenizer_.cut(text, std::min(at + static_cast<size_t>(block_), text.size()));
      const std::string_view block = text.substr(at, end - at);
      note_invalid(path, block, at);
      out_.write(at ? tokenizer_.encode_more(block, path) : tokenizer_.encode(block, path));
      map.release(static_cast<int64_t>(at), static_cast<int64_t>(end));
      at = end;
      if (signals_.asked()) return false;
    }
    if (const auto end = tokenizer_.end_of_text()) out_.write({&*end, 1});
    bytes_ += file.size();
    ++documents_;
    return true;
  }
  int signal() const { return signals_.asked(); }

  void finish() { out_.finish(); }

  std::string summary(double seconds, int threads) const {
    char speed[64];
    std::snprintf(speed, sizeof speed, "%.1f MB in %.2f s = %.1f MB/s", static_cast<double>(bytes_) / 1e6, seconds,
                  static_cast<double>(bytes_) / 1e6 / seconds);
    return str(out_.size(), " tokens (", tokenizer_.kind(), ") of ", documents_,
               documents_ == 1 ? " document, " : " documents, ", speed, " with ", threads,
               threads == 1 ? " thread" : " threads");
  }
  const std::string& note() const { return note_; }

 private:
  // Every byte can be encoded, but a text in another encoding would train nothing sensible.
  void note_invalid(const std::string& path, std::string_view block, size_t at) {
    if (!note_.empty() || tokenizer_.kind() == "byte") return;
    const size_t valid = models::valid_utf8_prefix(block);
    if (valid < block.size())
      note_ = str("'", path, "' is not UTF-8 at byte ", at + valid, "; such bytes became tokens one by one");
  }

  StopSignals signals_;
  const models::Tokenizer& tokenizer_;
  models::TokenFileWriter out_;
  int64_t block_, bytes_ = 0, documents_ = 0;
  std::string note_;
};

}  // namespace

int tokenize_command(const TokenizeArguments& arguments) {
  std::vector<std::string> texts = arguments.files;
  if (texts.size() < 2) fail<ConfigError>("[tokenize] name at least one text and, last, the file to write");
  const std::string out = texts.back();
  texts.pop_back();
  const auto tokenizer = models::open_tokenizer(arguments.tokenizer, arguments.tokenizer_folder);
  require_no_text(out);
  const int threads = arguments.threads > 0 ? arguments.threads : threads_per_rank(1);
  RankContext::current().threads = threads;
  const RankScope scope(RankContext::current());
  const auto start = std::chrono::steady_clock::now();
  Tokenizing tokenizing(*tokenizer, out, threads);
  for (const std::string& text : texts)
    if (!tokenizing.add_document(text)) {
      models::warn_on_stderr(str("'", out, "' is not written: signal ", tokenizing.signal(), " asked to stop"));
      return 128 + tokenizing.signal();
    }
  tokenizing.finish();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  if (!tokenizing.note().empty()) models::warn_on_stderr(tokenizing.note());
  say(out + ": " + tokenizing.summary(seconds.count(), threads));
  return 0;
}

}  // namespace sheaf::tools
