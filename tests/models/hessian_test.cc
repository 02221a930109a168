// Products of a loss's Hessian with a direction: against differences of gradients, on every mesh, with the bits that strategies promise,
// and what travels and lies in memory for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/direction.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

// The directions' values are drawn, those of norms and biases, too.
void draw_all(models::Decoder& model, const ShardOptions&) {
  for (nn::Parameter p : model.parameters()) p.set_init(nn::Init::normal(0.1));
}

Tensor loss_of(models::Decoder& model, const TinyBatch& batch) {
  return model.loss(batch.tokens, batch.targets, {.divide_by = static_cast<double>(batch.tokens.numel())});
}

struct Products {
  Values product, direction;
  double along = 0;  // <H v, v>
};

Products hessian_f64(const Axes& axes, const std::string& strategy, int64_t rows, const models::ModelConfig& config) {
  Products out;
  Whole product, direction;
  run_local(num_ranks(axes), [&](World& w) {
    const Mesh mesh = w.mesh(axes);
    const auto model = tiny_model_f64(mesh, {.strategy = strategy}, {}, 5, config);
    const auto v = tiny_model_f64(mesh, {.strategy = strategy}, {}, 6, config, draw_all);
    const TinyBatch batch = tiny_batch(mesh, 0, rows);
    {
      Recording recording({.higher_order = true});
      recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
    }
    product.collect(*model, true);
    direction.collect(*v, false);
    const double along = gradient_along(*model, *v).item<double>();
    if (w.rank() == 0) out.along = along;
  }, {.threads_per_rank = 1});
  out.product = product.values(), out.direction = direction.values();
  return out;
}

// (∇loss(w + εv) − ∇loss(w − εv)) / 2ε
Values difference_of_gradients(int64_t rows, const models::ModelConfig& config, const Values& direction) {
  constexpr double kStep = 2e-5;
  Values out;
  run_local(1, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}});
    Values at[2];
    for (const int side : {0, 1}) {
      const auto model = tiny_model_f64(mesh, {.strategy = "replicate"}, {}, 5, config);
      for (const nn::Parameter& p : model->parameters()) {
        std::vector<double> values = full_parameter(p).to_vector<double>();
        const std::vector<double>& v = direction.at(p.name());
        for (size_t i = 0; i < values.size(); ++i) values[i] += (side == 0 ? kStep : -kStep) * v[i];
        assign(p, Tensor::from<double>(values, p.shape()));
      }
      {
        Recording recording;
        recording.backward(loss_of(*model, tiny_batch(mesh, 0, rows)));
      }
      Whole whole;
      whole.collect(*model, true);
      at[side] = whole.values();
    }
    for (auto& [name, up] : at[0]) {
      const std::vector<double>& down = at[1].at(name);
      for (size_t i = 0; i < up.size(); ++i) up[i] = (up[i] - down[i]) / (2 * kStep);
      out[name] = up;
    }
  }, {.threads_per_rank = 1});
  return out;
}

class HessianOf : public ::testing::TestWithParam<std::string> {};

models::ModelConfig model_of(const std::string& type) {
  if (type == "mixture") return tiny_mixture();
  return tiny_model(type, 4, 2);
}

TEST_P(HessianOf, ProductsAreDifferencesOfGradients) {
  const models::ModelConfig config = model_of(GetParam());
  const Products one = hessian_f64({{"data", 1}}, "replicate", 3, config);
  const Values expected = difference_of_gradients(3, config, one.direction);
  EXPECT_LE(max_difference(expected, one.product), 1e-6 * max_magnitude(expected));
  double along = 0;
  for (const auto& [name, v] : one.direction)
    for (size_t i = 0; i < v.size(); ++i) along += v[i] * one.product.at(name)[i];
  EXPECT_NEAR(one.along, along, 1e-12 * std::abs(along));
}

TEST_P(HessianOf, ProductsAreThoseOfOneRank) {
  const models::ModelConfig config = model_of(GetParam());
  const Products one = hessian_f64({{"data", 1}}, "replicate", 3, config);
  const auto expect_same = [&](const Axes& axes, const char* strategy) {
    const Products many = hessian_f64(axes, strategy, 3, config);
    std::string where = strategy;
    for (const auto& a : axes) where += str(' ', a.name, ' ', a.size);
    EXPECT_EQ(max_difference(one.direction, many.direction), 0) << where;
    EXPECT_LE(max_difference(one.product, many.product), 1e-11 * max_magnitude(one.product)) << where;
    EXPECT_NEAR(many.along, one.along, 1e-11 * std::abs(one.along)) << where;
  };
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) expect_same({{"data", 3}}, strategy);
  expect_same({{"replica", 2}, {"data", 2}}, "full_shard");
  expect_same({{"data", 2}, {"model", 2}}, "full_shard");
  expect_same({{"data", 1}, {"context", 2}}, "full_shard");
  expect_same({{"secondary", 2}, {"data", 2}}, "full_shard");
  expect_same({{"gathered", 2}, {"data", 1}, {"model", 2}}, "zero1");
}

