#include "sheaf/kernels/experts.h"

#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf::kernels {
namespace {

using namespace sheaf::testing;

TEST(CudaExperts, TopK) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (int64_t experts : {1, 8, 33, 128}) {
      const int64_t k = std::min<int64_t>(experts, 8);
      Array x = Array::random(d, {7, 5, experts}, 1);
      for (int64_t i = 0; i < x.view().numel(); i += 3) x.set(i, i % 2 ? NAN : 0.5);  // ties
      const Array want(kI64, {7, 5, k}), out(kI64, {7, 5, k});
      const OnGpu gx(x), gout(out);
      cuda::top_k(OnGpu::stream(), gx, gout);
      cpu::top_k(x, want);
      EXPECT_TRUE(same_bits(gout.back(), want)) << name(d) << experts;
    }
}

TEST(CudaExperts, RoutesInParts) {
  SHEAF_NEEDS_GPU();
  for (const auto& [tokens, experts, parts, groups, places, room] :
       {std::tuple{67, 6, 1, 1, 67, 201}, {67, 6, 1, 4, 5, 30}, {67, 6, 4, 1, 67, 134}, {67, 300, 2, 3, 9, 69}, {67, 300, 7, 1, 20, 201},
        {67, 6, 3, 2, 34, 20}, {500, 6, 2, 1, 500, 700}, {1500, 5, 1, 2, 90, 400}, {2100, 3, 3, 1, 1999, 1999}}) {
    const int64_t sequences = 3, k = 3;
    Array choices(kI64, {sequences, tokens, k});
    choices.fill([&, n = experts](int64_t i) { return static_cast<double>((i * i / 3 + i) % 311 % n); });
    Array slots(kI32, {sequences, tokens, k}), sources(kI32, {parts, sequences, groups, room}), counts(kI32, {experts, sequences, groups});
    for (Array* x : {&slots, &sources, &counts}) x->fill([](int64_t) { return 5; });  // previous contents are -1 elsewhere
    const OnGpu gchoices(choices), gslots(slots), gsources(sources), gcounts(counts);
    cuda::route(OnGpu::stream(), gchoices, places, gslots, gsources, gcounts);
    cpu::route(choices, places, slots, sources, counts);
    EXPECT_TRUE(same_bits(gcounts.back(), counts)) << tokens << ' ' << experts << ' ' << parts << ' ' << places;
    EXPECT_TRUE(same_bits(gslots.back(), slots)) << tokens << ' ' << experts << ' ' << parts << ' ' << places;
    EXPECT_TRUE(same_bits(gsources.back(), sources)) << tokens << ' ' << experts << ' ' << parts << ' ' << places;
  }
}

