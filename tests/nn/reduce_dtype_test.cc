// ShardOptions::reduce_dtype: how a gradient is rounded, bitwise, on every mesh; and what the tape says of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "sheaf/autograd/checks.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using Gradients = std::map<std::string, std::vector<float>>;

constexpr int64_t kRows = 7, kWidth = 7;

void backward(TinyBlock& net, const Tensor& x) {
  Recording recording;
  recording.backward(sum(square(net(x))));
}

void collect(nn::Module& net, Gradients& into) {
  for (const auto& unit : units(net)) {
    unit->reduce_waiting(), unit->complete_reduction();
    for (const FlatBuffer& b : unit->buffers()) {
      EXPECT_EQ(b.grad.dtype(), kF32);
      const std::vector<float> local = b.grad.to_vector<float>();
      for (const LocalPiece& piece : unit->pieces(b)) {
        std::vector<float>& whole = into[unit->leaves()[piece.leaf].name];
        whole.resize(static_cast<size_t>(unit->leaves()[piece.leaf].shape.numel()));
        for (int64_t i = 0; i < piece.runs.numel(); ++i)
          whole[static_cast<size_t>(piece.runs.at(i))] = local[static_cast<size_t>(piece.shard_offset + i)];
      }
    }
  }
}

/// The sum over ranks, from their own gradients of each micro-batch: the definition that the tape is compared with.
using Sum = std::vector<float>;
float rounded(float x, DType dtype) { return dtype == kBF16 ? static_cast<float>(bf16(x)) : static_cast<float>(f16(x)); }
Sum sent_and_added(const std::vector<Sum>& addends, DType dtype) {
  if (addends.size() == 1) return addends[0];  // no rank to send it to
  Sum out(addends[0].size());
  for (size_t i = 0; i < out.size(); ++i) {
    float sum = 0;
    for (const Sum& a : addends) sum += rounded(a[i], dtype);
    out[i] = rounded(sum, dtype);
  }
  return out;
}
Sum added(const std::vector<Sum>& addends) {
  Sum out = addends[0];
  for (size_t k = 1; k < addends.size(); ++k)
    for (size_t i = 0; i < out.size(); ++i) out[i] += addends[k][i];
  return out;
}

struct Case {
  int replicas, ranks, parts;
  std::string strategy;
  bool secondary = false;
  DType dtype = kBF16;
  friend void PrintTo(const Case& c, std::ostream* out) {
    *out << c.replicas << " x " << c.ranks << " " << c.strategy << (c.secondary ? " secondary " : " ") << c.parts << " parts " << name(c.dtype);
  }
};

/// of[rank][part]
Sum expected(const Case& c, const std::vector<std::vector<Sum>>& of) {
  const bool waits = c.strategy == "zero1" && c.ranks > 1;  // all micro-batches are added up before anything is sent
  std::vector<Sum> groups;
  for (int r = 0; r < c.replicas; ++r) {
    std::vector<Sum> reduced;
    for (int p = 0; p < (waits ? 1 : c.parts); ++p) {
      std::vector<Sum> addends;
      for (int d = 0; d < c.ranks; ++d) {
        const std::vector<Sum>& own = of[static_cast<size_t>(r * c.ranks + d)];
        addends.push_back(waits ? added(own) : own[static_cast<size_t>(p)]);
      }
      reduced.push_back(sent_and_added(addends, c.dtype));
    }
    groups.push_back(added(reduced));
  }
  return sent_and_added(groups, c.dtype);
}

class ReduceDType : public ::testing::TestWithParam<Case> {};

