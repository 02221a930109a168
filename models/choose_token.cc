#include "sheaf/models/choose_token.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sheaf/core/error.h"
#include "sheaf/core/random.h"

namespace sheaf::models {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Logits with a NaN or +inf have neither a softmax nor a likeliest token. -inf is allowed: it forbids a token.
void require_numbers(std::span<const double> logits, int64_t position, size_t prompt) {
  const bool none = std::ranges::all_of(logits, [](double logit) { return logit == -kInfinity; });
  const auto wrong = std::ranges::find_if(logits, [](double logit) { return std::isnan(logit) || logit == kInfinity; });
  if (!none && wrong == logits.end()) return;
  fail<NonFiniteError>("[generate] position ", position, ", after a prompt of ", prompt, " tokens: ",
                       none ? "the logits of all tokens are -inf"
                            : str("the logit of token ", wrong - logits.begin(), " is ", std::isnan(*wrong) ? "nan" : "inf"));
}

void require_choice(const GenerateConfig& c) {
  const auto share = [](double p) { return p >= 0 && p <= 1; };
  check<ConfigError>(c.temperature >= 0 && c.top_k >= 0 && share(c.top_p) && share(c.min_p), "[generate] temperature ", c.temperature,
                     ", top_k ", c.top_k, ", top_p ", c.top_p, ", min_p ", c.min_p, ": at least 0, and the last two at most 1");
}

// `u` is uniform in [0, 1). Sorting a whole vocabulary may take longer than the model: a draw among all tokens iterates over them by
// id, and a restricted one sorts only as far as necessary.
int32_t choose(std::span<const double> logits, const GenerateConfig& config, double u) {
  const auto likeliest = [&] { return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin()); };
  if (config.temperature == 0) return likeliest();
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  size_t sorted = 0;
  if (config.top_k > 0) {
    sorted = std::min(static_cast<size_t>(config.top_k), ids.size());
    std::partial_sort(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(sorted), ids.end(), likelier);
    ids.resize(sorted);
  }
  const double best = logits[sorted > 0 ? ids[0] : likeliest()];
  const auto weight = [&](int32_t id) { return std::exp((logits[id] - best) / config.temperature); };
  std::vector<double> weights(ids.size());  // of `ids`
  double total = 0;
  for (size_t i = 0; i < ids.size(); ++i) total += weights[i] = weight(ids[i]);
  if (config.top_p < 1) {
    const double enough = config.top_p * total;
    size_t count = 0;
    for (total = 0; count < ids.size() && (count == 0 || total < enough); ++count) {
      if (count == sorted) {  // usually a few make up enough
        sorted = std::min(std::max(size_t{64}, 8 * sorted), ids.size());
        const auto begin = ids.begin() + static_cast<ptrdiff_t>(count), end = ids.begin() + static_cast<ptrdiff_t>(sorted);
        if (end != ids.end()) std::nth_element(begin, end, ids.end(), likelier);
        std::sort(begin, end, likelier);
      }
      total += weights[count] = weight(ids[count]);
    }
    ids.resize(count);
  }
  if (config.min_p > 0) {  // the likeliest has weight 1
    size_t count = 0;
    for (size_t i = 0; i < ids.size(); ++i)
      if (weights[i] >= config.min_p) ids[count] = ids[i], weights[count++] = weights[i];
    ids.resize(count);
    total = std::accumulate(weights.begin(), weights.begin() + static_cast<ptrdiff_t>(count), 0.0);
  }
  // The same sum as `total`, and u * total is less than it: a token without weight is never drawn, not even by rounding.
  double sum = 0;
  for (size_t i = 0; i < ids.size(); ++i)
    if (u * total < (sum += weights[i])) return ids[i];
  return ids.back();
}

}  // namespace

int32_t choose_token(std::span<const double> logits, const GenerateConfig& config, int64_t sample, int64_t index, size_t prompt) {
  require_choice(config);
  require_numbers(logits, static_cast<int64_t>(prompt) + index, prompt);
  const Key key = key_of("generate", static_cast<uint64_t>(config.seed));
  const uint64_t draw = (static_cast<uint64_t>(sample) << 32) + static_cast<uint64_t>(index);
  return choose(logits, config, static_cast<double>(random_u64(key, draw) >> 11) * 0x1p-53);
}

}  // namespace sheaf::models
