// Products of a loss's Hessian with a direction: against differences of gradients, on every mesh, with the bits that strategies guarantee,
// and their communication and memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/simulated.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/sharded_model.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/direction.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

const auto draw_all = draw_all_parameters;

using ::testing::HasSubstr;

Tensor loss_of(models::Decoder& model, const TinyBatch& batch) {
  return model.loss(batch.tokens, batch.targets, {.divide_by = static_cast<double>(batch.tokens.numel())});
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
    for (const nn::Parameter& p : tiny_model_f64(mesh, {.strategy = "replicate"}, {}, 5, config)->parameters())
      if (p.steered() > 0) at[0].erase(p.name());  // a measurement, not a gradient
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
  if (type == "biased mixture") return tiny_biased_mixture();
  return tiny_model(type, 4, 2);
}

TEST_P(HessianOf, ProductsAreDifferencesOfGradients) {
  const models::ModelConfig config = model_of(GetParam());
  HessianProducts one = hessian_f64({{"data", 1}}, "replicate", 3, config);
  const Values expected = difference_of_gradients(3, config, one.direction);
  std::erase_if(one.product, [&](const auto& p) { return !expected.contains(p.first); });
  EXPECT_LE(max_difference(expected, one.product), 1e-6 * max_magnitude(expected));
  double along = 0;
  for (const auto& [name, product] : one.product)
    for (size_t i = 0; i < product.size(); ++i) along += product[i] * one.direction.at(name)[i];
  EXPECT_NEAR(one.along, along, 1e-12 * std::abs(along));
}

TEST_P(HessianOf, ProductsAreThoseOfOneRank) {
  const models::ModelConfig config = model_of(GetParam());
  const HessianProducts one = hessian_f64({{"data", 1}}, "replicate", 3, config);
  const auto expect_same = [&](const Axes& axes, const char* strategy) {
    const HessianProducts many = hessian_f64(axes, strategy, 3, config);
    std::string where = strategy;
    for (const auto& a : axes) where += str(' ', a.name, ' ', a.size);
    EXPECT_EQ(max_difference(one.direction, many.direction), 0) << where;
    EXPECT_LE(max_difference(one.product, many.product), 1e-11 * max_magnitude(one.product)) << where;
    EXPECT_NEAR(many.along, one.along, 1e-11 * std::abs(one.along)) << where;
    EXPECT_NEAR(many.slope, one.slope, 1e-12 * std::abs(one.slope)) << where;
    EXPECT_NEAR(many.slope, many.slope_by_gradient, 1e-12 * std::abs(one.slope)) << where;
  };
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) expect_same({{"data", 3}}, strategy);
  expect_same({{"replica", 2}, {"data", 2}}, "full_shard");
  expect_same({{"data", 2}, {"model", 2}}, "full_shard");
  expect_same({{"data", 1}, {"context", 2}}, "full_shard");
  expect_same({{"data", 1}, {"context", 2}, {"model", 2}}, "full_shard");  // of key heads, copies are along one of them
  expect_same({{"secondary", 2}, {"data", 2}}, "full_shard");
  expect_same({{"gathered", 2}, {"data", 1}, {"model", 2}}, "zero1");
}

INSTANTIATE_TEST_SUITE_P(Models, HessianOf,
                         ::testing::Values("gpt2", "llama", "untied llama", "qwen3", "olmo", "gemma2", "latent", "mixture", "biased mixture"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace(name, ' ', '_');
                           return name;
                         });

// The parts of a configuration that do not change the bits of gradients do not change those of their derivatives: each order is reduced
// separately.
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
                  recompute ? 1e-15 : 0)  // gradients of values and their copies are added up in another order
            << strategy << ' ' << prefetch << ' ' << recompute;
}

// With three blocks on two ranks, without prefetch: every unit is gathered where it is used, its gradients are reduced where each of the
// two passes leaves it, and only one unit's gradients, and those in flight, are whole at a time.
TEST(Hessian, NoMoreThanAUnitIsWhole) {
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const ShardOptions options{.strategy = "full_shard", .prefetch_bytes = 0};
    const auto model = tiny_model_f64(mesh, options), v = tiny_model_f64(mesh, options, {}, 6, tiny_config().model, draw_all);
    const TinyBatch batch = tiny_batch(mesh, 0, 4);
    Recording recording({.higher_order = true});
    recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
    const Tape tape = recording.take();
    for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
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
    EXPECT_LE(most, 2);  // the root's stay until the end
    EXPECT_EQ(open, 0);
    for (const char* block : {"blocks.0", "blocks.1", "blocks.2"}) {
      EXPECT_EQ(reductions[block], 2) << block;
      // The model's weights in the forward, in the derivative and in the two halves of its backward, except one gather of the last block
      // and of the first; the direction's in the derivative and in its backward.
      EXPECT_EQ(gathers[block], block == std::string("blocks.1") ? 6 : 5) << block;
    }
    EXPECT_EQ(reductions[""], 2);
  }, {.threads_per_rank = 1});
}

