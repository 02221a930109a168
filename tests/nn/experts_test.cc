// A mixture of experts against a plain loop over tokens.
#include "sheaf/nn/layers/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/optim/optimizer.h"
#include "sheaf/nn/shard.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kBatch = 3, kTokens = 11, kWidth = 6;

nn::MixtureConfig config(double capacity_factor = 0, int64_t groups = 1) {
  nn::MixtureConfig c;
  c.width = kWidth;
  c.hidden = 5;
  c.experts = 4;
  c.choices = 2;
  c.capacity_factor = capacity_factor;
  c.capacity_groups = groups;
  c.balances = c.measures_logits = true;
  c.init = c.projection_init = nn::Init::normal(1.0);
  return c;
}

struct Expected {
  std::vector<double> y;
  double imbalance = 0, router_z = 0;
  int64_t dropped = 0;
  std::vector<double> excess = {};  // of an expert's choices: E times their number, minus the total
};

// The experts in the groups whose two largest affinities, including bias, have the largest sums.
std::vector<bool> allowed_experts(const nn::MixtureConfig& c, const std::vector<double>& p, const std::vector<double>& bias) {
  const int64_t size = c.experts / c.routing_groups;
  std::vector<std::pair<double, int64_t>> parts;
  for (int64_t s = 0; s < c.routing_groups; ++s) {
    std::vector<double> in;
    for (int64_t e = s * size; e < (s + 1) * size; ++e) in.push_back(p[e] + bias[e]);
    std::ranges::sort(in, std::greater());
    parts.emplace_back(size > 1 ? in[0] + in[1] : in[0], s);
  }
  std::ranges::stable_sort(parts, [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<bool> out(c.experts);
  for (int64_t i = 0; i < c.routing_groups_per_token; ++i)
    for (int64_t e = 0; e < size; ++e) out[parts[i].second * size + e] = true;
  return out;
}

// Choices of a group for which an expert has no place contribute nothing.
Expected plain(nn::MixtureOfExperts& m, const std::vector<double>& x, bool drops = true) {
  const nn::MixtureConfig& c = m.config;
  const auto values = [](const nn::Parameter& p) { return full_parameter(p).to_vector<double>(); };
  const auto router = values(m.router.weight), gate = values(m.experts.gate), up = values(m.experts.up), down = values(m.experts.down);
  const auto bias = m.choice_bias ? values(m.choice_bias) : std::vector<double>(c.experts);
  const auto biases = [&](const nn::Parameter& p, int64_t count) { return p ? values(p) : std::vector<double>(count); };
  const auto router_bias = biases(m.router.bias, c.experts), gate_bias = biases(m.experts.gate_bias, c.experts * c.hidden),
             up_bias = biases(m.experts.up_bias, c.experts * c.hidden), down_bias = biases(m.experts.down_bias, c.experts * kWidth);
  Expected out{std::vector<double>(x.size(), 0.0)};
  const int64_t group_tokens = (kTokens + c.capacity_groups - 1) / c.capacity_groups;
  const auto places = c.capacity_factor == 0 || !drops
                          ? kTokens
                          : std::min<int64_t>(group_tokens, std::ceil(c.capacity_factor * c.choices * group_tokens / c.experts));
  std::vector<double> chosen(c.experts), mean(c.experts);
  for (int64_t b = 0; b < kBatch; ++b) {
    std::vector<int64_t> taken(c.experts);
    for (int64_t t = 0, group = 0; t < kTokens; ++t) {
      while (group + 1 < c.capacity_groups && t >= kTokens * (group + 1) / c.capacity_groups) ++group, std::ranges::fill(taken, 0);
      const double* row = x.data() + (b * kTokens + t) * kWidth;
      std::vector<double> p(c.experts);
      double total = 0, all = 0;
      for (int64_t e = 0; e < c.experts; ++e) {
        double logit = router_bias[e];
        for (int64_t i = 0; i < kWidth; ++i) logit += row[i] * router[e * kWidth + i];
        total += p[e] = c.affinity == nn::Affinity::sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit);
        all += std::exp(logit);
      }
      out.router_z += std::log(all) * std::log(all) / (kBatch * kTokens);
      std::vector<int64_t> order(c.experts);
      for (int64_t e = 0; e < c.experts; ++e) {
        order[e] = e, mean[e] += p[e] / total / (kBatch * kTokens);
        if (c.affinity == nn::Affinity::softmax) p[e] /= total;
      }
      const std::vector<bool> allowed = allowed_experts(c, p, bias);
      std::ranges::stable_sort(order, [&](int64_t a, int64_t d) {
        return allowed[a] != allowed[d] ? allowed[a] : p[a] + bias[a] > p[d] + bias[d];
      });
      double weights = 0;
      for (int64_t k = 0; k < c.choices; ++k) weights += p[order[k]];
      for (int64_t k = 0; k < c.choices; ++k) {
        const int64_t e = order[k];
        chosen[e] += 1.0 / (kBatch * kTokens * c.choices);
        if (taken[e] == places) {
          ++out.dropped;
          continue;
        }
        ++taken[e];
        std::vector<double> hidden(c.hidden);
        for (int64_t h = 0; h < c.hidden; ++h) {
          double g = gate_bias[e * c.hidden + h], u = up_bias[e * c.hidden + h];
          for (int64_t i = 0; i < kWidth; ++i) {
            g += row[i] * gate[(e * c.hidden + h) * kWidth + i];
            u += row[i] * up[(e * c.hidden + h) * kWidth + i];
          }
          const double limit = c.gate_limit;
          if (limit > 0) g = std::min(g, limit), u = std::clamp(u, -limit, limit) + 1;
          hidden[h] = g / (1 + std::exp(-(limit > 0 ? c.gate_alpha : 1.0) * g)) * u;
        }
        for (int64_t i = 0; i < kWidth; ++i) {
          double y = down_bias[e * kWidth + i];
          for (int64_t h = 0; h < c.hidden; ++h) y += hidden[h] * down[(e * kWidth + i) * c.hidden + h];
          out.y[(b * kTokens + t) * kWidth + i] += c.scale * p[e] / (c.normalize ? weights : 1) * y;
        }
      }
    }
  }
  for (int64_t e = 0; e < c.experts; ++e) out.imbalance += c.experts * chosen[e] * mean[e];
  const double choices = kBatch * kTokens * c.choices;
  for (int64_t e = 0; e < c.experts; ++e) out.excess.push_back(std::round(choices * chosen[e]) * c.experts - choices);
  return out;
}

std::vector<double> tokens(uint64_t key = 1) {
  return randn({kF64, {kBatch, kTokens, kWidth}, {}}, Key{key}).to_vector<double>();
}
Tensor tensor(const std::vector<double>& x) { return Tensor::from(x, {kBatch, kTokens, kWidth}); }

double difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

TEST(MixtureOfExperts, EqualsALoopOverTokens) {
  const std::vector<double> x = tokens();
  for (const bool normalize : {true, false})
    for (const auto& [capacity, groups] : {std::pair{0.0, 1}, {0.0, 4}, {1.0, 1}, {0.3, 1}, {1.0, 3}, {0.01, 1}, {9.0, 1}}) {
      nn::MixtureConfig c = config(capacity, groups);
      c.normalize = normalize;
      nn::MixtureOfExperts m(c);
      materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
      const Expected expected = plain(m, x);
      EXPECT_EQ(expected.dropped > 0, capacity > 0 && capacity < 9) << capacity;
      EXPECT_LT(difference(m(tensor(x)).to_vector<double>(), expected.y), 1e-12) << capacity << " " << groups << normalize;
      EXPECT_NEAR(m.imbalance.item<double>(), expected.imbalance, 1e-13);
      EXPECT_NEAR(m.router_z.item<double>(), expected.router_z, 1e-12);
      m.imbalance = m.router_z = {};
      EXPECT_LT(difference(m(tensor(x), /*drops=*/false).to_vector<double>(), plain(m, x, false).y), 1e-12);
      m.imbalance = m.router_z = {};
      m.eval();
      m(tensor(x));
      EXPECT_FALSE(m.imbalance || m.router_z);
    }
}

// Like DeepSeek-V3's: sigmoid affinities, biases that affect the choice but not the weights, groups, and a shared MLP.
TEST(MixtureOfExperts, ChoosesByBiasAmongAllowedParts) {
  const std::vector<double> x = tokens();
  for (const nn::Affinity affinity : {nn::Affinity::sigmoid, nn::Affinity::softmax})
    for (const auto& [parts, allowed] : {std::pair{1, 1}, {2, 1}, {4, 2}, {4, 3}})
      for (const double capacity : {0.0, 0.7})
        for (const bool biased : {true, false})
          for (const bool normalize : {true, false}) {
            SCOPED_TRACE(str(parts, " ", allowed, " ", capacity, biased, normalize));
            nn::MixtureConfig c = config(capacity);
            c.affinity = affinity, c.routing_groups = parts, c.routing_groups_per_token = allowed, c.normalize = normalize, c.choice_bias = biased;
            c.scale = 2.5;
            nn::MixtureOfExperts m(c);
            if (biased) m.choice_bias.set_init(nn::Init::normal(0.3));
            materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
            const Expected expected = plain(m, x);
            Recording recording;
            const Tensor y = m(tensor(x));
            EXPECT_LT(difference(y.to_vector<double>(), expected.y), 1e-12);
            EXPECT_NEAR(m.imbalance.item<double>(), expected.imbalance, 1e-13);
            recording.backward(sum(y));
            recording.take();
            if (biased) {
              EXPECT_EQ(full_gradient(m.choice_bias).to_vector<double>(), expected.excess);
            }
          }
}

// Like gpt-oss's. Experts' outputs at places without a token are not used, with biases or not: gradients of biases are sums over choices.
TEST(MixtureOfExperts, BiasesAndAGateWithALimit) {
  const std::vector<double> x = tokens();
  for (const bool biased : {true, false})
    for (const double limit : {0.0, 0.8, 7.0})
      for (const double capacity : {0.0, 0.7}) {
        SCOPED_TRACE(str(biased, " ", limit, " ", capacity));
        nn::MixtureConfig c = config(capacity);
        c.linear_bias = biased, c.gate_limit = limit, c.gate_alpha = 1.3;
        nn::MixtureOfExperts m(c);
        if (biased)
          for (nn::Parameter* p : {&m.router.bias, &m.experts.gate_bias, &m.experts.up_bias, &m.experts.down_bias})
            p->set_init(nn::Init::normal(0.5));
        materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
        const Expected expected = plain(m, x);
        Recording recording;
        const Tensor y = m(tensor(x));
        EXPECT_LT(difference(y.to_vector<double>(), expected.y), 1e-12);
        recording.backward(sum(y));
        recording.take();
        if (!biased) continue;
        // A token's weights add up to 1, and so does its share of down's biases, if no choice is dropped.
        const std::vector<double> of_down = full_gradient(m.experts.down_bias).to_vector<double>();
        const double kept = std::accumulate(of_down.begin(), of_down.end(), 0.0) / kWidth;
        if (expected.dropped == 0) EXPECT_NEAR(kept, kBatch * kTokens, 1e-12);
        else EXPECT_LT(kept, kBatch * kTokens - 0.1);
      }
}

// Ranks have different experts if each rank has a part, or each expert is one: with three parts two ranks would have unequal halves.
TEST(MixtureOfExperts, RanksHaveWholeParts) {
  run_local(2, [](World& w) {
    const Layout cut(w.mesh({{"expert", 2}}).spec, Placement::shard(0));
    const auto product = [&](int64_t experts, int64_t parts) {
      return expert_linear(full_of({kF32, {parts, 1, 1, 6, 4}, cut}, 1.0), full_of({kF32, {experts, 5, 4}, cut}, 1.0),
                           full_of({kI32, {experts, 1, 1}, cut}, 1));
    };
    product(7, 2);
    product(7, 7);
    EXPECT_THROW(product(7, 3), PlacementError);
    EXPECT_THROW(product(7, 1), PlacementError);
  }, {.threads_per_rank = 1});
}

// How experts are arranged in parts: with 100 tokens of two choices each.
TEST(MixtureOfExperts, PartsAndHowFullTheyAre) {
  struct Case { int64_t experts, places; int ranks; bool gpu, fp8; int64_t parts; double fill; };
  for (const Case& k : {Case{8, 100, 1, false, false, 1, 1.0}, {8, 25, 1, false, false, 8, 1.0}, {8, 32, 1, false, false, 1, 1.0},
                        {8, 100, 2, false, false, 2, 0.5}, {7, 100, 2, false, false, 2, 0.5}, {4, 100, 2, false, false, 4, 0.5},
                        {8, 100, 1, true, false, 1, 1.0}, {8, 32, 1, true, false, 8, 200.0 / 256}, {4, 100, 1, true, false, 1, 1.0},
                        {3, 100, 1, true, false, 3, 2.0 / 3}, {8, 100, 1, true, true, 1, 1.0}, {7, 100, 1, true, true, 7, 2.0 / 7},
                        {8, 100, 2, true, false, 2, 0.5}, {32, 100, 16, true, false, 32, 2.0 / 32}}) {
    SCOPED_TRACE(str(k.experts, ' ', k.places, ' ', k.ranks, k.gpu ? " gpu" : "", k.fp8 ? " fp8" : ""));
    run_local(k.ranks, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 1}, {"expert", k.ranks}});
      nn::MixtureConfig c = config();
      c.experts = k.experts;
      nn::MixtureOfExperts m(c);
      shard(m, mesh, {.expert_axis = "expert"});
      materialize(m, Device::cpu());
      if (k.fp8) m.experts.fp8 = Fp8::activations;
      RankContext::current().meta_is = k.gpu ? Device::cuda() : Device::cpu();
      const Tensor x = Tensor::empty({kF32, {1, 100, kWidth}, Layout(mesh.spec)}, k.gpu ? Device::meta() : Device::cpu());
      const nn::Experts::Rows rows = m.experts.rows_of(x, 100, 2, k.places);
      EXPECT_EQ(rows.parts, k.parts);
      EXPECT_DOUBLE_EQ(rows.fill, k.fill);
    }, {.threads_per_rank = 1});
  }
}

