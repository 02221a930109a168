// Mistakes of a first program: each message says what to change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

struct Net : nn::Module {
  nn::Linear up{4, 6}, down{6, 3};
  Tensor forward(const Tensor& x) { return down(tanh(up(x))); }
  SHEAF_FIELDS(up, down);
};

/// A model of one rank, on a mesh of its own, and a batch that is cut over it.
struct Step {
  World& world;
  Mesh mesh = world.mesh({{"data", world.size()}});
  Layout rows{mesh.spec, Placement::shard(0)};
  Tensor x = full_of({kF32, {4, 4}, rows}, 1);
  Tensor labels = redistribute(Tensor::from<int64_t>({0, 1, 2, 0}, {4}), rows);
  Net net;
  explicit Step(World& w) : world(w) {
    shard(net, mesh);
    materialize(net, w.device(), {.seed = 1});
  }
  Tensor loss() { return cross_entropy(net(x), labels); }
};

/// The message of the error of `f`, of any type.
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "no exception";
}
std::string error_of(const std::function<void(Step&)>& f) {
  std::string message;
  run_local(1, [&](World& w) {
    Step step(w);
    message = error_of([&] { f(step); });
  });
  return message;
}
std::string error_in_recording(const std::function<void(Step&, Recording&)>& f) {
  return error_of([&](Step& s) {
    Recording recording;
    f(s, recording);
  });
}

TEST(Losses, TakeNumbersOfClasses) {
  EXPECT_THAT(error_of([](Step& s) { cross_entropy(s.net(s.x), cast(s.labels, kF32)); }),
              HasSubstr("[cross_entropy] targets f32[4] Shard(0)@data are no integers: a target is the number of a class, one for each row of "
                        "f32[4,3] Shard(0)@data"));
  EXPECT_THAT(error_of([](Step& s) { cross_entropy(s.net(s.x), softmax(s.net(s.x))); }),
              HasSubstr("; of probabilities p the loss is -sum(p * log_softmax(logits), -1)"));
  EXPECT_THAT(error_of([](Step& s) { cross_entropy(s.net(s.x), unsqueeze(s.labels, 1)); }),
              HasSubstr("targets i64[4,1] Shard(0)@data do not fit f32[4,3] Shard(0)@data: one for each row, [4]"));
  for (const int64_t label : {-100, 3})
    EXPECT_EQ(error_of([=] { cross_entropy(full({2, 3}, 1.0), Tensor::from<int64_t>({0, label}, {2})); }),
              str("[cross_entropy] target ", label, " at position [1] is none of 3 classes, nor ignore_index, -1"));
  EXPECT_THAT(error_of([] { linear_cross_entropy(full({2, 4}, 1.0), full({3, 4}, 1.0), Tensor::from<int64_t>({0, 7}, {2})); }),
              HasSubstr("target 7 at position [1] is none of 3 classes"));
}

TEST(Losses, HaveOptionsThatGoTogether) {
  const auto loss = [](const CrossEntropyOptions& o) { return error_of([&](Step& s) { cross_entropy(s.net(s.x), s.labels, o); }); };
  EXPECT_THAT(loss({.label_smoothing = 1.5}), HasSubstr("[cross_entropy] label_smoothing 1.5; wants a number from 0 to 1"));
  EXPECT_THAT(loss({.divide_by = 4, .mean_of_counted = true}), HasSubstr("mean_of_counted with divide_by: wants one of them"));
  EXPECT_THAT(loss({.mean_of_counted = true, .per_target = true}), HasSubstr("mean_of_counted with per_target: wants one of them"));
  EXPECT_THAT(error_of([](Step& s) { linear_cross_entropy(s.x, s.net.up.weight, s.labels, {.softcap = 30, .label_smoothing = 0.1}); }),
              HasSubstr("label_smoothing 0.1 of logits with a softcap of 30"));
}