// A dry run on one thread, without data, predicts the peak of each rank, to the byte.
TEST(Hessian, ThePeakOfADryRunIsTheMeasured) {
  const auto peak = [](World& w, const char* type, Device device) {
    const DeviceScope scope(device);
    const Mesh mesh = w.mesh({{"data", 2}});
    const models::ModelConfig c = model_of(type);
    const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}, device, 5, c),
               v = tiny_model_f64(mesh, {.strategy = "full_shard"}, device, 6, c);
    TinyBatch batch = tiny_batch(mesh, 0, 3);
    if (device.is_meta())
      for (Tensor* t : {&batch.tokens, &batch.targets}) *t = Tensor::empty(t->type(), device);
    Allocator& memory = *RankContext::current().memory(device);
    for (int step = 0; step < 3; ++step) {
      zero_grad(*model);
      memory.reset_peak();
      Recording recording({.higher_order = true});
      recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
    }
    return memory.stats().peak;
  };
  for (const char* type : {"gpt2", "qwen3", "latent"}) {
    std::vector<int64_t> measured(2);
    run_local(2, [&](World& w) { measured[static_cast<size_t>(w.rank())] = peak(w, type, Device::cpu()); }, {.threads_per_rank = 1});
    for (int rank = 0; rank < 2; ++rank) {
      World dry = distributed::simulated_world(rank, 2, {.threads = 1, .comm = "local"});
      EXPECT_EQ(peak(dry, type, Device::meta()), measured[static_cast<size_t>(rank)]) << type << " rank " << rank;
    }
  }
}

// From the second step on the order of gathers, of both the model and the direction, is known: nearly all are prefetched.
TEST(Hessian, GathersAreForeseen) {
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}),
               v = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 6, tiny_config().model, draw_all);
    const TinyBatch batch = tiny_batch(mesh, 0, 4);
    int ahead = 0, all = 0;
    for (int step = 0; step < 3; ++step) {
      Recording recording({.higher_order = true});
      recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
      const Tape tape = recording.take();
      ahead = all = 0;
      for (NodeId id = 0; id < tape.num_nodes(); ++id) {
        const Node& n = tape.node(id);
        if (!n.op || std::string_view(n.op->name) != "all_gather") continue;
        ++all, ahead += (n.flags & Node::kPrefetched) != 0;
      }
    }
    EXPECT_GE(all, 14);
    EXPECT_GE(ahead, all - 4);
    EXPECT_EQ(gather_schedule(*model).mispredicted(), 0);
    EXPECT_EQ(gather_schedule(*v).mispredicted(), 0);
  }, {.threads_per_rank = 1});
}

// Under zero1 gradients of both orders wait for the step, and are communicated once.
TEST(Hessian, GradientsThatWaitTravelOnce) {
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const auto model = tiny_model_f64(mesh, {.strategy = "zero1"}),
               v = tiny_model_f64(mesh, {.strategy = "zero1"}, {}, 6, tiny_config().model, draw_all);
    Recording recording({.higher_order = true});
    recording.backward(derivative_along(loss_of(*model, tiny_batch(mesh, 0, 4)), *model, *v), {.last_micro_batch = true});
    const auto moved = traffic(recording.take());
    EXPECT_EQ(moved.at("reduce_scatter data").count, 4);  // of three blocks and the root
    EXPECT_EQ(moved.at("all_gather data").count, 8);      // the model's and the direction's
  }, {.threads_per_rank = 1});
}

