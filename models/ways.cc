#include "sheaf/models/ways.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "sheaf/models/plan.h"

namespace sheaf::models {
namespace {

// One choice, in the order in which options() names them.
struct Choice {
  int64_t pipeline, context, experts, tensor, replicas;
  bool secondary;
  std::string strategy;
  int64_t micro_batches;
  std::string recompute;
  auto operator<=>(const Choice&) const = default;
};

Choice choice_of(const TrainConfig& c) {
  return {c.sharding.pipeline, c.sharding.context,   c.sharding.experts,    c.sharding.tensor, c.sharding.replicas,
          c.sharding.secondary, c.sharding.strategy, c.train.micro_batches, c.train.recompute};
}

TrainConfig with(TrainConfig c, const Choice& x) {
  auto& s = c.sharding;
  s.pipeline = x.pipeline, s.context = x.context, s.experts = x.experts, s.tensor = x.tensor;
  s.replicas = x.replicas, s.secondary = x.secondary, s.strategy = x.strategy;
  c.train.micro_batches = x.micro_batches;
  if (c.train.recompute != x.recompute) c.train.recompute_blocks = -1;
  c.train.recompute = x.recompute;
  return c;
}

// What leads from `before` to x, and what is no default: it tells ways apart.
std::string options_of(const Choice& x, const Choice& before) {
  std::string out;
  const auto add = [&](const char* key, const auto& value, const auto& was, const auto& usual) {
    if (value != was || value != usual) out += str(out.empty() ? "" : " ", "--", key, ' ', value);
  };
  add("sharding.pipeline", x.pipeline, before.pipeline, 1);
  add("sharding.context", x.context, before.context, 1);
  add("sharding.experts", x.experts, before.experts, 1);
  add("sharding.tensor", x.tensor, before.tensor, 1);
  add("sharding.replicas", x.replicas, before.replicas, 1);
  add("sharding.secondary", std::string(x.secondary ? "true" : "false"), before.secondary ? "true" : "false", "false");
  add("sharding.strategy", x.strategy, before.strategy, "");
  add("train.micro_batches", x.micro_batches, before.micro_batches, 1);
  add("train.recompute", x.recompute, before.recompute, "none");
  return out;
}

class Search {
 public:
  Search(const TrainConfig& config, int64_t vocab, int world, const Machine& machine, const WaysOptions& options)
      : config_(config), vocab_(vocab), world_(world), machine_(machine), options_(options) {}

  Ways run() {
    std::vector<Choice> axes = choices_of_axes();
    std::erase_if(axes, [&](const Choice& x) { return takes_long(x); });
    in_parallel(axes.size(), [&](size_t i) { plan(axes[i]); });
    // Whatever makes it fit takes more time. Stages gain some by more micro-batches.
    double fastest = std::numeric_limits<double>::max();
    for (const auto& [choice, time] : done_)
      if (time) fastest = std::min(fastest, time->seconds);
    std::vector<Choice> near;
    for (const Choice& x : axes)
      if (const auto& time = done_.at(x); time && time->seconds <= 2 * fastest) near.push_back(x);
    in_parallel(near.size(), [&](size_t i) { settle_memory(near[i]); });
    // If none of these fits, the others may.
    if (fitting().empty()) in_parallel(axes.size(), [&](size_t i) { settle_memory(axes[i]); });
    std::vector<Choice> best = fitting();
    best.resize(std::min(best.size(), static_cast<size_t>(options_.refine)));
    std::set<Choice> around;
    for (const Choice& c : best)
      for (const Choice& other : neighbours(c))
        if (!takes_long(other)) around.insert(other);
    const std::vector<Choice> more(around.begin(), around.end());
    in_parallel(more.size(), [&](size_t i) { plan(more[i]); });

    if (std::ranges::none_of(done_, [](const auto& d) { return d.second.has_value(); }))
      fail<ConfigError>("[plan] no way to share ", world_, " ranks suits: ", refused_.empty() ? "there is none" : refused_.begin()->second);
    Ways out;
    out.passed_over = passed_over_;
    out.least_bytes = std::numeric_limits<int64_t>::max();
    for (const auto& [choice, time] : done_) {
      if (!time) continue;
      ++out.planned;
      if (time->peak_bytes <= machine_.memory) out.fitting.push_back({with(config_, choice), *time, options_of(choice, choice_of(config_))});
      else out.least_bytes = std::min(out.least_bytes, time->peak_bytes);
    }
    std::ranges::stable_sort(out.fitting, {}, [](const Way& w) { return w.time.seconds; });
    for (auto way = out.fitting.begin(); way != out.fitting.end();) {
      if (!out.front.empty() && way->time.peak_bytes >= out.front.back().time.peak_bytes) {
        ++way;
        continue;
      }
      for (const int rank : ranks_that_hold_most(way->config, world_))
        way->time.peak_bytes = std::max(way->time.peak_bytes, plan_step(way->config, vocab_, rank, world_, 1, "nccl", Device::cuda()).peak_bytes);
      if (way->time.peak_bytes > machine_.memory) {
        way = out.fitting.erase(way);
        continue;
      }
      if (out.front.empty() || way->time.peak_bytes < out.front.back().time.peak_bytes) out.front.push_back(*way);
      ++way;
    }
    return out;
  }

