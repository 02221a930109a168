// `sheaf bench --quick`: every suite measures something, and prints it in a table and in JSON that agree. The figures themselves are not
// tested.
#include "sheaf/tools/bench/bench.h"

#include <sys/stat.h>

#include <cmath>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/bench_run.h"
#include "sheaf/tests/tools/sheaf_process.h"
#include "sheaf/tools/bench/roofline.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::Outcome;
using testing::run_sheaf;
using testing::work;

using Words = std::vector<std::string>;

/// The lines of a quick run on the CPU, by name.
std::map<std::string, Json> bench(const std::string& suite, const std::string& filter,
                                  const Words& more = {}) {
  const testing::BenchRun run = testing::run_bench(suite, filter, more);
  EXPECT_GT(run.machine.at("fma_gflops").as_double(), 0);
  EXPECT_GT(run.machine.at("copy_gbs").as_double(), 0);
  EXPECT_FALSE(run.machine.find("gpu"));
  return run.lines;
}

TEST(Bench, Step) {
  const ScratchFolder folder;
  const auto lines = bench("step", "nanogpt", {"--samples", "5", "--threads", "1", "--traces", folder / ""});
  EXPECT_GT(File::open<DataError>(folder / "step_nanogpt-f32-12x64.trace.json").read_all().size(), 10'000u);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines.at("nanogpt-f32-12x64-program").at("peer").as_string(), "the eager step");
  const Json& line = lines.at("nanogpt-f32-12x64");
  EXPECT_EQ(line.at("samples_s").as_array().size(), 5u);
  const double seconds = line.at("value").as_double();
  EXPECT_NEAR(line.at("more").at("tokens/s").as_double(), 8 * 16 / seconds, 1e-6 / seconds);  // of a quick run
  EXPECT_NEAR(line.at("more").at("GFLOP/s").as_double() * seconds,
              line.at("more").at("GFLOP/step").as_double(), 1e-9);
}

// Whatever the size of the models that its lines are named after.
TEST(Bench, QuickIsQuick) {
  const Outcome r = run_sheaf({"bench", "step", "overlap", "--quick"});
  testing::expect_ok(r);
  EXPECT_LT(r.cpu_seconds, 60);
  EXPECT_THAT(r.out, HasSubstr("step/gpt2-124m-f32-1x1024 "));
  EXPECT_THAT(r.out, HasSubstr("overlap/mixture-f32-8x256-experts-1.25GB/s "));
}

TEST(Bench, Experts) {
  const auto lines = bench("experts", "f32-2-of-8-capacity");
  ASSERT_EQ(lines.size(), 1u);
  const Json& line = lines.at("f32-2-of-8-capacity-1.25");
  EXPECT_EQ(line.at("peer").as_string(), "one MLP of as much work");
  EXPECT_GT(line.at("ratio").as_double(), 0);
  EXPECT_GT(line.at("more").at("MiB of a step").as_double(), line.at("more").at("MiB of the peer's").as_double());
}

TEST(Bench, Hessian) {
  const auto lines = bench("hessian", "nanogpt");
  ASSERT_EQ(lines.size(), 1u);
  const Json& line = lines.at("nanogpt-f32-12x64");
  EXPECT_EQ(line.at("peer").as_string(), "a gradient");
  EXPECT_LT(line.at("ratio").as_double(), 1);
  EXPECT_GT(line.at("more").at("MiB live").as_double(), line.at("more").at("MiB live for a gradient").as_double());
}

TEST(Bench, Generate) {
  const auto lines = bench("generate", "f32");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines.at("gpt2-124m-f32-1x64+64").at("peer").as_string(), "a copy of the weights' bytes for each token");
  const Json& line = lines.at("gpt2-124m-f32-8x64+64");
  EXPECT_EQ(line.at("peer").as_string(), "one by one");
  EXPECT_GT(line.at("ratio").as_double(), 0);
  EXPECT_GT(line.at("more").at("tok/s").as_double(), 0);
}

TEST(Bench, Fuse) {
  const auto lines = bench("fuse", "f32");
  ASSERT_EQ(lines.size(), 2u);
  for (const auto& [name, line] : lines) {
    EXPECT_EQ(line.at("peer").as_string(), "op by op") << name;
    EXPECT_LE(line.at("more").at("MiB").as_double(), line.at("more").at("MiB op by op").as_double()) << name;
  }
}

