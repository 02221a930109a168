#include "sheaf/models/generate_many.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/parallel.h"
#include "sheaf/distributed/in_turn.h"
#include "sheaf/models/choose_token.h"
#include "sheaf/nn/shard.h"

namespace sheaf::models {
namespace {

/// Rows of batches, equally many on each rank.
class RowsOfRanks {
 public:
  RowsOfRanks(const Layout& rows, Device device) : rows_(rows), device_(device) {
    for (int a = 0; a < rows.num_axes(); ++a) {
      check<PlacementError>(rows[a].is_shard(0) || rows[a].is_replicate(), "[generate_many] rows lie as ", rows.to_string(),
                            ": wants Shard(0) on the axes that cut them, Replicate on others");
      if (rows[a].is_shard(0)) parts_ *= rows.mesh()->size(a);
    }
  }
  /// [ranks B, ..] of this rank's values [B, ..].
  Tensor batch(const std::vector<int32_t>& values, Shape local) const {
    local[0] *= parts_;
    return Tensor::from_local(values, {kI32, local, rows_}).to(device_);
  }
  /// The largest of each on any rank. Collective.
  template <size_t N>
  std::array<int64_t, N> most(const std::array<int64_t, N>& here) const {
    if (parts_ == 1) return here;
    const std::vector<int64_t> mine(here.begin(), here.end());
    const Tensor of_ranks = Tensor::from_local(mine, {kI64, {parts_, static_cast<int64_t>(N)}, rows_}).to(device_);
    const auto all = redistribute(of_ranks, Layout(rows_.mesh(), Placement::replicate())).template to_vector<int64_t>();
    std::array<int64_t, N> out = here;
    for (size_t i = 0; i < all.size(); ++i) out[i % N] = std::max(out[i % N], all[i]);
    return out;
  }

 private:
  Layout rows_;
  Device device_;
  int64_t parts_ = 1;
};

/// A sequence in progress.
struct Row {
  std::span<const int32_t> prompt;
  int64_t sample = 0;          ///< its number among all
  int64_t most = 0;            ///< tokens that it may have
  Continuation* to = nullptr;  ///< null: padding, to make the numbers on all ranks equal
  bool done = true;
};

/// Sequences that are started and read together.
class Wave {
 public:
  Wave(Decoder& model, const RowsOfRanks& ranks, std::vector<Row> rows, int64_t longest, int64_t most, int64_t vocab,
       std::span<const int32_t> ends, const GenerateConfig& config)
      : model_(model), ranks_(ranks), rows_(std::move(rows)), longest_(longest), vocab_(vocab), ends_(ends), config_(config),
        cache_(longest + most - 1) {}

  /// `seen`: shapes that have been read before.
  void run(std::set<std::pair<int64_t, int64_t>>& seen) {
    std::vector<int32_t> tokens = prompts();
    for (int64_t width = longest_;; width = 1) {
      const auto count = std::ssize(rows_);
      std::optional<CollectivesInTurn> in_turn;
      if (seen.emplace(count, width).second) in_turn.emplace();  // kernels are new
      tokens = draw(model_.next_logits(ranks_.batch(tokens, {count, width}), cache_).to(Device::cpu()));
      const auto alive = ranks_.most<1>({std::ranges::count(rows_, false, &Row::done)})[0];
      if (alive == 0) return;
      if (alive <= count / 2) keep(alive, tokens);
      begin_anew();
    }
  }

 private:
  // With padding in front, so that all end together.
  std::vector<int32_t> prompts() {
    std::vector<int32_t> tokens(rows_.size() * static_cast<size_t>(longest_), 0);
    for (size_t i = 0; i < rows_.size(); ++i) {
      const std::span<const int32_t> prompt = rows_[i].prompt;
      std::ranges::copy(prompt, tokens.begin() + static_cast<ptrdiff_t>((i + 1) * static_cast<size_t>(longest_) - prompt.size()));
      begins_.push_back(static_cast<int32_t>(longest_ - std::ssize(prompt)));
    }
    cache_.set_begins(ranks_.batch(begins_, {std::ssize(rows_)}));
    return tokens;
  }

