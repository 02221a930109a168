// Compiled steps against the same eager steps: the same bits for every way to shard; and an error, by name, for anything that a program
// would compute wrongly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <set>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/compile.h"
#include "sheaf/autograd/fuse.h"
#include "sheaf/autograd/passes/keep_gathered.h"
#include "sheaf/autograd/tape_editor.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/keep_within.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/nn/clip_grad_norm.h"
#include "sheaf/nn/optim/adamw.h"
#include "sheaf/tests/needs_gpu.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kVocab = 11;

struct DropoutModel : nn::Module {
  TinyModel net;
  nn::Dropout dropout{0.3};
  Tensor forward(const Tensor& tokens) {
    const Tensor y = net(tokens);
    return dropout(y * sigmoid(1.5 * (y + 0.25)));  // elementwise ops in a row, forward and backward
  }
  SHEAF_FIELDS(net, dropout);
};

Tensor scalars_of(const optim::Optimizer& optimizer, double lr) {
  const std::vector<double> values = optimizer.next_scalars({.lr = lr});
  return Tensor::from(values, {static_cast<int64_t>(values.size())});
}

struct Outcome {
  std::vector<float> losses, evaluations;
  std::vector<std::vector<float>> parameters;
  bool fused = false;  // of the program
  friend bool operator==(const Outcome& a, const Outcome& b) {
    return a.losses == b.losses && a.evaluations == b.evaluations && a.parameters == b.parameters;
  }
};

// Six steps, of which the last three are run by a program if compiled; between them a forward reads the parameters.
Outcome train(World& w, Strategy strategy, const nn::UnitPolicy& units_by, int64_t prefetch, bool compiled,
              CompileOptions options = {}) {
  const Mesh mesh = w.mesh({{"data", w.size()}});
  DropoutModel model;
  shard(model, mesh, {.units = units_by, .strategy = strategy, .prefetch_bytes = prefetch});
  materialize(model, w.device(), {.seed = 5});
  optim::AdamW optimizer(model, {.weight_decay = 0.1});
  const auto code = [&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
    Tensor total;
    for (int micro = 0; micro < 2; ++micro) {
      Recording& recording = *Recording::current();
      recording.next_micro_batch(recording.options().first_sample + 5 * micro);
      const Tensor loss = cross_entropy(model(tokens), targets, {.divide_by = 70.0});
      recording.backward(loss, {.last_micro_batch = micro == 1});
      total = total ? total + loss : loss;
    }
    clip_grad_norm(model, 0.5);
    optimizer.step({.scalars = scalars});
    optimizer.zero_grad();
    return redistribute(total, Layout(mesh.spec, Placement::invariant()));
  };
  const bool fuse = options.fuse;
  auto step = compile(code, std::move(options));
  Outcome out;
  for (int64_t s = 0; s < 6; ++s) {
    const Tensor tokens = token_rows(mesh, 5, 7, kVocab, s).to(w.device()),
                 targets = token_rows(mesh, 5, 7, kVocab, s + 1).to(w.device());
    const Tensor scalars = scalars_of(optimizer, 0.02 / static_cast<double>(s + 1)).to(w.device());
    const RecordingOptions options{.step = s, .first_sample = 10 * s, .seed = 9};
    EXPECT_EQ(step.program() != nullptr, compiled && s >= 3);
    model.train();
    if (compiled) {
      out.losses.push_back(step(options, tokens, targets, scalars).item());
    } else {
      Recording recording(options);
      out.losses.push_back(code(tokens, targets, scalars).item());
    }
    EXPECT_EQ(optimizer.steps(), s + 1);
    model.eval();
    for (float x : redistribute(sum(model(tokens)), Layout(mesh.spec, Placement::invariant())).to_vector()) out.evaluations.push_back(x);
  }
  if (compiled) {
    const Tape& tape = step.program()->tape();
    int fused = 0;
    for (NodeId id = 0; id < tape.num_nodes(); ++id) fused += tape.node(id).op == &fused_op();
    EXPECT_TRUE(fuse || fused == 0);
    out.fused = fused > 0;
    for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
  }
  for (const auto& unit : units(model))
    for (const FlatBuffer& b : unit->buffers()) out.parameters.push_back(b.shard.to_vector<float>());
  return out;
}

