// Modules whose activations are recomputed in the backward: the same bits, fewer bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/norm.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kWidth = 16, kHidden = 64;

/// Wide inside: its intermediate values are eight times as large as its input.
struct Layer : nn::Module {
  nn::LayerNorm norm{kWidth};
  nn::Linear up{kWidth, kHidden}, down{kHidden, kWidth};
  nn::Dropout dropout{0.25};
  Tensor forward(const Tensor& x) { return x + dropout(down(gelu(up(norm(x))))); }
  SHEAF_FIELDS(norm, up, down, dropout);
};

struct Net : nn::Module {
  std::vector<Layer> layers;
  nn::Parameter scale{{kWidth}, nn::Init::constant(0.5)};
  explicit Net(int n) : layers(static_cast<size_t>(n)) {}
  Tensor forward(Tensor x) {
    for (Layer& layer : layers) x = layer(x) * scale;
    return x;
  }
  SHEAF_FIELDS(layers, scale);
};

Tensor rows_of(const Mesh& mesh, int64_t rows, float shift) {
  const Type type{kF32, {rows, kWidth}, mesh.spec ? Layout(mesh.spec).with(0, Placement::shard(0)) : Layout()};
  const int64_t first = mesh.spec ? type.local_start()[0] : 0;
  std::vector<float> local;
  for (int64_t i = 0; i < type.local_shape().numel(); ++i)
    local.push_back(0.1f * static_cast<float>((first * kWidth + i) * 7 % 11) - shift);
  return Tensor::from_local(local, type);
}

struct Outcome {
  std::vector<std::vector<float>> weights;  // whole, after three steps
  int64_t peak = 0;                         // of the last step
  Tape tape;                                // of the last step
};

/// Three steps of two micro-batches each; with a replay of the last one, which must give the same bits.
Outcome train(int world, const std::string& strategy, bool recompute, std::optional<DType> compute = std::nullopt,
              int layers = 3, int64_t rows = 12) {
  Outcome out;
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    Net net(layers);
    for (Layer& layer : net.layers) layer.recompute(recompute);
    shard(net, mesh, {.units = nn::units_of<Layer>(), .strategy = strategy, .compute_dtype = compute});
    materialize(net, Device::cpu(), {.seed = 3});
    optim::AdamW optimizer(net);
    Allocator& memory = *RankContext::current().memory(Device::cpu());
    for (int step = 0; step < 3; ++step) {
      memory.reset_peak();
      Recording recording({.step = step, .capture_leaves = step == 2});
      std::vector<ValueId> losses;
      for (int micro = 0; micro < 2; ++micro) {
        if (micro > 0) recording.next_micro_batch(rows);
        Tensor x = rows_of(mesh, rows, 0.3f + 0.2f * static_cast<float>(micro));
        if (compute) x = cast(x, *compute);
        const Tensor loss = sum(square(cast(net(x), kF32)));
        losses.push_back(recording.value_of(loss));
        recording.backward(loss);
      }
      optimizer.step({.lr = 0.05});
      optimizer.zero_grad();
      if (w.rank() == 0) out.peak = memory.stats().peak;
      if (step < 2) continue;
      const auto leaves = recording.captured();
      std::vector<ValueId> updated;
      const Tape tape = recording.take();
      for (NodeId i = 0; i < tape.num_nodes(); ++i)
        if (const Node& n = tape.node(i); n.op && n.op->kind == OpKind::step) updated.push_back(tape.output(n));
      std::vector<std::vector<float>> bits;
      for (const auto& unit : units(net))
        for (const FlatBuffer& b : unit->buffers()) bits.push_back(b.shard.to_vector<float>());
      const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return leaves.at(v).clone(); }, updated);
      ASSERT_EQ(again.size(), bits.size());
      for (const Tensor& t : again)
        EXPECT_NE(std::find(bits.begin(), bits.end(), t.to_vector<float>()), bits.end()) << "a replay of the step";
      if (w.rank() == 0) out.tape = tape;
    }
    for (nn::Parameter& p : net.parameters()) {
      const std::vector<float> whole = full_parameter(p).to_vector<float>();
      if (w.rank() == 0) out.weights.push_back(whole);
    }
  }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
  return out;
}

