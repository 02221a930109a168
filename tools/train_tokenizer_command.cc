#include <chrono>
#include <cstdio>
#include <utility>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/file.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/huggingface_tokenizer.h"
#include "sheaf/models/text_reader.h"
#include "sheaf/models/utf8.h"
#include "sheaf/models/word_pattern.h"
#include "sheaf/tools/commands.h"
#include "sheaf/tools/output.h"
#include "sheaf/tools/stop_signals.h"

namespace sheaf::tools {
namespace {

// Bytes of text that each thread counts at a time: texts may be larger than memory.
constexpr size_t kBlockPerThread = size_t{8} << 20;

// Requires the name that readers look for in a folder; if OUT was forgotten, the last text would be overwritten.
void require_tokenizer_file(const std::string& path) {
  if (path.substr(path.rfind('/') + 1) != "tokenizer.json")
    fail<ConfigError>("[train-tokenizer] name the file to write last, FOLDER/tokenizer.json, not '", path, "'");
}

// Joins documents into one text: the byte between them ends words and is not part of one (WordCounts).
std::string joined(const std::vector<std::string>& documents) {
  std::string all;
  for (const std::string& document : documents) (all += document) += '\xFF';
  return all;
}

class Counting {
 public:
  Counting(models::BpeTrainer& trainer, const TextArguments& texts, size_t block) : trainer_(trainer), texts_(texts), block_(block) {}

  /// Reads on until everything is counted or `stop` is signalled.
  void add(const std::string& path, const StopSignals& stop) {
    models::TextReader reader(path, block_, [&] { return stop.asked() != 0; });
    const bool in_lines = texts_.in_json_lines(path);
    models::JsonLines lines = texts_.lines();
    std::vector<std::string> documents;
    const models::TextReader::Cut cut = in_lines ? models::JsonLines::cut : models::safe_cut;
    for (std::string_view block; !stop.asked() && !(block = reader.next(cut)).empty();) {
      if (in_lines) {
        documents.clear();
        lines.read(block, reader.name(), documents);
        trainer_.add(joined(documents));
      } else {
        note_invalid(reader, block);
        trainer_.add(block);
      }
    }
    check<DataError>(reader.bytes() > 0 || stop.asked(), "[train-tokenizer] ", reader.name(), " is empty");
    bytes_ += reader.bytes();
  }
  double megabytes() const { return static_cast<double>(bytes_) / 1e6; }
  const std::string& note() const { return note_; }

 private:
  void note_invalid(const models::TextReader& reader, std::string_view block) {
    if (!note_.empty()) return;
    const size_t valid = models::valid_utf8_prefix(block);
    if (valid < block.size())
      note_ = str(reader.name(), " is not UTF-8 at byte ", reader.offset() + static_cast<int64_t>(valid), "; such bytes join nothing");
  }

  models::BpeTrainer& trainer_;
  const TextArguments& texts_;
  size_t block_;
  int64_t bytes_ = 0;
  std::string note_;
};

class Clock {
 public:
  /// Seconds since the last call.
  double lap() {
    const auto before = std::exchange(start_, std::chrono::steady_clock::now());
    return std::chrono::duration<double>(start_ - before).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

int train_tokenizer_command(const TrainTokenizerArguments& arguments) {
  std::vector<std::string> texts = arguments.files;
  if (texts.size() < 2) fail<ConfigError>("[train-tokenizer] name at least one text and, last, the file to write");
  const std::string out = texts.back();
  texts.pop_back();
  arguments.texts.check(texts);
  require_tokenizer_file(out);
  models::BpeTrainerOptions options = arguments.options;
  if (!arguments.special.empty()) options.special = arguments.special;
  models::BpeTrainer trainer(options);
  make_folders(parent_of(out));
  expect_writable_file("train-tokenizer", out);
  const int threads = arguments.threads > 0 ? arguments.threads : threads_per_rank(1);
  RankContext::current().threads = threads;
  const RankScope scope(RankContext::current());

  const StopSignals signals;
  Clock clock;
  Counting counting(trainer, arguments.texts, kBlockPerThread * static_cast<size_t>(threads));
  for (const std::string& text : texts) counting.add(text, signals);
  const double counting_seconds = clock.lap();
  const Json file = signals.asked() ? Json() : trainer.train([&] { return signals.asked() != 0; });
  if (file.is_null()) {
    warn_on_stderr(str("'", out, "' is not written: signal ", signals.asked(), " asked to stop"));
    return 128 + signals.asked();
  }
  models::make_huggingface_tokenizer(file, "what was learned");
  const double learned = clock.lap();
  replace_file(out, file.dump() + "\n");
  if (!counting.note().empty()) warn_on_stderr(counting.note());
  char speed[160];
  std::snprintf(speed, sizeof speed, "%.1f MB counted in %.2f s = %.1f MB/s with %s, merges learned in %.2f s",
                counting.megabytes(), counting_seconds, counting.megabytes() / counting_seconds, counted(threads, "thread").c_str(), learned);
  say(str(out, ": ", options.vocab, " tokens of ", counted(std::ssize(texts), "text"), ", ", trainer.words(),
          " distinct words; ", speed));
  return 0;
}

}  // namespace sheaf::tools
