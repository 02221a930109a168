#include "sheaf/models/text_reader.h"

#include <cerrno>
#include <system_error>

#include <poll.h>
#include <unistd.h>

#include "sheaf/core/json.h"
#include "sheaf/core/parallel.h"

namespace sheaf::models {
namespace {

// How much text after a cut may affect it: some characters, or a token.
constexpr size_t kBehindCut = 64 << 10;

}  // namespace

TextReader::TextReader(const std::string& path, size_t block, std::function<bool()> stop)
    : name_(path == "-" ? "standard input" : str("'", path, "'")), is_input_(path == "-"), stop_(std::move(stop)), block_(block) {
  if (!is_input_) file_ = File::open<DataError>(path);
}

// Until the buffer has this many bytes, or all that exist.
void TextReader::fill(size_t bytes) {
  size_t have = buffer_.size();
  buffer_.resize(std::max(have, bytes));
  while (!ended_ && have < bytes) {
    size_t count = bytes - have;
    if (is_input_) {
      count = read_input(&buffer_[have], count);
      ended_ = count == 0;
    } else {
      const int64_t at = offset_ + static_cast<int64_t>(have);
      count = std::min(count, static_cast<size_t>(file_.size() - at));
      file_.read_at(at, &buffer_[have], static_cast<int64_t>(count));
      ended_ = at + static_cast<int64_t>(count) == file_.size();
    }
    have += count;
  }
  buffer_.resize(have);
}

// 0 at the end.
size_t TextReader::read_input(char* to, size_t bytes) {
  for (;;) {
    if (stop_()) return 0;
    pollfd input{STDIN_FILENO, POLLIN, 0};
    const int ready = poll(&input, 1, /*milliseconds=*/200);
    if (ready == 0) continue;
    // A signal ends the waiting, and stop_() must be called: read() would continue to wait.
    const ssize_t got = ready < 0 ? -1 : ::read(STDIN_FILENO, to, bytes);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR && errno != EAGAIN)
      fail<IoError>("[text] cannot read ", name_, ": ", std::generic_category().message(errno));
  }
}

// It would be read as a text of strange characters.
void TextReader::refuse_compressed() const {
  const auto begins = [&](std::string_view magic) { return std::string_view(buffer_).starts_with(magic); };
  const char* const what = begins("\x1f\x8b") ? "gzip" : begins("\x28\xb5\x2f\xfd") ? "zstd" : begins("PAR1") ? "Parquet" : nullptr;
  if (what) fail<DataError>("[text] ", name_, " is ", what, ", no text: write what is in it to standard input, and read that as -");
}

std::string_view TextReader::next(const Cut& cut) {
  buffer_.erase(0, given_);
  offset_ += static_cast<int64_t>(given_);
  given_ = 0;
  size_t from = block_;  // where the search for a cut goes on
  for (size_t want = block_ + kBehindCut;; want += block_) {
    fill(want);
    if (offset_ == 0) refuse_compressed();
    if (ended_ && buffer_.size() <= block_) break;
    given_ = cut(buffer_, from);
    if (ended_ || given_ + kBehindCut / 2 <= buffer_.size()) return std::string_view(buffer_).substr(0, given_);
    from = std::max(from, buffer_.size() - kBehindCut);
  }
  given_ = buffer_.size();
  return buffer_;
}

size_t JsonLines::cut(std::string_view text, size_t at) {
  const size_t end = text.find('\n', at == 0 ? 0 : at - 1);
  return end == std::string_view::npos ? text.size() : end + 1;
}

std::vector<NumberedLine> numbered_lines(std::string_view block, int64_t& lines) {
  std::vector<NumberedLine> found;
  while (!block.empty()) {
    const size_t end = std::min(block.find('\n'), block.size());
    ++lines;
    const std::string_view line = block.substr(0, end);
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) found.push_back({line, lines});
    block.remove_prefix(std::min(end + 1, block.size()));
  }
  return found;
}

void JsonLines::read(std::string_view block, const std::string& name, std::vector<std::string>& documents) {
  const std::vector<NumberedLine> lines = numbered_lines(block, lines_);
  const size_t first = documents.size();
  documents.resize(first + lines.size());
  parallel_for(static_cast<int64_t>(lines.size()), 16, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const std::string place = str("line ", lines[i].number, " of ", name);
      documents[first + i] = std::move(json_text_members(lines[i].text, {&field_, 1}, place)[0]);
    }
  });
  std::erase_if(documents, [](const std::string& text) { return text.empty(); });
}

bool is_json_lines(std::string_view path) { return path.ends_with(".jsonl") || path.ends_with(".ndjson"); }

}  // namespace sheaf::models
