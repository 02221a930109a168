#include "sheaf/models/config_search.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include "sheaf/distributed/pipeline.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/models/config_choice.h"
#include "sheaf/nn/layers/attention.h"

namespace sheaf::models {
namespace {

using namespace config_search;

class Search {
 public:
  Search(const TrainConfig& config, int64_t vocab, int world, const Machine& machine, const ConfigSearchOptions& options)
      : islands_(config.train.islands), config_(island_of(config)), vocab_(vocab), world_(ranks_of_island("plan", config, world)),
        machine_(machine), options_(options) {}

  ConfigSearchResult run() {
    const std::vector<Choice> axes = choices_of_axes();
    for_all(axes, [&](const Choice& x) { plan(x); });
    // Any measure to make it fit takes more time, except that more micro-batches save some for stages.
    double fastest = std::numeric_limits<double>::max();
    for (const auto& [choice, time] : done_)
      if (time) fastest = std::min(fastest, time->seconds);
    std::vector<Choice> near;
    for (const Choice& x : axes)
      if (const auto& time = done_.at(x); time && time->seconds <= 2 * fastest) near.push_back(x);
    for_all(with_all_gather(near), [&](const Choice& x) { settle_memory(x); });
    // If none of these fits, the others may.
    if (fitting().empty()) for_all(with_all_gather(axes), [&](const Choice& x) { settle_memory(x); });
    std::vector<Choice> best;  // of two that differ only in their communication, the faster one
    for (const Choice& x : fitting()) {
      const auto is_alike = [&](Choice other) { return other.context_comm = x.context_comm, other == x; };
      if (std::ssize(best) < options_.refine && std::ranges::none_of(best, is_alike)) best.push_back(x);
    }
    std::set<Choice> around;
    for (const Choice& x : best) around.merge(neighbours(x));
    for_all(std::vector(around.begin(), around.end()), [&](const Choice& x) { plan(x); });
    best = fitting();
    const auto pipeline = std::ranges::find_if(best, [](const Choice& x) { return x.pipeline > 1; });
    if (pipeline != best.end() && done_.at(*pipeline)->seconds <= 1.5 * done_.at(best.front())->seconds)
      for_all(with_schedules(*pipeline), [&](const Choice& x) { plan(x); });
    return found();
  }

 private:
  ConfigSearchResult found() const {
    if (std::ranges::none_of(done_, [](const auto& d) { return d.second.has_value(); }))
      fail<ConfigError>("[plan] no configuration of ", world_, " ranks suits: ", refused_.empty() ? "there is none" : refused_.begin()->second);
    ConfigSearchResult out;
    const Choice* least = nullptr;
    for (const auto& [choice, time] : done_) {
      if (!time) continue;
      ++out.planned;
      if (!least || time->peak_bytes < done_.at(*least)->peak_bytes) least = &choice;
    }
    for (const Choice& x : fitting()) {
      PlannedConfig planned{islands_of(with(config_, x), islands_), *done_.at(x), options_of(x, choice_of(config_))};
      int64_t& peak = planned.time.peak_bytes;
      if (const int64_t least = out.front.empty() ? machine_.memory + 1 : out.front.back().time.peak_bytes; peak < least) {
        peak = std::max(peak, first_ranks_peak(x));
        if (peak > machine_.memory) continue;
        if (peak < least) out.front.push_back(planned);
      }
      out.fitting.push_back(std::move(planned));
    }
    if (out.fitting.empty()) out.least_bytes = std::max(done_.at(*least)->peak_bytes, first_ranks_peak(*least));
    return out;
  }

  int64_t first_ranks_peak(const Choice& x) const {
    return peak_of_first_ranks(islands_of(with(config_, x), islands_), vocab_, all_ranks(), machine_);
  }

  template <class T>
  bool keeps(T Choice::* field) const {
    const std::string key = key_of(field);
    if (key == "train.recompute" && config_.train.offload_activations) return true;  // only blocks' are offloaded
    return options_.keep.contains(key);
  }

  // Numbers of ranks that one axis may have: divisors of `ranks` up to `most`.
  std::vector<int64_t> sizes(int64_t Choice::* axis, int64_t ranks, int64_t most) const {
    if (keeps(axis)) {
      const int64_t have = choice_of(config_).*axis;
      return have > 0 && ranks % have == 0 ? std::vector<int64_t>{have} : std::vector<int64_t>{};
    }
    std::vector<int64_t> out;
    for (int64_t n = 1; n <= std::min(ranks, most); ++n)
      if (ranks % n == 0) out.push_back(n);
    return out;
  }