int count(const Tape& tape, std::string_view op, Phase phase, uint8_t flags) {
  int n = 0;
  for (NodeId i = 0; i < tape.num_nodes(); ++i)
    n += tape.op_name(tape.node(i)) == op && tape.node(i).phase == phase && (tape.node(i).flags & flags) == flags;
  return n;
}

TEST(Recompute, HasTheSameBitsAtEveryWorldAndStrategy) {
  for (const std::string strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (int world : {1, 2, 3}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      const Outcome kept = train(world, strategy, false), again = train(world, strategy, true);
      ASSERT_EQ(kept.weights.size(), 3u * 6 + 1);
      EXPECT_EQ(again.weights, kept.weights);
      // One gather for recomputation and derivatives.
      EXPECT_EQ(count(again.tape, "all_gather", Phase::backward, 0), count(kept.tape, "all_gather", Phase::backward, 0));
      EXPECT_EQ(count(kept.tape, "linear", Phase::backward, 0), 0);
      // The last product of a layer is not read in its backward.
      EXPECT_EQ(count(again.tape, "linear", Phase::backward, Node::kRecomputed), 2 * 3);
    }
  EXPECT_EQ(train(2, "full_shard", true, kBF16).weights, train(2, "full_shard", false, kBF16).weights);
}

TEST(Recompute, KeepsOnlyWhatEntersAModule) {
  constexpr int kLayers = 8;
  constexpr int64_t kMany = 480;
  const int64_t kept = train(1, "full_shard", false, {}, kLayers, kMany).peak,
                again = train(1, "full_shard", true, {}, kLayers, kMany).peak;
  // Of all layers except the current one: the norm's result and two hidden tensors, at least.
  EXPECT_LE(again, kept - (kLayers - 1) * kMany * (2 * kHidden + kWidth) * 4);
}

TEST(Recompute, TheTapePassesItsChecksAndSaysWhatIsComputedAgain) {
  const Outcome again = train(2, "full_shard", true);
  for (const Finding& finding : check_tape(again.tape)) ADD_FAILURE() << finding.to_string();
  EXPECT_THAT(to_text(again.tape), HasSubstr("computed again"));
}

/// f64 values with gradients, of a function that is partly recomputed.
struct Case {
  Tensor x = Tensor::from<double>({0.3, -0.7, 1.1, 0.2}, {4});
  Tensor f(bool recompute, Tensor* inner = nullptr) const {
    std::optional<RecomputeScope> scope;
    if (recompute) scope.emplace();
    const Tensor y = tanh(x * 1.5);
    if (inner) *inner = y;
    {
      const RecomputeScope within;  // does nothing itself
      return sum(exp(y) * y);
    }
  }
};

TEST(Recompute, DerivativesOfDerivativesGoThroughBothCopies) {
  for (const bool recompute : {false, true}) {
    Case c;
    Recording recording;
    recording.watch(c.x);
    Tensor y;
    const Tensor z = c.f(recompute, &y);
    const Tensor dy = recording.gradient(z, std::span(&y, 1), {.keep = true})[0];
    // z = Σ y eʸ: z' = (1 + y) eʸ, z'' = (2 + y) eʸ; of x by the chain rule.
    const Tensor second = recording.gradient(sum(dy), std::span(&y, 1), {.keep = true})[0];
    const Tensor of_x = recording.gradient(sum(dy), std::span(&c.x, 1))[0];
    for (int i = 0; i < 4; ++i) {
      const double x = c.x.to_vector<double>()[i], t = std::tanh(1.5 * x), e = std::exp(t);
      EXPECT_NEAR(dy.to_vector<double>()[i], (1 + t) * e, 1e-12);
      EXPECT_NEAR(second.to_vector<double>()[i], (2 + t) * e, 1e-12);
      EXPECT_NEAR(of_x.to_vector<double>()[i], (2 + t) * e * 1.5 * (1 - t * t), 1e-12);
    }
  }
}

TEST(Recompute, WhatIsNotReadAgainIsNotKept) {
  constexpr int64_t kMany = 4096;
  const Tensor x = full_of({kF64, {kMany}, {}}, 0.5);
  const Allocator& memory = *RankContext::current().memory(Device::cpu());
  Recording recording;
  recording.watch(x);
  const int64_t before = memory.stats().live;
  Tensor out;
  {
    const Tensor other = x * 3.0;
    const RecomputeScope scope;
    out = exp(x) + other;  // the gradient of a sum reads nothing; that of exp reads its result
  }
  EXPECT_LT(memory.stats().live - before, 2 * kMany * 8);
  const Tensor dx = recording.gradient(sum(out), std::span(&x, 1))[0];
  EXPECT_NEAR(dx.to_vector<double>()[7], std::exp(0.5) + 3, 1e-12);
}

TEST(Recompute, ValuesUsedOutsideAreKept) {
  Case c;
  Recording recording;
  recording.watch(c.x);
  Tensor y;
  Tensor z = c.f(true, &y);
  z = z + sum(y * y);  // y is saved outside, too
  const Tensor dx = recording.gradient(z, std::span(&c.x, 1))[0];
  for (int i = 0; i < 4; ++i) {
    const double x = c.x.to_vector<double>()[i], t = std::tanh(1.5 * x);
    EXPECT_NEAR(dx.to_vector<double>()[i], ((1 + t) * std::exp(t) + 2 * t) * 1.5 * (1 - t * t), 1e-12);
  }
}

TEST(Recompute, ResultsMayNotBeKeptEither) {
  constexpr int64_t kMany = 4096;
  const Tensor x = full_of({kF64, {kMany}, {}}, 0.5);
  const Allocator& memory = *RankContext::current().memory(Device::cpu());
  Recording recording;
  recording.watch(x);
  const int64_t before = memory.stats().live;
  Tensor y;
  {
    std::optional<RecomputeScope> scope(RecomputeOptions{.results = true});
    const Tensor part = exp(x), whole = part * 3.0;
    scope.reset();
    y = sum(part * whole);
  }
  EXPECT_LT(memory.stats().live - before, kMany * 8);
  const Tensor dx = recording.gradient(y, std::span(&x, 1))[0];
  EXPECT_NEAR(dx.to_vector<double>()[7], 6 * std::exp(1.0), 1e-12);
}

// Layers without a gradient, such as a teacher's: what they read is freed when the next one begins.
TEST(Recompute, WhatLeadsToResultsThatNobodySavesIsNotKept) {
  constexpr int64_t kMany = 4096;
  const Allocator& memory = *RankContext::current().memory(Device::cpu());
  Recording recording;
  Tensor x = full_of({kF64, {kMany}, {}}, 0.5);
  const int64_t before = memory.stats().live;
  for (int layer = 0; layer < 8; ++layer) {
    std::optional<RecomputeScope> scope(RecomputeOptions{.results = true});
    const Tensor inside = x * 3.0;
    scope.reset();
    x = inside * 0.25;
  }
  EXPECT_LT(memory.stats().live - before, 2 * kMany * 8) << "the last one's";
}

// One region, which is reached before or after its other inputs, and two passes over its outputs.
TEST(Recompute, ResultsAreKeptForLaterPassesOnceTheirRegionIsPassed) {
  for (const bool met : {false, true})
    for (const bool keep : {false, true}) {
      SCOPED_TRACE(str("met ", met, " keep ", keep));
      const Tensor data = Tensor::from<double>({0.3, -0.7}, {2});
      Tensor w = Tensor::from<double>({2, 3}, {2});
      Recording recording;
      if (met) (void)neg(data);
      recording.watch(w);
      Tensor part, whole;
      {
        const RecomputeScope scope({.results = true});
        part = data * 2.0;
        whole = part * 3.0;
      }
      for (const double factor : {1.0, 2.0}) {
        const Tensor dw = recording.gradient(sum(w * whole) * factor, std::span(&w, 1), {.keep = keep})[0];
        EXPECT_NEAR(dw.to_vector<double>()[1], -0.7 * 6 * factor, 1e-12);
      }
      const Tensor dw = recording.gradient(sum(w * part), std::span(&w, 1), {.keep = keep})[0];  // not saved by any earlier op
      EXPECT_NEAR(dw.to_vector<double>()[1], -0.7 * 2, 1e-12);
    }
}

// Selective: the same, for cheap ops. An op's saved values are freed with the first pass.
TEST(Recompute, WhatIsCheapIsKeptForLaterPassesOnceItsOpIsPassed) {
  for (const bool keep : {false, true}) {
    SCOPED_TRACE(str("keep ", keep));
    const Tensor x = Tensor::from<double>({0.3, -0.7}, {2}), w = Tensor::from<double>({2, 3}, {2});
    Recording recording;
    recording.watch(x), recording.watch(w);
    Tensor y;
    {
      const RecomputeScope scope({.selective = true});
      y = silu(x);
    }
    for (const double factor : {1.0, 2.0}) {
      const Tensor dw = recording.gradient(sum(w * y) * factor, std::span(&w, 1), {.keep = keep})[0];
      EXPECT_NEAR(dw.to_vector<double>()[1], -0.7 / (1 + std::exp(0.7)) * factor, 1e-12);
    }
  }
}

// An open scope does not apply to what its derivatives compute: there would be copies of copies.
TEST(Recompute, ThirdDerivativesInsideOfASelectiveScope) {
  const Tensor x = Tensor::from<double>({0.3, -0.7}, {2});
  Recording recording;
  recording.watch(x);
  const RecomputeScope scope({.selective = true});
  const Tensor y = silu(x);
  const Tensor first = recording.gradient(sum(y * y * y), std::span(&y, 1), {.keep = true})[0];
  const Tensor second = recording.gradient(sum(first), std::span(&y, 1), {.keep = true})[0];
  const Tensor third = recording.gradient(sum(second), std::span(&y, 1))[0];
  for (int i = 0; i < 2; ++i) {
    const double at = y.to_vector<double>()[static_cast<size_t>(i)];
    EXPECT_NEAR(first.to_vector<double>()[static_cast<size_t>(i)], 3 * at * at, 1e-12);
    EXPECT_NEAR(second.to_vector<double>()[static_cast<size_t>(i)], 6 * at, 1e-12);
    EXPECT_NEAR(third.to_vector<double>()[static_cast<size_t>(i)], 6, 1e-12);
  }
}

// The gradient of a norm has no derivative; that of its neighbours has.
TEST(Norm, WhatIsAddedToItsGradientIsDifferentiatedAgain) {
  const Tensor x = Tensor::from<double>({0.5, -1, 2}, {1, 3}), w = Tensor::from<double>({1, 2, -1}, {1, 3});
  Recording recording;
  recording.watch(x), recording.watch(w);
  const Tensor normed = sum(tanh(layer_norm(x)));
  const Tensor dx = recording.gradient(normed + sum(x * x * w), std::span(&x, 1), {.keep = true})[0];
  const Tensor dw = recording.gradient(sum(dx), std::span(&w, 1))[0];
  for (int i = 0; i < 3; ++i)
    EXPECT_NEAR(dw.to_vector<double>()[static_cast<size_t>(i)], 2 * x.to_vector<double>()[static_cast<size_t>(i)], 1e-12);
}

struct NoMemory : Allocator {
  void* allocate(size_t, MemoryKind) override { fail<OutOfMemory>("no memory of the host's"); }
  void free(void*, size_t) override {}
  MemoryStats stats() const override { return {}; }
  void reset_peak() override {}
  void add_wire(SharedRange) override {}
};

// The last module's activations are offloaded when the next one begins.
TEST(Recompute, AModuleIsNotOpenIfItsRegionCannotBegin) {
  run_local(1, [](World& w) {
    RankContext& context = RankContext::current();
    context.meta_is = Device::cuda();
    context.meta_host = std::make_shared<NoMemory>();
    Net net(2);
    for (Layer& layer : net.layers) layer.recompute({.offload = true});
    shard(net, w.mesh({{"data", 1}}), {.units = nn::units_of<Layer>()});
    materialize(net, Device::meta());
    Recording recording;
    const Tensor y = net.layers[0](recording.watch(Tensor::empty({kF32, {4, kWidth}, {}}, Device::meta())));
    EXPECT_THROW(net.layers[1](y), OutOfMemory);
    EXPECT_EQ(nn::ModuleScope::current(), nullptr);
  }, {.threads_per_rank = 1});
}

// Before what is offloaded enters its scope it may change; then it may not.
TEST(Recompute, ChangesOfWhatIsOffloadedAreNoticed) {
  run_local(1, [](World&) {
    RankContext::current().meta_is = Device::cuda();
    const auto changed_after = [](int layers) {
      const Tensor x = Tensor::empty({kF32, {4}, {}}, Device::meta()), memory = reshape(x, {2, 2});
      const auto change = [&](int now) { if (now == layers) store_into(memory, full_like(memory, 1)); };
      return message_of<LifetimeError>(ExitCode::kDesync, [&] {
        change(0);
        Recording recording;
        Tensor y = recording.watch(x);
        for (int layer = 1; layer <= 3; ++layer) {
          {
            const RecomputeScope scope({.offload = true});
            y = tanh(square(y));
          }
          change(layer);
        }
        recording.gradient(sum(y), std::span(&x, 1));
      });
    };
    EXPECT_EQ(changed_after(-1), "no exception");
    EXPECT_EQ(changed_after(0), "no exception");
    EXPECT_THAT(changed_after(1), HasSubstr("was changed in place between forward and backward"));
  }, {.threads_per_rank = 1});
}

TEST(Recompute, AScopeEndsWhereAnotherRecordingBeganInIt) {
  for (const bool selective : {false, true}) {
    Recording outer;
    auto scope = std::make_unique<RecomputeScope>(RecomputeOptions{.selective = selective});
    const Tensor x = outer.watch(full({3}, 2.0)), y = sum(mul(tanh(x), tanh(x)));
    auto inner = std::make_unique<Recording>();
    scope.reset();
    inner.reset();
    EXPECT_TRUE(RecomputeScope().is_region()) << "the first one is over";
    const Tensor xs[] = {x};
    EXPECT_GT(outer.gradient(y, xs)[0].to_vector<float>()[0], 0);
  }
}

TEST(Recompute, WhatCannotBeSaysSo) {
  Case c;
  Recording recording;
  recording.watch(c.x);
  const Tensor memory = Tensor::from<double>({0, 0, 0, 0}, {4}), before = sum(c.x * memory);
  {
    const RecomputeScope scope;
    const Tensor y = tanh(c.x);
    EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { store_into(memory, y); }),
                HasSubstr("what is computed again in the backward cannot be"));
    EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.gradient(sum(y), std::span(&c.x, 1)); }),
                HasSubstr("inside of a RecomputeScope: it must end first"));
  }
  EXPECT_EQ(recording.gradient(before, std::span(&c.x, 1), {.keep = true})[0].to_vector<double>(), (std::vector<double>{0, 0, 0, 0}))
      << "what is refused changes nothing";
  EXPECT_EQ(recording.gradient(sum(tanh(c.x)), std::span(&c.x, 1)).size(), 1u);
}

// A scope's input is read again, even if the op inside would not have kept it.
TEST(Recompute, WhatEnteredAScopeMayNotChange) {
  for (const bool changes : {false, true}) {
    Recording recording;
    const Tensor x = recording.watch(Tensor::from<double>({1, 2, 3}, {3})), m = Tensor::from<double>({1, 1, 1}, {3});
    Tensor z;
    {
      const RecomputeScope scope;
      z = sum(square(add(x, m)));
    }
    if (changes) store_into(m, Tensor::from<double>({5, 5, 5}, {3}));
    const Tensor xs[] = {x};
    if (!changes) EXPECT_EQ(recording.gradient(z, xs)[0].to_vector<double>(), (std::vector<double>{4, 6, 8}));
    else EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.gradient(z, xs); }), HasSubstr("was changed in place between"));
  }
}

}  // namespace
}  // namespace sheaf
