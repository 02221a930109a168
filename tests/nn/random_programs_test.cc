// Random programs: the separate guarantees of ops, placements, units and recordings, in combinations that nobody chose. random_programs.h
// has the grammar. Every program gives on several ranks what it gives on one without a mesh; in f32 its bits do not depend on strategy,
// prefetch or units, and one rank has the bits of no mesh. A backward gives the gradients of gradient(), which may be operands themselves.
// Recomputation changes nothing but the order in which derivatives of derivatives are added up. Tapes pass all checks and replay, bytes are as predicted on meta, and all of them are freed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <optional>

#include "sheaf/autograd/checks.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/distributed/simulated.h"
#include "sheaf/nn/optim/sgd.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/nn/random_programs.h"

namespace sheaf::testing {
namespace {

class Run {
 public:
  Run(const Program& program, const Config& config, World* world, Device device)
      : program_(program), config_(config), device_(device), on_meta_(device) {
    if (world && config.replicas == 0) mesh_ = world->mesh({{"data", world->size()}});
    if (world && config.replicas > 0)
      mesh_ = world->mesh({{"replica", config.replicas}, {"data", world->size() / config.replicas}});
    for (const Node& node : program.tree) {
      Tree& module = node.parent < 0 ? root_ : *modules_[static_cast<size_t>(node.parent)]->children.emplace_back(
                                                   std::make_unique<Tree>());
      modules_.push_back(&module);
      for (const Leaf& leaf : node.leaves) {
        parameters_.emplace_back(leaf.shape, nn::Init::normal(0.6));
        const nn::Parameter* first = leaf.tied < 0 ? nullptr : &parameters_[static_cast<size_t>(leaf.tied)];
        if (first ? !first->trainable() : leaf.frozen) parameters_.back().freeze();
        if (first) tie(parameters_.back(), *first);
        module.leaves.push_back(parameters_.back());
      }
    }
    const auto chosen = [&](nn::Module& m, const std::string&) {
      return config.units >> (std::find(modules_.begin(), modules_.end(), &m) - modules_.begin()) & 1;
    };
    const bool secondary = config.secondary && config.replicas > 0 && config.strategy != std::string("replicate");
    const bool any = std::ranges::any_of(modules_, [&](nn::Module* m) { return chosen(*m, ""); });
    if (world)
      shard(root_, mesh_, {.replica_axis = config.replicas ? "replica" : "", .secondary = secondary,
                           .units = any ? nn::units_where(chosen) : nn::UnitPolicy(), .strategy = config.strategy,
                           .prefetch_bytes = config.prefetch});
    for (size_t m = 1; m < modules_.size(); ++m)
      if (config.recompute >> m & 1) modules_[m]->recompute(config.how);
    materialize(root_, device, {.seed = program.seed, .dtype = config.dtype});
  }

  std::vector<Tensor> inputs(uint64_t key) const { return drawn_inputs(mesh_.spec, device_, config_.dtype, key); }

  /// Executes one instruction: appends its results to `values`, and to `seen` what is to be compared.
  void execute(const Instruction& in, std::vector<Tensor>& values) {
    std::vector<Tensor> a;
    for (int i : in.operands)
      a.push_back(i < 0 ? parameters_[static_cast<size_t>(~i)].value() : values[static_cast<size_t>(i)]);
    if (in.kind == Instruction::enter) scopes_.emplace_back(*modules_[static_cast<size_t>(in.module)]);
    if (in.kind == Instruction::leave) scopes_.pop_back();
    if (in.kind == Instruction::op) values.push_back(in.f(a));
    if (in.kind == Instruction::backward) {
      if (!mesh_.spec && config_.dtype == kF64) add_gradients(a[0]);
      Recording::current()->backward(a[0]);
      seen_.push_back(a[0]);
    }
    if (in.kind == Instruction::gradients)
      for (Tensor& g : Recording::current()->gradient(a[0], std::span(a).subspan(1), {.keep = true}))
        seen_.push_back(g), values.push_back(g);
  }