// Modules of the root's unit that are called by themselves: no scope of a unit is entered, and parameters are gathered where they are read.
// The order of gathers is known after one step here, too.
struct Coder : nn::Module {
  nn::Linear encode{6, 4}, decode{4, 6};
  SHEAF_FIELDS(encode, decode);
};

TEST(Compile, TakesModulesThatAreCalledWithoutTheirRoot) {
  for (const bool evaluates : {false, true})
    for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
      SCOPED_TRACE(str(strategy, evaluates ? " with evaluations" : ""));
      run_local(3, [&](World& w) {
        const Mesh mesh = w.mesh({{"data", w.size()}});
        std::vector<std::vector<float>> parameters;
        for (const bool compiled : {false, true}) {
          Coder model;
          shard(model, mesh, {.strategy = strategy});
          materialize(model, Device::cpu(), {.seed = 5});
          optim::AdamW optimizer(model);
          const auto decoded = [&](const Tensor& x) { return model.decode(tanh(model.encode(x))); };
          const auto code = [&](const Tensor& x, const Tensor& scalars) {
            const Tensor loss = sum(square(decoded(x) - x));
            Recording::current()->backward(loss);
            optimizer.step({.scalars = scalars});
            optimizer.zero_grad();
            return redistribute(loss, "data", Placement::invariant());
          };
          auto step = compile(code);
          for (int s = 0; s < 5; ++s) {
            const Tensor x = dense_rows(mesh, 5, 6, s), scalars = scalars_of(optimizer, 0.02);
            if (compiled) {
              step({.step = s}, x, scalars);
            } else {
              Recording recording({.step = s});
              code(x, scalars);
            }
            if (evaluates) decoded(x);
          }
          EXPECT_EQ(step.program() != nullptr, compiled);
          parameters.push_back(full_parameter(model.encode.weight).to_vector<float>());
        }
        EXPECT_EQ(parameters[0], parameters[1]);
      }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
    }
}

TEST(Compile, HasTheBitsOfStepsRunOneByOne) {
  std::atomic<int> fused = 0, plain = 0;  // where values have only a few elements, there may be too little to fuse
  for (int world = 1; world <= 5; ++world)
    for_each_sharding(world, [&](Strategy strategy, const nn::UnitPolicy& units_by, int64_t prefetch, const char* name) {
      SCOPED_TRACE(str(name, " at ", world));
      run_local(world, [&](World& w) {
        const Outcome expected = train(w, strategy, units_by, prefetch, false);
        const Outcome program = train(w, strategy, units_by, prefetch, true);
        EXPECT_EQ(program, expected);
        (program.fused ? fused : plain) += 1;
        if (prefetch == 0) {
          EXPECT_EQ(train(w, strategy, units_by, prefetch, true, {.fuse = false}), expected);
        }
        for (size_t s = 1; s < 6; ++s) EXPECT_NE(expected.losses[s], expected.losses[s - 1]);
      }, {.threads_per_rank = 1});
    });
  EXPECT_GT(fused, 5 * plain);
}

