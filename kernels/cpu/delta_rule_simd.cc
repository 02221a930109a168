// The gated delta rule, compiled twice.
#include "sheaf/kernels/cpu/delta_rule_chunk.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

/// A slot that computes the value heads of one key head, a chunk after the other.
template <class T, class C = ComputeType<T>>
class Forward {
 public:
  Forward(const DeltaRuleOperands& x, const DeltaRuleOptions& o, const View& out, const View& state, C* cells)
      : x_(x), out_(out), state_(state), sizes_(x), scratch_{cells}, keys_(x, o, scratch_), chunk_(x, scratch_) {
    scaled_ = scratch_.take(L * chunk_.columns);
    states_ = scratch_.take(sizes_.readers() * sizes_.state());
  }

  void run(int64_t b, int64_t g) {
    const int64_t readers = sizes_.readers();
    bool fresh = !given(x_.initial);
    std::fill_n(states_, readers * sizes_.state(), C(0));
    for (int64_t r = 0; r < readers && !fresh; ++r) load_state(sizes_, x_.initial, b, g * readers + r, state(r));
    for_runs(x_.begins, b, sizes_.tokens, L, [&](int64_t first, int64_t count) {
      if (first > 0 && begins_at(x_.begins, b, first)) fresh = true;
      const int64_t end = first + count;
      keys_.load(b, first, count, g);
      for (int64_t r = 0; r < readers; ++r) {
        const int64_t h = g * readers + r;
        const C* before = fresh ? nullptr : state(r);
        chunk_.write(keys_, before, b, first, count, h);
        chunk_.answer(keys_, before, count, chunk_.answered);
        for (int64_t i = 0; i < count; ++i)
          store_row(chunk_.answered + i * chunk_.columns, chunk_.width, row_of<T>(out_, b, first + i, h));
        const bool goes_on = end < sizes_.tokens ? !begins_at(x_.begins, b, end) : given(state_);
        if (goes_on) chunk_.advance(keys_, fresh, count, state(r), scaled_);
      }
      fresh = false;
    });
    if (!given(state_)) return;
    for (int64_t r = 0; r < readers; ++r) store_state(sizes_, state(r), b, g * readers + r, state_);
  }

 private:
  C* state(int64_t r) { return states_ + r * sizes_.state(); }

  const DeltaRuleOperands& x_;
  const View &out_, &state_;
  const DeltaRuleSizes sizes_;
  Scratch<C> scratch_;
  Keys<T, C> keys_;
  Chunk<T, C> chunk_;
  C *scaled_, *states_;
};

}  // namespace

void delta_rule(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out, const View& state, Workspace workspace) {
  visit_floating("delta_rule", x.q.dtype, [&]<class T>() {
    using C = ComputeType<T>;
    const DeltaRuleSizes s(x);
    const int64_t cells = DeltaRuleSizes::aligned<C>(s.forward_cells());
    parallel_slots(s.items(), s.slots(), [&](int64_t slot, int64_t begin, int64_t end) {
      Forward<T> head(x, options, out, state, static_cast<C*>(workspace.data) + slot * cells);
      for (int64_t item = begin; item < end; ++item) head.run(item / s.key_heads, item % s.key_heads);
    });
  });
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
