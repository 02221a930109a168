#include "sheaf/nn/layers/experts.h"

#include <algorithm>
#include <cmath>

namespace sheaf::nn {
namespace {

Parameter matrices(const Shape& shape, const Init& init) {
  Parameter p(shape, init);
  p.set_cut(OwnershipMap::even(0));
  return p;
}

MixtureConfig checked(const MixtureConfig& c) {
  check<ConfigError>(c.experts > 0 && c.choices > 0 && c.choices <= c.experts && c.hidden > 0, "[experts] ", c.choices,
                     " choices among ", c.experts, " experts of hidden width ", c.hidden);
  check<ConfigError>(c.capacity_factor >= 0 && c.groups > 0, "[experts] capacity factor ", c.capacity_factor, " for ", c.groups,
                     " groups of each sequence");
  return c;
}

/// `to` in place of `from` on all axes.
Layout replaced(Layout l, const Placement& from, const Placement& to) {
  for (int a = 0; a < l.num_axes(); ++a)
    if (l[a] == from) l[a] = to;
  return l;
}

/// x in a type that takes more memory, in which it is not kept for the backward.
Tensor wider(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  const RecomputeScope again(RecomputeOptions{.results = true});
  return cast(x, dtype);
}

}  // namespace

Experts::Experts(const MixtureConfig& c)
    : gate(matrices({c.experts, c.hidden, c.width}, c.init)),
      up(matrices({c.experts, c.hidden, c.width}, c.init)),
      down(matrices({c.experts, c.width, c.hidden}, c.projection_init)) {}

Tensor Experts::forward(const Tensor& rows_EBNPC, const Tensor& counts_EBN) {
  const int axis = gate.cut_axis();
  const auto at = [axis](const Tensor& t, const Placement& p) {
    return axis >= 0 && t.layout().mesh() ? redistribute(t, t.layout().with(axis, p)) : t;
  };
  const Placement outside = axis >= 0 && rows_EBNPC.layout().mesh() ? rows_EBNPC.layout()[axis] : Placement();
  const Placement inside = Placement::shard(OwnershipMap::even(0));
  const Tensor x = at(rows_EBNPC, inside), counts = at(counts_EBN, inside);
  const Tensor gates = expert_linear(x, gate, counts), ups = expert_linear(x, up, counts);
  return at(expert_linear(swiglu(gates, ups), down, counts), outside);
}

MixtureOfExperts::MixtureOfExperts(const MixtureConfig& c)
    : config(checked(c)), router(c.width, c.experts, {.bias = false, .init = c.init}), experts(c), dropout(c.dropout) {
  router.weight.set_table();
}

// Where nothing is dropped, ranks that share a sequence have a group each.
int64_t MixtureOfExperts::groups_of(const Tensor& x_BTC, bool drops) const {
  const Layout& l = x_BTC.layout();
  int64_t ranks = 1;
  std::string axes;
  for (int a = 0; a < l.num_axes(); ++a) {
    if (!l[a].is_shard(1)) continue;
    ranks *= l.mesh()->size(a);
    axes += str(axes.empty() ? "'" : " and '", l.mesh()->name(a), "'");
  }
  if (!drops || config.capacity_factor == 0) return ranks;
  const int64_t tokens = x_BTC.size(1);
  if (ranks > 1 && (config.groups % ranks != 0 || tokens % config.groups != 0))
    fail<ConfigError>("[experts] '", path(), "': places for the tokens of a sequence are counted in ", config.groups,
                      config.groups == 1 ? " group" : " groups", ", and the ", ranks, " ranks of ", axes, " share its ",
                      tokens, ": with a capacity, groups must be a multiple of these ranks and divide the tokens");
  return config.groups;
}

Tensor MixtureOfExperts::imbalance_of(const Tensor& probabilities_BTE, const Tensor& choices_BTK) const {
  const auto choices = static_cast<double>(choices_BTK.numel());
  const Tensor one = full_of({probabilities_BTE.dtype(), choices_BTK.shape(), choices_BTK.layout()}, 1.0);
  const Tensor chosen = sum(scatter_add(full_like(probabilities_BTE, 0.0), 2, choices_BTK, one), {0, 1});
  const Tensor share = redistribute(chosen, replaced(chosen.layout(), Placement::partial(), Placement::replicate()));
  const double scale = static_cast<double>(config.experts * config.choices) / (choices * choices);
  return sum(mul(sum(probabilities_BTE, {0, 1}), share)) * scale;
}

Tensor MixtureOfExperts::forward(const Tensor& x_BTC, bool drops) {
  const DType exact = x_BTC.dtype() == kF64 ? kF64 : kF32;
  Tensor probabilities;
  {
    const auto scope = router.enter();
    probabilities = softmax(linear(wider(x_BTC, exact), cast(router.weight, exact)));
  }
  const Tensor choices = top_k(probabilities, config.choices);
  Tensor weights = gather(probabilities, 2, choices);
  if (config.normalize) weights = weights / sum(weights, {2}, /*keepdim=*/true);
  if (training() && config.balances) imbalance = imbalance_of(probabilities, choices);

  const int64_t groups = groups_of(x_BTC, drops), tokens = (x_BTC.size(1) + groups - 1) / groups;
  int64_t places = tokens;
  if (drops && config.capacity_factor > 0) {
    const double share = static_cast<double>(config.choices * tokens) / static_cast<double>(config.experts);
    places = std::min(tokens, static_cast<int64_t>(std::ceil(config.capacity_factor * share)));
  }
  const ExpertRoutes routes = expert_routes(choices, config.experts, places, groups);
  const Tensor rows = experts(to_experts(x_BTC, routes), routes.counts);
  return dropout(from_experts(rows, routes, weights));
}

}  // namespace sheaf::nn