// Rows of one expert in several groups, none of some, and not all in use; widths of whole packs and others; weights as they are and
// transposed; more experts than a block has threads.
TEST(CudaExperts, ProductsOfParts) {
  SHEAF_NEEDS_GPU();
  struct Case { int64_t experts, parts, groups, room, in, out; };
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const auto& [experts, parts, groups, room, in, out] :
         {Case{3, 1, 2, 150, 40, 136}, Case{5, 2, 3, 41, 24, 48}, Case{4, 3, 1, 70, 37, 19}, Case{270, 1, 1, 300, 16, 8},
          Case{2, 1, 2, 400, 232, 264}, Case{2, 1, 2, 400, 201, 131}, Case{3, 3, 2, 60, 40, 48}}) {  // last: mostly empty experts
      Array counts(kI32, {experts, groups});
      std::vector<int64_t> begins(static_cast<size_t>(experts * groups)), used(static_cast<size_t>(parts * groups));
      const ExpertParts p{experts, parts};
      for (int64_t e = 0; e < experts; ++e)
        for (int64_t j = 0; j < groups; ++j) {
          int64_t& taken = used[static_cast<size_t>(p.part_of(e) * groups + j)];
          const int64_t wants = (e * groups + j) % 4 == 3 ? 0 : experts == 2 ? 140 + 57 * e : (e * 31 + j * 17) % 70,
                        count = std::min(wants, room - 3 - taken);
          counts.set(e * groups + j, static_cast<double>(count));
          taken += count;
        }
      Array x = Array::random(d, {parts, groups, room, in}, 1), dy = Array::random(d, {parts, groups, room, out}, 2);
      for (Array* rows : {&x, &dy}) {
        const int64_t cols = rows->view().shape.back();
        for (int64_t i = 0; i < rows->view().numel(); ++i)
          if (i / cols % room >= used[static_cast<size_t>(i / cols / room)]) rows->set(i, 0);
      }
      for (const bool turned : {false, true})
        for (const bool has_bias : {false, true}) {
          const Array weight = Array::random(d, {experts, out, in}, 3, 1, turned ? Shape{out * in, 1, out} : Shape{}),
                      bias = Array::random(d, {experts, out}, 4), y(d, {parts, groups, room, out});
          const OnGpu gx(x), gweight(weight), gbias(bias), gcounts(counts), gy(y);
          const View b = has_bias ? bias.view() : View{}, gb = has_bias ? gbias.view() : View{};
          {
            const GpuScratch scratch(cuda::expert_linear_workspace(without_data(gx), without_data(gweight), without_data(gb), without_data(gcounts),
                                                                   gy, {.mostly_empty = parts == experts}));
            cuda::expert_linear(OnGpu::stream(), gx, gweight, gb, gcounts, gy, scratch, {.mostly_empty = parts == experts});
            cuda::synchronize(OnGpu::stream());
          }
          cpu::expert_linear(x, weight, b, counts, y, Scratch(cpu::expert_linear_workspace(x, weight, b, counts, y)));
          EXPECT_LT(scaled_error(gy.back(), values(y)), 20 * epsilon(d)) << name(d) << experts << turned << has_bias;
        }
      for (const DType sums : {d, d == kF64 ? kF64 : kF32}) {
        const Array dweight(sums, {experts, out, in});
        const OnGpu gx(x), gdy(dy), gcounts(counts), gdweight(dweight);
        {
          const GpuScratch scratch(
              cuda::expert_weight_gradient_workspace(without_data(gdy), without_data(gx), without_data(gcounts), gdweight, parts == experts));
          cuda::expert_weight_gradient(OnGpu::stream(), gdy, gx, gcounts, gdweight, scratch, parts == experts);
          cuda::synchronize(OnGpu::stream());
        }
        cpu::expert_weight_gradient(dy, x, counts, dweight, Scratch(cpu::expert_weight_gradient_workspace(dy, x, counts, dweight)));
        EXPECT_LT(scaled_error(gdweight.back(), values(dweight)), 40 * epsilon(sums)) << name(d) << experts;
        const Array dbias(sums, {experts, out});
        const OnGpu gdbias(dbias);
        {
          const GpuScratch scratch(cuda::expert_bias_gradient_workspace(without_data(gdy), without_data(gcounts), gdbias));
          cuda::expert_bias_gradient(OnGpu::stream(), gdy, gcounts, gdbias, scratch);
          cuda::synchronize(OnGpu::stream());
        }
        cpu::expert_bias_gradient(dy, counts, dbias);
        EXPECT_LT(scaled_error(gdbias.back(), values(dbias)), 40 * epsilon(sums)) << name(d) << experts;
      }
    }
}

// Rows that are not contiguous, and counts larger than the number of rows: rows that do not exist are not computed, as on the CPU.
TEST(CudaExperts, ProductsOfPartsOfAnyStridesAndCounts) {
  SHEAF_NEEDS_GPU();
  const int64_t experts = 3, groups = 2, room = 40, in = 24, out = 40;
  const Array counts = Array::of(kI32, {experts, groups}, {30, 0, 500, 20, 7, 1 << 30});
  for (DType d : {kF32, kBF16}) {
    const Array x = Array::random(d, {1, groups, room, in}, 1, 1, {5000, 2000, in + 8, 1}),
                dy = Array::random(d, {1, groups, room, out}, 2, 1, {9000, 4000, out + 8, 1}), weight = Array::random(d, {experts, out, in}, 3),
                y(d, {1, groups, room, out}), dweight(kF32, {experts, out, in}), dbias(kF32, {experts, out});
    const OnGpu gx(x), gdy(dy), gweight(weight), gcounts(counts), gy(y), gdweight(dweight), gdbias(dbias);
    cuda::expert_linear(OnGpu::stream(), gx, gweight, View{}, gcounts, gy,
                        GpuScratch(cuda::expert_linear_workspace(without_data(gx), without_data(gweight), View{}, without_data(gcounts), gy)));
    cuda::synchronize(OnGpu::stream());
    cuda::expert_weight_gradient(
        OnGpu::stream(), gdy, gx, gcounts, gdweight,
        GpuScratch(cuda::expert_weight_gradient_workspace(without_data(gdy), without_data(gx), without_data(gcounts), gdweight)));
    cuda::synchronize(OnGpu::stream());
    cuda::expert_bias_gradient(OnGpu::stream(), gdy, gcounts, gdbias,
                               GpuScratch(cuda::expert_bias_gradient_workspace(without_data(gdy), without_data(gcounts), gdbias)));
    cuda::synchronize(OnGpu::stream());
    cpu::expert_linear(x, weight, View{}, counts, y, Scratch(cpu::expert_linear_workspace(x, weight, View{}, counts, y)));
    cpu::expert_weight_gradient(dy, x, counts, dweight, Scratch(cpu::expert_weight_gradient_workspace(dy, x, counts, dweight)));
    cpu::expert_bias_gradient(dy, counts, dbias);
    EXPECT_LT(scaled_error(gy.back(), values(y)), 20 * epsilon(d)) << name(d);
    EXPECT_LT(scaled_error(gdweight.back(), values(dweight)), 40 * epsilon(kF32)) << name(d);
    EXPECT_LT(scaled_error(gdbias.back(), values(dbias)), 40 * epsilon(kF32)) << name(d);
  }
}

