// Pipelines by hand: any order of forwards and backwards has the gradients of sequential ones, and misuse is reported.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/pipeline.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kParts = 4;  // micro-batches, of two rows

struct Step {
  Recording& recording;
  std::function<void(int)> forward;
  std::function<void(const Tensor&)> backward;
  std::vector<Tensor>& losses;
};

// Gradients in f64, of all parameters, concatenated.
std::vector<double> gradients_of(const Axes& axes, const std::string& strategy, const std::function<void(Step&)>& schedule) {
  models::ModelConfig config = tiny_model("gpt2", 2, 2);
  config.layers = 3;
  std::vector<double> out;
  run_local(num_ranks(axes), [&](World& w) {
    const Mesh mesh = w.mesh(axes);
    const auto model = tiny_model_f64(mesh, {.strategy = strategy}, {}, 5, config);
    std::vector<Tensor> losses(kParts);
    Recording recording;
    Step step{recording,
              [&](int i) {
                recording.next_micro_batch(2 * i);
                const TinyBatch batch = tiny_batch(mesh, 2 * i, 2);
                losses[static_cast<size_t>(i)] = model->loss(batch.tokens, batch.targets, {.divide_by = 2.0 * kParts * config.context});
              },
              [&](const Tensor& loss) { recording.backward(loss); }, losses};
    schedule(step);
    recording.take();
    for (const nn::Parameter& p : model->parameters()) {
      const Tensor g = full_gradient(p);
      if (w.rank() == 0) out.insert(out.end(), g.view().as<double>(), g.view().as<double>() + g.numel());
    }
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  return out;
}

void all_forwards(Step& s) {
  for (int i = 0; i < kParts; ++i) s.forward(i);
}

const std::pair<const char*, void (*)(Step&)> kSchedules[] = {
    {"all forwards, then all backwards", [](Step& s) { all_forwards(s); for (const Tensor& loss : s.losses) s.backward(loss); }},
    {"the last first", [](Step& s) { all_forwards(s); for (int i = kParts; i-- > 0;) s.backward(s.losses[static_cast<size_t>(i)]); }},
    {"one backward", [](Step& s) {
       all_forwards(s);
       s.backward(add(add(s.losses[0], s.losses[1]), add(s.losses[2], s.losses[3])));
     }},
    {"pairs", [](Step& s) {
       all_forwards(s);
       for (size_t i = 0; i < kParts; i += 2) s.backward(add(s.losses[i], s.losses[i + 1]));
     }},
    {"scaled between forward and backward", [](Step& s) {
       all_forwards(s);
       std::vector<Tensor> halves;
       for (const Tensor& loss : s.losses) halves.push_back(mul(loss, 0.5));
       for (const Tensor& half : halves) s.backward(add(half, half));
     }},
    {"weights later", [](Step& s) {
       all_forwards(s);
       for (const Tensor& loss : s.losses) s.recording.backward(loss, {.defer_weights = true});
       for (int i = 0; i < kParts; ++i) s.recording.backward_weights();
     }},
    {"evaluations between", [](Step& s) {
       for (int i = 0; i < kParts; ++i) {
         s.forward(i);
         const Tensor loss = s.losses[static_cast<size_t>(i)];
         s.forward((i + 1) % kParts);
         s.backward(loss);
       }
     }},
    {"a loss that is refused first", [](Step& s) {
       all_forwards(s);
       for (const Tensor& loss : s.losses) {
         EXPECT_THROW(s.backward(redistribute(loss, Layout(loss.layout().mesh()))), PlacementError);
         s.backward(loss);
       }
     }},
};

TEST(PipelineSchedules, AllHaveTheSameGradients) {
  const std::vector<double> expected = gradients_of({{"data", 1}}, "replicate", [](Step& s) {
    for (int i = 0; i < kParts; ++i) s.forward(i), s.backward(s.losses[static_cast<size_t>(i)]);
  });
  for (const Axes& axes : {Axes{{"data", 2}}, Axes{{"stage", 3, true}, {"data", 1}}, Axes{{"stage", 2, true}, {"data", 2}}})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
      for (const auto& [name, schedule] : kSchedules) {
        SCOPED_TRACE(str(axes[0].name, " ", num_ranks(axes), " ", strategy, ": ", name));
        const std::vector<double> actual = gradients_of(axes, strategy, schedule);
        ASSERT_EQ(actual.size(), expected.size());
        double most = 0;
        for (size_t i = 0; i < expected.size(); ++i) most = std::max(most, std::abs(expected[i] - actual[i]));
        EXPECT_LE(most, 1e-12);
      }
}

struct Two : nn::Module {
  nn::Linear a{4, 4}, b{4, 4};
  Tensor forward(const Tensor& x) { return b(a(x)); }
  SHEAF_FIELDS(a, b);
};
struct Three : nn::Module {
  Two first, second, third;
  Tensor forward(const Tensor& x) { return third(second(first(x))); }
  SHEAF_FIELDS(first, second, third);
};

struct Joined : nn::Module {
  nn::Linear a{4, 4};
  Tensor forward(const Tensor& x, const Tensor& skipped) { return a(add(x, skipped)); }
  SHEAF_FIELDS(a);
};
struct Skipping : nn::Module {
  Two first, second;
  Joined third;
  Tensor forward(const Tensor& x) {
    const Tensor y = first(x);
    return third(second(y), y);
  }
  SHEAF_FIELDS(first, second, third);
};

nn::UnitPolicy down_to(int64_t depth) {
  return nn::units_where([depth](nn::Module&, const std::string& path) {
    return !path.empty() && std::ranges::count(path, '.') < depth;
  });
}

template <class F>
void on_two_stages(ShardOptions options, const F& f) {
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"stage", 2, true}, {"data", 1}});
    Three model;
    options.stage_axis = "stage";
    shard(model, mesh, options);
    materialize(model, {}, {.seed = 1, .dtype = kF64});
    f(mesh, model);
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