TEST_P(ReduceDType, RoundsWhatIsSentAndTheSumOnce) {
  const Case c = GetParam();
  const int world = c.replicas * c.ranks;
  std::mutex mutex;
  Gradients got;
  std::map<std::string, std::vector<std::vector<Sum>>> of;
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh({{"replica", c.replicas}, {"data", c.ranks}});
    TinyBlock net(kWidth), own(kWidth);
    shard(net, mesh, {.replica_axis = "replica", .secondary = c.secondary, .strategy = c.strategy, .reduce_dtype = c.dtype});
    materialize(net, Device::cpu(), {.seed = 5});
    shard(own, Mesh{});
    materialize(own, Device::cpu(), {.seed = 5});
    for (int part = 0; part < c.parts; ++part) {
      backward(net, dense_rows(mesh, kRows, kWidth, part));
      for (const auto& unit : units(own)) unit->zero_grad();
      backward(own, dense_rows(mesh, kRows, kWidth, part, true));
      Gradients mine;
      collect(own, mine);
      std::lock_guard lock(mutex);
      for (auto& [name, g] : mine) {
        of[name].resize(static_cast<size_t>(world));
        of[name][static_cast<size_t>(w.rank())].push_back(g);
      }
    }
    w.communicator().barrier("own").sync();
    for (const auto& unit : units(net)) unit->reduce_waiting(), unit->complete_reduction();
    std::lock_guard lock(mutex);
    collect(net, got);
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
  ASSERT_EQ(got.size(), 6u);
  bool rounds = false;
  for (const auto& [name, g] : got) {
    EXPECT_EQ(g, expected(c, of.at(name))) << name;
    std::vector<Sum> all;
    for (const auto& parts : of.at(name)) all.push_back(added(parts));
    rounds |= g != added(all);
  }
  EXPECT_EQ(rounds, world > 1) << "a test that could not tell";
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const auto& [replicas, ranks] : {std::pair{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}, {2, 1}, {3, 1}, {2, 2}, {3, 2}, {2, 3}})
    for (const int parts : {1, 2})
      for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"}) {
        const std::string s = strategy;
        if (s == "replicate" && replicas > 1) continue;
        out.push_back({replicas, ranks, parts, s});
        if (replicas > 1 && s != "replicate") out.push_back({replicas, ranks, parts, s, true});
      }
  out.push_back({1, 3, 1, "full_shard", false, kF16});
  return out;
}
INSTANTIATE_TEST_SUITE_P(Meshes, ReduceDType, ::testing::ValuesIn(cases()));

/// How often each op on units' gradients occurs, and the dtype of its first result.
std::map<std::string, std::pair<int, DType>> ops_of(const Tape& tape) {
  std::map<std::string, std::pair<int, DType>> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    const std::string op(tape.op_name(n));
    if (op != "cast_gradient" && op != "cast_reduced" && op != "reduce_scatter" && op != "all_reduce") continue;
    ++out[op].first;
    out[op].second = tape.type(tape.output(n)).dtype;
  }
  return out;
}

TEST(ReduceDTypeTape, HasACastOnEachSideOfAReduction) {
  for (const auto& [world, strategy] : {std::pair{1, "full_shard"}, {3, "full_shard"}, {3, "replicate"}}) {
    SCOPED_TRACE(str(strategy, " at ", world));
    run_local(world, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", w.size()}});
      TinyBlock net(kWidth);
      shard(net, mesh, {.strategy = strategy, .reduce_dtype = kBF16});
      materialize(net, Device::cpu(), {.seed = 5});
      Recording recording;
      recording.backward(sum(square(net(dense_rows(mesh, kRows, kWidth, 0)))));
      const Tape tape = recording.take();
      std::map<std::string, std::pair<int, DType>> want;
      if (w.size() > 1)
        want = {{"cast_gradient", {1, kBF16}}, {"cast_reduced", {1, kF32}},
                {strategy == std::string("replicate") ? "all_reduce" : "reduce_scatter", {1, kBF16}}};
      EXPECT_EQ(ops_of(tape), want);
      for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
    }, {.threads_per_rank = 1});
  }
}

// The slots, which are as large as the unit, are freed when they are cast: after the cast nothing is live that was not live with the slots.
TEST(ReduceDTypeTape, SlotsGoWhenTheyAreCast) {
  run_local(2, [&](World& w) {
    const Mesh mesh = w.mesh({{"data", w.size()}});
    Allocator& memory = *RankContext::current().memory(Device::cpu());
    constexpr int64_t kWide = kWidth * 32;
    std::map<DType, int64_t> live;
    for (const DType dtype : {kF32, kBF16}) {
      TinyBlock net(kWide);
      shard(net, mesh, {.reduce_dtype = dtype});
      materialize(net, Device::cpu(), {.seed = 5});
      const Tensor x = full_of(Type{kF32, {2, kWide}, Layout(mesh.spec, Placement::shard(0))}, 0.5);
      const auto unit = units(net)[0];
      const int64_t slots = unit->buffers()[0].layout.total * 4, before = memory.stats().live;
      memory.reset_peak();
      Recording recording;
      recording.backward(sum(square(net(x))));
      live[dtype] = memory.stats().live - before;
      EXPECT_LT(live[dtype], slots);  // the gradient's own half
      EXPECT_GE(live[dtype], slots / 2);
      // The gathered weights, the slots, and half of those: their slice in f32, or all of them in bf16.
      EXPECT_LT(memory.stats().peak - before, 5 * slots / 2 + slots / 8) << name(dtype);
    }
    EXPECT_EQ(live[kF32], live[kBF16]);
  }, {.threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
