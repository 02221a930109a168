#include "sheaf/models/drafter.h"

#include <algorithm>
#include <utility>

#include "sheaf/autograd/ops.h"

namespace sheaf::models {

Drafter::Drafter(Decoder& model, int64_t most, int64_t capacity, int64_t vocab)
    : model_(model),
      vocab_(vocab),
      caches_(static_cast<size_t>(std::clamp<int64_t>(most, 0, model.num_mtp_layers())), nn::KeyValueCache(capacity)),
      before_(caches_.size()) {}

// At position i layer k reads the previous layer's output there, and the token at i + k + 1. So if the model has read n tokens, and
// one more is known, layer k reads its last k positions, up to n - 1, with drafted tokens: it forgets them. Of these the next layer
// needs only the position before them next time, which was computed without drafts.
std::vector<int32_t> Drafter::draft(const Tensor& x_BTC, std::span<const int32_t> tokens, int64_t most) {
  const int64_t n = std::ssize(tokens) - 1;
  std::vector<int32_t> all(tokens.begin(), tokens.end());
  Tensor x = x_BTC, next_before;
  for (int64_t k = 0; k < std::min(most, this->most()); ++k) {
    nn::KeyValueCache& cache = caches_[static_cast<size_t>(k)];
    const Tensor before = std::exchange(before_[static_cast<size_t>(k)], std::exchange(next_before, {}));
    if (before) x = concat({before, x}, 1);
    const int64_t begin = cache.length();
    check<ShapeError>(begin + x.size(1) == n, "[draft] MTP layer ", k, " has read ", begin, " tokens of ", n, ", and gets ", x.size(1));
    const std::vector<int32_t> next(all.begin() + begin + k + 1, all.end());
    x = model_.read_further(k, x, Tensor::from(next, {1, n - begin}).to(x.device()), cache);
    cache.shorten(std::max<int64_t>(0, n - k));
    if (const int64_t last = n - 1 - k; last >= 0) next_before = slice(x, 1, last - begin, last - begin + 1).clone();
    const Tensor logits = model_.logits_behind(slice(x, 1, x.size(1) - 1, x.size(1)));
    all.push_back(static_cast<int32_t>(argmax(slice(logits, 2, 0, std::min(vocab_, logits.size(2)))).to_vector<int64_t>()[0]));
  }
  return {all.begin() + std::ssize(tokens), all.end()};
}

}  // namespace sheaf::models
