// The gated delta rule, one chunk after another; compiled twice ([Note: two builds of one kernel] in simd.h).
#include "sheaf/kernels/cpu/delta_rule_chunk.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

template <class T, class C = ComputeType<T>>
class Forward : DeltaRuleChunk<T, C> {
 public:
  Forward(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out, const View& state, C* scratch)
      : DeltaRuleChunk<T, C>(x, options, scratch), out_(out), state_(state), states_(scratch) {}

  void run(int64_t b, int64_t g) {
    const Chunks chunks(x_.begins, b, s_.tokens);
    const int64_t first_head = g * s_.group();
    for (int64_t j = 0; j < s_.group(); ++j)
      if (given(x_.initial))
        pack<C, C>({rows_of(x_.initial), b, 0, first_head + j}, 0, s_.width, s_.columns(), C(1), states_ + j * s_.state_cells());
    for (int64_t t = 0; t < s_.tokens; t += n_) {
      const Chunk chunk = chunks.from(t);
      load_keys(b, g, chunk);
      load_queries(g);
      const bool from_zero = chunk.begins && !(t == 0 && given(x_.initial));
      const bool goes_on = !chunk.ends || (t + chunk.count == s_.tokens && given(state_));
      for (int64_t j = 0; j < s_.group(); ++j) {
        C* state = states_ + j * s_.state_cells();
        read(first_head + j, from_zero ? nullptr : state);
        if (goes_on) advance(from_zero ? nullptr : state, state);
      }
    }
    if (!given(state_)) return;
    for (int64_t j = 0; j < s_.group(); ++j) {
      C* state = states_ + j * s_.state_cells();
      if (s_.tokens == 0 && !given(x_.initial)) std::fill_n(state, s_.state_cells(), C(0));
      unpack(state, C(1), HeadRows<C>(rows_of(state_), b, 0, first_head + j), 0, s_.width);
    }
  }

 private:
  using Base = DeltaRuleChunk<T, C>;
  using Base::s_, Base::x_, Base::n_, Base::chunk_, Base::b_, Base::load_keys, Base::load_queries, Base::advance, Base::queries_,
      Base::result_, Base::gamma_, Base::scale_, Base::scores_, Base::written_;

  /// Results of head h.
  void read(int64_t h, const C* state) {
    const int64_t columns = s_.value_columns();
    this->load_gates(h);
    this->make_scores();
    this->write(h, state);
    if (state) {
      tile_gemm<C>(n_, columns, s_.width, queries_, s_.columns(), 1, state, columns, result_, columns, false);
      for (int64_t i = 0; i < n_; ++i) scale_row(scale_ * gamma_[i], result_ + i * columns, columns, result_ + i * columns);
    }
    lower_product(n_, columns, scores_, written_, result_, state != nullptr);
    unpack(result_, C(1), HeadRows<T>(out_, b_, chunk_.first, h), 0, n_);
  }

  const View &out_, &state_;
  C* states_;
};

}  // namespace

void delta_rule(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out, const View& state, Workspace workspace) {
  visit_floating("delta_rule", x.q.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const DeltaRuleShape s(x);
    run_items<C>(s, s.forward_cells(), workspace, [&](C* scratch) { return Forward<T>(x, options, out, state, scratch); });
  });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