INSTANTIATE_TEST_SUITE_P(Models, HessianOf, ::testing::Values("gpt2", "llama", "untied llama", "qwen3", "latent", "mixture"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, ' ', '_');
                           return name;
                         });

// The parts of a job that change no bit of gradients change none of their derivatives: each order is reduced by itself.
TEST(Hessian, StrategiesPrefetchAndRecomputingChangeNoBit) {
  const auto product = [](const ShardOptions& options, bool recompute) {
    Whole whole;
    run_local(3, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 3}});
      const auto model = tiny_model_f64(mesh, options, {}, 5, model_of("untied llama"));
      const auto v = tiny_model_f64(mesh, options, {}, 6, model_of("untied llama"), draw_all);
      if (recompute) {
        for (auto& [path, module] : model->named_modules())
          if (path.starts_with("blocks.") && path.size() == 8) module->recompute();
      }
      const TinyBatch batch = tiny_batch(mesh, 0, 4);
      for (int repeat = 0; repeat < 2; ++repeat) {  // the second time gathers are foreseen
        zero_grad(*model);
        Recording recording({.higher_order = true});
        recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
      }
      whole.collect(*model, true);
    }, {.threads_per_rank = 1});
    return whole.values();
  };
  const Values expected = product({.strategy = "full_shard"}, false);
  for (const char* strategy : {"full_shard", "shard_grad_op", "replicate"})
    for (const int64_t prefetch : {int64_t{0}, int64_t{-1}, int64_t{1} << 30})
      for (const bool recompute : {false, true})
        EXPECT_LE(max_difference(expected, product({.strategy = strategy, .prefetch_bytes = prefetch}, recompute)),
                  recompute ? 1e-15 : 0)  // values and their copies have gradients that are added up in another order
            << strategy << ' ' << prefetch << ' ' << recompute;
}

// Of three blocks on two ranks, without prefetch: every unit is gathered where it is used, its gradients are reduced where each of the
// two passes leaves it, and of gradients no more lie in memory at a time than a unit's and those that travel.
TEST(Hessian, NoMoreThanAUnitIsWhole) {
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const ShardOptions options{.strategy = "full_shard", .prefetch_bytes = 0};
    const auto model = tiny_model_f64(mesh, options), v = tiny_model_f64(mesh, options, {}, 6, tiny_config().model, draw_all);
    const TinyBatch batch = tiny_batch(mesh, 0, 4);
    Recording recording({.higher_order = true});
    recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
    const Tape tape = recording.take();
    for (const auto& findings : {check_types(tape), check_cotangents(tape), check_gathers(tape)})
      for (const Finding& f : findings) ADD_FAILURE() << f.to_string();
    std::map<std::string, int> gathers, reductions;
    int open = 0, most = 0;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) {
      const Node& n = tape.node(id);
      if (!n.op) continue;
      const std::string_view op = n.op->name;
      if (op == "all_gather") ++gathers[tape.path(n)];
      if (op == "grad_slots") most = std::max(most, ++open);
      if (op == "reduce_scatter") ++reductions[tape.path(n)], --open;
    }
    EXPECT_LE(most, 2);  // the root's are there until the end
    EXPECT_EQ(open, 0);
    for (const char* block : {"blocks.0", "blocks.1", "blocks.2"}) {
      EXPECT_EQ(reductions[block], 2) << block;
      // The model's in the forward, the derivative and its backward's two halves, but for one of the last block's and of the first's;
      // the direction's in the derivative and in its backward.
      EXPECT_EQ(gathers[block], block == std::string("blocks.1") ? 6 : 5) << block;
    }
    EXPECT_EQ(reductions[""], 2);
  }, {.threads_per_rank = 1});
}