// An evaluation in a recording is a pass of its own, behind which the next step gathers at other places.
TEST(Compile, TakesModelsThatAreEvaluatedAfterSomeOfTheFirstSteps) {
  for (const unsigned evaluated : {0b1u, 0b10u, 0b100u, 0b110u, 0b1010101010u, 0b100100100100u})
    for_each_sharding(3, [&](Strategy strategy, const nn::UnitPolicy& units_by, int64_t prefetch, const char* name) {
      SCOPED_TRACE(str(name, " evaluated after ", evaluated));
      run_local(3, [&](World& w) {
        const Mesh mesh = w.mesh({{"data", w.size()}});
        std::vector<std::vector<float>> losses;
        for (const bool compiled : {false, true}) {
          TinyModel model;
          shard(model, mesh, {.units = units_by, .strategy = strategy, .prefetch_bytes = prefetch});
          materialize(model, Device::cpu(), {.seed = 5});
          optim::AdamW optimizer(model);
          const auto code = [&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
            const Tensor loss = cross_entropy(model(tokens), targets, {.divide_by = 35.0});
            Recording::current()->backward(loss);
            optimizer.step({.scalars = scalars});
            optimizer.zero_grad();
            return redistribute(loss, "data", Placement::invariant());
          };
          auto step = compile(code);
          losses.emplace_back();
          for (int s = 0; s < 12; ++s) {
            const Tensor tokens = token_rows(mesh, 5, 7, kVocab, s), targets = token_rows(mesh, 5, 7, kVocab, s + 1);
            const Tensor scalars = scalars_of(optimizer, 0.02);
            std::optional<Recording> recording;
            if (!compiled) recording.emplace(RecordingOptions{.step = s});
            const Tensor loss = compiled ? step({.step = s}, tokens, targets, scalars) : code(tokens, targets, scalars);
            losses.back().push_back(loss.item());
            recording.reset();
            if (evaluated >> s & 1) {
              const Recording of_evaluation;
              losses.back().push_back(redistribute(sum(model(tokens)), "data", Placement::invariant()).item());
            }
          }
          EXPECT_EQ(step.program() != nullptr, compiled);
        }
        EXPECT_EQ(losses[0], losses[1]);
      }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
    });
}

TEST(Compile, HasThemOnAGpu) {
  SHEAF_NEEDS_GPU();
  for (int world = 1; world <= 3; ++world)
    for_each_sharding(world, [&](Strategy strategy, const nn::UnitPolicy& units_by, int64_t prefetch, const char* name) {
      SCOPED_TRACE(str(name, " at ", world));
      run_local(world, [&](World& w) {
        EXPECT_EQ(train(w, strategy, units_by, prefetch, true), train(w, strategy, units_by, prefetch, false));
      }, {.threads_per_rank = 1, .device = Device::cuda()});
    });
}

// Whatever stays gathered: nothing, some, or all units.
TEST(Compile, UnitsThatStayGatheredChangeNoBit) {
  std::set<size_t> counts;
  for (const int world : {2, 3}) {
    for (const double share : {0.0, 0.4, 0.7, 0.8, 0.9, 1.0, 1.1}) {
      SCOPED_TRACE(str("within ", share, " of the peak at ", world));
      run_local(world, [&](World& w) {
        size_t all = 0, kept = 0;
        const auto rewrite = [&](const Program& plain) {
          const int64_t live = RankContext::current().cpu->stats().live;
          Program program = keep_within(live + static_cast<int64_t>(share * static_cast<double>(plain.arena_bytes())), w,
                                        Device::cpu())(plain);
          all = regathers(plain).size(), kept = all - regathers(program).size();
          for (const Finding& f : check_tape(program.tape())) ADD_FAILURE() << f.to_string();
          EXPECT_LE(static_cast<double>(program.arena_bytes()), std::max(share, 1.0) * static_cast<double>(plain.arena_bytes()));
          return program;
        };
        const auto by_block = nn::units_of<TinyBlock>();
        const Outcome expected = train(w, Strategy::full_shard, by_block, 0, false);
        EXPECT_EQ(train(w, Strategy::full_shard, by_block, 0, true, {.rewrite = rewrite}), expected);
        EXPECT_EQ(all, 5u);  // blocks.0 in each backward, all three for the second micro-batch
        EXPECT_TRUE(share > 0 || kept < all);
        EXPECT_TRUE(share < 1.1 || kept == all);
        if (w.rank() == 0) counts.insert(kept);
      }, {.threads_per_rank = 1});
    }
  }
  EXPECT_GE(counts.size(), 4u);
}

struct Net : nn::Module {
  nn::Linear layer{3, 2};
  SHEAF_FIELDS(layer);
};

Tensor update(optim::AdamW& optimizer, const Tensor& loss, const optim::StepOptions& options) {
  Recording::current()->backward(loss);
  optimizer.step(options);
  optimizer.zero_grad();
  return loss;
}

// An update without a kernel of its own.
class SgdOfOps final : public optim::Optimizer {
 public:
  explicit SgdOfOps(nn::Module& model) : Optimizer("sgd_of_ops", model.parameters(), {}, {}, {}) {}

 private:
  std::vector<double> scalars(const optim::StepOptions& options, int64_t) const override { return {options.lr.value_or(0.1)}; }
  void update(optim::ShardState& shard, const Tensor& scalars) override {
    const FlatBuffer& b = shard.flat();
    store_into(b.shard, b.shard - b.grad * cast(scalars, b.shard.dtype()));
  }
};

// A unit's values change between two updates: weights gathered before the first are invalid after it.
template <class Optimizer>
void expect_gathered_again() {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    std::vector<float> losses[2];
    for (const bool compiled : {false, true}) {
      TinyModel model(3);
      shard(model, mesh, {.units = nn::units_of<TinyBlock>()});
      materialize(model, Device::cpu(), {.seed = 5});
      Optimizer optimizer(model);
      const auto code = [&](const Tensor& tokens, const Tensor& targets, const Tensor& scalars) {
        Tensor total;
        for (int update = 0; update < 2; ++update) {
          const Tensor loss = model.loss(tokens, targets);
          Recording::current()->backward(loss);
          optimizer.step({.scalars = scalars});
          optimizer.zero_grad();
          total = total ? total + loss : loss;
        }
        return redistribute(total, Layout(mesh.spec, Placement::invariant()));
      };
      auto step = compile(code, {.rewrite = keep_within(1 << 30, w, Device::cpu())});
      const Tensor tokens = token_rows(mesh, 5, 7, kVocab), targets = token_rows(mesh, 5, 7, kVocab, 1);
      const Tensor scalars = scalars_of(optimizer, 0.01);
      for (int64_t s = 0; s < 6; ++s) {
        std::optional<Recording> recording;
        if (!compiled) recording.emplace(RecordingOptions{.step = s});
        losses[compiled].push_back((compiled ? step({.step = s}, tokens, targets, scalars) : code(tokens, targets, scalars)).item());
      }
      EXPECT_EQ(optimizer.steps(), 12);
    }
    EXPECT_EQ(losses[1], losses[0]);
  }, {.threads_per_rank = 1});
}

