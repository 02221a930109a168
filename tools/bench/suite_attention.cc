// attention: causal, on queries, keys and values packed as the projection leaves them, against the
// machine's f32 multiply-adds.
#include <cmath>

#include "sheaf/kernels/attention.h"
#include "sheaf/tools/bench/array.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

namespace cpu = kernels::cpu;

// One of the three parts of a packed projection [B, T, 3, H, D].
View part(const Array& packed, int which) {
  View v = packed.view();
  const Shape& s = v.shape;
  v.data =
      static_cast<char*>(v.data) + which * s[3] * s[4] * static_cast<int64_t>(size_of(v.dtype));
  v.shape = {s[0], s[1], s[3], s[4]};
  v.strides = {packed.view().strides[0], packed.view().strides[1], s[4], 1};
  return v;
}

}  // namespace

void attention_suite(Session& session) {
  struct Size {
    int64_t b, t, h, d;
  };
  constexpr Size kSizes[] = {{4, 64, 12, 64}, {1, 1024, 12, 64}, {16, 256, 6, 64}};
  for (DType dtype : {kF32, kBF16})
    for (const Size& full : kSizes)
      for (bool backward : {false, true}) {
        const std::string name = str(backward ? "backward-" : "forward-", dtype, "-B", full.b, "-T",
                                     full.t, "-H", full.h, "-D", full.d);
        if (!session.wants("attention", name)) continue;
        Size s = full;
        if (session.options().quick) s.t /= 4;
        const Array qkv(dtype, {s.b, s.t, 3, s.h, s.d}), dqkv(dtype, {s.b, s.t, 3, s.h, s.d}),
            out(dtype, {s.b, s.t, s.h, s.d}), dout(dtype, {s.b, s.t, s.h, s.d}),
            lse(kF32, {s.b, s.h, s.t});
        const View q = part(qkv, 0), k = part(qkv, 1), v = part(qkv, 2);
        const double scale = 1 / std::sqrt(static_cast<double>(s.d));
        const Scratch scratch(cpu::attention_workspace(q, k, v, true, out, lse)),
            backward_scratch(cpu::attention_backward_workspace(q, k, v, out, lse, dout, true,
                                                               part(dqkv, 0), part(dqkv, 1),
                                                               part(dqkv, 2)));
        // A product of T x D with D x T under a causal mask takes B H T² D operations: half of
        // 2 B H T² D. The forward pass has two such products; the backward pass five, since it
        // computes the scores again (Dao 2023).
        const double product = static_cast<double>(s.b * s.h * s.t * s.t * s.d);
        Comparison c{.name = name, .unit = Unit::gigaflops};
        c.amount = product * (backward ? 5 : 2);
        c.peak = dtype == kBF16 ? Peak::bf16 : Peak::f32;
        c.peer = "FMA peak";
        c.peer_run = [&] { session.probe().run_fma(); };
        c.peer_amount = session.probe().flops_per_piece();
        c.prepare = [&] { cpu::attention(q, k, v, true, scale, out, lse, scratch); };
        c.run = c.prepare;
        if (backward)
          c.run = [&] {
            cpu::attention_backward(q, k, v, out, lse, dout, true, scale, part(dqkv, 0),
                                    part(dqkv, 1), part(dqkv, 2), backward_scratch);
          };
        session.compare("attention", c);
      }
}

}  // namespace sheaf::bench