TEST(CudaExperts, RoutesAndRows) {
  SHEAF_NEEDS_GPU();
  for (const auto& [tokens, groups, places] : {std::tuple{67, 1, 9}, {67, 1, 67}, {67, 4, 5}, {3, 5, 2}}) {
    const int64_t sequences = 3, k = 3, experts = 6;
    Array choices(kI64, {sequences, tokens, k});
    choices.fill([&](int64_t i) { return static_cast<double>((i * i / 3 + i) % 11 % experts); });
    const Array slots(kI32, {sequences, tokens, k}), sources(kI32, {experts, sequences, groups, places}),
        counts(kI32, {experts, sequences, groups});
    const OnGpu gchoices(choices), gslots(slots), gsources(sources), gcounts(counts);
    cuda::route(OnGpu::stream(), gchoices, places, gslots, gsources, gcounts);
    cpu::route(choices, places, slots, sources, counts);
    EXPECT_TRUE(same_bits(gslots.back(), slots));
    EXPECT_TRUE(same_bits(gsources.back(), sources));
    EXPECT_TRUE(same_bits(gcounts.back(), counts));
    for (DType d : {kF32, kF64, kBF16, kF16})
      for (int64_t width : {1, 16, 37, 264}) {
        const DType wide = d == kF64 ? kF64 : kF32;
        // Rows of one matrix inside a wider one.
        const Shape pitch{tokens * (width + 3), width + 3, 1};
        const Array x = Array::random(d, {sequences, tokens, width}, 1, 1, pitch), w = Array::random(wide, {sequences, tokens, k}, 2),
                    rows(d, {experts, sequences, groups, places, width}), y(d, {sequences, tokens, width}, pitch),
                    dots(wide, {sequences, tokens, k});
        const OnGpu gx(x), gw(w), grows(rows), gy(y), gdots(dots);
        for (const bool weighted : {false, true}) {
          cuda::to_experts(OnGpu::stream(), gx, weighted ? gw.view() : View{}, gslots, gsources, grows);
          cpu::to_experts(x, weighted ? w.view() : View{}, slots, sources, rows);
          EXPECT_TRUE(same_bits(grows.back(), rows)) << name(d) << width;
          cuda::from_experts(OnGpu::stream(), grows, weighted ? gw.view() : View{}, gslots, gy);
          cpu::from_experts(rows, weighted ? w.view() : View{}, slots, y);
          EXPECT_LT(scaled_error(gy.back(), values(y)), 4 * epsilon(d)) << name(d) << width;
          EXPECT_TRUE(gaps_kept(y, gy.back()));
        }
        cuda::choice_dots(OnGpu::stream(), grows, gx, gslots, gdots);
        cpu::choice_dots(rows, x, slots, dots);
        EXPECT_LT(scaled_error(gdots.back(), values(dots)), 40 * epsilon(wide)) << name(d) << width;
        // Of the rows of only some parts.
        const int64_t first = 2, some = 3, part = sequences * groups * places * width * static_cast<int64_t>(size_of(d));
        const auto of_some = [&](const View& v) { return View::dense(v.as<char>() + first * part, d, {some, sequences, groups, places, width}); };
        cuda::from_experts(OnGpu::stream(), of_some(grows.view()), gw.view(), gslots, gy, first);
        cpu::from_experts(of_some(rows.view()), w.view(), slots, y, first);
        EXPECT_LT(scaled_error(gy.back(), values(y)), 4 * epsilon(d)) << name(d) << width;
        cuda::choice_dots(OnGpu::stream(), of_some(grows.view()), gx, gslots, gdots, first);
        cpu::choice_dots(of_some(rows.view()), x, slots, dots, first);
        EXPECT_LT(scaled_error(gdots.back(), values(dots)), 40 * epsilon(wide)) << name(d) << width;
      }
  }
}