TEST(Operands, AreInTheRangeOfTheirOp) {
  for (const double scale : {-1.0, std::nan("")})
    EXPECT_THAT(error_of([&](Step& s) {
                  const Tensor heads = reshape(s.x, {4, 1, 1, 4});
                  attention(heads, heads, heads, {.scale = scale});
                }),
                HasSubstr("wants a positive factor, or 0 for 1 / sqrt(D)"));
  EXPECT_THAT(error_of([](Step& s) { matmul(s.x, full({4}, 1)); }),
              HasSubstr("wants [.., M, K] and [.., K, N]; unsqueeze() makes a matrix of a vector"));
  EXPECT_THAT(error_of([](Step&) { arange(0, INFINITY, 1); }), HasSubstr("[arange] inf numbers from 0 to inf in steps of 1"));
}

TEST(Losses, AreScalarsOfTheirRecording) {
  EXPECT_THAT(error_in_recording([](Step& s, Recording& r) { r.backward(s.net(s.x)); }),
              EndsWith("needs a scalar, not f32[4,3] Shard(0)@data: take the mean() or sum()"));
  EXPECT_THAT(error_of([](Step& s) {
                const Tensor loss = s.loss();
                Recording().backward(loss);
              }),
              EndsWith("the loss, f32[] Partial@data, is not a value of this recording: it was computed outside of any; create the Recording before "
                       "the forward"));
  EXPECT_THAT(error_in_recording([](Step& s, Recording&) {
                const Tensor loss = s.loss();
                Recording().backward(loss);
              }),
              EndsWith("is not a value of this recording: it was computed in another one"));
}

TEST(Losses, OfNoParameterSayWhy) {
  const std::string begins = "[backward] no trainable parameter leads to the loss, f32[] Partial@data: ";
  EXPECT_EQ(error_in_recording([](Step& s, Recording& r) { r.backward(mean(stop_gradient(s.net(s.x)))); }),
            begins + "stop_gradient passes no gradient on");
  EXPECT_EQ(error_in_recording([](Step& s, Recording& r) { r.backward(mean(cast(eq(argmax(s.net(s.x)), s.labels), kF32))); }),
            begins + "argmax passes no gradient on");
  EXPECT_EQ(error_in_recording([](Step& s, Recording& r) {
              Net frozen;
              nn::freeze(frozen);
              shard(frozen, s.mesh);
              materialize(frozen);
              r.backward(mean(frozen(s.x)));
            }),
            begins + "parameters of unit 'root' do, but are frozen");
  EXPECT_EQ(error_of([](Step& s) {
              Tensor before;
              {
                Recording recording;
                before = s.net(s.x);
              }
              Recording recording;
              recording.backward(mean(before));
            }),
            begins + "f32[4,3] Shard(0)@data, which was computed in another recording, is a constant in this one");
  EXPECT_EQ(error_of([](Step& s) {
              const Tensor before = s.net(s.x);
              Recording recording;
              recording.backward(mean(before));
            }),
            begins + "only constants do, such as f32[4,3] Shard(0)@data; parameters are to be read in this recording, and a gradient of an "
                     "input x is recording.gradient(..), after recording.watch(x)");
}

struct Forgets : nn::Module {
  nn::Linear up{4, 6}, down{6, 3};
  Tensor forward(const Tensor& x) { return down(tanh(up(x))); }
  SHEAF_FIELDS(up);
};
struct Around : nn::Module {
  Forgets inner;
  Tensor forward(const Tensor& x) { return inner(x); }
  SHEAF_FIELDS(inner);
};

// Elsewhere they would be constants without a word.
TEST(Parameters, AreReadInTheRecording) {
  for (const bool in_another : {false, true}) {
    const auto error = [&](const std::function<void(const Tensor&)>& use) {
      return error_of([&](Step& s) {
        std::vector<Tensor> weights;
        {
          std::optional<Recording> before;
          if (in_another) before.emplace();
          for (const nn::Parameter& p : s.net.parameters()) weights.push_back(p);
        }
        const Recording recording;
        use(weights[0]);
      });
    };
    EXPECT_THAT(error([](const Tensor& w) { square(w); }),
                HasSubstr("[square] root: input 0, f32[6,4] Replicate@data, is the value of a trained parameter, read outside of this recording"));
    EXPECT_EQ(error([](const Tensor& w) { square(stop_gradient(w)); }), "no exception");
  }
}

