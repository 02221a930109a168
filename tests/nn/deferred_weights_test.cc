// Deferred gradients of weights (BackwardOptions::defer_weights): their bits, when they are computed and reduced, and what is refused.
#include <cstring>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 2, kLength = 3, kVocab = 11;

using Gradients = std::vector<std::vector<double>>;

Gradients gradients_of(nn::Module& module) {
  Gradients out;
  for (const auto& unit : units(module)) {
    unit->reduce_waiting(), unit->complete_reduction();
    for (const FlatBuffer& b : unit->buffers())
      if (b.trainable) out.push_back(b.grad.to_vector<double>());
  }
  return out;
}

// "1 2 i1 w i2 w": forwards, backwards ("b1") and input-only backwards of micro-batches, and weight gradients of the earliest one.
Gradients gradients_in_order(const std::string& order, int world, Strategy strategy, const nn::UnitPolicy& units, DType compute = kF64,
                             bool recompute = false) {
  Gradients out;
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    TinyModel model;
    ShardOptions options{.units = units, .strategy = strategy};
    if (compute != kF64) options.compute_dtype = compute;
    shard(model, mesh, options);
    if (recompute)
      for (TinyBlock& b : model.blocks) b.recompute();
    materialize(model, Device::cpu(), {.seed = 4, .dtype = compute == kF64 ? kF64 : kF32});
    std::vector<Tensor> losses(10);
    Recording recording;
    const auto count = std::ranges::count_if(order, [](char c) { return c == 'b' || c == 'i'; });
    int64_t done = 0;
    for (size_t at = 0; at < order.size(); at += order.find(' ', at) == order.npos ? order.size() : order.find(' ', at) + 1 - at) {
      const char kind = order[at];
      if (kind == 'w') {
        recording.backward_weights();
        continue;
      }
      const bool backward = kind == 'b' || kind == 'i';
      const int m = order[at + (backward ? 1 : 0)] - '0';
      Tensor& loss = losses[static_cast<size_t>(m)];
      if (backward) {
        recording.backward(loss, {.last_micro_batch = ++done == count, .defer_weights = kind == 'i'});
        continue;
      }
      recording.next_micro_batch(kRows * m);
      loss = model.loss(token_rows(mesh, kRows, kLength, kVocab, m), token_rows(mesh, kRows, kLength, kVocab, m + 1));
    }
    const Gradients mine = gradients_of(model);
    if (w.rank() == 0) out = mine;
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  return out;
}

// Including a table with two uses, whose gradients add up in one order.
TEST(WeightsLater, ChangeNoBit) {
  for (const int world : {1, 2, 3})
    for_each_sharding(world, [&](Strategy strategy, const nn::UnitPolicy& units, int64_t, const std::string& name) {
      if (strategy == Strategy::none) return;
      SCOPED_TRACE(str(name, " ", world));
      const Gradients expected = gradients_in_order("1 b1 2 b2 3 b3", world, strategy, units);
      EXPECT_EQ(gradients_in_order("1 i1 w 2 i2 w 3 i3 w", world, strategy, units), expected);
      EXPECT_EQ(gradients_in_order("1 i1 2 i2 w 3 i3 w w", world, strategy, units), expected);
      EXPECT_EQ(gradients_in_order("1 2 3 i1 i2 i3 w w w", world, strategy, units), expected);
      EXPECT_EQ(gradients_in_order("1 2 i1 3 w i2 i3 w w", world, strategy, units), expected);
      EXPECT_EQ(gradients_in_order("1 2 b1 i2 3 w b3", world, strategy, units), expected) << "where all of a backward comes at once";
    });
}

TEST(WeightsLater, ChangeNoBitInBf16OrWhereBlocksAreComputedAgain) {
  for (const Strategy strategy : {Strategy::full_shard, Strategy::zero1, Strategy::replicate}) {
    const auto in = [&](const std::string& order, DType compute, bool recompute) {
      return gradients_in_order(order, 2, strategy, nn::units_of<TinyBlock>(), compute, recompute);
    };
    EXPECT_EQ(in("1 2 i1 3 i2 w i3 w w", kF64, true), in("1 b1 2 b2 3 b3", kF64, false));
    EXPECT_EQ(in("1 2 i1 3 i2 w i3 w w", kBF16, false), in("1 b1 2 b2 3 b3", kBF16, false));
    EXPECT_EQ(in("1 2 i1 3 i2 w i3 w w", kBF16, true), in("1 b1 2 b2 3 b3", kBF16, false));
  }
}