// <∇<∇<∇loss, v>, v>, v> is the third derivative along v, and its gradient has the fourth.
TEST(Hessian, DerivativesOfAnyOrder) {
  const auto derivative = [](const std::string& type, const Axes& axes, int which, double at) {
    std::vector<double> out(static_cast<size_t>(num_ranks(axes)));
    run_local(num_ranks(axes), [&](World& w) {
      const Mesh mesh = w.mesh(axes);
      const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 5, model_of(type));
      const auto v = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 6, model_of(type), draw_all);
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
      recording.take();
      for (const auto& unit : units(*v))
        for (const FlatBuffer& b : unit->buffers()) EXPECT_FALSE(b.grad.defined()) << unit->name() << ": it was opened for its values alone";
      orders.push_back(gradient_along(*model, *v).item<double>());
      out[static_cast<size_t>(w.rank())] = orders[static_cast<size_t>(which)];
    }, {.threads_per_rank = 1});
    for (const double other : out) EXPECT_EQ(other, out[0]);
    return out[0];
  };
  for (const char* type : {"gpt2", "qwen3", "latent", "mixture"})
    for (const int which : {2, 3}) {
      const Axes one = {{"data", 1}};
      const double expected = (derivative(type, one, which - 1, 2e-5) - derivative(type, one, which - 1, -2e-5)) / 4e-5;
      const double actual = derivative(type, one, which, 0);
      EXPECT_NEAR(actual, expected, 1e-5 * std::abs(expected)) << type << ' ' << which;
      EXPECT_NEAR(derivative(type, {{"data", 2}, {"model", 2}}, which, 0), actual, 1e-10 * std::abs(actual)) << type << ' ' << which;
    }
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
    zero_grad(*model);  // of which a part was there already
    Recording recording({.higher_order = true});
    const Tensor loss = loss_of(*model, batch);
    EXPECT_THAT(message([&] { derivative_along(loss, *model, *other); }), HasSubstr("[derivative_along] "));
    EXPECT_THAT(message([&] { derivative_along(Tensor::from<double>({1}, {}), *model, *v); }), HasSubstr("not a value of this recording"));
    EXPECT_THAT(message([&] { derivative_along(full({}, 1, kF64) * 2.0, *model, *v); }), HasSubstr("no trainable parameter leads to"));
    EXPECT_THAT(message([&] { set_to_gradient(*v, *model); }), HasSubstr("not inside a recording"));
    recording.take();
    EXPECT_THAT(message([&] { gradient_along(*model, *other); }), HasSubstr("[gradient_along] "));
    const auto frozen =
        tiny_model_f64(mesh, {}, {}, 6, tiny_config().model, [](models::Decoder& m, const ShardOptions&) { m.parameters()[3].freeze(); });
    EXPECT_THAT(message([&] { set_to_gradient(*frozen, *model); }), HasSubstr("freeze() the same parameters"));
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

// The largest eigenvalue of a Hessian, by products alone, on ranks that never hold a whole vector: the Rayleigh quotient of the vector to
// which the iteration converges; its residual tells how close that is to an eigenvector.
TEST(Hessian, PowerIteration) {
  for (const int ranks : {1, 3}) {
    run_local(ranks, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", ranks}});
      const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}),
                 v = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 6, tiny_config().model, draw_all);
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

// Products over micro-batches add up, whether they are computed per micro-batch or at once; also with gradients that wait for the step.
TEST(Hessian, ProductsAddUpOverMicroBatches) {
  const auto product = [](const Axes& axes, const char* strategy, int64_t parts) {
    Whole whole;
    run_local(num_ranks(axes), [&](World& w) {
      const Mesh mesh = w.mesh(axes);
      const auto model = tiny_model_f64(mesh, {.strategy = strategy}),
                 v = tiny_model_f64(mesh, {.strategy = strategy}, {}, 6, tiny_config().model, draw_all);
      Recording recording({.higher_order = true});
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t rows = 4 / parts;
        const TinyBatch batch = tiny_batch(mesh, part * rows, rows);
        recording.next_micro_batch(part * rows);
        const Tensor loss = model->loss(batch.tokens, batch.targets, {.divide_by = static_cast<double>(batch.tokens.numel() * parts)});
        recording.backward(derivative_along(loss, *model, *v), {.last_micro_batch = part + 1 == parts});
      }
      recording.take();
      whole.collect(*model, true);
    }, {.threads_per_rank = 1});
    return whole.values();
  };
  const Values expected = product({{"data", 1}}, "replicate", 1);
  for (const Axes& axes : {Axes{{"data", 2}}, Axes{{"replica", 2}, {"data", 2}}})
    for (const char* strategy : {"full_shard", "zero1"})
      EXPECT_LE(max_difference(expected, product(axes, strategy, 2)), 1e-12 * max_magnitude(expected)) << strategy;
}

