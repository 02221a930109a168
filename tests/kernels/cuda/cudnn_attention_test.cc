#include "sheaf/kernels/cuda/cudnn_attention.h"

#include "sheaf/kernels/attention.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

// Against the CPU's kernel in f64. The emulated GPU has the CPU's kernel in cuDNN's place, so there
// this tests what is refused and how operands get in and out.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;
using cuda::cudnn::Attention;

struct Case {
  int64_t batch, tokens, heads, groups, width;
};
constexpr Case kCases[] = {{2, 128, 3, 3, 64}, {1, 192, 4, 2, 128}, {3, 64, 2, 1, 32}};

struct Data {
  Array q, k, v, out, lse, dout, dq, dk, dv;
  double scale;

  /// Queries, keys and values lie as slices of a packed projection do.
  Data(const Case& c, DType dtype) {
    const int64_t row = (c.heads + 2 * c.groups) * c.width;
    const Shape strides{c.tokens * row, row, c.width, 1};
    const Shape queries{c.batch, c.tokens, c.heads, c.width},
        keys{c.batch, c.tokens, c.groups, c.width};
    q = Array::random(dtype, queries, 1, 1, strides);
    k = Array::random(dtype, keys, 2, 1, strides);
    v = Array::random(dtype, keys, 3, 1, strides);
    dout = Array::random(dtype, queries, 4);
    out = Array(dtype, queries);
    lse = Array(dtype == kF64 ? kF64 : kF32, {c.batch, c.heads, c.tokens});
    dq = Array(dtype, queries, strides);
    dk = Array(dtype, keys, strides);
    dv = Array(dtype, keys, strides);
    scale = 1 / std::sqrt(static_cast<double>(c.width));
  }
};

struct Expected {
  Array out, lse, dq, dk, dv;

  explicit Expected(const Data& d) {
    const Array q = in_f64(d.q), k = in_f64(d.k), v = in_f64(d.v), dout = in_f64(d.dout);
    out = Array(kF64, d.q.view().shape), dq = out.clone();
    dk = Array(kF64, d.k.view().shape), dv = dk.clone();
    lse = Array(kF64, d.lse.view().shape);
    cpu::attention(q, k, v, true, d.scale, out, lse, Scratch(cpu::attention_workspace(q, k)));
    cpu::attention_backward(q, k, v, out, lse, dout, true, d.scale, dq, dk, dv,
                            Scratch(cpu::attention_backward_workspace(q, k)));
  }
};

TEST(CudnnAttention, ForwardAndBackward) {
  SHEAF_NEEDS_GPU();
  for (DType dtype : {kBF16, kF16})
    for (const Case& c : kCases) {
      const Data d(c, dtype);
      const Expected want(d);
      const OnGpu q(d.q), k(d.k), v(d.v), out(d.out), lse(d.lse), dout(d.dout), dq(d.dq), dk(d.dk),
          dv(d.dv);
      const Attention forward{.q = q, .k = k, .v = v, .out = out, .lse = lse, .scale = d.scale};
      const std::string why = cuda::cudnn::refusal(forward);
      if (!why.empty()) GTEST_SKIP() << "not run: cuDNN refuses on this GPU: " << why;
      const auto run = [](const Attention& a) {
        cuda::cudnn::attention(OnGpu::stream(), a, GpuScratch(cuda::cudnn::attention_workspace(a)));
      };
      run(forward);
      // bf16 rounds probabilities, outputs and inputs of sums.
      const double bound = 4 * epsilon(dtype);
      const Array first = out.back();
      EXPECT_LT(scaled_error(first, values(want.out)), bound) << name(dtype) << c.heads;
      EXPECT_LT(scaled_error(lse.back(), values(want.lse)), 1e-5) << name(dtype) << c.heads;
      run(forward);
      EXPECT_TRUE(same_bits(out.back(), first));

      for (bool deterministic : {true, false}) {
        Attention backward = forward;
        backward.dout = dout, backward.dq = dq, backward.dk = dk, backward.dv = dv;
        backward.deterministic = deterministic;
        ASSERT_EQ(cuda::cudnn::refusal(backward), "");
        run(backward);
        const Array got_dq = dq.back(), got_dk = dk.back(), got_dv = dv.back();
        EXPECT_LT(scaled_error(got_dq, values(want.dq)), 2 * bound) << name(dtype) << c.heads;
        EXPECT_LT(scaled_error(got_dk, values(want.dk)), 2 * bound) << name(dtype) << c.heads;
        EXPECT_LT(scaled_error(got_dv, values(want.dv)), 2 * bound) << name(dtype) << c.heads;
        EXPECT_TRUE(gaps_kept(d.dq, got_dq) && gaps_kept(d.dk, got_dk) && gaps_kept(d.dv, got_dv));
        if (!deterministic) continue;
        run(backward);
        EXPECT_TRUE(same_bits(dq.back(), got_dq) && same_bits(dk.back(), got_dk) &&
                    same_bits(dv.back(), got_dv));
      }
    }
}