TEST(WeightsLater, OtherGradientsMayBeAskedForInBetween) {
  const auto gradients = [](bool later) {
    TinyModel model;
    materialize(model, Device::cpu(), {.seed = 4, .dtype = kF64});
    Recording recording;
    recording.backward(model.loss(token_rows({}, kRows, kLength, kVocab), token_rows({}, kRows, kLength, kVocab, 1)), {.defer_weights = later});
    recording.next_micro_batch(kRows);
    const Tensor x = recording.watch(full_of({kF64, {2, 7}, {}}, 0.5)), xs[] = {x};
    std::vector<double> out = recording.gradient(sum(model.blocks[0](x)), xs)[0].to_vector<double>();
    if (later) recording.backward_weights();
    Gradients all = gradients_of(model);
    all.push_back(out);
    return all;
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

// Once a backward has passed a block, its parameters are discarded, and its weight gradients are not computed yet.
TEST(WeightsLater, AreComputedAndReducedThen) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    TinyModel model;
    shard(model, mesh, {.units = nn::units_of<TinyBlock>()});
    materialize(model);
    Recording recording;
    const auto count = [&](const std::string& op, const std::string& path) {
      int n = 0;
      const Tape& tape = recording.tape();
      for (NodeId id = 0; id < tape.num_nodes(); ++id)
        n += tape.op_name(tape.node(id)) == op && tape.path(tape.node(id)).starts_with(path) && tape.node(id).phase == Phase::backward;
      return n;
    };
    recording.backward(model.loss(token_rows(mesh, kRows, kLength, kVocab), token_rows(mesh, kRows, kLength, kVocab, 1)), {.defer_weights = true});
    EXPECT_EQ(count("discard", "blocks.0"), 1);
    for (const char* op : {"linear_weight_gradient", "linear_gradients", "reduce_scatter", "grad_slots"}) EXPECT_EQ(count(op, "blocks"), 0) << op;
    EXPECT_EQ(units(model)[1]->buffers()[0].grad.defined(), false);
    recording.backward_weights();
    EXPECT_EQ(count("linear_gradients", "blocks.0"), 2);
    EXPECT_EQ(count("reduce_scatter", "blocks"), 2);
    EXPECT_EQ(count("all_gather", "blocks"), 1) << "none for what reads no parameter; the last block's is elided";
    EXPECT_EQ(count("discard", "blocks"), 2);
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

// Reductions that wait for the step under zero1, or over other replicas, overlap with further weights' gradients.
TEST(WeightsLater, OfTheLastMicroBatchAreReducedToTheEnd) {
  for (const bool replicas : {false, true})
    run_local(2, [&](World& w) {
      const Mesh mesh = replicas ? w.mesh({{"replica", 2}, {"data", 1}}) : w.mesh({{"data", 2}});
      TinyModel model;
      ShardOptions options{.units = nn::units_of<TinyBlock>(), .strategy = Strategy::zero1};
      if (replicas) options.replica_axis = "replica";
      shard(model, mesh, options);
      materialize(model);
      Recording recording;
      for (const bool last : {false, true}) {
        recording.next_micro_batch(last ? kRows : 0);
        const Layout cut(mesh.spec, Placement::shard(0));
        const auto rows = [&](int64_t shift) {
          return redistribute(token_rows({}, 4, kLength, kVocab, shift), replicas ? cut.with(1, Placement::replicate()) : cut);
        };
        const Tensor loss = model.loss(rows(0), rows(1));
        recording.backward(replicas ? redistribute(loss, "data", Placement::partial()) : loss, {.last_micro_batch = last, .defer_weights = true});
      }
      const auto reductions = [&] {
        int n = 0;
        const Tape& tape = recording.tape();
        for (NodeId id = 0; id < tape.num_nodes(); ++id) {
          const std::string name = tape.op_name(tape.node(id));
          n += tape.path(tape.node(id)).starts_with("blocks") && name == (replicas ? "all_reduce" : "reduce_scatter");
        }
        return n;
      };
      recording.backward_weights();
      EXPECT_EQ(reductions(), 0) << w.rank();
      recording.backward_weights();
      EXPECT_EQ(reductions(), 2) << w.rank();
    }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

TEST(WeightsLater, TheirMemoryGoesWhereTheyAreComputed) {
  Allocator& memory = *RankContext::current().memory(Device::cpu());
  const auto live = [&](bool later) {
    TinyModel model;
    materialize(model);
    const int64_t before = memory.stats().live;
    Recording recording;
    const auto step = [&] {
      recording.next_micro_batch(0);
      recording.backward(model.loss(token_rows({}, kRows, kLength, kVocab), token_rows({}, kRows, kLength, kVocab, 1)), {.defer_weights = later});
    };
    step();
    if (later) recording.backward_weights();
    step();
    if (later) recording.backward_weights();
    return memory.stats().live - before;
  };
  EXPECT_EQ(live(true), live(false));
}

TEST(WeightsLater, WhatIsForgottenIsTold) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    TinyModel model;
    shard(model, mesh, {.units = nn::units_of<TinyBlock>()});
    materialize(model);
    optim::AdamW optimizer(model);
    const auto loss = [&] { return model.loss(token_rows(mesh, kRows, kLength, kVocab), token_rows(mesh, kRows, kLength, kVocab, 1)); };
    const auto told = [](auto&& f) { return message_of<LifetimeError>(ExitCode::kDesync, f); };
    {
      Recording recording;
      EXPECT_THAT(told([&] { recording.backward_weights(); }), HasSubstr("no backward with defer_weights is without its weights' gradients"));
      recording.backward(loss(), {.defer_weights = true});
      recording.next_micro_batch(kRows);
      recording.backward(loss(), {.defer_weights = true});
      EXPECT_THAT(told([&] { optimizer.step({.lr = 0.1}); }), HasSubstr("put off in 2 backwards with defer_weights"));
      recording.backward_weights();
      EXPECT_THAT(told([&] { optimizer.step({.lr = 0.1}); }), HasSubstr("put off in 1 backward with defer_weights"));
      EXPECT_EQ(optimizer.steps(), 0) << "a step that is refused is none";
      const RecomputeScope scope;
      EXPECT_THAT(told([&] { recording.backward_weights(); }), HasSubstr("inside of a RecomputeScope"));
    }
    EXPECT_THAT(told([&] { optimizer.step({.lr = 0.1}); }), HasSubstr("put off in 1 backward with defer_weights")) << "its recording is over";
    optimizer.zero_grad();
    {
      Recording recording;
      recording.backward(loss(), {.defer_weights = true});
      optimizer.zero_grad();
      EXPECT_THAT(told([&] { recording.backward_weights(); }), HasSubstr("that zero_grad() has given up since"));
    }
    Recording recording;
    recording.backward(loss(), {.defer_weights = true});
    recording.backward_weights();
    EXPECT_THAT(told([&] { recording.backward_weights(); }), HasSubstr("no backward with defer_weights"));
    optimizer.step({.lr = 0.1});
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
}

// If a layer's input is a parameter, both gradients are computed at once, so that its gathered weights can be discarded.
struct Asking : nn::Module {
  nn::Parameter queries{{3, 4}, nn::Init::normal(1)};
  nn::Linear ask{4, 5};
  Tensor forward(const Tensor& x) { return ask(queries.value()) * x; }
  SHEAF_FIELDS(queries, ask);
};

// A weight with two uses, one of which is not a linear layer's product; in bf16 its gradients are rounded alike.
struct Twice : nn::Module {
  nn::Linear a{4, 4};
  nn::Parameter b{{4, 4}, nn::Init::normal(1)};
  Tensor forward(const Tensor& x) { return a(matmul(matmul(tanh(matmul(x, a.weight.value())), b.value()), b.value())); }
  SHEAF_FIELDS(a, b);
};

template <class M>
Gradients gradients_of_whole(bool later, const Shape& shape, DType compute, const std::function<void(M&)>& prepare = {}) {
  Gradients out;
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", 2}});
    M model;
    ShardOptions options;
    if (compute != kF32) options.compute_dtype = compute;
    if (prepare) prepare(model);
    shard(model, mesh, options);
    materialize(model, Device::cpu(), {.seed = 4});
    Recording recording;
    for (int64_t m = 0; m < 2; ++m) {
      recording.next_micro_batch(m);
      const Tensor x = redistribute(full_of({compute, shape, Layout(mesh.spec)}, 0.3 + static_cast<double>(m)), "data", Placement::shard(0));
      recording.backward(sum(model(x)), {.defer_weights = later});
    }
    for (int m = 0; later && m < 2; ++m) recording.backward_weights();
    const Gradients mine = gradients_of(model);
    if (w.rank() == 0) out = mine;
  }, {.timeout = std::chrono::seconds(20), .threads_per_rank = 1});
  return out;
}

TEST(WeightsLater, OfLayersWhoseInputIsAParameterComeAtOnce) {
  EXPECT_EQ(gradients_of_whole<Asking>(true, {3, 5}, kF32), gradients_of_whole<Asking>(false, {3, 5}, kF32));
}

TEST(WeightsLater, OfWeightsWithSeveralUsesAreRoundedAlike) {
  for (const DType compute : {kF32, kBF16})
    EXPECT_EQ(gradients_of_whole<Twice>(true, {6, 4}, compute), gradients_of_whole<Twice>(false, {6, 4}, compute));
}

TEST(WeightsLater, OfABiasBesideAFrozenWeightComeLaterToo) {
  const std::function<void(Twice&)> freeze = [](Twice& m) { m.a.weight.freeze(); };
  const Gradients gradients = gradients_of_whole<Twice>(false, {6, 4}, kF32, freeze);
  EXPECT_EQ(gradients_of_whole<Twice>(true, {6, 4}, kF32, freeze), gradients);
}

struct Failing {
  static constexpr const char* kName = "failing";
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void execute(const Attrs&, Execute& c) {
    std::memcpy(c.output(0).data, c.input(0).data, static_cast<size_t>(c.output_tensor(0).local_bytes()));
  }
  static void vjp(const Attrs&, Vjp&) { fail<ShapeError>("[failing] for once"); }
};

// The deferred work is dropped, so the error says what the step lacks.
TEST(WeightsLater, ABackwardThatFailsLeavesNothingToDo) {
  Twice model;
  materialize(model);
  optim::AdamW optimizer(model);
  Recording recording;
  const Tensor x = full_of({kF32, {2, 4}, {}}, 0.3);
  EXPECT_THROW(recording.backward(sum(model.a(apply<Failing>({}, {matmul(x, model.b.value())}))), {.defer_weights = true}), ShapeError);
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.backward_weights(); }), HasSubstr("no backward with defer_weights"));
  recording.next_micro_batch(0);
  recording.backward(sum(model.a(x)));
  optimizer.step({.lr = 0.1});
}