TEST(Bench, Gemm) {
  const auto lines = bench("gemm", "f32-256x768x768");
  EXPECT_EQ(lines.size(), 3u);
  // A quick run takes an eighth of every size.
  for (const auto& [name, line] : lines) EXPECT_NEAR(work(line), 2.0 * 32 * 96 * 96, 1) << name;
  EXPECT_EQ(bench("gemm", "head-and-loss-f32-256").size(), 1u);
}

TEST(Bench, Kernels) {
  const auto lines = bench("kernels", "rms-norm");
  ASSERT_EQ(lines.size(), 4u);
  const double bytes = 64 * 768 * 4;  // of an operand of a quick run
  EXPECT_NEAR(work(lines.at("rms-norm-f32")), 2 * bytes, 1);
  EXPECT_NEAR(work(lines.at("rms-norm-backward-f32")), 3 * bytes, 1);
  EXPECT_NEAR(work(lines.at("rms-norm-bf16")), bytes, 1);
  const auto adamw = bench("kernels", "adamw");
  ASSERT_EQ(adamw.size(), 2u);
  EXPECT_NEAR(work(adamw.at("adamw-bf16-state")) / work(adamw.at("adamw")), 20.0 / 28, 1e-9);
}

TEST(Bench, Attention) {
  EXPECT_EQ(bench("attention", "f32-B4").size(), 2u);
  EXPECT_EQ(bench("attention", "narrow-values").size(), 4u);
  const auto lines = bench("attention", "f32-B1-T1024-H12-D64-of-100");
  ASSERT_EQ(lines.size(), 2u);
  for (const auto& [name, line] : lines) EXPECT_EQ(line.at("peer").as_string(), "one document") << name;
}

TEST(Bench, LinearAttention) {
  const auto lines = bench("linear-attention", "bf16-B1-T1024");
  ASSERT_EQ(lines.size(), 2u);
  for (const auto& [name, line] : lines) EXPECT_EQ(line.at("peer").as_string(), "attention") << name;
}

TEST(Bench, Tape) {
  const auto lines = bench("tape", "mul-meta");
  ASSERT_EQ(lines.size(), 2u);
  // A multiplication's gradient is one node per op; the seed is one more node among thousands.
  EXPECT_NEAR(lines.at("backward-mul-meta").at("more").at("nodes per op").as_double(), 1, 1e-3);
  // More than a function call, less than something left in a loop by mistake.
  for (const auto& [name, line] : lines) {
    EXPECT_GT(line.at("value").as_double(), 5) << name;
    EXPECT_LT(line.at("value").as_double(), 1e6) << name;
  }
}

TEST(Bench, Allocator) {
  const auto lines = bench("allocator", "nanogpt");
  ASSERT_EQ(lines.size(), 1u);
  const Json& more = lines.begin()->second.at("more");
  EXPECT_GT(more.at("calls a step").as_double(), 100);
#if !defined(SHEAF_ASAN) && !defined(SHEAF_TSAN)  // there memory comes from malloc
  EXPECT_GE(more.at("reserved/live").as_double(), 1);
  EXPECT_LT(more.at("reserved/live").as_double(), 1.5);  // the process's memory would show it, too
#endif
}

TEST(Bench, Comm) {
  EXPECT_EQ(bench("comm", "local-all-gather-2-64KiB").size(), 1u);
  const auto lines = bench("comm", "gloo-reduce-scatter-2-64KiB");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_GT(lines.begin()->second.at("more").at("raw Gloo").as_double(), 0);
}

TEST(Bench, Ranks) {
  EXPECT_EQ(bench("fsdp", "nanogpt-f32-12x64-full_shard-2").size(), 1u);
  const auto lines = bench("memory", "nanogpt-f32-12x64-full_shard-1");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NEAR(lines.begin()->second.at("more").at("of theory").as_double(), 1, 0.03);
  EXPECT_EQ(lines.begin()->second.at("more").at("of plan").as_double(), 1);
}

TEST(Bench, Hosts) {
  const auto lines = bench("hosts", "1.25GB/s");
  ASSERT_EQ(lines.size(), 17u);
  for (const auto& [name, line] : lines)  // full_shard's layers, if each is cut within a host: half of its traffic
    EXPECT_LT((name.ends_with("GB/s-reduce-bf16") || name.ends_with("GB/s-reduce-int8") ? 1.2
               : name.ends_with("-tensor") || name.ends_with("-kept") ? 1.9 : 2) * line.at("more").at("MB from the other host").as_double(),
              line.at("more").at("MB under full_shard").as_double())
        << name;
}