TEST(MixtureOfExperts, BiasesDoNotDecay) {
  nn::MixtureConfig c = config();
  c.linear_bias = true;
  const nn::MixtureOfExperts m(c);
  for (const nn::Parameter* p : {&m.experts.gate_bias, &m.experts.up_bias, &m.experts.down_bias}) EXPECT_FALSE(optim::decays_matrices(*p));
  EXPECT_TRUE(optim::decays_matrices(m.experts.gate));
}

TEST(MixtureOfExperts, TheSharedMlpIsAdded) {
  nn::MixtureConfig c = config();
  c.shared_hidden = 7;
  nn::MixtureOfExperts m(c);
  materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
  const std::vector<double> x = tokens(), y = m(tensor(x)).to_vector<double>(), shared = (*m.shared)(tensor(x)).to_vector<double>();
  std::vector<double> rest(y.size());
  for (size_t i = 0; i < y.size(); ++i) rest[i] = y[i] - shared[i];
  EXPECT_LT(difference(rest, plain(m, x).y), 1e-12);
  EXPECT_GT(difference(y, rest), 0.1);
}

// With a router whose logits are all equal, every token takes the first experts: the counts are as uneven as possible, the probabilities
// even.
TEST(MixtureOfExperts, TiesGoToTheFirstExperts) {
  nn::MixtureOfExperts m(config());
  m.router.weight.set_init(nn::Init::zeros());
  materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
  const std::vector<double> x = tokens();
  EXPECT_LT(difference(m(tensor(x)).to_vector<double>(), plain(m, x).y), 1e-12);
  EXPECT_NEAR(m.imbalance.item<double>(), 1.0, 1e-13);
}

