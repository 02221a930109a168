// Causal attention on packed projections [B, T, (H + G) D + G E], and the expected results in f64 on the CPU.
#pragma once

#include "sheaf/kernels/attention.h"
#include "sheaf/kernels/attention_operands.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::testing {

struct AttentionCase {
  int64_t batch, tokens, heads, groups, width, value_width = 0;  ///< 0: as `width`
  int64_t of_values() const { return value_width ? value_width : width; }
  Shape packed() const { return {batch, tokens, (heads + groups) * width + groups * of_values()}; }
  kernels::PackedHeads heads_of(const View& packed) const {
    kernels::PackedHeads out(packed, heads, groups, width);
    out.v.shape[3] = out.v.strides[2] = of_values();
    return out;
  }
  Shape outputs() const { return {batch, tokens, heads, of_values()}; }
  Shape statistics() const { return {batch, heads, tokens}; }
};

/// On the host: operands filled, results blank; with a window of this many keys, if any. With `documents`, sequence b begins with documents
/// of these lengths, starting at the b-th one, and ends with one of the remaining tokens.
struct AttentionData {
  AttentionCase sizes;
  Array qkv, out, lse, dout, dqkv, begins;
  bool apart;
  int64_t window;
  double scale;

  AttentionData(const AttentionCase& c, DType dtype, const std::vector<int64_t>& documents = {}, int64_t keys_seen = 0)
      : sizes(c),
        qkv(Array::random(dtype, c.packed(), 1)),
        out(dtype, c.outputs()),
        lse(dtype == kF64 ? kF64 : kF32, c.statistics()),
        dout(Array::random(dtype, c.outputs(), 4)),
        dqkv(dtype, c.packed()),
        begins(kI32, {c.batch, c.tokens}),
        apart(!documents.empty()),
        window(keys_seen),
        scale(1 / std::sqrt(static_cast<double>(c.width))) {
    begins.fill([](int64_t) { return 0; });
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t begin = 0, d = b; begin < c.tokens; ++d) {
        const int64_t left = c.tokens - begin,
                      n = d < std::ssize(documents) ? std::min(left, documents[static_cast<size_t>(d)]) : left;
        for (int64_t t = begin; t < begin + n; ++t) begins.set(b * c.tokens + t, static_cast<double>(begin));
        begin += n;
      }
  }
  kernels::AttentionMask mask_with(const View& where) const { return {true, apart ? where : View(), window}; }
};

/// The results of AttentionData in f64.
struct ExpectedAttention {
  Array out, lse, dqkv;

  explicit ExpectedAttention(const AttentionData& data)
      : out(kF64, data.sizes.outputs()),
        lse(kF64, data.sizes.statistics()),
        dqkv(kF64, data.sizes.packed()) {
    namespace cpu = kernels::cpu;
    const Array qkv = in_f64(data.qkv), dout = in_f64(data.dout);
    const kernels::PackedHeads x = data.sizes.heads_of(qkv), d = data.sizes.heads_of(dqkv);
    const kernels::AttentionMask mask = data.mask_with(data.begins);
    cpu::attention(x.q, x.k, x.v, mask, data.scale, out, lse,
                   Scratch(cpu::attention_workspace(x.q, x.k, x.v, mask, out, lse)));
    cpu::attention_backward(x.q, x.k, x.v, out, lse, dout, mask, data.scale, d.q, d.k, d.v,
                            Scratch(cpu::attention_backward_workspace(x.q, x.k, x.v, out, lse, dout,
                                                                      mask, d.q, d.k, d.v)));
  }
};

/// The same on the GPU.
struct AttentionOnGpu {
  OnGpu qkv, out, lse, dout, dqkv, begins;
  kernels::PackedHeads x, d;
  kernels::AttentionMask mask;

  explicit AttentionOnGpu(const AttentionData& data)
      : qkv(data.qkv),
        out(data.out),
        lse(data.lse),
        dout(data.dout),
        dqkv(data.dqkv),
        begins(data.begins),
        x(data.sizes.heads_of(qkv)),
        d(data.sizes.heads_of(dqkv)),
        mask(data.mask_with(begins)) {}
};

}  // namespace sheaf::testing
