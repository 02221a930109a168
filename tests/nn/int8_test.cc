// ShardOptions::gather_int8 and ::reduce_int8: how weights and gradients are rounded, bitwise, on meshes of replicas and ranks; and what
// the tape says of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/passes/without_sharding.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/kernels/quantize.h"
#include "sheaf/nn/layers/experts.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

using Values = std::vector<float>;

constexpr int64_t kRows = 7, kWidth = 7;

// --- the definition ---

Values through_blocks(Values x, std::optional<uint32_t> key) {
  const int64_t n = std::ssize(x);
  std::vector<uint8_t> blocks(static_cast<size_t>(n / kBlockSize * block_bytes(BlockFormat::int8)));
  const View values = View::dense(x.data(), kF32, {n}), bytes = View::dense(blocks.data(), kU8, {std::ssize(blocks)});
  kernels::cpu::to_int8_blocks(values, key, bytes);
  kernels::cpu::dequantize(bytes, BlockFormat::int8, values);
  return x;
}
Values sent_by(size_t rank, Values x) { return through_blocks(std::move(x), static_cast<uint32_t>(rank + 1) * 0x85ebca6bu); }
Values added(const std::vector<Values>& addends) {
  Values out = addends[0];
  for (size_t k = 1; k < addends.size(); ++k)
    for (size_t i = 0; i < out.size(); ++i) out[i] += addends[k][i];
  return out;
}
Values slice(const Values& x, int64_t begin, int64_t count) { return {x.begin() + begin, x.begin() + begin + count}; }

/// The sum of what the ranks of an axis have sent.
Values sum_of_sent(const std::vector<Values>& of) {
  std::vector<Values> sent;
  for (size_t r = 0; r < of.size(); ++r) sent.push_back(of.size() == 1 ? of[r] : sent_by(r, of[r]));
  return added(sent);
}
/// The sum as all ranks get it: rounded once more by the rank that added it up.
Values whole_sum(const std::vector<Values>& of) { return of.size() == 1 ? of[0] : through_blocks(sum_of_sent(of), 0); }
/// The parts of the sum that a reduce_scatter leaves on each rank.
std::vector<Values> parts_of_sum(const std::vector<Values>& of) {
  const Values sum = sum_of_sent(of);
  const int64_t n = std::ssize(of), size = std::ssize(sum) / n;
  std::vector<Values> out;
  for (int64_t r = 0; r < n; ++r) out.push_back(slice(sum, r * size, size));
  return out;
}

struct Case {
  int replicas, ranks, parts;
  std::string strategy;
  bool secondary = false, gather = false;
  int world() const { return replicas * ranks; }
  int rank(int replica, int at) const { return replica * ranks + at; }
  friend void PrintTo(const Case& c, std::ostream* out) {
    *out << c.replicas << " x " << c.ranks << " " << c.strategy << (c.secondary ? " secondary " : " ") << c.parts << " parts"
         << (c.gather ? " gathered in int8" : "");
  }
};

/// By rank, the gradient at rest of one buffer: of[rank][part] are whole buffers of a rank's own gradients.
std::vector<Values> expected(const Case& c, const std::vector<std::vector<Values>>& of) {
  const bool waits = c.strategy == "zero1" && c.ranks > 1;  // all micro-batches are added up before anything is sent
  std::vector<std::vector<Values>> held(static_cast<size_t>(c.world()));  // by rank, for each reduction
  for (int r = 0; r < c.replicas; ++r) {
    std::vector<int> group;
    for (int d = 0; d < c.ranks; ++d) group.push_back(c.rank(r, d));
    for (int p = 0; p < (waits ? 1 : c.parts); ++p) {
      std::vector<Values> addends;
      for (const int rank : group) {
        const std::vector<Values>& own = of[static_cast<size_t>(rank)];
        addends.push_back(waits ? added(own) : own[static_cast<size_t>(p)]);
      }
      const bool whole = c.strategy == "replicate";
      const std::vector<Values> sums = whole ? std::vector<Values>{whole_sum(addends)} : parts_of_sum(addends);
      for (int d = 0; d < c.ranks; ++d) held[static_cast<size_t>(group[static_cast<size_t>(d)])].push_back(sums[whole ? 0 : static_cast<size_t>(d)]);
    }
  }
  std::vector<Values> out(static_cast<size_t>(c.world()));
  for (int d = 0; d < c.ranks; ++d) {
    std::vector<int> group;
    std::vector<Values> addends;
    for (int r = 0; r < c.replicas; ++r) group.push_back(c.rank(r, d)), addends.push_back(added(held[static_cast<size_t>(group.back())]));
    const std::vector<Values> sums = c.secondary ? parts_of_sum(addends) : std::vector<Values>{whole_sum(addends)};
    for (int r = 0; r < c.replicas; ++r) out[static_cast<size_t>(group[static_cast<size_t>(r)])] = sums[c.secondary ? static_cast<size_t>(r) : 0];
  }
  return out;
}