// Later tokens do not affect a token's output, though they compete for places.
TEST(MixtureOfExperts, LaterTokensChangeNothing) {
  nn::MixtureOfExperts m(config(0.5));
  materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
  const std::vector<double> x = tokens(), other = tokens(2);
  const std::vector<double> y = m(tensor(x)).to_vector<double>();
  for (int64_t first = 0; first < kTokens; ++first) {
    std::vector<double> mixed = x;
    for (int64_t b = 0; b < kBatch; ++b)
      std::copy_n(other.data() + (b * kTokens + first) * kWidth, (kTokens - first) * kWidth,
                  mixed.data() + (b * kTokens + first) * kWidth);
    const std::vector<double> got = m(tensor(mixed)).to_vector<double>();
    for (int64_t b = 0; b < kBatch; ++b)
      for (int64_t i = b * kTokens * kWidth; i < (b * kTokens + first) * kWidth; ++i) EXPECT_EQ(got[i], y[i]);
  }
}

TEST(MixtureOfExperts, OfNoTokensIsBalanced) {
  nn::MixtureOfExperts m(config());
  materialize(m, Device::cpu(), {.seed = 3});
  EXPECT_EQ(m(zeros({2, 0, kWidth})).shape(), (Shape{2, 0, kWidth}));
  EXPECT_EQ(m.imbalance.item(), 0);
}

