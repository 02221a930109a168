// linear-attention: the gated delta rule on queries, keys and values packed as the projection writes them, against attention with the
// same heads, whose work grows quadratically with the tokens.
#include "sheaf/kernels/delta_rule.h"

#include "sheaf/tools/bench/attention_call.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

/// Each value head has its own keys, as in multi-head attention. B, T, H, D are attention's.
class DeltaRuleCall {
 public:
  DeltaRuleCall(DType dtype, const AttentionSize& s, Device device)
      : qkv_(Array(dtype, {s.b, s.t, 3 * s.h, s.d}).on(device)),
        dqkv_(Array(dtype, {s.b, s.t, 3 * s.h, s.d}).on(device)),
        out_(Array(dtype, {s.b, s.t, s.h, s.d}).on(device)),
        dout_(Array(dtype, {s.b, s.t, s.h, s.d}).on(device)),
        decay_(rates(s, -0.05).on(device)),
        beta_(rates(s, 0.5).on(device)),
        ddecay_(rates(s, 0).on(device)),
        dbeta_(rates(s, 0).on(device)),
        x_{heads(qkv_, 0, s.h), heads(qkv_, s.h, s.h), heads(qkv_, 2 * s.h, s.h), decay_, beta_, {}, {}},
        d_{heads(dqkv_, 0, s.h), heads(dqkv_, s.h, s.h), heads(dqkv_, 2 * s.h, s.h), ddecay_, dbeta_, {}},
        options_{1 / std::sqrt(static_cast<double>(s.d)), 1e-6},
        scratch_(static_cast<size_t>(SHEAF_WORKSPACE(device, delta_rule, x_, out_, View{})), device),
        backward_scratch_(static_cast<size_t>(SHEAF_WORKSPACE(device, delta_rule_backward, x_, dout_, View{}, d_)), device) {}

  void forward(const Stream& stream) const { SHEAF_ON_DEVICE(stream, delta_rule, x_, options_, out_, View{}, scratch_); }
  void backward(const Stream& stream) const {
    SHEAF_ON_DEVICE(stream, delta_rule_backward, x_, options_, dout_, View{}, d_, backward_scratch_);
  }

 private:
  static Array rates(const AttentionSize& s, double value) {
    Array a(kF32, {s.b, s.t, s.h});
    std::fill_n(a.view().as<float>(), a.view().numel(), static_cast<float>(value));
    return a;
  }
  static View heads(const Array& packed, int64_t first, int64_t count) {
    View v = packed.view();
    v.data = v.as<char>() + first * v.shape[3] * static_cast<int64_t>(size_of(v.dtype));
    v.shape[2] = count;
    return v;
  }

  const Array qkv_, dqkv_, out_, dout_, decay_, beta_, ddecay_, dbeta_;
  const kernels::DeltaRuleOperands x_;
  const kernels::DeltaRuleGradients d_;
  const kernels::DeltaRuleOptions options_;
  const Scratch scratch_, backward_scratch_;
};

void measure(Session& session, DType dtype, const AttentionSize& full) {
  for (bool backward : {false, true}) {
    const std::string name = str(backward ? "backward-" : "forward-", dtype, "-B", full.b, "-T", full.t, "-H", full.h, "-D", full.d);
    if (!session.wants("linear-attention", name)) continue;
    AttentionSize s = full;
    if (session.options().quick) s.t = 130, s.h = s.g = 2;
    const Stream stream = session.stream();
    std::unique_ptr<const DeltaRuleCall> call;
    std::unique_ptr<const AttentionCall> peer;
    Comparison c{.name = name, .unit = Unit::seconds};
    c.peer = "attention";
    c.prepare = [&] {
      call = std::make_unique<const DeltaRuleCall>(dtype, s, session.device());
      peer = std::make_unique<const AttentionCall>(dtype, s, session.device());
      call->forward(stream), peer->forward(stream);
    };
    c.run = [&] { backward ? call->backward(stream) : call->forward(stream); };
    c.peer_run = [&] { backward ? peer->backward(stream) : peer->forward(stream); };
    session.compare("linear-attention", c);
  }
}

}  // namespace

void linear_attention_suite(Session& session) {
  for (DType dtype : {kF32, kBF16}) {
    if (session.on_gpu() && dtype == kF32) continue;
    for (const int64_t tokens : session.on_gpu() ? std::vector<int64_t>{4096, 16384, 65536} : std::vector<int64_t>{1024, 4096, 8192})
      measure(session, dtype, {1, tokens, session.on_gpu() ? 32 : 4, session.on_gpu() ? 32 : 4, 128});
  }
}

}  // namespace sheaf::bench
