#include "sheaf/models/bpe_trainer.h"

#include <unordered_set>
#include <utility>

#include "sheaf/models/bpe.h"
#include "sheaf/models/bpe_merges.h"
#include "sheaf/models/byte_alphabet.h"
#include "sheaf/models/utf8.h"

namespace sheaf::models {
namespace {

const WordPattern& pattern_of(const std::string& name) {
  const WordPattern* pattern = WordPattern::of_name(name);
  if (!pattern)
    fail<ConfigError>("[bpe] unknown pattern '", name, "'; known are gpt2, llama3, qwen2, tekken and o200k");
  return *pattern;
}

void check_options(const BpeTrainerOptions& options) {
  std::unordered_set<std::string> taken;
  for (const unsigned char byte : bytes_in_alphabet())
    taken.insert(bytes_to_alphabet(std::string(1, static_cast<char>(byte))));
  for (const std::string& token : options.special) {
    if (token.empty() || token.size() > Bpe::kLongestToken || valid_utf8_prefix(token) < token.size())
      fail<ConfigError>("[bpe] a special token is text of 1 to ", Bpe::kLongestToken, " bytes, not ",
                        json_string(token.substr(0, 80)));
    if (!taken.insert(token).second)
      fail<ConfigError>("[bpe] the special token ", json_string(token), " stands there twice, or is what a byte is called");
  }
  if (options.min_frequency < 1) fail<ConfigError>("[bpe] a minimal frequency of ", options.min_frequency);
  const auto least = static_cast<int64_t>(taken.size());
  if (options.vocab < least || options.vocab > INT32_MAX)
    fail<ConfigError>("[bpe] a vocabulary of ", options.vocab, " tokens: 256 bytes and ", options.special.size(),
                      options.special.size() == 1 ? " special token" : " special tokens", " are ", least, " already, and ",
                      INT32_MAX, " the most");
}

Json byte_level(bool prefix, bool regex) {
  return Json::Object{{"type", "ByteLevel"}, {"add_prefix_space", prefix}, {"trim_offsets", true}, {"use_regex", regex}};
}

Json pre_tokenizer_of(const WordPattern& pattern) {
  if (&pattern == &WordPattern::gpt2()) return byte_level(false, true);
  Json split = Json::Object{{"type", "Split"},
                            {"pattern", Json::Object{{"Regex", pattern.published()}}},
                            {"behavior", "Isolated"},
                            {"invert", false}};
  return Json::Object{{"type", "Sequence"}, {"pretokenizers", Json::Array{std::move(split), byte_level(false, false)}}};
}

Json file_of(const WordPattern& pattern, const std::vector<std::string>& special, const LearnedMerges& learned) {
  Json::Object vocab;
  Json::Array added, merges;
  for (const std::string& token : special) {
    const auto id = static_cast<int64_t>(vocab.size());
    added.push_back(Json::Object{{"id", id}, {"content", token}, {"single_word", false}, {"lstrip", false},
                                 {"rstrip", false}, {"normalized", false}, {"special", true}});
    vocab.emplace_back(token, id);
  }
  std::vector<std::string> names;
  for (const std::string& token : learned.tokens) {
    names.push_back(bytes_to_alphabet(token));
    vocab.emplace_back(names.back(), static_cast<int64_t>(vocab.size()));
  }
  for (const auto& [left, right] : learned.merges)
    merges.push_back(Json::Array{names[static_cast<size_t>(left)], names[static_cast<size_t>(right)]});
  Json model = Json::Object{{"type", "BPE"}, {"dropout", Json()}, {"unk_token", Json()},
                            {"continuing_subword_prefix", Json()}, {"end_of_word_suffix", Json()}, {"fuse_unk", false},
                            {"byte_fallback", false}, {"ignore_merges", false}, {"vocab", std::move(vocab)},
                            {"merges", std::move(merges)}};
  return Json::Object{{"version", "1.0"}, {"truncation", Json()}, {"padding", Json()}, {"added_tokens", std::move(added)},
                      {"normalizer", Json()}, {"pre_tokenizer", pre_tokenizer_of(pattern)}, {"post_processor", Json()},
                      {"decoder", byte_level(true, true)}, {"model", std::move(model)}};
}

}  // namespace

BpeTrainer::BpeTrainer(BpeTrainerOptions options)
    : options_(std::move(options)), pattern_(pattern_of(options_.pattern)), counts_(pattern_) {
  check_options(options_);
}

Json BpeTrainer::train(const std::function<bool()>& stop) const {
  const std::unordered_set<std::string> special(options_.special.begin(), options_.special.end());
  const auto others = static_cast<int64_t>(special.size());
  bool stopped = false;
  MergeOptions options{.tokens = options_.vocab - others, .min_frequency = options_.min_frequency};
  options.stop = [&] { return stopped = stop(); };
  // A name in the file has up to two bytes for each of its token.
  options.may_be = [&](const std::string& bytes) {
    return bytes.size() <= Bpe::kLongestToken / 2 && !special.contains(bytes_to_alphabet(bytes));
  };
  const LearnedMerges learned = learn_merges(counts_, options);
  if (stopped) return {};
  const auto reached = static_cast<int64_t>(learned.tokens.size()) + others;
  if (reached < options_.vocab)
    fail<DataError>("[bpe] these texts make a vocabulary of ", reached, " tokens, not of ", options_.vocab, ": in their ",
                    words(), " distinct words no pair is left that stands there at least ", options_.min_frequency,
                    options_.min_frequency == 1 ? " time" : " times");
  return file_of(pattern_, options_.special, learned);
}

}  // namespace sheaf::models