  /// All steps. Observed values, gradients and parameters, as consecutive lists.
  std::vector<std::vector<double>> numbers() {
    std::vector<std::vector<double>> out;
    optim::SGD optimizer(root_, {.lr = 0.01});
    Allocator& memory = *(device_.is_meta() ? RankContext::current().meta : RankContext::current().cpu);
    int64_t live = 0;
    for (int step = 0; step < kSteps; ++step) {
      {
        std::vector<std::vector<Tensor>> batches;
        for (size_t m = 0; m < program_.steps[step].size(); ++m)
          batches.push_back(inputs(static_cast<uint64_t>(step) * 10 + m));
        memory.reset_peak();
        Recording recording({.step = step, .seed = program_.seed, .capture_leaves = step == kSteps - 1, .higher_order = true});
        std::optional<nn::ModuleScope> around;  // one pass, which prefetches from one backward to the next segment
        if (program_.seed % 2) around.emplace(root_);
        for (size_t m = 0; m < batches.size(); ++m) {
          recording.next_micro_batch(static_cast<int64_t>(m) * kRows);
          for (const Instruction& in : program_.segments[program_.steps[step][m]]) execute(in, batches[m]);
          close_scopes();
          batches[m].clear();
        }
        around.reset();
        optimizer.step();
        peak_ = memory.stats().peak;
        if (!device_.is_meta()) check(recording);
      }
      for (const auto& [i, sum] : sums_) {
        const std::vector<double> got = full_gradient(parameters_[i]).to_vector<double>();
        for (size_t j = 0; j < sum.size(); ++j) EXPECT_NEAR(got[j], sum[j], 1e-9 * std::max(1.0, std::fabs(sum[j])));
      }
      sums_.clear();
      if (!device_.is_meta()) {
        for (Tensor t : seen_) {
          t = everywhere(t, Placement::invariant());
          out.push_back(t.to_vector<double>());
        }
        for (const nn::Parameter& p : parameters_) {
          out.push_back(full_parameter(p).to_vector<double>());
          if (const Tensor g = p.trainable() ? full_gradient(p) : Tensor()) out.push_back(g.to_vector<double>());
          else out.emplace_back(p.numel(), 0.0);  // a unit that no backward reached has none
        }
      }
      seen_.clear();
      optimizer.zero_grad();
      if (step == 0) live = memory.stats().live;
      EXPECT_EQ(memory.stats().live, live) << "bytes after step " << step;
    }
    return out;
  }

  ~Run() { close_scopes(); }
  void close_scopes() {
    while (!scopes_.empty()) scopes_.pop_back();  // the last opened one first
  }
  int64_t peak() const { return peak_; }
  const std::vector<nn::Parameter>& parameters() const { return parameters_; }
  bool lies_in_parameters(const Tensor& t) {
    for (const auto& unit : units(root_))
      for (const FlatBuffer& b : unit->buffers())
        if (b.shard.storage() == t.storage()) return true;
    return false;
  }

 private:
  /// An alternative to a backward that writes into slots, kernel by kernel: adds up the results of gradient().
  void add_gradients(const Tensor& loss) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].trainable()) continue;
      const std::vector<Tensor> x{parameters_[i].value()};
      const auto g = Recording::current()->gradient(loss, x, {.keep = true})[0].to_vector<double>();
      auto& sum = sums_[i];
      sum.resize(g.size());
      for (size_t j = 0; j < g.size(); ++j) sum[j] += g[j];
    }
  }

  void check(Recording& recording) {
    std::vector<ValueId> wanted;
    std::vector<Tensor> before;
    for (const Tensor& t : seen_)
      if (const ValueId v = recording.value_of(t); v >= 0) wanted.push_back(v), before.push_back(t);
    const auto leaves = recording.captured();
    const bool captured = recording.options().capture_leaves;
    const Tape tape = recording.take();
    for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
    if (!captured) return;
    const std::vector<Tensor> again = replay(tape, [&](ValueId v) { return leaves.at(v); }, wanted);
    for (size_t i = 0; i < again.size(); ++i)
      EXPECT_TRUE(identical(again[i], before[i])) << "replay of value " << wanted[i];
  }

  const Program& program_;
  const Config& config_;
  const Device device_;
  const DeviceScope on_meta_;
  Mesh mesh_;
  Tree root_;
  std::vector<Tree*> modules_;
  std::vector<nn::Parameter> parameters_;
  std::deque<nn::ModuleScope> scopes_;
  std::vector<Tensor> seen_;
  std::map<size_t, std::vector<double>> sums_;  // by parameter
  int64_t peak_ = 0;
};

