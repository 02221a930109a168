// `sheaf bench --quick` on a GPU: every suite with lines for one measures, and names what it measured. The figures themselves are not
// tested.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/needs_gpu.h"
#include "sheaf/tests/tools/bench_run.h"
#include "sheaf/tests/tools/sheaf_process.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf {
namespace {

using testing::BenchRun;
using ::testing::HasSubstr;
using testing::Outcome;
using testing::run_sheaf;
using testing::work;

BenchRun on_gpu(const std::string& suite, const std::string& filter, std::vector<std::string> more = {}) {
  more.insert(more.end(), {"--device", "cuda", "--samples", "3"});
  const BenchRun run = testing::run_bench(suite, filter, more);
  const Json& gpu = run.machine.at("gpu");
  EXPECT_FALSE(gpu.at("name").as_string().empty());
  EXPECT_GT(gpu.at("memory").as_double(), 0);
  EXPECT_GT(gpu.at("gflops_bf16").as_double(), 0);
  EXPECT_GT(gpu.at("copy_gbs").as_double(), 0);
  EXPECT_EQ(run.machine.at("fma_gflops").as_double(), 0) << "the CPU was not asked";
  EXPECT_THAT(run.markdown, HasSubstr(gpu.at("name").as_string()));
  return run;
}

TEST(BenchOnGpu, Gemm) {
  SHEAF_NEEDS_GPU();
  const BenchRun run = on_gpu("gemm", "-bf16-8192x4096x6144");
  EXPECT_EQ(run.lines.size(), 3u);
  for (const auto& [name, line] : run.lines) {
    EXPECT_NEAR(work(line), 2.0 * 1024 * 512 * 768, 1e3) << name;
    EXPECT_GT(line.at("of_peak").as_double(), 0) << name;
  }
  const BenchRun f32 = on_gpu("gemm", "forward-f32-16384x768x768");
  EXPECT_GT(f32.machine.at("gpu").at("gflops_f32").as_double(), 0);
  EXPECT_EQ(on_gpu("gemm", "head-and-loss").lines.size(), 4u);
  const BenchRun fp8 = on_gpu("gemm", "-fp8-8192x4096x6144");
  EXPECT_EQ(fp8.lines.size(), 3u);
  for (const auto& [name, line] : fp8.lines) EXPECT_EQ(line.at("peer").as_string(), "bf16") << name;
}

TEST(BenchOnGpu, Kernels) {
  SHEAF_NEEDS_GPU();
  const BenchRun run = on_gpu("kernels", "rms-norm");
  ASSERT_EQ(run.lines.size(), 4u);
  EXPECT_NEAR(work(run.lines.at("rms-norm-backward-bf16")), 3.0 * 64 * 768 * 2, 1);
  EXPECT_EQ(on_gpu("kernels", "adamw").lines.size(), 2u);
  EXPECT_EQ(on_gpu("kernels", "bias-gradient").lines.size(), 2u);
}

TEST(BenchOnGpu, Attention) {
  SHEAF_NEEDS_GPU();
  const BenchRun run = on_gpu("attention", "bf16-B1-T8192-H32-G8-D128");
  ASSERT_EQ(run.lines.size(), 2u);
  const double product = 8.0 * 16 * 16 * 128;  // eight query heads, 16 tokens, half of the square
  EXPECT_NEAR(work(run.lines.at("forward-bf16-B1-T8192-H32-G8-D128")), 2 * product, 1);
  EXPECT_NEAR(work(run.lines.at("backward-bf16-B1-T8192-H32-G8-D128")), 5 * product, 1);
}

TEST(BenchOnGpu, LinearAttention) {
  SHEAF_NEEDS_GPU();
  EXPECT_EQ(on_gpu("linear-attention", "bf16-B1-T4096").lines.size(), 2u);
}

TEST(BenchOnGpu, Step) {
  SHEAF_NEEDS_GPU();
  const ScratchFolder folder;
  BenchRun run = on_gpu("step", "", {"--traces", folder / ""});
  ASSERT_EQ(run.lines.size(), 8u);
  for (const auto& [name, peer] : {std::pair{"gpt2-124m-bf16-4x1024-graph", "the step without a graph"},
                                   {"gpt2-124m-bf16-4x1024-program", "the eager step"}}) {
    const Json line = run.lines.at(name);
    run.lines.erase(name);
    ASSERT_FALSE(line.find("missing")) << line.at("missing").as_string();
    EXPECT_EQ(line.at("peer").as_string(), peer);
    EXPECT_GT(line.at("more").at("host ms").as_double(), 0);
  }
  for (const auto& [name, line] : run.lines) {
    SCOPED_TRACE(name);
    ASSERT_FALSE(line.find("missing")) << line.at("missing").as_string();
    const Json& more = line.at("more");
    const double seconds = line.at("value").as_double();
    EXPECT_NEAR(more.at("tokens/s").as_double(), 8 * 16 / seconds, 1e-6 / seconds);
    EXPECT_EQ(line.at("note").as_string(), "1 x 8 x 16 tokens");
    const models::TrainConfig config = bench::training_config(name, bench::tiny_model());
    const double causal = models::flops_per_step(config),
                 full = models::flops_per_step(config, models::CountAttention::full);
    EXPECT_NEAR(more.at("TFLOP/s").as_double() * 1e12 * seconds, causal, 1);
    EXPECT_NEAR(more.at("MFU % with full attention").as_double() / more.at("MFU %").as_double(),
                full / causal, 1e-9);
    EXPECT_NEAR(more.at("MFU %").as_double() / 100, line.at("ratio").as_double(), 1e-9);
    EXPECT_EQ(more.at("GiB live").as_double(), more.at("predicted").as_double());
    EXPECT_GE(more.at("reserved").as_double(), more.at("GiB live").as_double());
    EXPECT_NEAR(more.at("% of the roofline").as_double() / 100,
                more.at("roofline s").as_double() / seconds, 1e-9);
    EXPECT_GT(more.at("attention TFLOP/s").as_double(), 0);
    EXPECT_TRUE(std::filesystem::exists(folder / ("step_" + name + ".trace.json")));
  }
}

TEST(BenchOnGpu, MemoryAndItsPlan) {
  SHEAF_NEEDS_GPU();
  const BenchRun run = on_gpu("memory", "gpt2-124m");
  EXPECT_EQ(run.lines.size(), 6u);
  for (const auto& [name, line] : run.lines)
    EXPECT_EQ(line.at("more").at("of plan").as_double(), 1) << name;
}

TEST(BenchOnGpu, RanksOnLinks) {
  SHEAF_NEEDS_GPU();
  const BenchRun run = on_gpu("fsdp", "-2-50GB/s");
  ASSERT_EQ(run.lines.size(), 2u);  // one with tensor parallelism
  for (const auto& [name, line] : run.lines) {
    ASSERT_FALSE(line.find("missing")) << line.at("missing").as_string();
    EXPECT_EQ(line.at("peer").as_string(), "links without a limit");
    EXPECT_TRUE(line.at("more").find("without prefetch"));
  }
}

TEST(BenchOnGpu, CommunicatorsAndAllocator) {
  SHEAF_NEEDS_GPU();
  const BenchRun comm = on_gpu("comm", "-64KiB");
  EXPECT_EQ(comm.lines.size(), 6u);
  for (const auto& [name, line] : comm.lines) {  // there is no NCCL where the GPU is emulated
    if (name.starts_with("local")) {
      EXPECT_FALSE(line.find("missing")) << name;
    }
  }
  const BenchRun allocator = on_gpu("allocator", "");
  EXPECT_EQ(allocator.lines.size(), 2u);
  EXPECT_EQ(on_gpu("hessian", "gpt2-124m").lines.size(), 1u);
  EXPECT_EQ(on_gpu("generate", "-f32-8x").lines.size(), 1u);
  for (const auto& [name, line] : allocator.lines) {
    EXPECT_GT(line.at("more").at("calls a step").as_double(), 100) << name;
    EXPECT_GE(line.at("more").at("reserved/live").as_double(), 1) << name;
  }
}

TEST(BenchOnGpu, SuitesOfTheCpuSaySo) {
  SHEAF_NEEDS_GPU();
  const Outcome r = run_sheaf({"bench", "checkpoint", "--device", "cuda", "--quick"});
  EXPECT_EQ(r.code, 64);
  EXPECT_THAT(r.err,
              HasSubstr("[bench] suite 'checkpoint' measures the CPU: --device cpu runs it"));
}

TEST(BenchOnGpu, WithoutOneItSaysSo) {
  if constexpr (kernels::kHasCuda)
    if (kernels::cuda::device_count() > 0) return;
  const Outcome r = run_sheaf({"bench", "gemm", "--device", "cuda", "--quick"});
  EXPECT_EQ(r.code, 64);
  EXPECT_THAT(r.err, HasSubstr("[device] --device=cuda, but "));
}

// By the plan alone: no GPU is needed.
TEST(BenchFit, MicroBatchesAndThenLayersShrinkToTheMemory) {
  if constexpr (!kernels::kHasCuda) GTEST_SKIP() << "not run: built without CUDA";
  constexpr int64_t kGiB = int64_t{1} << 30;
  const auto fit = [](const char* name, int64_t bytes) {
    const bench::Fitted f = bench::fit_to_gpu(bench::training_config(name), bytes);
    EXPECT_LE(f.planned_peak, bytes) << name;
    return f;
  };
  const bench::Fitted roomy = fit("gpt2-124m-bf16-512x1024", 128 * kGiB),
                      tight = fit("gpt2-124m-bf16-512x1024", 12 * kGiB);
  EXPECT_EQ(roomy.config.train.micro_batches, 8);  // of 64 sequences: 65,536 tokens
  EXPECT_GT(tight.config.train.micro_batches, 8);
  EXPECT_EQ(tight.config.model.layers, 12);
  const bench::Fitted llama = fit("llama3-8b-bf16-4x8192", 64 * kGiB);
  EXPECT_EQ(llama.config.train.micro_batches, 4);
  EXPECT_LT(llama.config.model.layers, 32);
  EXPECT_GE(llama.config.model.layers, 6);
  EXPECT_EQ(llama.layers, 32);
  EXPECT_EQ(fit("llama3-8b-8layers-bf16-4x8192", 120 * kGiB).config.model.layers, 8);
  EXPECT_THROW(bench::fit_to_gpu(bench::training_config("llama3-8b-bf16-4x8192"), kGiB),
               OutOfMemory);
}

}  // namespace
}  // namespace sheaf