TEST(CudnnAttention, RefusesWhatItWasNotTriedFor) {
  if constexpr (!kHasCuda) {
    GTEST_SKIP() << "not run: built without CUDA";
  } else {
    const Data d({2, 128, 4, 2, 64}, kBF16);
    const Attention good{.q = d.q, .k = d.k, .v = d.v, .out = d.out, .lse = d.lse};
    using cuda::cudnn::layout_refusal;
    EXPECT_EQ(layout_refusal(good), "");
    const auto refuses = [&](const char* word, auto change) {
      Attention a = good;
      change(a);
      EXPECT_NE(layout_refusal(a).find(word), std::string::npos)
          << word << ": " << layout_refusal(a);
    };
    refuses("not f32", [](Attention& a) { a.q.dtype = kF32; });
    refuses("one type", [](Attention& a) { a.v.dtype = kF16; });
    refuses("causal", [](Attention& a) { a.causal = false; });
    refuses("last dense", [](Attention& a) { a.k.strides[3] = 2; });
    refuses("last dense", [](Attention& a) { a.k.strides[1] += 4; });
    refuses("last dense", [](Attention& a) { a.k.strides[2] = 0; });
    refuses("last dense", [](Attention& a) { a.k.data = a.k.as<char>() + 2; });
    refuses("one type", [](Attention& a) { a.dout = Array(kBF16, {2, 128, 4, 64}).view(); });
    refuses("fit together", [](Attention& a) { a.k.shape[2] = a.v.shape[2] = 3; });
    refuses("fit together", [](Attention& a) { a.v.shape[1] = 64; });
    refuses("as many keys", [](Attention& a) { a.k.shape[1] = a.v.shape[1] = 64; });
    refuses("nothing",
            [](Attention& a) { a.q.shape[0] = a.k.shape[0] = a.v.shape[0] = a.out.shape[0] = 0; });
    refuses("not for 96",
            [](Attention& a) { a.q.shape[1] = a.k.shape[1] = a.v.shape[1] = a.out.shape[1] = 96; });
    refuses("not of 60",
            [](Attention& a) { a.q.shape[3] = a.k.shape[3] = a.v.shape[3] = a.out.shape[3] = 60; });
    refuses("lse", [](Attention& a) { a.lse.dtype = kF64; });
    refuses("lse", [](Attention& a) { a.lse.strides[2] = 2; });
    Attention backward = good;
    backward.dout = d.dout, backward.dq = d.dq, backward.dk = d.dk, backward.dv = d.dv;
    EXPECT_EQ(layout_refusal(backward), "");
    backward.dk.shape[2] = 4;
    EXPECT_NE(layout_refusal(backward), "");
  }
}

}  // namespace
}  // namespace sheaf::kernels
