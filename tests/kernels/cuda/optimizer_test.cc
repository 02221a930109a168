#include "sheaf/kernels/optimizer.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

// The same bits as the CPU's kernels on threads that flush subnormal numbers, as all threads of a rank do. In a build for a real GPU this
// also shows that code compiled by nvcc links into our programs.
namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

/// A shard of n elements: padding at its beginning, in between and at its end, segments that begin and end inside vectors, some shorter
/// than one, an empty one, and one over several thread blocks.
Array segments_of(int64_t n) {
  std::vector<double> table;
  int64_t at = 1;
  const int64_t lengths[] = {2, 1, 5, 0, 1022, 1, 3, 4096, 64, 7};
  for (int s = 0; at < n - 2; ++s) {
    const int64_t end = std::min(at + (s < 40 ? lengths[s % 10] : n / 3), n - 2);
    table.insert(table.end(), {static_cast<double>(at), static_cast<double>(end), (s + 1) % 5 * 0.3, s % 3 * 0.7});
    at = end + (s % 4 == 1 ? 3 : 0);
  }
  return Array::of(kF64, {static_cast<int64_t>(table.size()) / 4, 4}, table);
}

Array positive(Array x) {
  for (int64_t i = 0; i < x.view().numel(); ++i) x.set(i, std::fabs(x.at(i)));
  return x;
}
View part(const View& x, int64_t first) {
  return View::dense(x.as<char>() + static_cast<size_t>(first) * size_of(x.dtype), x.dtype,
                     {x.numel() - first});
}

const double kAdamW[] = {0.01, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975, 0.7, 5};
const double kSgd[] = {0.01, 0.9, 0.1, 0.5, 5};
Array scalars_of(DType d, const double* values, int64_t count) {
  return Array::of(d, {count}, std::vector<double>(values, values + count));
}

constexpr int64_t kSizes[] = {0, 1, 5, 31, 1000, 4096, 20011};

TEST(CudaOptimizer, AdamWHasTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, at_rest] : {std::pair{kF32, kF32}, {kF32, kBF16}, {kF64, kF64}})
    for (DType grad : {kF32, kBF16, kF16, kF64})
      for (int64_t n : kSizes)
        with_threads(1, [&, d = d, at_rest = at_rest] {
          const auto state = [&](const Array& x) { return d == kF32 ? with_subnormals(x) : x; };
          const Array p = state(Array::random(d, {n}, 1)), g = grad == kF32 ? state(Array::random(grad, {n}, 2)) : Array::random(grad, {n}, 2),
                      m = state(Array::random(at_rest, {n}, 3, 0.1)),
                      v = state(positive(Array::random(at_rest, {n}, 4, 0.1))), segments = segments_of(n),
                      scalars = scalars_of(n % 2 ? kF64 : kF32, kAdamW, cpu::kAdamWScalars);
          const OnGpu gp(p), gg(g), gm(m), gv(v), gsegments(segments), gscalars(scalars);
          cuda::adamw(OnGpu::stream(), gp, gg, gm, gv, gsegments, gscalars);
          cpu::adamw(p, g, m, v, segments, scalars);
          EXPECT_TRUE(same_bits(gp.back(), p)) << name(at_rest) << name(grad) << n;
          EXPECT_TRUE(same_bits(gm.back(), m)) << name(at_rest) << name(grad) << n;
          EXPECT_TRUE(same_bits(gv.back(), v)) << name(at_rest) << name(grad) << n;
        });
}

TEST(CudaOptimizer, SgdHasTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const auto& [d, at_rest] : {std::pair{kF32, kF32}, {kF32, kBF16}, {kF64, kF64}})
    for (DType grad : {kF32, kBF16})
      for (int64_t n : kSizes)
        for (int variant = 0; variant < 3; ++variant)
          with_threads(1, [&, d = d, at_rest = at_rest] {
            const bool buffered = variant > 0, nesterov = variant == 2;
            const Array p = Array::random(d, {n}, 1), g = Array::random(grad, {n}, 2),
                        b = Array::random(at_rest, {n}, 3), segments = segments_of(n),
                        scalars = scalars_of(kF64, kSgd, cpu::kSgdScalars);
            const OnGpu gp(p), gg(g), gb(b), gsegments(segments), gscalars(scalars);
            cuda::sgd(OnGpu::stream(), gp, gg, buffered ? gb.view() : View{}, gsegments, gscalars,
                      nesterov);
            cpu::sgd(p, g, buffered ? b.view() : View{}, segments, scalars, nesterov);
            EXPECT_TRUE(same_bits(gp.back(), p)) << name(at_rest) << name(grad) << n << ' ' << variant;
            EXPECT_TRUE(same_bits(gb.back(), b)) << name(at_rest) << name(grad) << n << ' ' << variant;
          });
}

TEST(CudaOptimizer, AClipScaleTakesThePlaceOfItsElement) {
  SHEAF_NEEDS_GPU();
  const int64_t n = 5000;
  for (DType d : {kF32, kF64})
    with_threads(1, [&] {
      const Array p = Array::random(kF32, {n}, 1), g = Array::random(kF32, {n}, 2),
                  b = Array::random(kF32, {n}, 3), m = Array::random(kF32, {n}, 4),
                  v = positive(Array::random(kF32, {n}, 5)), segments = segments_of(n),
                  clip = Array::of(d, {}, {0.3});
      Array adamw = scalars_of(kF64, kAdamW, cpu::kAdamWScalars),
            sgd = scalars_of(kF64, kSgd, cpu::kSgdScalars);
      const OnGpu gp(p), gg(g), gb(b), gm(m), gv(v), gsegments(segments), gadamw(adamw), gsgd(sgd),
          gclip(clip);
      const Stream& s = OnGpu::stream();
      cuda::adamw(s, gp, gg, gm, gv, gsegments, gadamw, gclip);
      cuda::sgd(s, gp, gg, gb, gsegments, gsgd, false, gclip);
      adamw.set(cpu::kClipScale, clip.at(0)), sgd.set(cpu::kSgdClipScale, clip.at(0));
      cpu::adamw(p, g, m, v, segments, adamw);
      cpu::sgd(p, g, b, segments, sgd, false);
      EXPECT_TRUE(same_bits(gp.back(), p));
      EXPECT_TRUE(same_bits(gb.back(), b));
      EXPECT_TRUE(same_bits(gv.back(), v));
    });
}

TEST(CudaOptimizer, NothingIsDoneWhereInfinityWasFound) {
  SHEAF_NEEDS_GPU();
  const int64_t n = 5000;
  for (int found : {0, 1})
    with_threads(1, [&] {
      const Array p = Array::random(kF32, {n}, 1), g = Array::random(kF32, {n}, 2),
                  b = Array::random(kF32, {n}, 3), m = Array::random(kF32, {n}, 4),
                  v = positive(Array::random(kF32, {n}, 5)), segments = segments_of(n),
                  clip = Array::of(kF64, {}, {0.3}), flag = Array::of(kI32, {}, {double(found)}),
                  adamw = scalars_of(kF64, kAdamW, cpu::kAdamWScalars),
                  sgd = scalars_of(kF64, kSgd, cpu::kSgdScalars);
      const OnGpu gp(p), gg(g), gb(b), gm(m), gv(v), gsegments(segments), gadamw(adamw), gsgd(sgd),
          gclip(clip), gflag(flag);
      const Stream& s = OnGpu::stream();
      cuda::adamw(s, gp, gg, gm, gv, gsegments, gadamw, gclip, gflag);
      cuda::sgd(s, gp, gg, gb, gsegments, gsgd, false, gclip, gflag);
      if (!found) {
        cpu::adamw(p, g, m, v, segments, adamw, clip);
        cpu::sgd(p, g, b, segments, sgd, false, clip);
      }
      for (const auto& [gpu, cpu] : {std::pair{&gp, &p}, {&gb, &b}, {&gm, &m}, {&gv, &v}})
        EXPECT_TRUE(same_bits(gpu->back(), *cpu)) << found;
    });
}

TEST(CudaOptimizer, StepsAreCountedAsOnTheCpu) {
  SHEAF_NEEDS_GPU();
  const Array scalars = Array::random(kF64, {cpu::kAdamWScalars + 5}, 1),
              applied = Array::of(kI64, {}, {12});
  scalars.view().as<double>()[cpu::kBeta1] = 0.9, scalars.view().as<double>()[cpu::kBeta2] = 0.99;
  const Array out(kF64, {cpu::kAdamWScalars + 5});
  const OnGpu gscalars(scalars), gapplied(applied), gout(out);
  for (int step = 0; step < 40; ++step) {
    const Array flag = Array::of(kI32, {}, {step % 3 == 1 ? 1.0 : 0.0});
    const bool absent = step % 7 == 0;
    cpu::count_adamw(scalars, absent ? View{} : flag.view(), applied, out);
    const OnGpu gflag(flag);
    cuda::count_adamw(OnGpu::stream(), gscalars, absent ? View{} : gflag.view(), gapplied, gout);
    ASSERT_TRUE(same_bits(gapplied.back(), applied) && same_bits(gout.back(), out)) << step;
  }
}