  // Stages wait for the slowest run of blocks: too long if blocks cannot be divided into nearly equal runs. The head's contribution
  // is left to the estimate.
  bool divides_unevenly(int64_t stages, int64_t runs) const {
    return StageCut(config_.model.layers, static_cast<int>(stages), runs).imbalance() > 9.0 / 8;
  }

  // The numbers of ranks that may share sequences, which have `own` key heads together, each read by `group` query heads, and their
  // collective: with all_to_all all get equally many key heads, or one copy. For more ranks than that allows, all_gather.
  std::vector<std::pair<int64_t, std::string>> contexts(int64_t ranks, int64_t own, int64_t group) const {
    const auto alike = [&](int64_t c) { return own % c == 0 || (c % own == 0 && group % (c / own) == 0); };
    const std::vector<int64_t> all = sizes(&Choice::context, ranks, std::max(own * group, config_.model.context));
    int64_t most = 1;
    for (const int64_t c : all)
      if (alike(c)) most = std::max(most, c);
    const bool few = ranks > config_.train.batch * most, given = keeps(&Choice::context), gathers = config_.sharding.context_comm == "all_gather";
    std::vector<std::pair<int64_t, std::string>> out;
    for (const int64_t c : all) {
      if (keeps(&Choice::context_comm)) {
        if (alike(c) || given || gathers) out.emplace_back(c, config_.sharding.context_comm);
      } else if (alike(c) || few || given) {
        out.emplace_back(c, alike(c) || (given && c <= own * group) ? "all_to_all" : "all_gather");
      }
    }
    return out;
  }

  // The `choices` and, for those that share heads by all_to_all, the same with all_gather.
  std::vector<Choice> with_all_gather(std::vector<Choice> choices) const {
    if (keeps(&Choice::context_comm)) return choices;
    for (size_t i = 0, n = choices.size(); i < n; ++i) {
      Choice x = choices[i];
      if (x.context == 1 || x.context_comm == "all_gather") continue;
      x.context_comm = "all_gather";
      choices.push_back(std::move(x));
    }
    return choices;
  }

  // Axes, and which groups of ranks hold the model; initial strategy, micro-batches and recomputation.
  std::vector<Choice> choices_of_axes() const {
    const ModelConfig model = resolved(config_.model);
    const int64_t key_heads = model.kv_heads, host = machine_.ranks_per_host;
    std::vector<Choice> out;
    for (const int64_t p : sizes(&Choice::pipeline, world_, model.layers)) {
      if (!keeps(&Choice::pipeline) && divides_unevenly(p, 1)) continue;
      for (const int64_t t : sizes(&Choice::tensor, world_ / p, std::min(model.heads, host))) {
        const int64_t units = nn::head_units(model.heads, key_heads, model.head_dim, t);
        if (!keeps(&Choice::tensor) && units % t != 0) continue;
        // Linear attention's ranks share its key heads, on both axes.
        const int64_t linear = model.linear_key_heads;
        if (linear && !keeps(&Choice::tensor) && linear % t != 0) continue;
        const int64_t own = std::max<int64_t>(1, units / t), group = model.heads / units;
        for (const auto& [c, comm] : contexts(world_ / p / t, own, group)) {
          if (linear && !keeps(&Choice::context) && (t * c > linear || linear / t % c != 0)) continue;
          const int64_t experts = std::max<int64_t>(1, model.experts);
          for (const int64_t e : sizes(&Choice::experts, world_ / p / t / c, experts)) {
            if (!keeps(&Choice::experts) && experts % e != 0) continue;
            const int64_t data = world_ / p / t / c / e, in_group = t * c * e;
            std::vector<int64_t> replicas = {1};
            if (keeps(&Choice::replicas)) replicas = {config_.sharding.replicas};
            else if (in_group < host && host % in_group == 0 && data * in_group > host && data * in_group % host == 0)
              replicas.push_back(data * in_group / host);
            for (const int64_t r : replicas) {
              Choice x = choice_of(config_);
              x.pipeline = p, x.tensor = t, x.context = c, x.context_comm = comm, x.experts = e, x.replicas = r;
              if (!keeps(&Choice::pipeline_runs)) x.pipeline_runs = 1;
              if (!keeps(&Choice::pipeline_schedule)) x.pipeline_schedule = "1f1b";
              if (!keeps(&Choice::secondary)) x.secondary = false;
              // Stages would gather once per micro-batch.
              if (!keeps(&Choice::strategy)) x.strategy = p > 1 ? "zero1" : "full_shard";
              if (!keeps(&Choice::recompute)) x.recompute = "none";
              if (!keeps(&Choice::micro_batches)) x.micro_batches = micro_batches(p > 1 ? 2 * p : 1, x);
              out.push_back(x);
            }
          }
        }
      }
    }
    return out;
  }