// Several micro-batches of one recording, with no derivative, one or two of them, in one backward.
TEST(Hessian, MicroBatchesWithDerivativesOfUnlikeOrder) {
  const auto gradients = [](const std::string& strategy, int64_t orders_of_first, int64_t orders_of_second, bool at_once) {
    Whole whole;
    run_local(2, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 2}});
      const auto model = tiny_model_f64(mesh, {.strategy = strategy}),
                 v = tiny_model_f64(mesh, {.strategy = strategy}, {}, 6, tiny_config().model, draw_all);
      std::optional<Recording> recording;
      Tensor all;
      for (const int64_t part : {0, 1}) {
        if (!recording || !at_once) recording.emplace(RecordingOptions{.higher_order = true});
        if (at_once) recording->next_micro_batch(2 * part);
        Tensor y = loss_of(*model, tiny_batch(mesh, 2 * part, 2));
        for (int64_t order = part == 0 ? orders_of_first : orders_of_second; order > 0; --order) y = derivative_along(y, *model, *v);
        if (at_once) all = all ? all + y : y;
        else recording->backward(y);
      }
      if (at_once) recording->backward(all, {.last_micro_batch = true});
      recording.reset();
      whole.collect(*model, true);
    }, {.threads_per_rank = 1});
    return whole.values();
  };
  for (const auto& [first, second] : {std::pair(1, 0), {0, 1}, {2, 1}, {1, 2}, {2, 0}}) {
    const Values expected = gradients("full_shard", first, second, false);
    for (const char* strategy : {"full_shard", "zero1"})
      EXPECT_LE(max_difference(expected, gradients(strategy, first, second, true)), 1e-12 * max_magnitude(expected))
          << strategy << ": derivatives " << first << " and " << second;
  }
}

// Along the model itself, for a model on no mesh, and for one with adapters, whose product has adapters only.
TEST(Hessian, DirectionsOfManyKinds) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    const ShardOptions options{.strategy = "full_shard"};
    const auto model = tiny_model_f64(mesh, options), same = tiny_model_f64(mesh, options);  // of one seed
    const TinyBatch batch = tiny_batch(mesh, 0, 4);
    const auto product = [&](models::Decoder& along) {
      zero_grad(*model);
      {
        Recording recording({.higher_order = true});
        recording.backward(derivative_along(loss_of(*model, batch), *model, along));
      }
      Whole whole;
      std::vector<double> out;
      for (const nn::Parameter& p : model->parameters())
        for (const double g : full_gradient(p).to_vector<double>()) out.push_back(g);
      return out;
    };
    const std::vector<double> expected = product(*same);
    EXPECT_EQ(product(*model), expected);
    double along = 0;  // <H w, w>
    size_t at = 0;
    for (const nn::Parameter& p : model->parameters())
      for (const double x : full_parameter(p).to_vector<double>()) along += x * expected[at++];
    EXPECT_NEAR(gradient_along(*model, *model).item<double>(), along, 1e-12 * std::abs(along));
    zero_grad(*model);
    EXPECT_EQ(gradient_along(*model, *same).item<double>(), 0);  // it has no gradient
    set_to_gradient(*same, *model);
    for (const nn::Parameter& p : same->parameters())
      for (const double x : full_parameter(p).to_vector<double>()) ASSERT_EQ(x, 0) << p.name();
  }, {.threads_per_rank = 1});
  Values whole;
  for (const bool has_mesh : {true, false})
    run_local(1, [&](World& w) {
      models::ModelConfig c = model_of("llama");
      c.lora_rank = 2;
      const auto make = [&](uint64_t seed, bool draws) {
        auto model = models::make_language_model(c, c.vocab);
        if (draws) draw_all(*model, {});
        if (has_mesh) shard(*model, w.mesh({{"data", 1}}), {});
        materialize(*model, {}, {.seed = seed, .dtype = kF64});
        return model;
      };
      const auto model = make(5, true), v = make(6, true);  // adapters of zeros would have no curvature
      TinyBatch batch = tiny_batch(w.mesh({{"data", 1}}), 0, 3);
      if (!has_mesh)
        for (Tensor* t : {&batch.tokens, &batch.targets}) *t = Tensor::from(t->to_vector<int32_t>(), t->shape());
      Recording recording({.higher_order = true});
      recording.backward(derivative_along(loss_of(*model, batch), *model, *v));
      recording.take();
      Values product;
      for (const nn::Parameter& p : model->parameters()) {
        const Tensor g = full_gradient(p);
        EXPECT_EQ(g.defined(), p.trainable()) << p.name();
        if (g) product[p.name()] = g.to_vector<double>();
      }
      EXPECT_GT(max_magnitude(product), 1e-6);
      if (has_mesh) whole = product;
      else EXPECT_LE(max_difference(whole, product), 1e-14 * max_magnitude(whole));
    }, {.threads_per_rank = 1});
}