/// Every rank's numbers are rank 0's; the peak of each is what its program predicts on meta.
std::vector<std::vector<double>> numbers_of(const Program& program, const Config& config) {
  SCOPED_TRACE(config.to_string());
  if (config.world == 0) {
    RankContext alone;
    const RankScope scope(alone);
    return Run(program, config, nullptr, Device::cpu()).numbers();
  }
  std::vector<std::vector<std::vector<double>>> out(static_cast<size_t>(config.world));
  std::vector<int64_t> peaks(out.size());
  run_local(config.world, [&](World& w) {
    Run run(program, config, &w, Device::cpu());
    out[static_cast<size_t>(w.rank())] = run.numbers();
    peaks[static_cast<size_t>(w.rank())] = run.peak();
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
  for (int rank = 0; rank < config.world; ++rank) {
    EXPECT_EQ(out[static_cast<size_t>(rank)], out[0]) << "rank " << rank;
    World simulated = distributed::simulated_world(rank, config.world, {.threads = 1, .comm = "local"});
    Run run(program, config, &simulated, Device::meta());
    run.numbers();
    EXPECT_EQ(peaks[static_cast<size_t>(rank)], run.peak()) << "peak of rank " << rank;
  }
  return out[0];
}

Segment drawn_segment(Run& run, size_t modules, uint64_t seed, Draw& draw) {
  Recording recording({.seed = seed});
  Segment out;
  std::vector<Tensor> values = run.inputs(0);
  std::vector<int> usable{0, 1, 2, 3, 4, 0, 1};
  size_t known = values.size();
  const auto attempt = [&](const Instruction& in) {
    try {
      run.execute(in, values);
    } catch (const LifetimeError&) {
      if (in.kind != Instruction::gradients) throw;
      return false;  // one of them is a constant
    } catch (const CommError&) { throw;
    } catch (const Error&) { return false;  // shapes, dtypes, placements, a token that the table lacks
    }
    out.push_back(in);
    for (; known < values.size(); ++known) {
      // Of modest size; and not a view of a parameter, which may be discarded when the scope in which it was used is left.
      const Tensor& v = values[known];
      bool fair = v.numel() > 0 && v.numel() < 300 && !run.lies_in_parameters(v);
      for (double x : v.to_vector<double>()) fair = fair && std::fabs(x) < 30;
      if (!fair) continue;
      // There are few gradients: each is a likely operand.
      usable.insert(usable.end(), in.kind == Instruction::gradients ? 2 : 1, static_cast<int>(known));
    }
    return true;
  };
  const auto parameter = [&] { return ~draw.below(run.parameters().size()); };
  const auto operand = [&] {  // the later the likelier
    const int n = std::max(draw.below(usable.size()), draw.below(usable.size()));
    return draw.one_in(3) ? parameter() : usable[static_cast<size_t>(n)];
  };
  attempt({.kind = Instruction::enter, .module = 0});
  int open = 1;
  for (int i = 0; i < 40; ++i) {
    if (draw.one_in(8)) attempt({.kind = Instruction::enter, .module = draw.below(modules)}), ++open;
    if (open > 1 && draw.one_in(8)) attempt({.kind = Instruction::leave}), --open;
    if (draw.one_in(16)) {
      while (open > 1) attempt({.kind = Instruction::leave}), --open;
      const int scalar = static_cast<int>(values.size());
      if (attempt({.kind = Instruction::op, .operands = {operand(), operand(), operand()}, .f = loss_of}))
        attempt({.kind = Instruction::gradients, .operands = {scalar, operand(), parameter()}});
    }
    Instruction in{.kind = Instruction::op};
    for (int tries = 0; tries < 8; ++tries) {
      const Op& op = draw.of(ops());
      in.f = op.f;
      in.operands.clear();
      for (int k = 0; k < op.operands; ++k) in.operands.push_back(k && draw.one_in(4) ? in.operands[0] : operand());
      if (attempt(in)) break;
    }
  }
  while (open > 1) attempt({.kind = Instruction::leave}), --open;
  const int scalar = static_cast<int>(values.size());
  Instruction loss{.kind = Instruction::op, .f = loss_of};
  do {
    loss.operands = {~0};
    for (int i = 0; i < 6; ++i) loss.operands.push_back(operand());
  } while (!attempt(loss));
  if (draw.one_in(2)) attempt({.kind = Instruction::gradients, .operands = {scalar, operand(), parameter()}});
  if (draw.one_in(2)) attempt({.kind = Instruction::leave});
  attempt({.kind = Instruction::backward, .operands = {scalar}});
  run.close_scopes();
  return out;
}

Program drawn(uint64_t seed) {
  Program p{.seed = seed};
  Draw draw(seed);
  draw_tree(p, draw);
  run_local(1, [&](World& w) {
    const Config config{.world = 1};
    Run run(p, config, &w, Device::cpu());
    for (Segment& s : p.segments) s = drawn_segment(run, p.tree.size(), seed, draw);
  });
  return p;
}

class RandomPrograms : public ::testing::TestWithParam<int> {};

TEST_P(RandomPrograms, GiveTheSameEverywhere) {
  for (int seed = 20 * GetParam(); seed < 20 * GetParam() + 20; ++seed) {
    SCOPED_TRACE(str("program ", seed));
    const Program p = drawn(static_cast<uint64_t>(seed));
    Draw draw(~static_cast<uint64_t>(seed));
    const int world = 2 + seed % 5;
    std::vector<int> replicas{0, 0};  // those that divide the world, and none
    for (int r = 1; r <= world; ++r)
      if (world % r == 0) replicas.push_back(r);
    const auto want = numbers_of(p, {}), got = numbers_of(p, drawn_config(world, draw.of(replicas), kF64, draw));
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i)
      for (size_t j = 0; j < want[i].size(); ++j)
        ASSERT_NEAR(got[i][j], want[i][j], 1e-9 * std::max(1.0, std::fabs(want[i][j]))) << "list " << i << " element " << j;
    const int groups = draw.of(replicas);
    const Config one = drawn_config(1, draw.below(2), kF32, draw), some = drawn_config(world, groups, kF32, draw);
    Config others = drawn_config(world, groups, kF32, draw);
    const auto waits = [](const Config& c) { return c.strategy == std::string("zero1"); };
    if (waits(some) != waits(others)) others.strategy = waits(some) ? "zero1" : "shard_grad_op";  // sums in another order
    const auto recompute_alike = [](Config c, const Config& other) { return c.recompute = other.recompute, c.how = other.how, c; };
    others = recompute_alike(others, some);
    EXPECT_EQ(numbers_of(p, one), numbers_of(p, recompute_alike({.dtype = kF32}, one)));
    EXPECT_EQ(numbers_of(p, some), numbers_of(p, others)) << some.to_string() << " and " << others.to_string();
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomPrograms, ::testing::Range(0, 4));

}  // namespace
}  // namespace sheaf::testing