  // Micro-batches are equal, and give each group of ranks that shares sequences one of them.
  int64_t most_micro_batches(const Choice& x) const {
    const int64_t batch = config_.train.batch, groups = world_ / x.pipeline / x.tensor / x.context;
    int64_t most = std::max<int64_t>(1, batch / std::max<int64_t>(1, groups));
    while (batch % most != 0) --most;
    return most;
  }
  int64_t micro_batches(int64_t at_least, const Choice& x) const {
    const int64_t most = most_micro_batches(x);
    const auto suits = [&](int64_t n) { return config_.train.batch % n == 0 && (x.pipeline_runs == 1 || n % x.pipeline == 0); };
    while (at_least < most && !suits(at_least)) ++at_least;
    return std::min(at_least, most);
  }

  // How much memory a step takes at this level of recomputation, estimated from its last two numbers of micro-batches: the part of a
  // micro-batch shrinks with it, the rest does not.
  struct Level {
    std::string recompute;
    std::vector<std::pair<double, double>> too_large = {};  // micro-batches, bytes

    bool may_fit(double micro_batches, double memory) const {
      const size_t n = too_large.size();
      if (n < 2 || too_large[n - 2].first < 2) return true;  // one micro-batch has no sums of gradients besides its own
      const auto [few, bytes_of_few] = too_large[n - 2];
      const auto [more, bytes_of_more] = too_large[n - 1];
      const double shrinks = (bytes_of_few - bytes_of_more) / (1 / few - 1 / more);
      return bytes_of_more - shrinks * (1 / more - 1 / micro_batches) <= memory;
    }
  };

  // For one choice of axes: the fewest micro-batches with which a step fits, then more as long as they reduce recomputation.
  void settle_memory(Choice x) {
    std::vector<Level> levels;
    for (const char* level : {"none", "selective", "block"})
      if (!keeps(&Choice::recompute)) levels.push_back({level});
    if (levels.empty()) levels.push_back({x.recompute});
    const auto memory = static_cast<double>(machine_.memory);
    const int64_t most = keeps(&Choice::micro_batches) ? x.micro_batches : most_micro_batches(x);
    const auto least_fits = [&](int64_t micro_batches) {
      Choice least = x;
      least.recompute = levels.back().recompute, least.micro_batches = micro_batches;
      const auto time = plan(least);
      return !time || time->peak_bytes <= machine_.memory;
    };
    if (!least_fits(most) && (x.micro_batches > 1 || !least_fits(1))) return;
    for (;; x.micro_batches = micro_batches(2 * x.micro_batches, x)) {
      const auto m = static_cast<double>(x.micro_batches);
      std::erase_if(levels, [&](const Level& level) { return !level.may_fit(std::numeric_limits<double>::infinity(), memory); });
      for (size_t i = 0; i < levels.size(); ++i) {
        constexpr double kNearly = 1.02;  // lines are not quite straight
        if (x.micro_batches < most && !levels[i].may_fit(m, kNearly * memory)) continue;
        x.recompute = levels[i].recompute;
        const auto time = plan(x);
        if (time && time->peak_bytes <= machine_.memory) {
          if (i == 0) return;
          levels.resize(i + 1);  // more recomputation is slower
        } else if (time) {
          levels[i].too_large.emplace_back(m, time->peak_bytes);
        }
      }
      if (levels.empty() || x.micro_batches >= most) return;
    }
  }