class Int8 : public ::testing::TestWithParam<Case> {};

TEST_P(Int8, RoundsWhatIsSent) {
  const Case c = GetParam();
  const auto world = static_cast<size_t>(c.world());
  std::mutex mutex;
  std::map<std::string, std::vector<Values>> got;              // by buffer and rank
  std::map<std::string, std::vector<std::vector<Values>>> of;  // by buffer, rank and part
  run_local(c.world(), [&](World& w) {
    const Mesh mesh = w.mesh({{"replica", c.replicas}, {"data", c.ranks}});
    TinyBlock net(kWidth), own(kWidth);
    shard(net, mesh, {.replica_axis = "replica", .secondary = c.secondary, .strategy = c.strategy, .gather_int8 = c.gather, .reduce_int8 = true});
    materialize(net, Device::cpu(), {.seed = 5});
    shard(own, Mesh{});
    materialize(own, Device::cpu(), {.seed = 5});
    const auto unit = units(net)[0], alone = units(own)[0];
    FlatBuffer& b = alone->buffers()[0];
    if (c.gather && c.ranks > 1 && c.strategy != "replicate") {  // it computes with the values that others are sent
      auto* weights = b.shard.view().as<float>();
      for (const LocalPiece& piece : alone->pieces(b)) {
        const LeafSpec& leaf = alone->leaves()[static_cast<size_t>(piece.leaf)];
        if (leaf.shape.rank() < 2) continue;
        Values padded(static_cast<size_t>((leaf.shape.numel() + kBlockSize - 1) / kBlockSize * kBlockSize), 0.0f);
        std::copy_n(weights + piece.shard_offset, leaf.shape.numel(), padded.begin());
        std::copy_n(through_blocks(padded, std::nullopt).begin(), leaf.shape.numel(), weights + piece.shard_offset);
      }
    }
    for (int part = 0; part < c.parts; ++part) {
      Tensor y;
      for (TinyBlock* module : {&net, &own}) {
        Recording recording;
        const Tensor out = (*module)(dense_rows(mesh, kRows, kWidth, part, module == &own));
        recording.backward(sum(square(out)));
        if (module == &net) y = out;
        else EXPECT_EQ(y.to_vector<float>(), out.to_vector<float>()) << "weights are rounded otherwise";
      }
      // Its own gradients, at their places in the buffers that are reduced.
      const Values gradient = b.grad.to_vector<float>();
      std::lock_guard lock(mutex);
      for (const FlatBuffer& reduced : unit->buffers()) {
        Values whole(static_cast<size_t>(reduced.layout.total), 0.0f);
        for (size_t i = 0; i < reduced.leaves.size(); ++i)
          for (const LocalPiece& piece : alone->pieces(b))
            if (piece.leaf == reduced.leaves[i])
              std::copy_n(gradient.begin() + piece.shard_offset, piece.runs.numel(), whole.begin() + reduced.layout.offsets[i]);
        of[reduced.name].resize(world);
        of[reduced.name][static_cast<size_t>(w.rank())].push_back(whole);
      }
      alone->zero_grad();
    }
    unit->reduce_waiting(), unit->complete_reduction();
    std::lock_guard lock(mutex);
    for (const FlatBuffer& reduced : unit->buffers()) {
      EXPECT_EQ(reduced.grad.dtype(), kF32);
      EXPECT_EQ(reduced.grad.type().to_string(), reduced.shard.type().to_string());
      got[reduced.name].resize(world);
      got[reduced.name][static_cast<size_t>(w.rank())] = reduced.grad.to_vector<float>();
    }
  }, {.timeout = std::chrono::seconds(30), .threads_per_rank = 1});
  EXPECT_EQ(got.size(), c.gather ? 2u : 1u) << "vectors and matrices";
  bool rounds = false;
  for (const auto& [name, gradients] : got) {
    EXPECT_EQ(gradients, expected(c, of.at(name))) << name;
    std::vector<Values> all;
    for (const auto& parts : of.at(name)) all.push_back(added(parts));
    const Values exact = added(all);
    for (size_t r = 0; r < world; ++r) rounds |= c.strategy == "replicate" && gradients[r] != exact;
  }
  if (c.strategy == "replicate") {
    EXPECT_EQ(rounds, world > 1) << "a test that could not tell";
  }
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const auto& [replicas, ranks] : {std::pair{1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}, {2, 1}, {3, 1}, {2, 2}, {3, 2}, {2, 3}})
    for (const int parts : {1, 2})
      for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
        for (const bool gather : {false, true}) {
          const std::string s = strategy;
          if (s == "replicate" && gather) continue;
          out.push_back({replicas, ranks, parts, s, false, gather});
          if (replicas > 1 && s != "replicate") out.push_back({replicas, ranks, parts, s, true, gather});
        }
  return out;
}
INSTANTIATE_TEST_SUITE_P(Meshes, Int8, ::testing::ValuesIn(cases()));