 private:
  bool keeps(const std::string& key) const {
    if (key == "train.recompute" && config_.train.offload_activations) return true;  // only blocks' leave
    return options_.keep.contains(key);
  }

  // Numbers of ranks that one axis may have: divisors of `ranks` up to `most`.
  std::vector<int64_t> sizes(const std::string& key, int64_t have, int64_t ranks, int64_t most) const {
    if (keeps(key)) return ranks % have == 0 ? std::vector<int64_t>{have} : std::vector<int64_t>{};
    std::vector<int64_t> out;
    for (int64_t n = 1; n <= std::min(ranks, most); ++n)
      if (ranks % n == 0) out.push_back(n);
    return out;
  }

  // All stages are planned, each with all micro-batches: many stages of a deep model would take longer than all the rest. Whoever
  // wants them asks for them.
  bool takes_long(const Choice& x) {
    constexpr int64_t kBlocks = 12'288;
    if (x.pipeline == 1 || keeps("sharding.pipeline") || x.pipeline * x.micro_batches * config_.model.layers <= kBlocks) return false;
    const std::lock_guard lock(mutex_);
    passed_over_.insert(x.pipeline);
    return true;
  }

  // Axes, and which groups of ranks hold the model; strategy, micro-batches and recomputing to begin with.
  std::vector<Choice> choices_of_axes() const {
    const ModelConfig model = resolved(config_.model);
    const int64_t key_heads = model.kv_heads, host = machine_.ranks_per_host;
    std::vector<Choice> out;
    for (const int64_t p : sizes("sharding.pipeline", config_.sharding.pipeline, world_, model.layers)) {
      // Stages of unlike numbers of blocks wait for the largest: if it has many more than others, too long.
      const int64_t largest = (model.layers + p - 1) / p;
      if (!keeps("sharding.pipeline") && 8 * largest * p > 9 * model.layers) continue;
      for (const int64_t t : sizes("sharding.tensor", config_.sharding.tensor, world_ / p, std::min(key_heads, host))) {
        if (!keeps("sharding.tensor") && key_heads % t != 0) continue;
        for (const int64_t c : sizes("sharding.context", config_.sharding.context, world_ / p / t, std::max<int64_t>(1, key_heads / t))) {
          if (!keeps("sharding.context") && key_heads / t % c != 0) continue;
          const int64_t experts = std::max<int64_t>(1, model.experts);
          for (const int64_t e : sizes("sharding.experts", config_.sharding.experts, world_ / p / t / c, experts)) {
            if (!keeps("sharding.experts") && experts % e != 0) continue;
            const int64_t data = world_ / p / t / c / e, in_group = t * c * e;
            std::vector<int64_t> replicas = {1};
            if (keeps("sharding.replicas")) replicas = {config_.sharding.replicas};
            else if (in_group < host && host % in_group == 0 && data * in_group > host && data * in_group % host == 0)
              replicas.push_back(data * in_group / host);
            for (const int64_t r : replicas) {
              Choice x = choice_of(config_);
              x.pipeline = p, x.tensor = t, x.context = c, x.experts = e, x.replicas = r;
              if (!keeps("sharding.secondary")) x.secondary = false;
              // Stages would gather once for each micro-batch.
              if (!keeps("sharding.strategy")) x.strategy = p > 1 ? "zero1" : "full_shard";
              if (!keeps("train.recompute")) x.recompute = "none";
              if (!keeps("train.micro_batches")) x.micro_batches = std::min(p > 1 ? 2 * p : 1, most_micro_batches(x));
              out.push_back(x);
            }
          }
        }
      }
    }
    return out;
  }