// From the first stage to the third via the second, whichever micro-batch other stages process.
TEST(PipelineSchedules, StagesMayBeSkipped) {
  const auto gradients = [](int stages, auto schedule) {
    std::vector<double> out;
    run_local(stages, [&](World& w) {
      const Mesh mesh = w.mesh({{"stage", stages, true}, {"data", 1}});
      Skipping model;
      shard(model, mesh, {.stage_axis = "stage", .units = down_to(1)});
      materialize(model, {}, {.seed = 1, .dtype = kF64});
      std::vector<Tensor> losses(kParts);
      Recording recording;
      for (const auto [kind, i, run] : schedule(mesh.coordinate("stage"), stages, kParts, 1)) {
        Tensor& loss = losses[static_cast<size_t>(i)];
        if (kind == Turn::backward_weight) {
          recording.backward_weights();
          continue;
        }
        if (kind != Turn::forward) {
          recording.backward(loss, {.last_micro_batch = i + 1 == kParts, .defer_weights = kind == Turn::backward_input});
          continue;
        }
        recording.next_micro_batch(2 * i);
        const Tensor y = sum(model(full_of({kF64, {2, 4}, Layout(mesh.spec).with(0, Placement::on(0))}, 1.0 + i)));
        loss = redistribute(redistribute(y, "stage", Placement::partial()), "data", Placement::partial());
      }
      recording.take();
      for (const nn::Parameter& p : model.parameters()) {
        const Tensor g = full_gradient(p);
        if (w.rank() == 0) out.insert(out.end(), g.view().as<double>(), g.view().as<double>() + g.numel());
      }
    }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
    return out;
  };
  const std::vector<double> expected = gradients(1, one_forward_one_backward);
  for (const int stages : {2, 3}) {
    EXPECT_EQ(gradients(stages, one_forward_one_backward), expected);
    EXPECT_EQ(gradients(stages, zero_bubble), expected);
  }
}

TEST(PipelineSchedules, GradientGoesThroughAllMicroBatches) {
  on_two_stages({.units = down_to(1)}, [](const Mesh& mesh, Three& model) {
    const Tensor x = full_of({kF64, {2, 4}, Layout(mesh.spec).with(0, Placement::on(0))}, 1.0);
    const auto total = [&](const Tensor& y) {
      Layout partial = y.layout();
      for (int a = 0; a < partial.num_axes(); ++a) partial[a] = Placement::partial();
      return redistribute(y, partial);
    };
    Recording recording;
    recording.watch(x);
    const Tensor y = total(sum(model(x)));
    recording.next_micro_batch(2);
    total(sum(model.first(x)));
    const Tensor xs[] = {x};
    EXPECT_EQ(recording.gradient(y, xs)[0].shape(), x.shape());
  });
}

TEST(PipelineSchedules, UnitsBelowUnitsAreInTheirStage) {
  on_two_stages({.units = down_to(2)}, [](const Mesh&, Three& model) {
    for (const auto& [module, stage] : {std::pair<Two*, int>{&model.first, 0}, {&model.second, 1}, {&model.third, 1}})
      for (const nn::Parameter& p : module->parameters()) EXPECT_EQ(p.unit()->stage(), stage) << p.name();
  });
}

TEST(PipelineSchedules, WhatCannotBeIsRefused) {
  const auto refusal_of = [](ShardOptions options, const auto& f) -> std::string {
    try {
      on_two_stages(options, f);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "nothing is refused";
  };
  const auto nothing = [](const Mesh&, Three&) {};
  EXPECT_THAT(refusal_of({}, nothing), HasSubstr("0 units cannot be the 2 stages"));
  ShardOptions options{.units = down_to(1)};
  options.stage_of = [](const nn::Module&, const std::string&) { return 2; };
  EXPECT_THAT(refusal_of(options, nothing), HasSubstr("'first' is in stage 2 of 2"));
  options.stage_of = [](const nn::Module&, const std::string&) { return 0; };
  EXPECT_THAT(refusal_of(options, nothing), HasSubstr("no unit is in stage 1"));
  options.units = down_to(2);
  options.stage_of = [](const nn::Module&, const std::string& path) { return path == "third" ? 1 : 0; };
  EXPECT_THAT(refusal_of(options, nothing), HasSubstr("'third.a' is in stage 0, 'third' around it in stage 1"));
}

}  // namespace
}  // namespace sheaf::testing
