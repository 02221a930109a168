#include "sheaf/models/token_mixture.h"

#include <algorithm>
#include <cmath>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/number_words.h"

namespace sheaf::models {
namespace {

// How many of the first n samples a source with this split takes: its share of n, rounded.
int64_t taken(uint64_t split, int64_t n) {
  const auto product = static_cast<unsigned __int128>(split) * static_cast<uint64_t>(n);
  return static_cast<int64_t>((product + (uint64_t{1} << 63)) >> 64);
}

}  // namespace

TokenMixture::TokenMixture(Tokens tokens) : name_(tokens.name()), sources_{{std::move(tokens), 1}}, splits_{0} {}

TokenMixture::TokenMixture(std::vector<Source> sources) : sources_(std::move(sources)) {
  check<ConfigError>(!sources_.empty(), "[data] a mixture of nothing");
  for (const Source& s : sources_) {
    check<ConfigError>(std::isfinite(s.weight) && s.weight > 0, "[data] '", s.tokens.name(), "': its weight is ", s.weight,
                       ", not a number above 0");
    name_ += str(name_.empty() ? "" : " ", json_number(s.weight), " ", s.tokens.name());
  }
  splits_.resize(sources_.size());
  double rest = 0;  // the weights from s on
  for (size_t s = sources_.size(); s-- > 0;) {
    rest += sources_[s].weight;
    splits_[s] = static_cast<uint64_t>(std::ldexp(std::min(sources_[s].weight / rest, 1 - 0x1p-53), 64));
    check<ConfigError>(std::isfinite(rest) && splits_[s] > 0, "[data] '", sources_[s].tokens.name(), "': of weights like ",
                       sources_[s].weight, " and ", rest, " nothing can be mixed");
  }
}

TokenMixture TokenMixture::open(const std::string& text, int64_t vocab) {
  const std::vector<std::string> words = words_of(text);
  double weight = 0;
  const bool has_weights = words.size() > 1 && is_number(words[0], weight);
  try {
    return Tokens::open(text, vocab);
  } catch (const DataError& error) {
    if (!has_weights && std::ranges::none_of(words, [&](const std::string& w) { return is_number(w, weight); })) throw;
    if (!has_weights) fail<DataError>(error.what(), "; a mixture begins with a weight, \"0.7 web_*.bin 0.3 code_*.bin\"");
  }
  std::vector<Source> sources;
  for (size_t i = 0; i < words.size(); i += 2) {
    check<ConfigError>(is_number(words[i], weight) && i + 1 < words.size(), "[data] '", text,
                       "': a mixture is weights and files in turn, \"0.7 web_*.bin 0.3 code_*.bin\"; found '", words[i],
                       i + 1 < words.size() ? "' where a weight should be" : "' at its end");
    sources.push_back({Tokens::open(words[i + 1], vocab), weight});
  }
  TokenMixture mixture(std::move(sources));
  mixture.name_ = text;
  return mixture;
}

double TokenMixture::share(int s) const {
  double all = 0;
  for (const Source& source : sources_) all += source.weight;
  return sources_[static_cast<size_t>(s)].weight / all;
}

// The first source gets its share of the samples, evenly spaced; of the remaining ones, the second gets its share; the last gets the
// rest.
TokenMixture::Place TokenMixture::place(int64_t sample) const {
  const int last = static_cast<int>(sources_.size()) - 1;
  for (int s = 0; s < last; ++s) {
    const uint64_t split = splits_[static_cast<size_t>(s)];
    const int64_t before = taken(split, sample);
    if (taken(split, sample + 1) > before) return {s, before};
    sample -= before;
  }
  return {last, sample};
}

std::optional<int32_t> TokenMixture::example_end() const {
  std::vector<Tokens> all;
  for (const Source& s : sources_) all.push_back(s.tokens);
  return common_example_end(all);
}

int64_t TokenMixture::size() const {
  int64_t tokens = 0;
  for (const Source& s : sources_) tokens += s.tokens.size();
  return tokens;
}

int64_t TokenMixture::num_files() const {
  int64_t files = 0;
  for (const Source& s : sources_) files += s.tokens.num_files();
  return files;
}

std::string TokenMixture::check_all() const {
  if (sources_.size() == 1) return sources_[0].tokens.check_all();
  std::string all;
  for (const Source& s : sources_) all += str(json_number(s.weight), ' ', s.tokens.size(), ' ', s.tokens.check_all(), '\n');
  return digest_of_text(all).xxh3;
}

}  // namespace sheaf::models