// A user-defined op: its weights() callback may read only what it holds.
struct Careless {
  static constexpr const char* kName = "careless";
  static constexpr bool kDefersWeights = true;
  using Attrs = NoAttrs;
  static constexpr uint64_t kSavedInputs = 0b11;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void execute(const Attrs&, Execute& c) {
    std::memcpy(c.output(0).data, c.input(0).data, static_cast<size_t>(c.output_tensor(0).local_bytes()));
  }
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, mul(c.grad(), c.input(1)));
    c.weight_gradients(1, [](Vjp& c) { c.set(1, c.grad()); });
  }
};

struct CarelessLayer : nn::Module {
  nn::Parameter weight{{3}, nn::Init::normal(1)};
  Tensor forward(const Tensor& x) { return apply<Careless>({}, {x, weight.value()}); }
  SHEAF_FIELDS(weight);
};

TEST(WeightsLater, AnOpHoldsWhatItReads) {
  CarelessLayer layer;
  materialize(layer);
  Recording recording;
  recording.backward(sum(layer(Tensor::from<float>({1, 2, 3}, {3}))), {.defer_weights = true});
  EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.backward_weights(); }),
              HasSubstr("[careless] root: grad() in the function given to weight_gradients(), which must capture what it reads"));
}

TEST(WeightsLater, WhatTheyReadMayNotChangeBefore) {
  for (const bool changes : {false, true}) {
    nn::Linear layer(3, 2, {.bias = false});
    materialize(layer);
    const Tensor x = Tensor::from<float>({1, 2, 3}, {1, 3});
    Recording recording;
    recording.backward(sum(layer(x)), {.defer_weights = true});
    if (changes) store_into(x, Tensor::from<float>({5, 5, 5}, {1, 3}));
    if (!changes) recording.backward_weights();
    else
      EXPECT_THAT(message_of<LifetimeError>(ExitCode::kDesync, [&] { recording.backward_weights(); }),
                  HasSubstr("what linear read was changed in place"));
  }
}

}  // namespace
}  // namespace sheaf::testing