/// How often each op of the quantized communication occurs.
std::map<std::string, int> ops_of(const Tape& tape) {
  std::map<std::string, int> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const std::string op(tape.op_name(tape.node(id)));
    for (const char* counted : {"quantize_shard", "unpack", "quantize_gradient", "sum_of_blocks", "all_gather", "all_to_all", "reduce_scatter",
                                "all_reduce", "discard"})
      if (op == counted) ++out[op];
  }
  return out;
}

int64_t received(const Tape& tape, std::string_view op) {
  int64_t bytes = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    if (tape.op_name(tape.node(id)) == op) bytes += tape.wire_bytes(tape.node(id));
  return bytes;
}

/// Tapes of a model's step with this number of micro-batches on the ranks of a mesh, which pass all checks.
template <class F>
void with_tape(const std::vector<MeshSpec::Axis>& axes, ShardOptions options, F&& check, int64_t width = 16, int micro_batches = 1) {
  int world = 1;
  for (const auto& axis : axes) world *= axis.size;
  std::vector<Tape> tapes(static_cast<size_t>(world));
  run_local(world, [&](World& w) {
    const Mesh mesh = w.mesh(axes);
    TinyModel net(3, 11, width);
    options.units = nn::units_of<TinyBlock>();
    shard(net, mesh, options);
    materialize(net, Device::cpu(), {.seed = 5});
    Tape& tape = tapes[static_cast<size_t>(w.rank())];
    for (int step = 0; step < 2; ++step) {  // the second one knows what to prefetch
      Recording recording;
      for (int part = 0; part < micro_batches; ++part) {
        if (part > 0) recording.next_micro_batch(8 * part);
        recording.backward(net.loss(token_rows(mesh, 8, 5, 11, part), token_rows(mesh, 8, 5, 11, part + 1)),
                           {.last_micro_batch = part + 1 == micro_batches});
      }
      for (const auto& unit : units(net)) unit->reduce_waiting(), unit->complete_reduction();
      tape = recording.take();
      for (const auto& unit : units(net)) unit->zero_grad();
    }
    for (const Finding& f : check_tape(tape)) ADD_FAILURE() << f.to_string();
    check(tape, net);
  }, {.threads_per_rank = 1});
  std::vector<const Tape*> all;
  for (const Tape& tape : tapes) all.push_back(&tape);
  for (const Finding& f : check_collectives(all)) ADD_FAILURE() << f.to_string();
}

TEST(Int8Tape, HasBlocksWhereSomethingIsSent) {
  const auto counts = [](ShardOptions options, const std::vector<MeshSpec::Axis>& axes) {
    std::map<std::string, int> out;
    std::mutex mutex;
    with_tape(axes, options, [&](const Tape& tape, TinyModel&) {
      std::lock_guard lock(mutex);
      out = ops_of(tape);
    });
    return out;
  };
  using Counts = std::map<std::string, int>;
  ShardOptions both{.prefetch_bytes = 0, .gather_int8 = true, .reduce_int8 = true};
  // The root, and three blocks, of which two are gathered again.
  EXPECT_EQ(counts(both, {{"data", 1}}), Counts());
  EXPECT_EQ(counts(both, {{"data", 3}}),
            (Counts{{"quantize_shard", 6}, {"all_gather", 6}, {"unpack", 6}, {"discard", 12}, {"quantize_gradient", 8}, {"all_to_all", 4}, {"sum_of_blocks", 8}}));
  both.gather_int8 = false;
  both.replica_axis = "replica";
  EXPECT_EQ(counts(both, {{"replica", 2}, {"data", 2}}),
            (Counts{{"all_gather", 10}, {"discard", 6}, {"quantize_gradient", 12}, {"all_to_all", 8}, {"sum_of_blocks", 12}}));
}