TEST(Compile, WhatAStepChangedIsGatheredAgain) { expect_gathered_again<optim::AdamW>(); }
TEST(Compile, WhatWasStoredIntoIsGatheredAgain) { expect_gathered_again<SgdOfOps>(); }

struct Unread : nn::Module {
  nn::Linear layer{64, 64};
  Tensor forward(const Tensor& x) { return x * 2.0; }
  SHEAF_FIELDS(layer);
};
struct Read : nn::Module {
  nn::Linear layer{2, 2};  // too small to take the other's place
  Tensor forward(const Tensor& x) {
    const Tensor twice = x + x;  // in what was another's memory
    return twice + 0 * sum(layer.weight);  // which waits for this unit's gather, after the other's
  }
  SHEAF_FIELDS(layer);
};
struct UnreadAndRead : nn::Module {
  Unread first;
  Read second;
  Tensor forward(const Tensor& x) { return first(x) + second(x); }
  SHEAF_FIELDS(first, second);
};

// A gather that nobody reads is slow; its memory is reused as soon as it is discarded.
TEST(Compile, MemoryThatALaneFillsIsNoneElses) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    UnreadAndRead model;
    const auto both = nn::units_where([&](nn::Module& m, const std::string&) { return &m == &model.first || &m == &model.second; });
    shard(model, mesh, {.units = both, .prefetch_bytes = 0});
    materialize(model, Device::cpu(), {.seed = 1});
    const std::vector<float> ones(64 * 65, 1.0f);
    auto step = compile([&](const Tensor& x) { return model(x); });  // the second unit's gather discards the first's
    for (int64_t s = 0; s < 6; ++s)
      EXPECT_EQ(step({.step = s}, Tensor::from(ones, {64 * 65})).to_vector(), std::vector<float>(64 * 65, 4.0f)) << s;
  }, {.ranks_per_host = 1, .bytes_per_second_between_hosts = 1e6, .threads_per_rank = 1});
}