TEST(Bench, Pipeline) {
  const auto lines = bench("pipeline", "2-stages-of-2-runs-2-");
  ASSERT_EQ(lines.size(), 2u);
  for (const auto& [name, line] : lines)
    EXPECT_DOUBLE_EQ(line.at("more").at("ideal ratio").as_double(), name.ends_with("zero-bubble") ? 15.0 / 13 : 1.2) << name;
}

TEST(Bench, Init) {
  const auto lines = bench("init", "");
  ASSERT_EQ(lines.size(), 2u);
  for (const auto& [name, line] : lines) EXPECT_LT(line.at("value").as_double(), 200) << name;
}

TEST(Bench, Checkpoint) { EXPECT_EQ(bench("checkpoint", "").size(), 3u); }

TEST(Bench, BadInput) {
  const auto refused = [](const Words& words, int code, const std::string& part) {
    const Outcome r = run_sheaf(words);
    EXPECT_EQ(r.code, code) << r.err;
    EXPECT_EQ(testing::lines_of(r.err).size(), 1u) << r.err;
    EXPECT_THAT(r.err, HasSubstr(part));
    EXPECT_EQ(r.out, "");
  };
  refused({"bench", "gem"}, 64, "unknown suite 'gem'; known: step, experts, hessian, generate, fuse, gemm, kernels");
  refused({"bench", "gemm", "--filter", "nothing-like-it"}, 64, "no line's name contains");
  refused({"bench", "gemm", "--samples", "0"}, 64, "--samples");
  refused({"bench", "gemm", "--json", "/no/such/folder/b.json"}, 74, "/no/such/folder/b.json");
  refused({"bench", "gemm", "--markdown", "/tmp"}, 74, "'/tmp' is a folder");
  const ScratchFolder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  refused({"bench", "gemm", "--json", folder / "pipe"}, 74, "/pipe' is a device or a pipe");
  refused({"bench", "gemm", "--device", "gpu"}, 64, "[device] --device='gpu' is none of auto, cpu and cuda");
  refused({"bench", "step", "--traces", "/no/such/folder"}, 74, "/no/such/folder");
}