TEST(Models, ThatAreNotReady) {
  EXPECT_THAT(error_of([](Step& s) { Net()(s.x); }), HasSubstr("used in sheaf::nn::Linear, has no memory: call materialize(model, device) first"));
  EXPECT_THAT(error_of([](Step&) {
                Net net;
                optim::AdamW optimizer(net, {});
              }),
              HasSubstr("'up.weight' f32[6,4] has no memory: call materialize() first"));
  EXPECT_THAT(error_of([](Step& s) { shard(s.net.up, s.mesh); }), HasSubstr("is materialized already: shard before materialize()"));
  EXPECT_THAT(error_of([](Step& s) { materialize(s.net); }),
              HasSubstr("[materialize] 'up.weight' is materialized already, as 'up.weight': a model is once"));
  EXPECT_THAT(error_of([](Step& s) {
                Net copy;
                copy.down.weight = s.net.down.weight;
                materialize(copy);
              }),
              EndsWith("'down.weight' is materialized already, as 'down.weight': a model is once, and a copy of a Parameter is the same parameter"));
  const auto of = [](nn::Module& model, auto& call) {
    return error_of([&](Step& s) {
      shard(model, s.mesh);
      materialize(model);
      call(s.x);
    });
  };
  Forgets root;
  Around around;
  EXPECT_THAT(of(root, root), HasSubstr("Forgets (root) is not listed in its SHEAF_FIELDS"));
  EXPECT_THAT(of(around, around), HasSubstr("Forgets 'inner' is not listed in its SHEAF_FIELDS"));
}

TEST(Meshes, AreNamedWithTheirAxes) {
  EXPECT_EQ(error_of([](Step& s) {
              Net net;
              shard(net, s.world.mesh({{"dp", 1}}));
            }),
            "[shard] mesh (dp=1) has no axis 'data' (ShardOptions::axis, by default)");
  EXPECT_EQ(error_of([](Step& s) {
              Net net;
              shard(net, s.mesh, {.axis = "dp"});
            }),
            "[shard] mesh (data=1) has no axis 'dp' (ShardOptions::axis)");
  EXPECT_EQ(error_of([](Step&) { Mesh{}.size("dp"); }), "[mesh] axis 'dp' of an empty Mesh: World::mesh() makes others");
  EXPECT_EQ(error_of([](Step&) { Mesh{}.coordinate("dp"); }), "[mesh] axis 'dp' of an empty Mesh: World::mesh() makes others");
  EXPECT_EQ(error_of([](Step& s) { s.net(full_of({kF32, {4, 4}, Layout(s.world.mesh({{"rows", 1}}).spec, Placement::shard(0))}, 1)); }),
            "[linear] inputs on two meshes, (rows=1) and (data=1): f32[4,4] Shard(0)@rows and f32[6,4] Replicate@data; a model, its batches and what "
            "is computed from them share one (in up)");
}

TEST(Values, OfAnotherNumber) {
  EXPECT_EQ(error_of([] { Tensor::from(std::vector<float>(5), {2, 3}); }), "[tensor] 5 values for f32[2,3], of which there are 6");
  EXPECT_THAT(error_of([] {
                run_local(2, [](World& w) {
                  Tensor::from_local(std::vector<float>(16), {kF32, {4, 4}, Layout(w.mesh({{"data", 2}}).spec, Placement::shard(0))});
                });
              }),
              AllOf(HasSubstr("[tensor] 16 values for f32[4,4] Shard(0)@data, of which rank "),
                    HasSubstr(" has [2,4]: from_local() takes this rank's part; of the whole, write redistribute(Tensor::from(values, shape), "
                              "layout)")));
}

TEST(Operands, ThatWereNeverSet) {
  EXPECT_EQ(error_of([](Step& s) { s.net(Tensor()); }), "[linear] up: input 0 is undefined");
  EXPECT_EQ(error_of([](Step& s) { cross_entropy(s.net(s.x), Tensor()); }), "[cross_entropy] root: input 1 is undefined");
}

}  // namespace
}  // namespace sheaf