struct TwoHeads : nn::Module {
  nn::Linear trunk{64, 64}, a{64, 64}, b{64, 64};
  SHEAF_FIELDS(trunk, a, b);
};

// Nobody waits for the gathers of casts as such: what they read stays until their weights are read.
TEST(Compile, WhatALaneReadsIsNoneElses) {
  std::vector<float> losses[2];
  for (const bool erased : {false, true})
    run_local(2, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", w.size()}});
      TwoHeads model;
      shard(model, mesh, {.units = nn::units_of<nn::Linear>(), .compute_dtype = kBF16});
      materialize(model, Device::cpu(), {.seed = 1});
      optim::AdamW optimizer(model);
      const auto rewrite = [&](const Program& plain) {
        TapeEditor edit(plain.tape());
        for (NodeId id = 0; erased && id < plain.tape().num_nodes(); ++id) {
          const Tape& tape = edit.tape();
          const Node& n = tape.node(id);
          if (tape.op_name(n) == "complete" && tape.op_name(tape.node(tape.value(tape.inputs(n)[0]).producer)) == "all_gather") edit.erase(id);
        }
        return plain.with_tape(edit.take());
      };
      auto step = compile([&](const Tensor& x, const Tensor& scalars) {
        const Tensor y = model.b(tanh(model.a(gelu(model.trunk(cast(x, kBF16))))));
        const Tensor loss = update(optimizer, mean(cast(square(y), kF32)), {.scalars = scalars});
        return redistribute(loss, Layout(mesh.spec, Placement::invariant()));
      }, {.rewrite = rewrite});
      for (int64_t s = 0; s < 12; ++s) {
        const Tensor x = randn({kF32, {64, 64}, Layout(mesh.spec, Placement::shard(0))}, Key{static_cast<uint64_t>(s)});
        const float loss = step({.step = s}, x, scalars_of(optimizer, 0.01)).item();
        if (w.rank() == 0) losses[erased].push_back(loss);
      }
    }, {.ranks_per_host = 1, .bytes_per_second_between_hosts = 2e6, .threads_per_rank = 1});
  EXPECT_EQ(losses[1], losses[0]);
}

// Alternating heads: the prefetch for the second micro-batch is wrong, and nothing waits for it before it is discarded.
TEST(Compile, AGatherThatNobodyUsedIsNotKept) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    std::vector<float> losses[2];
    for (const bool compiled : {false, true}) {
      TwoHeads model;
      shard(model, mesh, {.units = nn::units_of<nn::Linear>(), .compute_dtype = kBF16});
      materialize(model, Device::cpu(), {.seed = 1});
      optim::AdamW optimizer(model);
      const auto code = [&](const Tensor& x, const Tensor& scalars) {
        Tensor total;
        for (int micro = 0; micro < 2; ++micro) {
          const auto scope = model.enter();
          Tensor h = x;
          for (int i = 0; i < 3; ++i) h = model.trunk(h) + x;
          h = micro ? model.b(h) : model.a(h);
          const Tensor loss = sum(square(cast(h, kF32)));
          Recording::current()->backward(loss, {.last_micro_batch = micro == 1});
          total = total ? total + loss : loss;
        }
        optimizer.step({.scalars = scalars});
        optimizer.zero_grad();
        return redistribute(total, Layout(mesh.spec, Placement::invariant()));
      };
      auto step = compile(code, {.rewrite = keep_within(1 << 30, w, Device::cpu())});
      const Tensor x = cast(full_of({kF32, {64, 64}, Layout(mesh.spec, Placement::shard(0))}, 0.5), kBF16);
      for (int64_t s = 0; s < 7; ++s) {
        const Tensor scalars = scalars_of(optimizer, 0.01);
        std::optional<Recording> recording;
        if (!compiled) recording.emplace(RecordingOptions{.step = s});
        losses[compiled].push_back((compiled ? step({.step = s}, x, scalars) : code(x, scalars)).item());
      }
    }
    EXPECT_EQ(losses[1], losses[0]);
  }, {.ranks_per_host = 1, .bytes_per_second_between_hosts = 1e6, .threads_per_rank = 1});
}

