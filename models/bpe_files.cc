// The published files of byte-pair tokenizers.
#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "sheaf/core/file.h"
#include "sheaf/models/bpe_tokenizer.h"
#include "sheaf/models/byte_alphabet.h"

namespace sheaf::models {
namespace {

// `first` in `folder`, or the same file under its other name.
std::string file_in(const std::string& folder, const char* first, const char* second) {
  const std::string path = folder + "/" + second;
  return path_exists(path) ? path : folder + "/" + first;
}

// Calls f; adds `where` in front of the messages of its errors.
template <class F>
auto at_place(const std::string& where, F&& f) {
  try {
    return f();
  } catch (const DataError& error) {
    fail<DataError>("[tokenizer] ", where, ": ", error.what());
  }
}

// Calls f(line, number) for the lines of a text that are not empty, counting from 1.
template <class F>
void for_each_line(std::string_view text, F&& f) {
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!line.empty()) f(line, number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// Tokens in any order, sorted by id: each id from 0 on once.
class ById {
 public:
  explicit ById(size_t count) : tokens_(count), taken_(count) {}

  void put(int64_t id, std::string bytes) {
    const auto count = static_cast<int64_t>(tokens_.size());
    if (id < 0 || id >= count)
      fail<DataError>("[tokenizer] id ", id, " among ", count, " tokens: the ids must be 0 to ", count - 1);
    if (taken_[static_cast<size_t>(id)]) fail<DataError>("[tokenizer] two tokens have the id ", id);
    taken_[static_cast<size_t>(id)] = true;
    tokens_[static_cast<size_t>(id)] = std::move(bytes);
  }
  // As many ids as tokens, none twice: there is no hole.
  std::vector<std::string> take() { return std::move(tokens_); }

 private:
  std::vector<std::string> tokens_;
  std::vector<bool> taken_;
};

std::string from_base64(std::string_view text) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  check<DataError>(text.size() % 4 == 0, "not base64");
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  text.remove_suffix(padding);
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    const size_t digit = kDigits.find(c);
    check<DataError>(digit != std::string_view::npos, "not base64");
    bits = (bits << 6 | static_cast<uint32_t>(digit)) & 0xFFFFFF;
    if ((count += 6) < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count);
  }
  return bytes;
}

}  // namespace

std::shared_ptr<const Tokenizer> load_gpt2_tokenizer(const std::string& folder) {
  const std::string vocabulary = file_in(folder, "encoder.json", "vocab.json"),
                    ranking = file_in(folder, "vocab.bpe", "merges.txt");
  const Json json = Json::parse(File::open<DataError>(vocabulary).read_all(), str("'", vocabulary, "'"));
  std::unordered_map<std::string_view, int32_t> ids;
  std::vector<std::string> tokens = at_place(str("'", vocabulary, "'"), [&] {
    ById by_id(json.as_object().size());
    for (const auto& [token, id] : json.as_object()) {
      by_id.put(id.as_int(), alphabet_to_bytes(token));
      ids.emplace(token, static_cast<int32_t>(id.as_int()));
    }
    return by_id.take();
  });
  const std::string text = File::open<DataError>(ranking).read_all();
  std::vector<BpePair> merges;
  for_each_line(text, [&](std::string_view line, int64_t number) {
    if (number == 1 && line.starts_with("#version")) return;
    const std::string where = str("[tokenizer] '", ranking, "' line ", number);
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos)
      fail<DataError>(where, ": expected two tokens and a space between them, found ", json_string(line.substr(0, 80)));
    const auto id_of = [&](std::string_view token) {
      const auto found = ids.find(token);
      if (found == ids.end())
        fail<DataError>(where, ": ", json_string(token.substr(0, 80)), " is not in '", vocabulary, "'");
      return found->second;
    };
    merges.emplace_back(id_of(line.substr(0, space)), id_of(line.substr(space + 1)));
  });
  return at_place(str("'", vocabulary, "' and '", ranking, "'"),
                  [&] { return make_gpt2_tokenizer(std::move(tokens), std::move(merges)); });
}

std::shared_ptr<const Tokenizer> load_llama3_tokenizer(const std::string& folder) {
  const std::string path = folder + "/tokenizer.model", text = File::open<DataError>(path).read_all();
  std::vector<std::pair<int64_t, std::string>> found;
  for_each_line(text, [&](std::string_view line, int64_t number) {
    const size_t space = std::min(line.find(' '), line.size());
    int64_t rank = -1;
    const char *begin = line.data() + std::min(space + 1, line.size()), *end = line.data() + line.size();
    const auto [stop, error] = std::from_chars(begin, end, rank);
    if (error != std::errc() || stop != end || begin == end)
      fail<DataError>("[tokenizer] '", path, "' line ", number, ": expected base64, a space and a rank");
    at_place(str("'", path, "' line ", number), [&] { found.emplace_back(rank, from_base64(line.substr(0, space))); });
  });
  return at_place(str("'", path, "'"), [&] {
    ById by_rank(found.size());
    for (auto& [rank, bytes] : found) by_rank.put(rank, std::move(bytes));
    return make_llama3_tokenizer(by_rank.take());
  });
}

}  // namespace sheaf::models
