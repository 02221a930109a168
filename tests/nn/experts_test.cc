// A mixture of experts against a plain loop over tokens.
#include "sheaf/nn/layers/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sheaf/distributed/run_local.h"
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
  c.groups = groups;
  c.balances = true;
  c.init = c.projection_init = nn::Init::normal(1.0);
  return c;
}

struct Expected {
  std::vector<double> y;
  double imbalance = 0;
  int64_t dropped = 0;
};

// What of the choices of a group an expert has no place for adds nothing.
Expected plain(nn::MixtureOfExperts& m, const std::vector<double>& x, bool drops = true) {
  const nn::MixtureConfig& c = m.config;
  const auto values = [](const nn::Parameter& p) { return full_parameter(p).to_vector<double>(); };
  const auto router = values(m.router.weight), gate = values(m.experts.gate), up = values(m.experts.up), down = values(m.experts.down);
  Expected out{std::vector<double>(x.size(), 0.0)};
  const int64_t group_tokens = (kTokens + c.groups - 1) / c.groups;
  const auto places = c.capacity_factor == 0 || !drops
                          ? kTokens
                          : std::min<int64_t>(group_tokens, std::ceil(c.capacity_factor * c.choices * group_tokens / c.experts));
  std::vector<double> chosen(c.experts), mean(c.experts);
  for (int64_t b = 0; b < kBatch; ++b) {
    std::vector<int64_t> taken(c.experts);
    for (int64_t t = 0, group = 0; t < kTokens; ++t) {
      while (group + 1 < c.groups && t >= kTokens * (group + 1) / c.groups) ++group, std::ranges::fill(taken, 0);
      const double* row = x.data() + (b * kTokens + t) * kWidth;
      std::vector<double> p(c.experts);
      double total = 0;
      for (int64_t e = 0; e < c.experts; ++e) {
        double logit = 0;
        for (int64_t i = 0; i < kWidth; ++i) logit += row[i] * router[e * kWidth + i];
        total += p[e] = std::exp(logit);
      }
      std::vector<int64_t> order(c.experts);
      for (int64_t e = 0; e < c.experts; ++e) order[e] = e, p[e] /= total, mean[e] += p[e] / (kBatch * kTokens);
      std::ranges::stable_sort(order, [&](int64_t a, int64_t d) { return p[a] > p[d]; });
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
          double g = 0, u = 0;
          for (int64_t i = 0; i < kWidth; ++i) {
            g += row[i] * gate[(e * c.hidden + h) * kWidth + i];
            u += row[i] * up[(e * c.hidden + h) * kWidth + i];
          }
          hidden[h] = g / (1 + std::exp(-g)) * u;
        }
        for (int64_t i = 0; i < kWidth; ++i)
          for (int64_t h = 0; h < c.hidden; ++h)
            out.y[(b * kTokens + t) * kWidth + i] +=
                p[e] / (c.normalize ? weights : 1) * hidden[h] * down[(e * kWidth + i) * c.hidden + h];
      }
    }
  }
  for (int64_t e = 0; e < c.experts; ++e) out.imbalance += c.experts * chosen[e] * mean[e];
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
      m.imbalance = {};
      EXPECT_LT(difference(m(tensor(x), /*drops=*/false).to_vector<double>(), plain(m, x, false).y), 1e-12);
      m.imbalance = {};
      m.eval();
      m(tensor(x));
      EXPECT_FALSE(m.imbalance);
    }
}

// Of a router that has no opinion everybody takes the first experts: as uneven as can be, but in probability even.
TEST(MixtureOfExperts, TiesGoToTheFirstExperts) {
  nn::MixtureOfExperts m(config());
  m.router.weight.set_init(nn::Init::zeros());
  materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
  const std::vector<double> x = tokens();
  EXPECT_LT(difference(m(tensor(x)).to_vector<double>(), plain(m, x).y), 1e-12);
  EXPECT_NEAR(m.imbalance.item<double>(), 1.0, 1e-13);
}

// Whatever later tokens are, what a token gets stays, though they compete for places.
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

// Cut anyhow, values and imbalance are those of the whole batch.
TEST(MixtureOfExperts, CutOverRanks) {
  const std::vector<double> x = tokens();
  for (const auto& [capacity, groups] : {std::pair{0.0, 1}, {0.7, 11}}) {
    nn::MixtureOfExperts whole(config(capacity, groups));
    materialize(whole, Device::cpu(), {.seed = 3, .dtype = kF64});
    const Expected expected = plain(whole, x);
    using Axes = std::vector<MeshSpec::Axis>;
    for (const Axes& axes : {Axes{{"data", 3}}, Axes{{"data", 1}, {"expert", 3}}, Axes{{"data", 2}, {"expert", 2}},
                             Axes{{"data", 1}, {"expert", 2}, {"context", 11}}, Axes{{"data", 1}, {"context", 11}}}) {
      int ranks = 1;
      for (const auto& a : axes) ranks *= a.size;
      run_local(ranks, [&, capacity = capacity, groups = groups](World& w) {
        const Mesh mesh = w.mesh(axes);
        const auto named = [&](const char* name) { return mesh.spec->has_axis(name) ? name : ""; };
        nn::MixtureOfExperts m(config(capacity, groups));
        shard(m, mesh, {.context_axis = named("context"), .expert_axis = named("expert")});
        materialize(m, Device::cpu(), {.seed = 3, .dtype = kF64});
        Layout layout(mesh.spec, Placement::shard(0));
        if (mesh.spec->has_axis("context")) layout[mesh.spec->axis("context")] = Placement::shard(1);
        const Tensor y = m(redistribute(tensor(x), layout));
        EXPECT_LT(difference(redistribute(y, Layout(mesh.spec)).to_vector<double>(), expected.y), 1e-12);
        EXPECT_NEAR(redistribute(m.imbalance, Layout(mesh.spec, Placement::invariant())).item<double>(), expected.imbalance, 1e-13);
      }, {.threads_per_rank = 1});
    }
  }
}

TEST(MixtureOfExperts, WhatCannotBeIsRefused) {
  nn::MixtureConfig c = config();
  c.choices = 5;
  EXPECT_THAT([&] { nn::MixtureOfExperts m(c); }, ThrowsMessage<ConfigError>(HasSubstr("5 choices among 4 experts")));
  c = config();
  c.groups = 0;
  EXPECT_THROW(nn::MixtureOfExperts m(c), ConfigError);
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
                ThrowsMessage<ConfigError>(HasSubstr("where it is whole, the size of that axis is 1")));
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf
