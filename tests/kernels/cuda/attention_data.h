// Causal attention as a packed projection gives it, and what it is in f64 on the CPU.
#pragma once

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::testing {

struct AttentionCase {
  int64_t batch, tokens, heads, groups, width;
  kernels::PackedHeads heads_of(const View& packed) const { return {packed, heads, groups, width}; }
  Shape packed() const { return {batch, tokens, (heads + 2 * groups) * width}; }
  Shape queries() const { return {batch, tokens, heads, width}; }
  Shape statistics() const { return {batch, heads, tokens}; }
};

/// On the host: operands filled, results blank.
struct AttentionData {
  AttentionCase sizes;
  Array qkv, out, lse, dout, dqkv;
  double scale;

  AttentionData(const AttentionCase& c, DType dtype)
      : sizes(c),
        qkv(Array::random(dtype, c.packed(), 1)),
        out(dtype, c.queries()),
        lse(dtype == kF64 ? kF64 : kF32, c.statistics()),
        dout(Array::random(dtype, c.queries(), 4)),
        dqkv(dtype, c.packed()),
        scale(1 / std::sqrt(static_cast<double>(c.width))) {}
};

/// The results of AttentionData in f64.
struct ExpectedAttention {
  Array out, lse, dqkv;

  explicit ExpectedAttention(const AttentionData& data)
      : out(kF64, data.sizes.queries()),
        lse(kF64, data.sizes.statistics()),
        dqkv(kF64, data.sizes.packed()) {
    namespace cpu = kernels::cpu;
    const Array qkv = in_f64(data.qkv), dout = in_f64(data.dout);
    const kernels::PackedHeads x = data.sizes.heads_of(qkv), d = data.sizes.heads_of(dqkv);
    cpu::attention(x.q, x.k, x.v, true, data.scale, out, lse,
                   Scratch(cpu::attention_workspace(x.q, x.k, x.v, true, out, lse)));
    cpu::attention_backward(x.q, x.k, x.v, out, lse, dout, true, data.scale, d.q, d.k, d.v,
                            Scratch(cpu::attention_backward_workspace(x.q, x.k, x.v, out, lse, dout,
                                                                      true, d.q, d.k, d.v)));
  }
};

/// The same on the GPU.
struct AttentionOnGpu {
  OnGpu qkv, out, lse, dout, dqkv;
  kernels::PackedHeads x, d;

  explicit AttentionOnGpu(const AttentionData& data)
      : qkv(data.qkv),
        out(data.out),
        lse(data.lse),
        dout(data.dout),
        dqkv(data.dqkv),
        x(data.sizes.heads_of(qkv)),
        d(data.sizes.heads_of(dqkv)) {}
};

}  // namespace sheaf::testing
