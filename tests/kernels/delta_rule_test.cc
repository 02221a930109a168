#include "sheaf/kernels/delta_rule.h"

#include <gmock/gmock.h>

#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cpu/simd.h"
#include "sheaf/tests/kernels/delta_rule_checks.h"

namespace sheaf::kernels {
SHEAF_SIMD_DECLARE(delta_rule)
SHEAF_SIMD_DECLARE(delta_rule_backward)

namespace {

using namespace sheaf::testing;
using namespace sheaf::testing::delta_rule;

/// Workspace that detects writes past its end.
class Poisoned {
 public:
  explicit Poisoned(size_t bytes) : bytes_(bytes), memory_(bytes + kBehind, '\xff') {}
  ~Poisoned() {
    EXPECT_TRUE(std::all_of(memory_.begin() + static_cast<int64_t>(bytes_), memory_.end(), [](char c) { return c == '\xff'; }));
  }
  operator Workspace() { return {memory_.data(), bytes_}; }

 private:
  static constexpr size_t kBehind = 4096;
  size_t bytes_;
  std::vector<char> memory_;
};

template <class Forward, class Backward>
Results computed(const Operands& o, Forward&& forward, Backward&& backward) {
  const Sizes s{o.q.view().shape[0], 0, 0, o.v.view().shape[2], o.q.view().shape[3], o.v.view().shape[3]};
  const bool states = o.initial.bytes() > 0;
  Results r{.out = like(o.v), .state = Array(statistics_of(o.dtype()), s.states()), .dq = like(o.q), .dk = like(o.k), .dv = like(o.v),
            .ddecay = like(o.decay), .dbeta = like(o.beta), .dinitial = Array(statistics_of(o.dtype()), s.states())};
  const DeltaRuleOperands x{o.q, o.k, o.v, o.decay, o.beta, states ? o.initial.view() : View{}, o.begins.bytes() ? o.begins.view() : View{}};
  Poisoned scratch(cpu::delta_rule_workspace(x, r.out, r.state));
  forward(x, o.options, r.out, r.state, scratch);
  const DeltaRuleGradients d{r.dq, r.dk, r.dv, r.ddecay, r.dbeta, r.dinitial};
  const View dstate = states ? o.dstate.view() : View{};
  Poisoned larger(cpu::delta_rule_backward_workspace(x, o.dout, dstate, d));
  backward(x, o.options, o.dout, dstate, d, larger);
  return r;
}
Results on_cpu(const Operands& o) { return computed(o, cpu::delta_rule, cpu::delta_rule_backward); }
void compare(const Operands& o, double slack = 1) { testing::delta_rule::compare(on_cpu, /*narrow=*/false, o, slack); }

void expect_same(const Results& a, const Results& b, const std::string& where) {
  each(a, b, [&](const char* what, const Array& x, const Array& y) { EXPECT_TRUE(same_bits(x, y)) << what << ' ' << where; });
}

TEST(DeltaRule, MatchesTheRecurrence) {
  for (DType d : {kF64, kF32, kBF16, kF16})
    for (const Sizes& s : kSizes) compare(random(d, s));
}

// One token more or less than a multiple of chunks and blocks of rows, a whole number of lanes and not, two and three heads that read a
// key.
TEST(DeltaRule, UnevenSizes) {
  for (DType d : {kF64, kF32, kBF16, kF16})
    for (const Sizes& s : {Sizes{1, 63, 1, 3, 16, 1}, {2, 17, 2, 2, 1, 33}, {1, 129, 2, 4, 32, 48}, {1, 97, 1, 2, 15, 17}}) {
      if (s.width > 1) compare(random(d, s));  // a single normalised number has no gradient
      compare(with_states(random(d, s, 0)));
    }
}

TEST(DeltaRule, StatesAndKeysAsTheyAre) {
  for (DType d : {kF64, kF32, kBF16, kF16}) compare(with_states(random(d, {2, 131, 1, 2, 24, 9}, 0)));
}

TEST(DeltaRule, WideHeads) {
  for (DType d : {kF64, kF32, kBF16}) compare(with_states(random(d, {1, 67, 1, 1, 256, 250})));
  compare(random(kF32, {1, 10, 1, 1, 300, 290}));
}

TEST(DeltaRule, LongSequences) { compare(with_states(random(kF32, {1, 700, 2, 2, 16, 16})), 2); }

TEST(DeltaRule, Documents) {
  for (DType d : {kF64, kF32, kBF16})
    compare(with_documents(with_states(random(d, {2, 200, 1, 2, 24, 9})), {1, 63, 66, 3, 1, 66}));
  compare(with_documents(with_states(random(kF32, {1, 260, 1, 2, 8, 8})), {130, 130}));
}

TEST(DeltaRule, PackedDocumentsAreThoseAlone) { expect_packed_documents_are_those_alone(on_cpu); }
TEST(DeltaRule, TheFirstDocumentMayHaveBegunEarlier) { expect_the_first_document_may_have_begun_earlier(on_cpu); }
TEST(DeltaRule, PartsAreTheWhole) { expect_parts_are_the_whole(on_cpu); }
TEST(DeltaRule, RunsAndStridesChangeNothing) { expect_runs_and_strides_change_nothing(on_cpu); }
TEST(DeltaRule, DecaysThatCutTheStateOff) { expect_decays_that_cut_the_state_off(on_cpu); }
TEST(DeltaRule, StatesOfNoTokens) { expect_states_of_no_tokens(on_cpu); }

// Of a randomly weighted sum of the results and the last state, along a random direction of each operand.
TEST(DeltaRule, GradientsMatchDifferences) {
  const Operands o = with_documents(with_states(random(kF64, {2, 100, 1, 2, 6, 5}, 0.1)), {30, 70});
  const Results got = on_cpu(o);
  const auto loss = [&](const Operands& at) {
    const Results r = on_cpu(at);
    double sum = 0;
    for (int64_t i = 0; i < r.out.view().numel(); ++i) sum += r.out.at(i) * o.dout.at(i);
    for (int64_t i = 0; i < r.state.view().numel(); ++i) sum += r.state.at(i) * o.dstate.at(i);
    return sum;
  };
  int seed = 20;
  for (const auto& [operand, gradient] : {std::pair<Array Operands::*, Array>(&Operands::q, got.dq), {&Operands::k, got.dk},
                                          {&Operands::v, got.dv}, {&Operands::decay, got.ddecay}, {&Operands::beta, got.dbeta},
                                          {&Operands::initial, got.dinitial}}) {
    const Array direction = Array::random(kF64, gradient.view().shape, seed++);
    double want = 0;
    for (int64_t i = 0; i < direction.view().numel(); ++i) want += gradient.at(i) * direction.at(i);
    const auto moved = [&](double by) {
      Operands to = o;
      to.*operand = (o.*operand).clone();
      (to.*operand).fill([&](int64_t i) { return (o.*operand).at(i) + by * direction.at(i); });
      return loss(to);
    };
    constexpr double kStep = 1e-5;
    EXPECT_NEAR((moved(kStep) - moved(-kStep)) / (2 * kStep), want, 1e-6 * (1 + std::abs(want))) << "operand " << seed - 20;
  }
}

// A decay after which little is left has a small gradient among large ones: it must be accurate to the last digits, not the rounding error
// of a difference of large sums.
TEST(DeltaRule, SmallGradientsOfDecaysAreExact) {
  Operands o = random(kF32, {1, 64, 1, 1, 16, 16});
  for (int64_t t = 0; t < 64; ++t) o.decay.set(t, t == 32 ? -16 : -0.01);
  const Array got = on_cpu(o).ddecay, want = in_reference(o).ddecay;
  EXPECT_LT(std::abs(want.at(32)), 1e-5);
  EXPECT_NEAR(got.at(32) / want.at(32), 1, 1e-4);
}

TEST(DeltaRule, SharesOfNothingAndOfAll) {
  for (DType d : {kF64, kF32}) {
    Operands o = with_states(random(d, {1, 90, 1, 2, 8, 8}));
    for (int64_t i = 0; i < o.beta.view().numel(); i += 3) o.beta.set(i, i % 2);
    compare(o);
  }
}

TEST(DeltaRule, StatesThatAreNotWanted) {
  const Operands o = random(kF32, {1, 130, 1, 2, 8, 8});
  const Results want = on_cpu(o);
  const Array out = like(o.v), dq = like(o.q), dk = like(o.k), dv = like(o.v), ddecay = like(o.decay), dbeta = like(o.beta);
  const DeltaRuleOperands x{o.q, o.k, o.v, o.decay, o.beta, View{}, View{}};
  cpu::delta_rule(x, o.options, out, View{}, Poisoned(cpu::delta_rule_workspace(x, out, View{})));
  const DeltaRuleGradients d{dq, dk, dv, ddecay, dbeta, View{}};
  cpu::delta_rule_backward(x, o.options, o.dout, View{}, d, Poisoned(cpu::delta_rule_backward_workspace(x, o.dout, View{}, d)));
  expect_same({out, want.state, dq, dk, dv, ddecay, dbeta, want.dinitial}, want, "without states");
}

TEST(DeltaRule, NothingToRead) {
  EXPECT_EQ(values(on_cpu(random(kF32, {2, 0, 1, 1, 2, 3})).state), std::vector<double>(12, 0.0));
  EXPECT_EQ(values(on_cpu(random(kF32, {2, 0, 1, 1, 2, 3})).dinitial), std::vector<double>(12, 0.0));
  EXPECT_EQ(values(on_cpu(random(kF32, {1, 3, 1, 0, 2, 5})).dq), std::vector<double>(6, 0.0));  // no values: nothing reads queries
  EXPECT_EQ(values(on_cpu(random(kF32, {1, 3, 1, 1, 0, 5})).out), std::vector<double>(15, 0.0));
  EXPECT_EQ(values(on_cpu(random(kF32, {1, 3, 1, 1, 5, 0})).dk), std::vector<double>(15, 0.0));
  on_cpu(random(kF32, {1, 3, 0, 0, 2, 5}));
}

// A token's result has the same bits without the tokens after it.
TEST(DeltaRule, LaterTokensChangeNothing) {
  for (DType d : {kF32, kBF16}) {
    const Operands o = random(d, {1, 140, 1, 2, 20, 12});
    const Array whole = on_cpu(o).out;
    for (const int64_t n : {1, 15, 16, 17, 63, 64, 65, 100, 139}) EXPECT_TRUE(same_bits(part(whole, 0, n), on_cpu(part(o, 0, n)).out)) << n;
  }
}

TEST(DeltaRule, ThreadsChangeNothing) {
  const Operands o = with_documents(with_states(random(kF32, {2, 90, 3, 6, 20, 12})), {50, 40});
  RankContext one;
  one.threads = 1;
  const Results want = [&] {
    RankScope scope(one);
    return on_cpu(o);
  }();
  for (const int threads : {2, 5}) {
    RankContext several;
    several.threads = threads;
    RankScope scope(several);
    expect_same(on_cpu(o), want, str(threads, " threads"));
  }
}

TEST(DeltaRule, BothBuildsHaveTheSameBits) {
  if (!has_v4()) GTEST_SKIP() << "this CPU has no AVX-512";
  for (DType d : {kF64, kF32, kBF16}) {
    const Operands o = with_documents(with_states(random(d, {2, 150, 1, 2, 37, 21})), {70, 80});
    expect_same(computed(o, v3::delta_rule, v3::delta_rule_backward), computed(o, v4::delta_rule, v4::delta_rule_backward), str(name(d)));
  }
}

TEST(DeltaRule, RefusesWhatItCannotTake) {
  const auto run = [](const Operands& o, const View& begins = {}) {
    const Array out = like(o.v);
    const DeltaRuleOperands x{o.q, o.k, o.v, o.decay, o.beta, View{}, begins};
    Poisoned scratch(cpu::delta_rule_workspace(x, out, View{}));
    cpu::delta_rule(x, o.options, out, View{}, scratch);
  };
  EXPECT_THROW(run(random(kF32, {1, 2, 2, 3, 8, 8})), ShapeError);
  Operands o = random(kBF16, {1, 2, 1, 1, 8, 8});
  o.decay = Array(kBF16, {1, 2, 1});
  EXPECT_THROW(run(o), DTypeError);
  const Operands three = random(kF32, {1, 3, 1, 1, 8, 8});
  EXPECT_THAT([&] { run(three, Array::of(kI32, {1, 3}, {0, 0, 1})); },
              ::testing::ThrowsMessage<DataError>(::testing::HasSubstr("[delta_rule] begins[0,2] is 1")));
  EXPECT_THROW(run(three, Array::of(kI32, {1, 3}, {1, 1, 2})), DataError);
}

}  // namespace
}  // namespace sheaf::kernels