TEST(Compile, StoresIntoViewsKeepTheirStrides) {
  for (const bool transposed : {false, true}) {
    const Tensor memory = Tensor::from(std::vector<float>(6, 0.0f), {2, 3});
    auto step = compile([&](const Tensor& x) {
      store_into(transposed ? transpose(memory, 0, 1) : slice(memory, 1, 0, 2), transposed ? x * 1.0 : slice(x, 0, 0, 2) * 1.0);
      return memory * 1.0;
    });
    for (int s = 0; s < 6; ++s)
      EXPECT_EQ(step({.step = s}, Tensor::from<float>({1, 2, 3, 4, 5, 6}, {3, 2})).to_vector(),
                transposed ? (std::vector<float>{1, 3, 5, 2, 4, 6}) : (std::vector<float>{1, 2, 0, 3, 4, 0}))
          << s;
  }
}

TEST(Compile, GoesOnAfterStepsThatFailed) {
  int64_t calls = 0;
  auto step = compile([&](const Tensor& x) {
    if (++calls <= 2) fail<DataError>("not yet");
    return calls == 5 ? x * 2.0 + x : x * 3.0;  // two steps that differ, then equal ones
  });
  const Tensor x = Tensor::from<float>({1, 2}, {2});
  int failed = 0, differed = 0;
  for (int64_t s = 0; s < 12; ++s) try {
      EXPECT_EQ(step({.step = s}, x).to_vector(), (std::vector<float>{3, 6}));
    } catch (const DataError&) {
      ++failed;
    } catch (const ConfigError&) {
      ++differed;
    }
  EXPECT_EQ(failed, 2);
  EXPECT_EQ(differed, 2);  // the step that differs, and the one after it
  EXPECT_NE(step.program(), nullptr);
  EXPECT_EQ(calls, 7);
}

TEST(Compile, ResultsAreTheCallers) {
  auto step = compile([](const Tensor& x) { return std::vector<Tensor>{x, slice(x + x, 0, 0, 1)}; });
  std::vector<Tensor> seen;
  for (int64_t s = 0; s < 6; ++s) seen.push_back(step({.step = s}, Tensor::from<float>({static_cast<float>(s), 1}, {2}))[0]);
  for (size_t s = 0; s < 6; ++s) EXPECT_EQ(seen[s].to_vector()[0], static_cast<float>(s));
}

// A program's run, like an optimizer's step, invalidates weights that were gathered for a scope that is still open.
TEST(Compile, AnOpenScopeSeesNewParameters) {
  run_local(2, [](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    Net net;
    shard(net, mesh);
    materialize(net, Device::cpu(), {.seed = 1});
    optim::AdamW optimizer(net);
    const Layout rows(mesh.spec, Placement::shard(0));
    const Tensor x = full_of({kF32, {2, 3}, rows}, 0.5);
    auto step = compile([&](const Tensor& in, const Tensor& scalars) {
      return redistribute(update(optimizer, sum(net.layer(in)), {.scalars = scalars}), Layout(mesh.spec, Placement::invariant()));
    });
    for (int64_t s = 0; s < 4; ++s) step({.step = s}, x, scalars_of(optimizer, 0.1));
    const auto scope = net.layer.enter();
    const auto look = [&] { return linear(x, net.layer.weight).to_vector(); };
    const std::vector<float> before = look();
    step({.step = 4}, x, scalars_of(optimizer, 0.1));
    EXPECT_NE(look(), before);
  }, {.threads_per_rank = 1});
}

