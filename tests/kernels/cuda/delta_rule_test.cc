#include "sheaf/kernels/delta_rule.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"
#include "sheaf/tests/kernels/delta_rule_checks.h"

// Against the recurrence, token by token, in f64.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;
using namespace sheaf::testing::delta_rule;

Results on_gpu(const Operands& o) {
  const Stream& s = OnGpu::stream();
  const Sizes sizes{o.q.view().shape[0], 0, 0, o.v.view().shape[2], o.q.view().shape[3], o.v.view().shape[3]};
  const Array of_state(statistics_of(o.dtype()), sizes.states());
  const bool states = o.initial.bytes() > 0;
  const OnGpu q(o.q), k(o.k), v(o.v), decay(o.decay), beta(o.beta), dout(o.dout), initial(states ? o.initial : of_state),
      dstate(states ? o.dstate : of_state), begins(o.begins.bytes() ? o.begins : Array(kI32, {1}));
  const OnGpu out(like(o.v)), state(of_state), dq(like(o.q)), dk(like(o.k)), dv(like(o.v)), ddecay(like(o.decay)), dbeta(like(o.beta)),
      dinitial(of_state);
  const DeltaRuleOperands x{q, k, v, decay, beta, states ? initial.view() : View{}, o.begins.bytes() ? begins.view() : View{}};
  const DeltaRuleOperands meta{without_data(q), without_data(k), without_data(v), without_data(decay), without_data(beta),
                               without_data(x.initial), without_data(x.begins)};
  const GpuScratch scratch(cuda::delta_rule_workspace(meta, without_data(out), without_data(state)));
  cuda::delta_rule(s, x, o.options, out, state, scratch);
  const DeltaRuleGradients d{dq, dk, dv, ddecay, dbeta, dinitial};
  const View gradient = states ? dstate.view() : View{};
  const GpuScratch larger(cuda::delta_rule_backward_workspace(
      meta, without_data(dout), without_data(gradient),
      {without_data(dq), without_data(dk), without_data(dv), without_data(ddecay), without_data(dbeta), without_data(dinitial)}));
  cuda::delta_rule_backward(s, x, o.options, dout, gradient, d, larger);
  return {out.back(), state.back(), dq.back(), dk.back(), dv.back(), ddecay.back(), dbeta.back(), dinitial.back()};
}

void compare(const Operands& o, double slack = 1) { testing::delta_rule::compare(on_gpu, /*narrow=*/true, o, slack); }

TEST(CudaDeltaRule, MatchesTheRecurrence) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16})
    for (const Sizes& s : kSizes) compare(random(d, s));
}

TEST(CudaDeltaRule, StatesAndKeysAsTheyAre) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16, kF16}) compare(with_states(random(d, {2, 131, 1, 1, 24, 9}, 0)));
}

TEST(CudaDeltaRule, WidestHeads) {
  SHEAF_NEEDS_GPU();
  compare(with_states(random(kF64, {1, 67, 1, 1, 256, 130})));
  compare(with_states(random(kF32, {1, 67, 1, 1, 140, 250})));
  compare(random(kBF16, {1, 10, 1, 1, 200, 256}));
}

TEST(CudaDeltaRule, Documents) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF64, kF32, kBF16})
    compare(with_documents(with_states(random(d, {1, 200, 1, 2, 24, 9})), {1, 63, 66, 3, 1, 66}));
  compare(with_documents(with_states(random(kF32, {2, 260, 1, 1, 8, 8})), {130, 130}));
}

TEST(CudaDeltaRule, TheFirstDocumentMayHaveBegunEarlier) {
  SHEAF_NEEDS_GPU();
  expect_the_first_document_may_have_begun_earlier(on_gpu);
}

TEST(CudaDeltaRule, PackedDocumentsAreThoseAlone) {
  SHEAF_NEEDS_GPU();
  expect_packed_documents_are_those_alone(on_gpu);
}

TEST(CudaDeltaRule, PartsAreTheWhole) {
  SHEAF_NEEDS_GPU();
  expect_parts_are_the_whole(on_gpu);
}

TEST(CudaDeltaRule, RunsAndStridesChangeNothing) {
  SHEAF_NEEDS_GPU();
  expect_runs_and_strides_change_nothing(on_gpu);
}

TEST(CudaDeltaRule, DecaysThatCutTheStateOff) {
  SHEAF_NEEDS_GPU();
  expect_decays_that_cut_the_state_off(on_gpu);
}

TEST(CudaDeltaRule, NothingIsWantedOfStates) {
  SHEAF_NEEDS_GPU();
  const Operands o = random(kF32, {1, 66, 1, 2, 8, 8});
  const Results want = on_gpu(o);
  const OnGpu q(o.q), k(o.k), v(o.v), decay(o.decay), beta(o.beta), dout(o.dout), out(like(o.v)), dq(like(o.q)), dk(like(o.k)),
      dv(like(o.v)), ddecay(like(o.decay)), dbeta(like(o.beta));
  const DeltaRuleOperands x{q, k, v, decay, beta, View{}, View{}};
  cuda::delta_rule(OnGpu::stream(), x, o.options, out, View{}, GpuScratch(cuda::delta_rule_workspace(x, out, View{})));
  const DeltaRuleGradients d{dq, dk, dv, ddecay, dbeta, View{}};
  cuda::delta_rule_backward(OnGpu::stream(), x, o.options, dout, View{}, d,
                            GpuScratch(cuda::delta_rule_backward_workspace(x, dout, View{}, d)));
  EXPECT_TRUE(same_bits(out.back(), want.out) && same_bits(dq.back(), want.dq) && same_bits(dk.back(), want.dk));
}

TEST(CudaDeltaRule, NoTokens) {
  SHEAF_NEEDS_GPU();
  expect_states_of_no_tokens(on_gpu);
}

TEST(CudaDeltaRule, RefusesWhatItCannotTake) {
  SHEAF_NEEDS_GPU();
  const auto run = [](const Operands& o) {
    cuda::delta_rule(OnGpu::stream(), {o.q, o.k, o.v, o.decay, o.beta, View{}, View{}}, o.options, like(o.v), View{}, Workspace{});
  };
  EXPECT_THROW(run(random(kF32, {1, 2, 1, 1, 257, 8})), ShapeError);
  EXPECT_THROW(run(random(kF32, {1, 2, 1, 1, 8, 257})), ShapeError);
  EXPECT_THROW(run(random(kF32, {1, 2, 2, 3, 8, 8})), ShapeError);
  EXPECT_THROW(run(random(kF32, {1, 2, 1, 1, 8, 8})), ShapeError);  // no workspace
  Operands o = random(kBF16, {1, 2, 1, 1, 8, 8});
  o.decay = Array(kBF16, {1, 2, 1});
  EXPECT_THROW(run(o), DTypeError);
}

}  // namespace
}  // namespace sheaf::kernels