  // Includes x.
  std::set<Choice> neighbours(const Choice& x) const {
    std::set<Choice> out = {x};
    const auto vary = [&]<class T>(T Choice::* field, const std::vector<T>& values) {
      if (keeps(field)) return;
      for (Choice other : std::vector(out.begin(), out.end()))
        for (const T& value : values) {
          other.*field = value;
          out.insert(other);
        }
    };
    vary(&Choice::strategy, std::vector<std::string>{"full_shard", "shard_grad_op", "zero1"});
    vary(&Choice::recompute, std::vector<std::string>{"none", "selective", "block"});
    int64_t fewer = std::max<int64_t>(1, x.micro_batches / 2);
    while (config_.train.batch % fewer != 0) --fewer;
    vary(&Choice::micro_batches, std::vector<int64_t>{fewer, micro_batches(2 * x.micro_batches, x)});
    if (x.replicas > 1) vary(&Choice::secondary, std::vector<bool>{true});
    return out;
  }

  // Interleaved stages, or those with deferred weight gradients, wait less and hold more: as many runs as leave none with many more
  // blocks than others.
  std::vector<Choice> with_schedules(const Choice& x) const {
    const auto goes_round = [&](int64_t runs) {
      return !keeps(&Choice::pipeline_runs) && x.micro_batches % x.pipeline == 0 && x.pipeline * runs <= config_.model.layers &&
             !divides_unevenly(x.pipeline, runs);
    };
    std::vector<Choice> out = {x};
    for (const int64_t runs : {2, 4})
      if (goes_round(runs)) add_with(&Choice::pipeline_runs, runs, {x}, out);
    if (!keeps(&Choice::pipeline_schedule)) add_with(&Choice::pipeline_schedule, std::string("zero_bubble"), std::vector(out), out);
    const std::vector<Choice> schedules(out.begin() + 1, out.end());
    out.clear();
    for (const char* level : {"none", "selective", "block"})
      if (!keeps(&Choice::recompute) || level == x.recompute) add_with(&Choice::recompute, std::string(level), schedules, out);
    return out;
  }

  template <class T>
  static void add_with(T Choice::* field, const T& value, std::vector<Choice> choices, std::vector<Choice>& to) {
    for (Choice& x : choices) x.*field = value, to.push_back(std::move(x));
  }

  // Planned choices that fit, in order of time.
  std::vector<Choice> fitting() const {
    std::vector<std::pair<double, Choice>> found;
    for (const auto& [choice, time] : done_)
      if (time && time->peak_bytes <= machine_.memory) found.emplace_back(time->seconds, choice);
    std::ranges::sort(found);
    std::vector<Choice> out;
    for (const auto& [seconds, choice] : found) out.push_back(choice);
    return out;
  }

  std::optional<StepTime> plan(const Choice& x) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = done_.find(x); found != done_.end()) return found->second;
    }
    std::optional<StepTime> time;
    std::string refused;
    try {
      time = time_step(islands_of(with(config_, x), islands_), vocab_, all_ranks(), machine_);
    } catch (const ConfigError& e) {
      refused = e.what();
    }
    const std::lock_guard lock(mutex_);
    if (!refused.empty()) refused_[x] = refused;
    return done_[x] = time;
  }

  template <class F>
  void for_all(const std::vector<Choice>& choices, F&& f) {
    std::atomic<size_t> next = 0;
    std::exception_ptr failure;
    const auto work = [&] {
      try {
        for (size_t i; (i = next++) < choices.size();) f(choices[i]);
      } catch (...) {
        next = choices.size();
        const std::lock_guard lock(mutex_);
        failure = std::current_exception();
      }
    };
    {
      std::vector<std::jthread> others;
      for (int t = 1; t < options_.threads; ++t) others.emplace_back(work);
      work();
    }
    if (failure) std::rethrow_exception(failure);
  }

  int all_ranks() const { return world_ * static_cast<int>(islands_); }

  const int64_t islands_;
  const TrainConfig config_;  // of one of them
  const int64_t vocab_;
  const int world_;  // its ranks
  const Machine& machine_;
  const ConfigSearchOptions& options_;
  std::mutex mutex_;
  std::map<Choice, std::optional<StepTime>> done_;
  std::map<Choice, std::string> refused_;
};

}  // namespace

ConfigSearchResult search_configs(const TrainConfig& config, int64_t vocab, int world, const Machine& machine, const ConfigSearchOptions& options) {
  return Search(config, vocab, world, machine, options).run();
}

}  // namespace sheaf::models