TEST(Compile, ABackwardOverWhatAProgramHasChangedIsRefused) {
  Net net;
  shard(net, {});
  materialize(net, Device::cpu(), {.seed = 1});
  optim::AdamW optimizer(net);
  auto step = compile([&](const Tensor& x, const Tensor& scalars) {
    return update(optimizer, sum(net.layer(x)), {.scalars = scalars});
  });
  const Tensor x = Tensor::from<float>({1, 2, 3}, {1, 3});
  for (int64_t s = 0; s < 4; ++s) step({.step = s}, x, scalars_of(optimizer, 0.1));
  Recording recording;
  const Tensor loss = sum(square(net.layer(recording.watch(x))));  // whose gradient needs the weights
  step({.step = 4}, x, scalars_of(optimizer, 0.1));
  EXPECT_THROW(recording.backward(loss), LifetimeError);
}

// --- what is refused ---

template <class Code>
std::string refused(Code code) {
  Net net;
  shard(net, {});
  materialize(net, Device::cpu(), {.seed = 1});
  optim::AdamW optimizer(net);
  auto step = compile([&](const Tensor& x, const Tensor& scalars) { return code(net, optimizer, x, scalars); });
  const Tensor x = Tensor::from<float>({1, 2, 3}, {1, 3});
  try {
    for (int64_t s = 0; s < 5; ++s) step({.step = s}, x, scalars_of(optimizer, 0.1));
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

TEST(Compile, RefusesWhatChangesFromStepToStep) {
  const auto good = [](Net& net, optim::AdamW& o, const Tensor& x, const Tensor& scalars) {
    return update(o, sum(net.layer(x) * Tensor::scalar(0.5)), {.scalars = scalars});
  };
  EXPECT_EQ(refused(good), "");
  int64_t calls = 0;
  EXPECT_THAT(refused([&](Net& net, optim::AdamW& o, const Tensor& x, const Tensor& scalars) {
                return update(o, sum(net.layer(x) * Tensor::scalar(1.0 / static_cast<double>(++calls))), {.scalars = scalars});
              }),
              HasSubstr("leaf 'input', f32[], used in root, is not what it was in the step before, and would stay as it is: it has to be an input"));
  const Tensor matrix = Tensor::from(std::vector<float>{1, 2, 2, 1}, {2, 2}), turned = transpose(matrix, 0, 1);  // equal as yet
  EXPECT_THAT(refused([&](Net& net, optim::AdamW& o, const Tensor& x, const Tensor& scalars) {
                return update(o, sum(net.layer(x)) * sum(++calls % 2 ? matrix : turned), {.scalars = scalars});
              }),
              HasSubstr("leaf 'input', f32[2,2], used in root, is not what it was in the step before"));
  EXPECT_THAT(refused([&](Net& net, optim::AdamW& o, const Tensor& x, const Tensor& scalars) {
                Tensor other;
                {
                  const Recording inner;
                  other = sum(x * static_cast<double>(++calls));
                }
                return update(o, sum(net.layer(x)) * other, {.scalars = scalars});
              }),
              HasSubstr("would stay as it is: it was computed in another recording, of which a program knows nothing"));
  EXPECT_THAT(refused([&](Net& net, optim::AdamW& o, const Tensor& x, const Tensor&) {
                return update(o, sum(net.layer(x)), {.lr = 0.1});
              }),
              HasSubstr("[adamw] in a step that is compiled the learning rate"));
  EXPECT_THAT(refused([&](Net& net, optim::AdamW& o, const Tensor& x, const Tensor& scalars) {
                return update(o, sum(net.layer(x) * static_cast<double>(++calls)), {.scalars = scalars});
              }),
              HasSubstr("attributes differ; what depends on the step has to be an input"));
  EXPECT_THAT(refused([&](Net& net, optim::AdamW& o, const Tensor& x, const Tensor& scalars) {
                const Tensor y = net.layer(x);
                return update(o, ++calls % 2 ? sum(y) : sum(square(y)), {.scalars = scalars});
              }),
              HasSubstr("two steps differ at node"));
}

TEST(Compile, RefusesARecordingOfTheCodesOwn) {
  auto step = compile([](const Tensor& x) {
    Recording own;
    static_cast<void>(x + x);
    return std::vector<Tensor>();
  });
  const Tensor x = Tensor::from<float>({1, 2}, {2});
  EXPECT_THROW(for (int64_t s = 0; s < 4; ++s) step({.step = s}, x), ConfigError);
}

TEST(Compile, RefusesGradientsThatStayAndResultsThatAreNone) {
  EXPECT_THAT(refused([](Net& net, optim::AdamW&, const Tensor& x, const Tensor&) {
                const Tensor loss = sum(net.layer(x));
                Recording::current()->backward(loss);
                return loss;
              }),
              HasSubstr("leaves gradients of unit 'root' behind"));
  EXPECT_THAT(refused([](Net&, optim::AdamW&, const Tensor&, const Tensor&) { return Tensor::scalar(1); }),
              HasSubstr("the step computes nothing in its recording"));
  double count = 0;
  EXPECT_THAT(refused([&](Net& net, optim::AdamW&, const Tensor& x, const Tensor&) {
                net.layer(x);
                return Tensor::scalar(++count);
              }),
              HasSubstr("leaf 'result', f32[], used in root, is not what it was in the step before"));
}

TEST(Compile, InputsKeepTheirTypes) {
  auto twice = compile([](const Tensor& x) { return std::vector<Tensor>{x + x, x * x}; });
  std::vector<Tensor> first;
  for (int64_t s = 0; s < 6; ++s) {
    const std::vector<Tensor> out = twice({.step = s}, Tensor::from<float>({static_cast<float>(s), 1}, {2}));
    EXPECT_EQ(out[0].to_vector(), (std::vector<float>{2 * static_cast<float>(s), 2}));
    EXPECT_EQ(out[1].to_vector(), (std::vector<float>{static_cast<float>(s * s), 1}));
    if (s == 3) first = out;  // results of a program, which belong to the caller
  }
  EXPECT_EQ(first[0].to_vector(), (std::vector<float>{6, 2}));
  EXPECT_THROW(twice({}, Tensor::from<float>({1, 2, 3}, {3})), ShapeError);
}

TEST(Compile, AnInputThatNoOpReadsCanBeAResult) {
  auto step = compile([](const Tensor& x, const Tensor& y) { return std::vector<Tensor>{x + x, y}; });
  std::vector<Tensor> first;
  for (int64_t s = 0; s < 6; ++s) {
    const auto at = static_cast<float>(s);
    const std::vector<Tensor> out = step({.step = s}, Tensor::scalar(at), Tensor::scalar(10 + at));
    EXPECT_EQ(out[0].item(), 2 * at);
    EXPECT_EQ(out[1].item(), 10 + at);
    if (s == 3) first = out;
  }
  EXPECT_EQ(first[1].item(), 13);
  auto none = compile([](const Tensor& x) { return std::vector<Tensor>{x + x, Tensor()}; });
  EXPECT_THAT([&] { none({}, Tensor::scalar(1)); }, ThrowsMessage<ConfigError>(HasSubstr("[compile] result 1 is no tensor")));
}

}  // namespace
}  // namespace sheaf::testing