// With a capacity, ranks that share sequences need separate groups.
bool mesh_refuses(const nn::MixtureConfig& c, const std::vector<MeshSpec::Axis>& axes) {
  return c.capacity_factor > 0 &&
         std::ranges::any_of(axes, [&](const MeshSpec::Axis& a) { return a.name == "context" && c.capacity_groups % a.size != 0; });
}

// However the batch is cut, values and imbalance are those of the whole batch.
TEST(MixtureOfExperts, CutOverRanks) {
  const std::vector<double> x = tokens();
  // With eight or seven experts, two ranks have a part each, three do not, as that leaves no fewer rows empty.
  for (const auto& [experts, capacity, groups] : {std::tuple{4, 0.0, 1}, {4, 0.7, 11}, {8, 0.0, 1}, {7, 0.0, 1}, {7, 3.0, 1}}) {
    nn::MixtureConfig c = config(capacity, groups);
    c.experts = experts;
    nn::MixtureOfExperts whole(c);
    materialize(whole, Device::cpu(), {.seed = 3, .dtype = kF64});
    const Expected expected = plain(whole, x);
    using Axes = std::vector<MeshSpec::Axis>;
    for (const Axes& axes : {Axes{{"data", 3}}, Axes{{"data", 1}, {"expert", 3}}, Axes{{"data", 2}, {"expert", 2}},
                             Axes{{"data", 1}, {"expert", 2}, {"context", 11}}, Axes{{"data", 1}, {"context", 11}}}) {
      int ranks = 1;
      for (const auto& a : axes) ranks *= a.size;
      if (mesh_refuses(c, axes)) continue;
      run_local(ranks, [&](World& w) {
        const Mesh mesh = w.mesh(axes);
        const auto named = [&](const char* name) { return mesh.spec->has_axis(name) ? name : ""; };
        nn::MixtureOfExperts m(c);
        shard(m, mesh, {.context_axis = named("context"), .expert_axis = named("expert")});
        materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
        Layout layout(mesh.spec, Placement::shard(0));
        if (mesh.spec->has_axis("context")) layout[mesh.spec->axis("context")] = Placement::shard(1);
        const Tensor y = m(redistribute(tensor(x), layout));
        EXPECT_LT(difference(redistribute(y, Layout(mesh.spec)).to_vector<double>(), expected.y), 1e-12);
        EXPECT_NEAR(redistribute(m.imbalance, Layout(mesh.spec, Placement::invariant())).item<double>(), expected.imbalance, 1e-13);
        EXPECT_NEAR(redistribute(m.router_z, Layout(mesh.spec, Placement::invariant())).item<double>(), expected.router_z, 1e-12);
      }, {.threads_per_rank = 1});
    }
  }
}