  // As many as leave one sequence to each group of ranks that shares one.
  int64_t most_micro_batches(const Choice& x) const {
    const int64_t groups = world_ / x.pipeline / x.tensor / x.context;
    return std::max<int64_t>(1, config_.train.batch / std::max<int64_t>(1, groups));
  }

  // For one choice of axes: the fewest micro-batches with which a step fits, then more as long as less is computed again.
  void settle_memory(Choice x) {
    const std::vector<std::string> recompute =
        keeps("train.recompute") ? std::vector<std::string>{x.recompute} : std::vector<std::string>{"none", "selective", "block"};
    const int64_t most = keeps("train.micro_batches") ? x.micro_batches : most_micro_batches(x);
    std::map<std::string, int64_t> before;  // peaks with half the micro-batches
    for (;; x.micro_batches = std::min(2 * x.micro_batches, most)) {
      if (takes_long(x)) return;
      bool may_fit = false;
      for (const std::string& again : recompute) {
        x.recompute = again;
        const auto time = plan(x);
        if (!time) continue;
        const int64_t peak = time->peak_bytes;
        if (peak <= machine_.memory) {
          if (!may_fit) return;
          break;
        }
        // What does not shrink with a micro-batch is left when all that does is gone. The first two differ in more.
        const auto had = before.find(again);
        may_fit = may_fit || had == before.end() || x.micro_batches <= 2 || 2 * peak - had->second <= machine_.memory;
        before[again] = peak;
      }
      if (!may_fit || x.micro_batches >= most) return;
    }
  }

  std::vector<Choice> neighbours(const Choice& x) const {
    std::vector<Choice> out;
    const auto vary = [&](const char* key, auto Choice::* field, auto values) {
      if (keeps(key)) return;
      for (size_t i = 0, n = out.size(); i < n; ++i)
        for (const auto& value : values) {
          Choice other = out[i];
          if (other.*field == value) continue;
          other.*field = value;
          out.push_back(other);
        }
    };
    out.push_back(x);
    vary("sharding.strategy", &Choice::strategy, std::vector<std::string>{"full_shard", "shard_grad_op", "zero1"});
    vary("train.recompute", &Choice::recompute, std::vector<std::string>{"none", "selective", "block"});
    std::vector<int64_t> micro_batches;
    const int64_t most = most_micro_batches(x);
    for (const int64_t m : {x.micro_batches / 2, std::min(2 * x.micro_batches, most)})
      if (m >= 1 && m <= most) micro_batches.push_back(m);
    vary("train.micro_batches", &Choice::micro_batches, micro_batches);
    if (x.replicas > 1) vary("sharding.secondary", &Choice::secondary, std::vector<bool>{true});
    return out;
  }

  // Of what has been planned, in order of time.
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
      time = time_step(with(config_, x), vocab_, world_, machine_);
    } catch (const ConfigError& e) {
      refused = e.what();
    }
    const std::lock_guard lock(mutex_);
    if (!refused.empty()) refused_[x] = refused;
    return done_[x] = time;
  }

  template <class F>
  void in_parallel(size_t n, F&& f) {
    std::atomic<size_t> next = 0;
    std::exception_ptr failure;
    const auto work = [&] {
      try {
        for (size_t i; (i = next++) < n;) f(i);
      } catch (...) {
        next = n;
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

  const TrainConfig& config_;
  const int64_t vocab_;
  const int world_;
  const Machine& machine_;
  const WaysOptions& options_;
  std::mutex mutex_;
  std::map<Choice, std::optional<StepTime>> done_;
  std::map<Choice, std::string> refused_;
  std::set<int64_t> passed_over_;
};

}  // namespace

Ways find_ways(const TrainConfig& config, int64_t vocab, int world, const Machine& machine, const WaysOptions& options) {
  return Search(config, vocab, world, machine, options).run();
}

}  // namespace sheaf::models