// zero1 keeps unpacked weights for all micro-batches.
TEST(Int8Tape, UnpacksOnceForAllMicroBatches) {
  with_tape({{"data", 2}}, {.strategy = Strategy::zero1, .gather_int8 = true, .reduce_int8 = true}, [&](const Tape& tape, TinyModel&) {
    const std::map<std::string, int> ops = ops_of(tape);
    EXPECT_EQ(ops.at("unpack"), 4);
    EXPECT_EQ(ops.at("all_gather"), 4);
    EXPECT_EQ(ops.at("all_to_all"), 4);
  }, 16, 3);
}

// 66 bytes for 64 elements.
TEST(Int8Tape, SaysWhatTravels) {
  for (const bool replicate : {false, true}) {
    std::mutex mutex;
    std::map<bool, int64_t> gathers, reductions;
    for (const bool int8 : {false, true})
      with_tape({{"data", 4}},
                {.strategy = replicate ? Strategy::replicate : Strategy::full_shard, .gather_int8 = int8 && !replicate, .reduce_int8 = int8},
                [&](const Tape& tape, TinyModel&) {
                  std::lock_guard lock(mutex);
                  gathers[int8] = received(tape, "all_gather");
                  reductions[int8] = received(tape, int8 ? "all_to_all" : replicate ? "all_reduce" : "reduce_scatter");
                }, 64);
    const double quarter = 66.0 / 256;
    if (replicate) {  // the gathers are part of the reductions
      EXPECT_NEAR(static_cast<double>(gathers[true] + reductions[true]) / static_cast<double>(reductions[false]), quarter, 0.01);
    } else {  // except vectors
      EXPECT_NEAR(static_cast<double>(gathers[true]) / static_cast<double>(gathers[false]), quarter, 0.02);
      EXPECT_NEAR(static_cast<double>(reductions[true]) / static_cast<double>(reductions[false]), quarter, 0.02);
    }
  }
}

TEST(Int8Tape, WithoutShardingItIsTheStepOfOneRank) {
  std::mutex mutex;
  std::string alone;
  with_tape({{"data", 1}}, {}, [&](const Tape& tape, TinyModel&) { alone = to_text(without_sharding(tape)); });
  for (const char* s : {"full_shard", "zero1"})
    with_tape({{"data", 2}}, {.strategy = s, .gather_int8 = true, .reduce_int8 = true}, [&](const Tape& tape, TinyModel&) {
      std::lock_guard lock(mutex);
      EXPECT_EQ(to_text(without_sharding(tape)), alone);
    });
}

// Invariant values have the same bits along an axis, however many axes they were summed over. Biases of experts are stacked in a matrix,
// but do not count as one.
TEST(Int8, BiasesOfExpertsAreGatheredAsTheyAre) {
  run_local(2, [](World& world) {
    nn::MixtureConfig c;
    c.width = 6, c.hidden = 5, c.experts = 4, c.linear_bias = true;
    nn::MixtureOfExperts m(c);
    shard(m, world.mesh({{"data", 2}}), {.gather_int8 = true});
    materialize(m, Device::cpu());
    int biases = 0, matrices = 0;
    for (const auto& unit : units(m))
      for (const FlatBuffer& buffer : unit->buffers())
        for (const int leaf : buffer.leaves) {
          const std::string& name = unit->leaves()[static_cast<size_t>(leaf)].name;
          const bool bias = name.ends_with("bias");
          (bias ? biases : matrices) += 1;
          EXPECT_EQ(buffer.gather_int8, !bias) << name;
        }
    EXPECT_EQ(biases, 4);
    EXPECT_EQ(matrices, 4);
  }, {.threads_per_rank = 1});
}