// A rank's tokens may be in several intervals of a sequence: groups are the same if each is within one interval.
TEST(MixtureOfExperts, CutFromBothEnds) {
  constexpr int64_t kLength = 12;
  const Tensor x = randn({kF64, {2, kLength, kWidth}, {}}, Key{4});
  const auto on_ranks = [&](int ranks, int64_t experts, double capacity, int64_t groups, const std::function<void(const Tensor&)>& f) {
    run_local(ranks, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 1}, {"expert", static_cast<int>(experts)}, {"context", ranks / static_cast<int>(experts)}});
      nn::MixtureOfExperts m(config(capacity, groups));
      shard(m, mesh, {.context_axis = "context", .expert_axis = "expert"});
      materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
      Layout layout(mesh.spec, Placement::shard(0));
      layout[2] = Placement::shard(OwnershipMap::from_both_ends(1, kLength, mesh.spec->size(2)));
      const Tensor y = m(redistribute(x, layout));
      EXPECT_EQ(y.layout(), layout);
      f(redistribute(y, Layout(mesh.spec)));
    }, {.threads_per_rank = 1});
  };
  for (const auto& [capacity, groups] : {std::pair{0.0, 1}, {0.7, 4}, {0.7, 12}}) {
    nn::MixtureOfExperts whole(config(capacity, groups));
    materialize(whole, Device::cpu(), {.seed = 3, .dtype = kF64});
    const std::vector<double> expected = whole(x).to_vector<double>();
    for (const auto& [ranks, experts] : {std::pair{2, 1}, {4, 2}})
      on_ranks(ranks, experts, capacity, groups,
               [&](const Tensor& y) { EXPECT_LT(difference(y.to_vector<double>(), expected), 1e-12) << capacity << ' ' << groups; });
  }
  EXPECT_THAT([&] { on_ranks(2, 1, 0.7, 2, [](const Tensor&) {}); },
              ThrowsMessage<ConfigError>(HasSubstr("share its 12 in pieces of multiples of 3: with a capacity")));
}