TEST(CudaOptimizer, SignStepsHaveTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64})
    for (int64_t n : kSizes)
      for (int found : {-1, 0, 1}) {
        const Array p = Array::random(d, {n}, 1), flag = Array::of(kI32, {}, {double(found)});
        Array g = Array::random(d, {n}, 2);
        for (int64_t i = 0; i < n; i += 7) g.set(i, i % 2 ? 0.0 : NAN);
        const OnGpu gp(p), gg(g), gflag(flag);
        cuda::sign_step(OnGpu::stream(), gp, gg, 0.001, found < 0 ? View{} : gflag);
        cpu::sign_step(p, g, 0.001, found < 0 ? View{} : flag.view());
        EXPECT_TRUE(same_bits(gp.back(), p)) << name(d) << n << " " << found;
      }
}

TEST(CudaOptimizer, AShardThatIsNotAligned) {
  SHEAF_NEEDS_GPU();
  const int64_t n = 5000;
  for (const auto& [first, at_rest] : {std::pair{1, kF32}, {2, kF32}, {3, kF32}, {1, kBF16}, {2, kBF16}, {3, kBF16}})
    with_threads(1, [&, first = first, at_rest = at_rest] {
      const Array p = Array::random(kF32, {n}, 1), g = Array::random(kBF16, {n}, 2),
                  m = Array::random(at_rest, {n}, 3), v = positive(Array::random(at_rest, {n}, 4)),
                  segments = segments_of(n - first),
                  scalars = scalars_of(kF64, kAdamW, cpu::kAdamWScalars);
      const OnGpu gp(p), gg(g), gm(m), gv(v), gsegments(segments), gscalars(scalars);
      cuda::adamw(OnGpu::stream(), part(gp.view(), first), part(gg.view(), first),
                  part(gm.view(), first), part(gv.view(), first), gsegments, gscalars);
      cpu::adamw(part(p, first), part(g, first), part(m, first), part(v, first), segments, scalars);
      EXPECT_TRUE(same_bits(gp.back(), p)) << first;
      EXPECT_TRUE(same_bits(gm.back(), m)) << first;
      EXPECT_TRUE(same_bits(gv.back(), v)) << first;
    });
}

TEST(CudaOptimizer, SegmentsBeyondTheShardAreCutAndNoneIsNoStep) {
  SHEAF_NEEDS_GPU();
  const Array p = Array::random(kF32, {100}, 1), g = Array::random(kF32, {100}, 2),
              scalars = scalars_of(kF64, kSgd, cpu::kSgdScalars);
  const OnGpu gp(p), gg(g), gscalars(scalars);
  cuda::sgd(OnGpu::stream(), gp, gg, View{}, OnGpu(Array(kF64, {0, 4})), gscalars, false);
  EXPECT_TRUE(same_bits(gp.back(), p));
  cuda::sgd(OnGpu::stream(), gp, gg, View{}, OnGpu(Array::of(kF64, {1, 4}, {90, 1e6, 1, 1})), gscalars,
            false);
  cpu::sgd(p, g, View{}, Array::of(kF64, {1, 4}, {90, 100, 1, 1}), scalars, false);
  EXPECT_TRUE(same_bits(gp.back(), p));
}

TEST(CudaOptimizer, RefusesWhatTheHostCanSee) {
  SHEAF_NEEDS_GPU();
  const Array p(kF32, {10}), narrow(kBF16, {10}), scalars(kF64, {cpu::kSgdScalars}),
      segments(kF64, {1, 4});
  const Stream& s = OnGpu::stream();
  EXPECT_THROW(cuda::sgd(s, p, p, View{}, Array(kF64, {1, 3}), scalars, false), ShapeError);
  EXPECT_THROW(cuda::sgd(s, p, p, View{}, segments, Array(kF64, {3}), false), ShapeError);
  EXPECT_THROW(cuda::sgd(s, narrow, p, View{}, segments, scalars, false), DTypeError);
  EXPECT_THROW(cuda::sgd(s, p, p, Array(kF16, {10}), segments, scalars, false), DTypeError);
  const Array wide(kF64, {10}), of_adamw(kF64, {cpu::kAdamWScalars});
  EXPECT_THROW(cuda::sgd(s, wide, p, narrow, segments, scalars, false), DTypeError);
  EXPECT_THROW(cuda::adamw(s, p, p, narrow, p, segments, of_adamw), DTypeError);
  EXPECT_THROW(cuda::adamw(s, p, p, p, narrow, segments, of_adamw), DTypeError);
  EXPECT_THROW(cuda::sgd(s, p, Array(kF32, {9}), View{}, segments, scalars, false), ShapeError);
}

}  // namespace
}  // namespace sheaf::kernels