TEST(Int8, RanksThatHoldTheSameHaveTheSame) {
  for (const char* strategy : {"full_shard", "zero1", "replicate"})
    for (const bool secondary : {false, true}) {
      if (secondary && strategy == std::string("replicate")) continue;
      std::vector<Values> gradients(8);
      std::vector<Layout> layouts(8);
      std::mutex mutex;
      run_local(8, [&](World& w) {
        const Mesh mesh = w.mesh({{"model", 2}, {"data", 2}, {"replica", 2}});
        TinyBlock net(16);
        shard(net, mesh, {.replica_axis = "replica", .secondary = secondary, .tensor_axis = "model", .strategy = strategy, .gather_int8 = true, .reduce_int8 = true});
        materialize(net, Device::cpu(), {.seed = 5});
        const Layout rows(mesh.spec, {Placement::shard(0), Placement::shard(0), Placement::shard(0)});
        const Type type{kF32, {16, 16}, rows};
        Values local;
        for (int64_t i = 0; i < type.local_shape().numel(); ++i) local.push_back(0.1f * static_cast<float>((i * 7 + w.rank() * 5) % 23) - 0.9f);
        Recording recording;
        recording.backward(sum(square(net(Tensor::from_local(local, type)))));
        const auto unit = units(net)[0];
        unit->reduce_waiting(), unit->complete_reduction();
        std::lock_guard lock(mutex);
        const auto rank = static_cast<size_t>(w.rank());
        EXPECT_EQ(unit->buffers().size(), 2u) << "vectors and matrices";
        layouts[rank] = unit->buffers()[0].grad.layout();
        for (const FlatBuffer& b : unit->buffers()) {
          const Values local = b.grad.to_vector<float>();
          gradients[rank].insert(gradients[rank].end(), local.begin(), local.end());
        }
      }, {.threads_per_rank = 1});
      for (size_t rank = 0; rank < 8; ++rank)
        for (int axis = 0; axis < 3; ++axis)
          if (layouts[rank][axis].is_invariant()) {
            EXPECT_EQ(gradients[rank], gradients[rank & ~(size_t{4} >> axis)]) << strategy << " rank " << rank << " axis " << axis;
          }
      EXPECT_NE(gradients[0], Values(gradients[0].size(), 0.0f));
    }
}

struct Smooth : nn::Module {
  nn::Linear up{kWidth, 21}, down{21, kWidth};
  Tensor forward(const Tensor& x) { return down(tanh(up(x))); }
  SHEAF_FIELDS(up, down);
};

// A loss with a gradient in it differentiates a unit twice, and both reductions may follow each other: whole sums take two exchanges.
TEST(Int8, GradientsOfBothOrdersAreSummed) {
  const auto gradients_of = [](const char* strategy, bool int8) {
    Values out;
    run_local(2, [&](World& w) {
      const Mesh mesh = w.mesh({{"data", 2}});
      Smooth net;
      shard(net, mesh, {.strategy = strategy, .reduce_int8 = int8});
      materialize(net, Device::cpu(), {.seed = 5});
      {
        Recording recording({.higher_order = true});
        const Tensor x = recording.watch(dense_rows(mesh, 6, kWidth, 0)), loss = sum(square(net(x)));
        const Tensor dx = recording.gradient(loss, std::span(&x, 1), {.keep = true})[0];
        recording.backward(loss + sum(square(dx)));
      }
      Values mine;
      for (const nn::Parameter& p : net.parameters()) {
        const Values g = full_gradient(p).to_vector<float>();
        mine.insert(mine.end(), g.begin(), g.end());
      }
      if (w.rank() == 0) out = mine;
    }, {.threads_per_rank = 1});
    return out;
  };
  for (const char* strategy : {"full_shard", "zero1", "replicate"}) {
    const Values exact = gradients_of(strategy, false), rounded = gradients_of(strategy, true);
    float largest = 0, worst = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      largest = std::max(largest, std::abs(exact[i]));
      worst = std::max(worst, std::abs(exact[i] - rounded[i]));
    }
    EXPECT_GT(worst, 0) << strategy;
    EXPECT_LT(worst, 0.05f * largest) << strategy;
  }
}

TEST(Int8, IsRefusedBesideAnotherDtypeOfGradients) {
  TinyBlock net(kWidth);
  EXPECT_THAT([&] { shard(net, Mesh{}, {.reduce_dtype = kBF16, .reduce_int8 = true}); },
              ::testing::ThrowsMessage<ConfigError>(
                  ::testing::HasSubstr("gradients are sent in int8 blocks (reduce_int8) or as bf16 (reduce_dtype), not both")));
}

}  // namespace
}  // namespace sheaf::testing