// <∇<∇<∇loss, v>, v>, v> is the third derivative along v.
TEST(Hessian, DerivativesOfAnyOrder) {
  const auto third = [](const Axes& axes, double at) {
    std::vector<double> out(static_cast<size_t>(num_ranks(axes)));
    run_local(num_ranks(axes), [&](World& w) {
      const Mesh mesh = w.mesh(axes);
      const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 5, model_of("qwen3"));
      const auto v = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 6, model_of("qwen3"), draw_all);
      const auto params = model->parameters(), along = v->parameters();
      for (size_t i = 0; i < params.size(); ++i) {
        std::vector<double> values = full_parameter(params[i]).to_vector<double>();
        const std::vector<double> step = full_parameter(along[i]).to_vector<double>();
        for (size_t k = 0; k < values.size(); ++k) values[k] += at * step[k];
        assign(params[i], Tensor::from<double>(values, params[i].shape()));
      }
      Recording recording({.higher_order = true});
      Tensor d = loss_of(*model, tiny_batch(mesh, 0, 3));
      std::vector<double> orders;
      for (int order = 0; order < 3; ++order) {
        d = derivative_along(d, *model, *v);
        Layout whole = d.layout();
        for (int a = 0; a < whole.num_axes(); ++a) whole[a] = Placement::invariant();
        orders.push_back(redistribute(d, whole).item<double>());
      }
      recording.backward(d);
      out[static_cast<size_t>(w.rank())] = at == 0 ? orders[2] : orders[1];
    }, {.threads_per_rank = 1});
    for (const double other : out) EXPECT_EQ(other, out[0]);
    return out[0];
  };
  const Axes one = {{"data", 1}};
  const double expected = (third(one, 1e-4) - third(one, -1e-4)) / 2e-4;
  EXPECT_NEAR(third(one, 0), expected, 1e-5 * std::abs(expected));
  EXPECT_NEAR(third({{"data", 2}, {"model", 2}}, 0), third(one, 0), 1e-10 * std::abs(expected));
}

TEST(Hessian, SaysWhatCannotBe) {
  run_local(1, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 1}});
    const auto model = tiny_model_f64(mesh, {}), v = tiny_model_f64(mesh, {}, {}, 6), other = tiny_model_f64(mesh, {}, {}, 6, model_of("llama"));
    const TinyBatch batch = tiny_batch(mesh, 0, 2);
    const auto message = [&](auto&& f) -> std::string {
      try {
        f();
      } catch (const Error& e) {
        return e.what();
      }
      return "";
    };
    {
      Recording recording;
      const Tensor d = derivative_along(loss_of(*model, batch), *model, *v);
      EXPECT_THAT(message([&] { recording.backward(d); }), HasSubstr("Recording recording({.higher_order = true})"));
    }
    Recording recording({.higher_order = true});
    const Tensor loss = loss_of(*model, batch);
    EXPECT_THAT(message([&] { derivative_along(loss, *model, *other); }), HasSubstr("[derivative_along] "));
    EXPECT_THAT(message([&] { derivative_along(Tensor::from<double>({1}, {}), *model, *v); }), HasSubstr("not a value of this recording"));
    EXPECT_THAT(message([&] { derivative_along(full({}, 1, kF64) * 2.0, *model, *v); }), HasSubstr("no trainable parameter leads to"));
    EXPECT_THAT(message([&] { set_to_gradient(*v, *model); }), HasSubstr("not inside a recording"));
  }, {.threads_per_rank = 1});
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"stage", 2, /*chain=*/true}, {"data", 1}});
    const auto model = tiny_model_f64(mesh, {}, {}, 5, model_of("untied llama")), v = tiny_model_f64(mesh, {}, {}, 6, model_of("untied llama"));
    const TinyBatch batch = tiny_batch(mesh, 0, 2);
    Recording recording({.higher_order = true});
    try {
      derivative_along(loss_of(*model, batch), *model, *v);
      ADD_FAILURE() << "accepted";
    } catch (const PlacementError& e) {
      EXPECT_THAT(e.what(), HasSubstr("stages of a pipeline"));
    }
  }, {.threads_per_rank = 1});
}

// The largest eigenvalue of a Hessian, by products alone, on ranks that never hold a whole vector: the Rayleigh quotient of what the
// iteration converges to, whose residual says how near that is to an eigenvector.
TEST(Hessian, PowerIteration) {
  for (const int ranks : {1, 3}) {
    run_local(ranks, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", ranks}});
      const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}), v = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 6, tiny_config().model, draw_all);
      const TinyBatch batch = tiny_batch(mesh, 0, 4);
      double value = 0, residual = 1;
      for (int i = 0; i < 400 && residual > 1e-3; ++i) {
        zero_grad(*model);
        {
          Recording recording({.higher_order = true});
          recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
        }
        const double norm = grad_norm(*model).item<double>();
        value = gradient_along(*model, *v).item<double>();
        residual = i == 0 ? 1 : std::sqrt(std::max(0.0, 1 - value * value / (norm * norm)));  // |v| is 1: sine of the angle
        set_to_gradient(*v, *model, 1 / norm);
      }
      EXPECT_LE(residual, 1e-3);
      EXPECT_GT(std::abs(value), 0.1);
    }, {.threads_per_rank = 1});
  }
}

}  // namespace
}  // namespace sheaf::testing