TEST(BenchFigures, RatesAndTimes) {
  EXPECT_DOUBLE_EQ(bench::figure(bench::Unit::gigaflops, 6e9, 2), 3);
  EXPECT_DOUBLE_EQ(bench::figure(bench::Unit::nanoseconds, 1000, 1e-6), 1);
  EXPECT_DOUBLE_EQ(bench::figure(bench::Unit::seconds, 1, 2), 2);
  EXPECT_DOUBLE_EQ(bench::quantile({4, 1, 3, 2}, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(bench::quantile({7}, 0.9), 7);
  bench::Line line;
  line.unit = bench::Unit::gigabytes_per_second;
  line.samples_s = {1, 2, 4};
  bench::set_figures(line, 4e9);
  EXPECT_DOUBLE_EQ(line.value, 2);  // of the rates 4, 2, 1
  EXPECT_LT(line.p10, line.p90);
}

TEST(BenchFigures, Soundness) {
  const bench::PeakReading best{.gflops = 100, .copy_gbs = 10};
  const auto sound = [&](double fma, double copy, bool by_memory, bench::Unit unit) {
    bench::Line line;
    line.unit = unit;
    line.worst = {fma, copy};
    line.by_memory = by_memory;
    return bench::is_sound(line, best);
  };
  using bench::Unit;
  EXPECT_TRUE(sound(90, 1, false, Unit::gigaflops));
  EXPECT_FALSE(sound(89, 10, false, Unit::gigaflops));
  EXPECT_FALSE(sound(100, 8.9, true, Unit::gigabytes_per_second));
  EXPECT_TRUE(sound(95, 9.1, true, Unit::gigabytes_per_second));
  EXPECT_TRUE(sound(1, 1, false, Unit::bytes));
  bench::Line missing;
  missing.missing = "no such thing";
  EXPECT_FALSE(bench::is_sound(missing, best));
}

TEST(BenchFigures, PeaksOfDataSheets) {
  EXPECT_DOUBLE_EQ(bench::datasheet_gflops("NVIDIA H200"), 989.4e3);
  EXPECT_DOUBLE_EQ(bench::datasheet_gflops("NVIDIA H100 80GB HBM3"), 989.4e3);
  for (const char* other : {"NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB",
                            "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-80GB", ""})
    EXPECT_EQ(bench::datasheet_gflops(other), 0) << other;
}

// 124M: 12 blocks of 12 · 768², a head of 50,257 · 768, 6 · 12 · 1024 · 768 for attention.
TEST(BenchFigures, OperationsOfAStep) {
  const double expected =
      1024 * (6.0 * (12 * 12 * 768.0 * 768 + 50257 * 768.0) + 6.0 * 12 * 1024 * 768);
  const models::TrainConfig gpt2 = bench::training_config("gpt2-124m-f32-1x1024");
  EXPECT_DOUBLE_EQ(models::flops_per_step(gpt2), expected);
  EXPECT_DOUBLE_EQ(models::flops_per_step(gpt2, models::CountAttention::full),
                   expected + 1024 * 6.0 * 12 * 1024 * 768);
}

// Llama 3 8B: 8,030,261,248 parameters, less the embedding, which is looked up, and the norms' weights.
TEST(BenchFigures, OperationsOfALlamaStep) {
  const double tokens = 4 * 8192.0,
               in_products = 8030261248.0 - 128256 * 4096.0 - (2 * 32 + 1) * 4096.0;
  EXPECT_DOUBLE_EQ(models::flops_per_step(bench::training_config("mixture-f32-8x256")),
                   models::flops_per_step(bench::training_config("llama-f32-8x256")) + 6.0 * 8 * 256 * 4 * 384 * 8)
      << "of the routers";
  models::TrainConfig mixture = bench::training_config("mixture-f32-8x256");
  const double routed = models::flops_per_step(mixture), each = 6.0 * 8 * 256 * 384;  // an element of each token
  mixture.model.shared_experts = 1;
  EXPECT_DOUBLE_EQ(models::flops_per_step(mixture), routed + each * 4 * 3 * 512) << "of experts for all tokens";
  mixture.model.dense_layers = 1, mixture.model.mlp_width = 700;
  EXPECT_DOUBLE_EQ(models::flops_per_step(mixture), routed + each * (3 * 3 * 512 + 3 * (700 - 2 * 512) - 8)) << "of an MLP in one block";
  EXPECT_DOUBLE_EQ(models::flops_per_step(bench::training_config("llama3-8b-bf16-4x8192")),
                   tokens * (6 * in_products + 6.0 * 32 * 8192 * 4096));
}

// By hand, for one token: 12 layers that read and write 2 · 8 elements of width 768 for their norms and 2 · 3,072 for gelu; 8 + 6 of width
// 768 outside them; 2 · 50,304 logits; 2 bytes each.
TEST(BenchFigures, RooflineOfAStep) {
  const models::TrainConfig gpt2 =
      bench::training_config("gpt2-124m-bf16-512x1024", {"--train.batch=64"});
  const double tokens = 64 * 1024.0, products = 12 * 12 * 768.0 * 768 + 50304 * 768.0;
  const int64_t parameters = 124475904;
  const double bytes = 2 * (12 * (16 * 768.0 + 2 * 3072) + 14 * 768 + 2 * 50304.0);
  const bench::Rates rates{
      .products = 790e12, .attention_forward = 250e12, .attention_backward = 200e12, .copy = 4e12};
  const double expected = tokens * (6 * products / 790e12 +
                                    12 * 1024 * 768.0 * (2 / 250e12 + 5 / 200e12) + bytes / 4e12) +
                          32.0 * parameters / 4e12;
  EXPECT_NEAR(expected, 93.8e-3, 0.1e-3);
  EXPECT_DOUBLE_EQ(bench::roofline_seconds(gpt2, parameters, rates), expected);

  // Llama: 2 · 8 elements of its width for norms, 2 · 4 of queries and keys rotated, swiglu's 8.
  const models::TrainConfig llama = bench::training_config("llama3-8b-bf16-4x8192");
  const double llama_bytes =
      2 * (32 * (16 * 4096.0 + 8 * 5120.0 / 2 + 8 * 14336.0) + 12 * 4096 + 2 * 128256.0);
  const bench::Rates by_memory{.products = INFINITY,
                               .attention_forward = INFINITY,
                               .attention_backward = INFINITY,
                               .copy = 1};
  EXPECT_DOUBLE_EQ(bench::roofline_seconds(llama, 0, by_memory), 4 * 8192.0 * llama_bytes);
}

}  // namespace
}  // namespace sheaf