  // The next token of each row, for `logits` [B, 1, V].
  std::vector<int32_t> draw(const Tensor& logits) {
    const View view = logits.view();
    std::vector<int32_t> next(rows_.size(), 0);
    const int64_t vocab = std::min(vocab_, logits.size(-1));
    parallel_for(std::ssize(rows_), 1, [&](int64_t begin, int64_t end) {
      std::vector<double> row(static_cast<size_t>(vocab));
      for (int64_t i = begin; i < end; ++i) {
        const Row& r = rows_[static_cast<size_t>(i)];
        if (r.done) continue;
        visit_floating("generate_many", view.dtype, [&]<class T>() {
          using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
          const T* from = view.as<T>() + i * view.strides[0];
          std::transform(from, from + vocab, row.begin(), [](T x) { return static_cast<Wide>(x); });
        });
        try {
          next[static_cast<size_t>(i)] = choose_token(row, config_, r.sample, std::ssize(r.to->tokens), r.prompt.size());
        } catch (const NonFiniteError& error) {
          fail<NonFiniteError>("[generate_many] prompt ", r.sample, ": ", error.what());
        }
      }
    });
    for (size_t i = 0; i < rows_.size(); ++i) {
      Row& r = rows_[i];
      if (r.done) continue;
      r.to->ended = std::ranges::find(ends_, next[i]) != ends_.end();
      if (!r.to->ended) r.to->tokens.push_back(next[i]);
      r.done = r.to->ended || std::ssize(r.to->tokens) == r.most;
    }
    return next;
  }

  // Keeps only as many as the rank with the most has in progress.
  void keep(int64_t count, std::vector<int32_t>& tokens) {
    std::vector<int64_t> order(rows_.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [&](int64_t i) { return rows_[static_cast<size_t>(i)].done; });
    order.resize(static_cast<size_t>(count));
    cache_.keep_sequences(order);
    const auto take_those = [&](auto& of) {
      std::remove_reference_t<decltype(of)> kept;
      for (const int64_t i : order) kept.push_back(of[static_cast<size_t>(i)]);
      of = std::move(kept);
    };
    take_those(rows_), take_those(tokens), take_those(begins_);
  }

  // Finished sequences begin anew with each token: so they cost little, and never get too long.
  void begin_anew() {
    if (std::ranges::none_of(rows_, &Row::done)) return;
    for (size_t i = 0; i < rows_.size(); ++i)
      if (rows_[i].done) begins_[i] = static_cast<int32_t>(cache_.length());
    cache_.set_begins(ranks_.batch(begins_, {std::ssize(rows_)}));
  }

  Decoder& model_;
  const RowsOfRanks& ranks_;
  std::vector<Row> rows_;
  std::vector<int32_t> begins_;  // of rows, in the cache
  int64_t longest_, vocab_;
  std::span<const int32_t> ends_;
  const GenerateConfig& config_;
  nn::KeyValueCache cache_;
};

void check_prompts(const Decoder& model, std::span<const std::vector<int32_t>> prompts, const GenerateManyOptions& options) {
  check<ConfigError>(options.context > 0 && options.vocab > 0 && options.at_once > 0, "[generate_many] context ", options.context,
                     ", vocab ", options.vocab, ", at_once ", options.at_once, ": all must be positive");
  check<ConfigError>(options.context <= model.context(), "[generate_many] context ", options.context, ": the model's is ", model.context());
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto number = options.first + static_cast<int64_t>(i);
    check<ConfigError>(!prompts[i].empty(), "[generate_many] prompt ", number, " is empty: give at least one token");
    check<ConfigError>(std::ssize(prompts[i]) <= options.context, "[generate_many] prompt ", number, " has ", prompts[i].size(),
                       " tokens, the context ", options.context);
  }
}

}  // namespace

std::vector<Continuation> generate_many(Decoder& model, std::span<const std::vector<int32_t>> prompts, const GenerateConfig& config,
                                        const GenerateManyOptions& options) {
  check_prompts(model, prompts, options);
  const nn::EvalScope evaluation(model);
  const Device device = device_of(model);
  const DeviceScope scope(device);
  const RowsOfRanks ranks(options.rows, device);
  std::vector<Continuation> out(prompts.size());
  if (config.tokens <= 0) return out;
  std::vector<size_t> order(prompts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater<>(), [&](size_t i) { return prompts[i].size(); });
  std::set<std::pair<int64_t, int64_t>> seen;
  static constexpr int32_t kPadding[] = {0};
  for (size_t at = 0;; at += static_cast<size_t>(options.at_once)) {
    std::vector<Row> rows;
    int64_t longest = 0, most = 0;
    for (size_t i = at; i < std::min(order.size(), at + static_cast<size_t>(options.at_once)); ++i) {
      const std::vector<int32_t>& prompt = prompts[order[i]];
      const int64_t tokens = std::min(config.tokens, options.context - std::ssize(prompt) + 1);
      rows.push_back({prompt, options.first + static_cast<int64_t>(order[i]), tokens, &out[order[i]], /*done=*/false});
      longest = std::max(longest, std::ssize(prompt)), most = std::max(most, tokens);
    }
    std::optional<CollectivesInTurn> in_turn;
    if (at == 0) in_turn.emplace();
    const auto [count, all_longest, all_most] = ranks.most<3>({std::ssize(rows), longest, most});
    in_turn.reset();
    if (count == 0) return out;
    rows.resize(static_cast<size_t>(count), Row{kPadding});
    Wave(model, ranks, std::move(rows), all_longest, all_most, options.vocab, options.ends, config).run(seen);
  }
}

}  // namespace sheaf::models