// An invalid expert index cannot be reported: the choice is dropped.
TEST(CudaExperts, ChoicesThatAreNoExpert) {
  SHEAF_NEEDS_GPU();
  const Array choices = Array::of(kI64, {1, 4, 1}, {0, 5, -1, 1}), slots(kI32, {1, 4, 1}), sources(kI32, {2, 1, 1, 4}),
              counts(kI32, {2, 1, 1});
  const OnGpu gchoices(choices), gslots(slots), gsources(sources), gcounts(counts);
  cuda::route(OnGpu::stream(), gchoices, 4, gslots, gsources, gcounts);
  EXPECT_EQ(values(gslots.back()), (std::vector<double>{0, -1, -1, 4}));
  EXPECT_EQ(values(gcounts.back()), (std::vector<double>{1, 1}));
}

TEST(CudaExperts, Products) {
  SHEAF_NEEDS_GPU();
  for (DType d : {kF32, kF64, kBF16, kF16})
    for (const bool cut : {false, true}) {  // groups of a rank, which are not contiguous
      const int64_t experts = 3, groups = 2, places = 21, in = 24, out = 40;
      const auto strides = [&](int64_t cols) {
        const int64_t step = places * cols;
        return Shape{(cut ? groups + 2 : groups) * step, step, cols, 1};
      };
      const Array counts(kI32, {experts, groups});
      const_cast<Array&>(counts).fill([&](int64_t i) { return static_cast<double>(i * 5 % (places + 1)); });
      Array x = Array::random(d, {experts, groups, places, in}, 1, 1, strides(in)),
            dy = Array::random(d, {experts, groups, places, out}, 2, 1, strides(out));
      for (Array* rows : {&x, &dy}) {
        const int64_t cols = rows->view().shape.back();
        for (int64_t i = 0; i < rows->view().numel(); ++i)
          if (i / cols % places >= static_cast<int64_t>(counts.at(i / cols / places))) rows->set(i, 0);
      }
      const Array weight = Array::random(d, {experts, out, in}, 3), y(d, {experts, groups, places, out}),
                  dweight(d == kF64 ? kF64 : kF32, {experts, out, in});
      const OnGpu gx(x), gdy(dy), gweight(weight), gcounts(counts), gy(y), gdweight(dweight);
      {
        const GpuScratch scratch(cuda::expert_linear_workspace(without_data(gx), without_data(gweight), View{}, without_data(gcounts), gy));
        cuda::expert_linear(OnGpu::stream(), gx, gweight, View{}, gcounts, gy, scratch);
        cuda::synchronize(OnGpu::stream());
      }
      {
        const GpuScratch scratch(
            cuda::expert_weight_gradient_workspace(without_data(gdy), without_data(gx), without_data(gcounts), gdweight));
        cuda::expert_weight_gradient(OnGpu::stream(), gdy, gx, gcounts, gdweight, scratch);
        cuda::synchronize(OnGpu::stream());
      }
      cpu::expert_linear(x, weight, View{}, counts, y, Scratch(cpu::expert_linear_workspace(x, weight, View{}, counts, y)));
      cpu::expert_weight_gradient(dy, x, counts, dweight, Scratch(cpu::expert_weight_gradient_workspace(dy, x, counts, dweight)));
      EXPECT_LT(scaled_error(gy.back(), values(y)), 20 * epsilon(d)) << name(d) << cut;
      EXPECT_LT(scaled_error(gdweight.back(), values(dweight)), 40 * epsilon(kF32)) << name(d) << cut;
    }
}

}  // namespace
}  // namespace sheaf::kernels
