// attention: causal, on queries, keys and values packed as the projection leaves them, against the
// machine's arithmetic: a CPU's f32 multiply-adds, a GPU's square product of the same dtype.
#include <cmath>

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

// B sequences of T tokens, H heads of queries and G of keys and values, D wide.
struct Size {
  int64_t b, t, h, g, d;
};

// Heads [first, first + count) of a packed projection [B, T, H + 2 G, D].
View heads(const Array& packed, int64_t first, int64_t count) {
  View v = packed.view();
  v.data = v.as<char>() + first * v.shape[3] * static_cast<int64_t>(size_of(v.dtype));
  v.shape[2] = count;
  return v;
}

// The operands of one call, and of the gradients'.
struct Operands {
  Operands(DType dtype, const Size& s, Device device)
      : device(device),
        qkv(Array(dtype, {s.b, s.t, s.h + 2 * s.g, s.d}).on(device)),
        dqkv(Array(dtype, {s.b, s.t, s.h + 2 * s.g, s.d}).on(device)),
        out(Array(dtype, {s.b, s.t, s.h, s.d}).on(device)),
        dout(Array(dtype, {s.b, s.t, s.h, s.d}).on(device)),
        lse(Array(kF32, {s.b, s.h, s.t}).on(device)),
        q(heads(qkv, 0, s.h)),
        k(heads(qkv, s.h, s.g)),
        v(heads(qkv, s.h + s.g, s.g)),
        dq(heads(dqkv, 0, s.h)),
        dk(heads(dqkv, s.h, s.g)),
        dv(heads(dqkv, s.h + s.g, s.g)),
        scale(1 / std::sqrt(static_cast<double>(s.d))),
        scratch(static_cast<size_t>(SHEAF_WORKSPACE(device, attention, q, k, v, true, out, lse)),
                device),
        backward_scratch(static_cast<size_t>(SHEAF_WORKSPACE(device, attention_backward, q, k, v,
                                                             out, lse, dout, true, dq, dk, dv)),
                         device) {}

  void forward(const Stream& stream) const {
    SHEAF_ON_DEVICE(stream, attention, q, k, v, true, scale, out, lse, scratch);
  }
  void backward(const Stream& stream) const {
    SHEAF_ON_DEVICE(stream, attention_backward, q, k, v, out, lse, dout, true, scale, dq, dk, dv,
                    backward_scratch);
  }

  const Device device;
  const Array qkv, dqkv, out, dout, lse;
  const View q, k, v, dq, dk, dv;
  const double scale;
  const Scratch scratch, backward_scratch;
};

void measure(Session& session, DType dtype, const Size& full) {
  for (bool backward : {false, true}) {
    const std::string group = full.g == full.h ? "" : str("-G", full.g);
    const std::string name = str(backward ? "backward-" : "forward-", dtype, "-B", full.b, "-T",
                                 full.t, "-H", full.h, group, "-D", full.d);
    if (!session.wants("attention", name)) continue;
    Size s = full;
    // A quick run takes a quarter of the tokens, and on a GPU, which may be emulated, few of all.
    if (session.options().quick) s.t /= 4;
    if (session.options().quick && session.on_gpu()) s = {1, 16, 2 * s.h / s.g, 2, s.d};
    // A product of T x D with D x T under a causal mask takes B H T² D operations: half of
    // 2 B H T² D. The forward pass has two such products; the backward pass five, since it
    // computes the scores again (Dao 2023).
    const double product = static_cast<double>(s.b * s.h * s.t * s.t * s.d);
    const Stream stream = session.stream();
    std::unique_ptr<const Operands> on;
    Comparison c{.name = name, .unit = session.flops_unit()};
    c.amount = product * (backward ? 5 : 2);
    c.arithmetic = dtype;
    c.prepare = [&] {
      on = std::make_unique<const Operands>(dtype, s, session.device());
      on->forward(stream);
    };
    c.run = [&] { backward ? on->backward(stream) : on->forward(stream); };
    session.compare_with_peak("attention", c);
  }
}

}  // namespace

void attention_suite(Session& session) {
  if (!session.on_gpu()) {
    for (DType dtype : {kF32, kBF16})
      for (const Size& s :
           {Size{4, 64, 12, 12, 64}, Size{1, 1024, 12, 12, 64}, Size{16, 256, 6, 6, 64}})
        measure(session, dtype, s);
    return;
  }
  // GPT-2 124M and 1.5B, Llama 3 8B at half of its context and all of it.
  for (DType dtype : {kBF16, kF16})
    for (const Size& s : {Size{16, 1024, 12, 12, 64}, Size{16, 1024, 25, 25, 64},
                          Size{2, 4096, 32, 8, 128}, Size{1, 8192, 32, 8, 128}})
      measure(session, dtype, s);
  measure(session, kF32, {16, 1024, 12, 12, 64});
}

}  // namespace sheaf::bench
