#include "sheaf/nn/direction.h"

#include <algorithm>
#include <map>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/nn/trainable_units.h"

namespace sheaf {
namespace {

using Units = std::vector<std::shared_ptr<Unit>>;

// The parameters of both, in the same order.
struct Pair {
  std::vector<nn::Parameter> model, direction;
  Pair(const char* who, nn::Module& of, nn::Module& along) : model(of.parameters()), direction(along.parameters()) {
    check<ShapeError>(model.size() == direction.size(), "[", who, "] the model ", of.type_name(), " has ", model.size(),
                      " parameters, the direction ", along.type_name(), " ", direction.size());
    for (size_t i = 0; i < model.size(); ++i) {
      const nn::Parameter &p = model[i], &v = direction[i];
      const bool is_its = nn::name_within(of, p.name()) == nn::name_within(along, v.name());
      check<ShapeError>(is_its && p.shape() == v.shape(), "[", who, "] '", p.name(), "' ", p.dtype(), p.shape(),
                        " of the model is no '", v.name(), "' ", v.dtype(), v.shape(), " of the direction");
    }
  }
};

enum class Gradients : bool { as_they_are, reduced };

// f(buffer of the model, its unit, buffer of the direction, its unit) for all trained, unsteered parameters.
template <class F>
void for_each_buffer(const char* who, nn::Module& model, nn::Module& direction, Gradients gradients, F&& f) {
  const Pair pair(who, model, direction);
  const Units units = nn::trainable_units(who, pair.model), along = nn::trainable_units(who, pair.direction);
  if (gradients == Gradients::reduced) {
    nn::reduce_waiting(units);
    for (const auto& unit : units) unit->expect_not_consumed(who);
  }
  const auto expect_alike = [&](const std::string& difference) {
    check<PlacementError>(difference.empty(), "[", who, "] the direction is sharded otherwise than the model: ", difference,
                          "; shard() both with the same options, and freeze() the same parameters");
  };
  expect_alike(nn::difference_of_units(model, units, direction, along));
  for (size_t u = 0; u < units.size(); ++u) {
    auto &of = units[u]->buffers(), &v = along[u]->buffers();
    for (size_t b = 0; b < of.size(); ++b) {
      if (of[b].has_slope() != v[b].has_slope()) expect_alike(str("unit '", path_label(units[u]->name()), "' has others that are trained"));
      if (of[b].has_slope()) f(of[b], *units[u], v[b], *along[u]);
    }
  }
}

}  // namespace

Tensor derivative_along(const Tensor& loss, nn::Module& model, nn::Module& direction) {
  Recording* const recording = Recording::current();
  if (!recording) fail<LifetimeError>("[derivative_along] outside of a recording");
  const Pair pair("derivative_along", model, direction);
  std::map<std::pair<const LeafGroup*, int>, const nn::Parameter*> along;
  for (size_t i = 0; i < pair.model.size(); ++i)
    if (const nn::Parameter& p = pair.model[i]; p.trainable() && p.steered() == 0)
      along[{p.unit().get(), p.index()}] = &pair.direction[i];
  return recording->derivative_along(loss, [&](const LeafGroup& group, int leaf) {
    const auto it = along.find({&group, leaf});
    return it == along.end() ? Tensor() : it->second->value();
  });
}

Tensor gradient_along(nn::Module& model, nn::Module& direction) {
  std::vector<Tensor> sums;  // one number per layout: one collective for all units of a kind
  const auto add_term = [&](const FlatBuffer& of, const Unit&, const FlatBuffer& v, const Unit&) {
    if (!of.grad) return;
    const Tensor term = sum(mul(cast(of.grad, kF64), cast(v.shard, kF64)));
    const auto same = std::ranges::find_if(sums, [&](const Tensor& s) { return s.layout() == term.layout(); });
    if (same == sums.end()) sums.push_back(term);
    else *same = add(*same, term);
  };
  for_each_buffer("gradient_along", model, direction, Gradients::reduced, add_term);
  Tensor all;
  for (const Tensor& s : sums) {
    Layout whole = s.layout();
    for (int a = 0; a < whole.num_axes(); ++a) whole[a] = Placement::invariant();
    const Tensor term = redistribute(s, whole);
    all = all ? add(all, term) : term;
  }
  return all ? all : full({}, 0, kF64);
}

void set_to_gradient(nn::Module& direction, nn::Module& model, double scale) {
  expect_no_recording("set_to_gradient");
  for_each_buffer("set_to_gradient", model, direction, Gradients::reduced, [&](const FlatBuffer& of, const Unit&, FlatBuffer& v, Unit& unit) {
    unit.close_for_change();
    const Tensor value = of.grad ? mul(of.grad, scale) : full_like(v.shard, 0);
    store_into(v.shard, value.dtype() == v.dtype ? value : cast(value, v.dtype));
  });
}

void move_along(nn::Module& model, nn::Module& direction, double scale) {
  expect_no_recording("move_along");
  const auto move = [&](FlatBuffer& of, Unit& unit, const FlatBuffer& v, const Unit&) {
    unit.close_for_change();
    add_into(of.shard, mul(v.shard, scale));
  };
  for_each_buffer("move_along", model, direction, Gradients::as_they_are, move);
}

void zero_grad(nn::Module& module) {
  for (const auto& unit : nn::trainable_units("zero_grad", module.parameters())) unit->zero_grad();
}

}  // namespace sheaf