// The number of blocks does not change how many gradients and directions are whole at a time: one more block adds its activations, and a
// rank's half of its gradient, which stays. Also together with a derivative that nobody differentiates.
TEST(Hessian, MemoryDoesNotGrowWithTheParameters) {
  const auto peak = [](int64_t layers, bool aside) {
    int64_t bytes = 0;
    run_local(2, [&](World& w) {
      models::ModelConfig c = tiny_config().model;
      c.layers = layers, c.width = 96, c.heads = 4;
      const Mesh mesh = w.mesh({{"data", 2}});
      const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 5, c), v = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 6, c);
      const TinyBatch batch = tiny_batch(mesh, 0, 2);
      Allocator& memory = *RankContext::current().memory(Device::cpu());
      int64_t live = 0;
      for (int step = 0; step < 2; ++step) {
        zero_grad(*model);
        live = memory.stats().live;
        memory.reset_peak();
        Recording recording({.higher_order = true});
        const Tensor y = loss_of(*model, batch);
        if (aside) derivative_along(y, *model, *v);
        recording.backward(derivative_along(y, *model, *v));
      }
      if (w.rank() == 0) bytes = memory.stats().peak - live;
    }, {.threads_per_rank = 1});
    return bytes;
  };
  constexpr int64_t kBlock = 12 * 96 * 96 * 8;
  for (const bool aside : {false, true}) EXPECT_LT((peak(8, aside) - peak(4, aside)) / 4, kBlock) << aside;
}

// In bf16 products are as close to f32's as gradients are.
TEST(Hessian, OfWhatIsComputedInBf16) {
  const auto values = [](const char* dtype) {
    Whole gradient, product;
    run_local(2, [&](World& w) {
      models::TrainConfig c = tiny_config();
      c.model = model_of("qwen3");
      c.train.dtype = dtype;
      const models::ShardedModel model = models::sharded_model(c, c.model.vocab, w), v = models::sharded_model(c, c.model.vocab, w);
      draw_all(*v.model, {});
      materialize(*model.model, {}, {.seed = 5}), materialize(*v.model, {}, {.seed = 6});
      const TinyBatch batch = tiny_batch(model.mesh, 0, 4);
      for (const bool second : {false, true}) {
        zero_grad(*model.model);
        {
          Recording recording({.higher_order = true});
          const Tensor loss = loss_of(*model.model, batch);
          recording.backward(second ? derivative_along(loss, *model.model, *v.model) : loss);
        }
        (second ? product : gradient).collect(*model.model, true);
      }
    }, {.threads_per_rank = 1});
    return std::pair(gradient.values(), product.values());
  };
  const auto [gradient, product] = values("f32");
  const auto [gradient_bf16, product_bf16] = values("bf16");
  EXPECT_GT(relative_difference(product, product_bf16), 1e-6);
  EXPECT_LE(relative_difference(product, product_bf16), 4 * relative_difference(gradient, gradient_bf16));
}

// A step that runs again as a program: the gradients it leaves are used for a step of descent.
TEST(Hessian, AsAProgram) {
  const auto parameters = [](bool compiled) {
    Whole whole;
    run_local(2, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 2}});
      const auto model = tiny_model_f64(mesh, {.strategy = "full_shard"}),
                 v = tiny_model_f64(mesh, {.strategy = "full_shard"}, {}, 6, tiny_config().model, draw_all);
      optim::SGD optimizer(*model, {.lr = 0.05});
      const TinyBatch batch = tiny_batch(mesh, 0, 4);
      const auto code = [&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
        const Tensor loss = loss_of(*model, {tokens, targets}), d = derivative_along(loss, *model, *v);
        Recording::current()->backward(loss + d);  // a penalty on the derivative along v
        optimizer.step({.scalars = scalars});
        optimizer.zero_grad();
        return redistribute(d, "data", Placement::invariant());
      };
      auto program = compile(code);
      for (int64_t step = 0; step < 5; ++step) {
        const RecordingOptions options{.step = step, .higher_order = true};
        const std::vector<double> numbers = optimizer.next_scalars();
        const Tensor scalars = Tensor::from(numbers, {static_cast<int64_t>(numbers.size())});
        if (compiled) {
          program(options, batch.tokens, batch.targets, scalars);
        } else {
          Recording recording(options);
          code(batch.tokens, batch.targets, scalars);
        }
      }
      whole.collect(*model, false);
    }, {.threads_per_rank = 1});
    return whole.values();
  };
  EXPECT_EQ(max_difference(parameters(false), parameters(true)), 0);
}

}  // namespace
}  // namespace sheaf::testing