TEST(MixtureOfExperts, WhatCannotBeIsRefused) {
  nn::MixtureConfig c = config();
  c.choices = 5;
  EXPECT_THAT([&] { nn::MixtureOfExperts m(c); }, ThrowsMessage<ConfigError>(HasSubstr("5 choices among 4 experts")));
  c = config();
  c.capacity_groups = 0;
  EXPECT_THROW(nn::MixtureOfExperts m(c), ConfigError);
  c = config();
  c.routing_groups = 3;
  EXPECT_THAT([&] { nn::MixtureOfExperts m(c); }, ThrowsMessage<ConfigError>(HasSubstr("2 choices among 1 of 3 equal groups of 4 experts")));
  c.routing_groups = 4;
  EXPECT_THAT([&] { nn::MixtureOfExperts m(c); }, ThrowsMessage<ConfigError>(HasSubstr("2 choices among 1 of 4 equal groups of 4 experts")));
  c.routing_groups = 1;
  c.gate_limit = -1;
  EXPECT_THAT([&] { nn::MixtureOfExperts m(c); }, ThrowsMessage<ConfigError>(HasSubstr("gates held to -1")));
  c.gate_limit = 0;
  c.balance_rate = -1;
  EXPECT_THAT([&] { nn::MixtureOfExperts m(c); }, ThrowsMessage<ConfigError>(HasSubstr("balance rate -1")));
  run_local(4, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}, {"expert", 2}});
    nn::MixtureOfExperts m(config());
    EXPECT_THROW(shard(m, mesh), ConfigError) << "leaves out axis 'expert'";
    EXPECT_THROW(shard(m, mesh, {.replica_axis = "expert", .expert_axis = "expert"}), ConfigError);
    EXPECT_THROW(shard(m, mesh, {.tensor_axis = "expert", .expert_axis = "expert"}), ConfigError);
    EXPECT_THROW(shard(m, mesh, {.context_axis = "expert", .expert_axis = "expert"}), ConfigError);
    EXPECT_THROW(shard(m, mesh, {.expert_axis = "experts"}), ConfigError);
    const Mesh alone = w.mesh({{"expert", 4}});
    EXPECT_THAT([&] { shard(m, alone, {.axis = "expert", .expert_axis = "expert"}); },
                ThrowsMessage<ConfigError>(HasSubstr("needs one more axis, over which the experts of each rank of 'expert' are sharded")));
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf
