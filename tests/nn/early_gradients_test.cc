// A head's gradient is in its slot from the forward on; another use of its unit's slots before the head's turn moves it. The gradients
// equal those of a head that recomputes its logits, whatever happens in between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/memory_ledger.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/nn/nets.h"

namespace sheaf::testing {
namespace {

constexpr int64_t kRows = 7, kLength = 5, kVocab = 11, kWidth = 6;

/// A tied table, or a separate head.
struct HeadModel : nn::Module {
  nn::Embedding table{kVocab, kWidth, nn::Init::normal(0.5)};
  nn::Linear body{kWidth, kWidth};
  std::optional<nn::Linear> head;
  explicit HeadModel(bool tied) {
    if (!tied) head.emplace(kWidth, kVocab, nn::LinearOptions{.bias = false, .init = nn::Init::normal(0.5)});
  }
  const nn::Parameter& weight() { return head ? head->weight : table.weight; }
  Tensor loss(const Tensor& tokens, const Tensor& targets, bool recompute) {
    const auto scope = enter();
    return linear_cross_entropy(tanh(body(table(tokens))), weight(), targets, {.divide_by = 70.0, .recompute = recompute});
  }
  SHEAF_FIELDS(table, body, head);
};

using Gradients = std::map<std::string, std::vector<double>>;

struct Step {
  HeadModel& model;
  Recording& recording;
  const Mesh& mesh;
  bool recompute;
  Tensor tokens(int64_t shift) const { return token_rows(mesh, kRows, kLength, kVocab, shift); }
  Tensor loss(int64_t shift) const { return model.loss(tokens(shift), tokens(shift + 1), recompute); }
};
using Use = std::function<void(const Step&)>;

struct Way {
  bool tied;
  Strategy strategy;
  int world;
  bool apart;  ///< table and head are units
};

/// Gradients of all parameters, and rank 0's tape, of the second of two steps.
std::pair<Gradients, Tape> gradients(const Way& way, bool recompute, const Use& use) {
  Gradients out;
  Tape tape;
  run_local(way.world, [&](World& w) {
    const Mesh mesh = way.strategy == Strategy::none ? Mesh{} : w.mesh({{"data", w.size()}});
    HeadModel model(way.tied);
    shard(model, mesh, {.units = way.apart ? nn::units_at({"head", "table"}) : nn::UnitPolicy(), .strategy = way.strategy});
    materialize(model, Device::cpu(), {.seed = 3, .dtype = kF64});
    for (int step = 0; step < 2; ++step) {
      for (const auto& unit : units(model)) unit->zero_grad();
      Recording recording;
      use({model, recording, mesh, recompute});
      for (const auto& unit : units(model)) unit->reduce_waiting(), unit->complete_reduction();
      const Tape now = recording.take();
      for (const Finding& f : check_tape(now)) ADD_FAILURE() << f.to_string();
      if (w.rank() == 0) tape = now;
    }
    for (nn::Parameter& p : model.parameters()) {
      const std::vector<double> whole = full_gradient(p).to_vector<double>();
      if (w.rank() == 0) out[p.name()] = whole;
    }
  }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
  return {out, std::move(tape)};
}

void expect_near(const Gradients& a, const Gradients& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, values] : a) {
    const std::vector<double>& others = b.at(name);
    ASSERT_EQ(values.size(), others.size());
    double largest = 0, off = 0;
    for (size_t i = 0; i < values.size(); ++i)
      largest = std::max(largest, std::abs(values[i])), off = std::max(off, std::abs(values[i] - others[i]));
    EXPECT_GT(largest, 0) << name;
    EXPECT_LT(off, 1e-13 * std::max(largest, 1e-3)) << name;
  }
}

/// How often the head's gradient was put into its slot, and how often it was moved out of it.
std::pair<int, int> ahead_and_moved(const Tape& tape) {
  int ahead = 0, moved = 0;
  for (NodeId i = 0; i < tape.num_nodes(); ++i) {
    const Node& n = tape.node(i);
    if (!n.op) continue;
    const std::string name = tape.op_name(n);
    ahead += name == "linear_cross_entropy_fused" && tape.value(tape.output(n, 1)).base >= 0;
    moved += name == "contiguous" && n.phase == Phase::backward;
  }
  return {ahead, moved};
}

const std::vector<Way>& ways() {
  static const std::vector<Way> all = [] {
    std::vector<Way> out;
    for (const bool tied : {false, true})
      for (const Strategy strategy : {Strategy::none, Strategy::replicate, Strategy::zero1, Strategy::shard_grad_op, Strategy::full_shard})
        for (const int world : {1, 2, 3})
          if (world == 1 || strategy != Strategy::none)
            for (const bool apart : {false, true})
              if (!apart || !tied) out.push_back({tied, strategy, world, apart});
    return out;
  }();
  return all;
}

void expect_same(const Use& use, std::optional<std::pair<int, int>> expected = {}) {
  for (const Way& way : ways()) {
    SCOPED_TRACE(str(way.tied ? "tied, " : "", name(way.strategy), " on ", way.world, way.apart ? ", units" : ""));
    const auto [fused, tape] = gradients(way, false, use);
    expect_near(fused, gradients(way, true, use).first);
    if (expected && !way.apart) {
      EXPECT_EQ(ahead_and_moved(tape), *expected) << to_text(tape);
    }
  }
}

TEST(GradientsAhead, OfOneLoss) {
  expect_same([](const Step& s) { s.recording.backward(s.loss(0), {.last_micro_batch = true}); }, std::pair(1, 0));
}

TEST(GradientsAhead, OfMicroBatches) {
  expect_same([](const Step& s) {
    for (int64_t m = 0; m < 3; ++m) {
      if (m > 0) s.recording.next_micro_batch(kRows * m);
      s.recording.backward(s.loss(m), {.last_micro_batch = m == 2});
    }
  }, std::pair(3, 0));
}

// The later loss's gradient is stored first, where the earlier one's is.
TEST(GradientsAhead, OfTwoLossesAddedUp) {
  expect_same([](const Step& s) {
    const Tensor first = s.loss(0), second = s.loss(3);
    s.recording.backward(first * 0.5 + second, {.last_micro_batch = true});
  }, std::pair(1, 1));
}

TEST(GradientsAhead, OfMicroBatchesThatAreAllUnderWay) {
  for (const bool in_turn : {true, false})
    expect_same([&](const Step& s) {
      std::vector<Tensor> losses;
      for (int64_t m = 0; m < 3; ++m) {
        if (m > 0) s.recording.next_micro_batch(kRows * m);
        losses.push_back(s.loss(m));
      }
      for (int64_t m = 0; m < 3; ++m)
        s.recording.backward(losses[static_cast<size_t>(in_turn ? m : 2 - m)], {.last_micro_batch = m == 2});
    }, std::pair(1, in_turn ? 0 : 1));
}

// Uses after the head contribute before it.
TEST(GradientsAhead, OfALossWithMoreBehindIt) {
  expect_same([](const Step& s) {
    const Tensor loss = s.loss(0);
    const auto scope = s.model.enter();
    const Tensor more = sum(square(s.model.body(s.model.table(s.tokens(2)))));
    s.recording.backward(loss * 3.0 + more * 0.01, {.last_micro_batch = true});
  }, std::pair(1, 1));
}

TEST(GradientsAhead, OfALossThatIsNotAskedFor) {
  expect_same([](const Step& s) {
    s.loss(4);
    s.recording.backward(s.loss(0), {.last_micro_batch = true});
  }, std::pair(1, 1));
}

// The inner recording has its own slots, and leaves alone the gradients that the outer recording has computed ahead.
TEST(GradientsAhead, OfALossWithARecordingInside) {
  expect_same([](const Step& s) {
    const Tensor loss = s.loss(0);
    {
      Recording inside;
      inside.backward(s.loss(5), {.last_micro_batch = true});
    }
    s.recording.backward(loss, {.last_micro_batch = true});
  });
}

TEST(GradientsAhead, BehindGradientsOfValues) {
  for (const bool keep : {true, false})
    expect_same(
        [&](const Step& s) {
          const Tensor x =
              s.recording.watch(full_of({kF64, {kRows, kLength, kWidth}, s.mesh.spec ? Layout(s.mesh.spec, Placement::shard(0)) : Layout()}, 0.25));
          const auto scope = s.model.enter();
          const Tensor aside = linear_cross_entropy(x, s.model.weight(), s.tokens(1), {.divide_by = 70.0, .recompute = s.recompute});
          s.recording.gradient(aside, std::vector{x}, {.keep = keep});
          s.recording.backward(s.loss(0), {.last_micro_batch = true});
        },
        keep ? std::pair(1, 1) : std::pair(2, 0));
}

TEST(GradientsAhead, WithWeightsLater) {
  expect_same([](const Step& s) {
    for (int64_t m = 0; m < 2; ++m) {
      if (m > 0) s.recording.next_micro_batch(kRows * m);
      s.recording.backward(s.loss(m), {.last_micro_batch = m == 1, .defer_weights = true});
    }
    s.recording.backward_weights();
    s.recording.backward_weights();
  }, std::pair(2, 0));
}

// An evaluation in a recording without a backward leaves no slots allocated.
TEST(GradientsAhead, ARecordingWithoutBackwardLeavesNothing) {
  RankContext context;
  const RankScope scope(context);
  HeadModel model(true);
  materialize(model);
  const int64_t at_rest = context.cpu->stats().live;
  const Tensor tokens = token_rows({}, kRows, kLength, kVocab);
  for (int i = 0; i < 3; ++i) {
    {
      Recording recording;
      model.loss(tokens, tokens, false);
    }
    EXPECT_EQ(context.cpu->stats().live, at_rest + tokens.local_bytes());
    Recording recording;
    recording.backward(model.loss(tokens, tokens, false));
    for (const auto& unit : units(model)) unit->zero_grad();
  }
}

// There is no second copy of the gradient, nor, after the forward, of the head itself.
TEST(GradientsAhead, TakesTheMemoryOfOne) {
  run_local(2, [&](World& w) {
    MemoryLedger ledger;
    const Mesh mesh = w.mesh({{"data", 2}});
    HeadModel model(false);
    shard(model, mesh, {.units = nn::units_at({"head", "table"})});
    materialize(model);
    const int64_t head = 512;  // 11 · 6 elements, rounded up to a multiple of 64
    for (int step = 0; step < 3; ++step) {
      Recording recording;
      const Tensor tokens = token_rows(mesh, kRows, kLength, kVocab);
      const Tensor loss = model.loss(tokens, tokens, false);
      ledger.reset_peak();
      const MemoryLedger::Peak held = ledger.peak(*RankContext::current().cpu);
      EXPECT_EQ(held.held_for(HeldFor::whole_gradients), head);
      for (const auto& h : held.holders) {
        if (h.op == "linear_cross_entropy_fused") {
          EXPECT_LE(h.bytes, kRows * kLength * kWidth * 4 + 64);
        }
      }
      recording.backward(loss);
      const Tape tape = recording.take();
      NodeId discarded = -1, scaled = -1;
      for (NodeId i = tape.num_nodes() - 1; i >= 0; --i) {
        if (tape.kind(tape.node(i)) == OpKind::discard && tape.path(tape.node(i)) == "head") discarded = i;
        if (tape.op_name(tape.node(i)) == "scale_by") scaled = i;
      }
      EXPECT_GE(discarded, 0);
      EXPECT_EQ(discarded < scaled, step > 0) << to_text(tape);  // the first step foresees nothing
    }
  }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
}

}  // namespace
}  // namespace sheaf::testing
