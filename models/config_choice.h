// How a training step is distributed, as its options: what search_configs() (config_search.h) searches.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>

#include "sheaf/models/train_config.h"

namespace sheaf::models::config_search {

struct Choice {
  int64_t pipeline, pipeline_runs;
  std::string pipeline_schedule;
  int64_t context;
  std::string context_comm;
  int64_t experts, tensor, replicas;
  bool secondary;
  std::string strategy;
  int64_t micro_batches;
  std::string recompute;
  auto operator<=>(const Choice&) const = default;
};

// A field of a choice as an option: its key, where it is in a configuration, and its default ("" if it is always stated).
template <class T>
struct Option {
  const char* key;
  T Choice::* field;
  T& (*in)(TrainConfig&);
  T usual;
};
using Config = TrainConfig;
inline const std::tuple kOptions{
    Option<int64_t>{"sharding.pipeline", &Choice::pipeline, [](Config& c) -> auto& { return c.sharding.pipeline; }, 1},
    Option<int64_t>{"sharding.pipeline_runs", &Choice::pipeline_runs, [](Config& c) -> auto& { return c.sharding.pipeline_runs; }, 1},
    Option<std::string>{"sharding.pipeline_schedule", &Choice::pipeline_schedule, [](Config& c) -> auto& { return c.sharding.pipeline_schedule; },
                        "1f1b"},
    Option<int64_t>{"sharding.context", &Choice::context, [](Config& c) -> auto& { return c.sharding.context; }, 1},
    Option<std::string>{"sharding.context_comm", &Choice::context_comm, [](Config& c) -> auto& { return c.sharding.context_comm; }, "all_to_all"},
    Option<int64_t>{"sharding.experts", &Choice::experts, [](Config& c) -> auto& { return c.sharding.experts; }, 1},
    Option<int64_t>{"sharding.tensor", &Choice::tensor, [](Config& c) -> auto& { return c.sharding.tensor; }, 1},
    Option<int64_t>{"sharding.replicas", &Choice::replicas, [](Config& c) -> auto& { return c.sharding.replicas; }, 1},
    Option<bool>{"sharding.secondary", &Choice::secondary, [](Config& c) -> auto& { return c.sharding.secondary; }, false},
    Option<std::string>{"sharding.strategy", &Choice::strategy, [](Config& c) -> auto& { return c.sharding.strategy; }, ""},
    Option<int64_t>{"train.micro_batches", &Choice::micro_batches, [](Config& c) -> auto& { return c.train.micro_batches; }, 1},
    Option<std::string>{"train.recompute", &Choice::recompute, [](Config& c) -> auto& { return c.train.recompute; }, "none"},
};

template <class F>
void for_each_option(F&& f) {
  std::apply([&](const auto&... option) { (f(option), ...); }, kOptions);
}

template <class T>
const char* key_of(T Choice::* field) {
  const char* key = nullptr;
  for_each_option([&](const auto& option) {
    if constexpr (std::is_same_v<decltype(option.field), T Choice::*>)
      if (option.field == field) key = option.key;
  });
  return key;
}

inline Choice choice_of(TrainConfig c) {
  Choice x;
  for_each_option([&](const auto& option) { x.*option.field = option.in(c); });
  return x;
}

inline TrainConfig with(TrainConfig c, const Choice& x) {
  if (c.train.recompute != x.recompute) c.train.recompute_blocks = -1;
  for_each_option([&](const auto& option) { option.in(c) = x.*option.field; });
  return c;
}

// The options that lead from `before` to x and are not defaults: they tell choices apart.
inline std::string options_of(const Choice& x, const Choice& before) {
  std::string out;
  for_each_option([&](const auto& option) {
    const auto& value = x.*option.field;
    if (value == before.*option.field && value == option.usual) return;
    out += str(out.empty() ? "" : " ", "--", option.key, ' ');
    if constexpr (std::is_same_v<decltype(option.usual), bool>) out += value ? "true" : "false";
    else out += str(value);
  });
  return out;
}

}  // namespace sheaf::models::config_search
