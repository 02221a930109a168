// Training steps that are captured and replayed (train.cuda_graph) against eager ones: the same bits, whatever else runs between them.
#include <gtest/gtest.h>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/models/batch_sampler.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

const Device kGpu = Device::cuda();
constexpr int kSteps = 6;  // the third one is captured, the fourth for a program

models::TrainConfig graph_config(bool graph) {
  models::TrainConfig c = tiny_config();
  c.model.dropout = 0.2;
  c.train.cuda_graph = graph;
  return c;
}

/// One rank on the GPU.
void on_gpu(const std::function<void(World&)>& body) {
  run_local(1, body, {.threads_per_rank = 1, .device = kGpu});
}

Allocator& gpu_memory() { return *RankContext::current().memory(kGpu); }

TEST(GraphTraining, HasTheBitsOfStepsThatAreEnqueuedOneByOne) {
  SHEAF_NEEDS_GPU();
  struct Case {
    const char* type;
    const char* dtype;
    double dropout, clip;
    int micro_batches;
    const char* strategy = "full_shard";
    const char* optimizer = "adamw";
  };
  for (const Case& k : {Case{"gpt2", "f32", 0.2, 0.5, 1}, Case{"gpt2", "f32", 0.2, 0.5, 3},
                        Case{"gpt2", "f32", 0, 0, 2}, Case{"llama", "f32", 0.1, 0.5, 1},
                        Case{"gpt2", "bf16", 0.2, 0.5, 2, "replicate"},
                        Case{"gpt2", "f32", 0.2, 0.5, 1, "full_shard", "muon"},
                        Case{"llama", "bf16", 0, 0.5, 1, "replicate", "muon"},
                        Case{"mixture", "bf16", 0.1, 0.5, 2}, Case{"gpt-oss", "bf16", 0.1, 0.5, 2},
                        Case{"qwen3-next", "bf16", 0.1, 0.5, 2}}) {
    SCOPED_TRACE(str(k.type, " ", k.dtype, ", dropout ", k.dropout, ", clip ", k.clip, ", micro-batches ",
                     k.micro_batches, ", ", k.optimizer));
    models::TrainConfig c = graph_config(false);
    if (std::string(k.type) == "mixture") c.model = tiny_mixture(1.1);
    else if (std::string(k.type) == "gpt-oss") c.model = tiny_gpt_oss();
    else if (std::string(k.type) == "qwen3-next") c.model = tiny_qwen3_next(1);
    else c.model.type = k.type;
    c.train.dtype = k.dtype;
    c.model.dropout = k.dropout;
    c.train.clip = k.clip;
    c.train.micro_batches = k.micro_batches;
    c.sharding.strategy = k.strategy;
    c.train.optimizer = k.optimizer;
    const TrainedRun expected = train_tiny(c, 1, kSteps, {}, kGpu);
    c.train.cuda_graph = true;
    expect_same_bits(train_tiny(c, 1, kSteps, {}, kGpu), expected);
    c.train.recompute = "block";
    if (std::string(k.dtype) == "f32") expect_same_bits(train_tiny(c, 1, kSteps, {}, kGpu), expected);  // emulated, bf16 takes longer
    c.train.compile = true;  // the graph is of a program's run
    expect_same_bits(train_tiny(c, 1, kSteps, {}, kGpu), expected);
  }
}

// Sizes at which cuDNN computes attention, if available.
TEST(GraphTraining, HoldsTheAttentionOfALibrary) {
  SHEAF_NEEDS_GPU();
  constexpr int64_t kContext = 128;
  const auto fill = [](int64_t first, int64_t count, int32_t* in, int32_t* out) {
    for (int64_t i = 0; i < count * kContext; ++i) {
      const int64_t at = first * kContext + i;
      in[i] = static_cast<int32_t>(at * at % 13), out[i] = static_cast<int32_t>((at + 1) * (at + 1) % 13);
    }
  };
  for (const char* type : {"gpt2", "llama"}) {
    std::vector<float> losses[2];
    int64_t calls = 0;
    if constexpr (kernels::kHasCuda) calls = kernels::cuda::cudnn::attention_calls();
    for (bool graph : {false, true})
      on_gpu([&](World& w) {
        models::TrainConfig c = graph_config(graph);
        c.model.type = type;
        c.model.layers = 1, c.model.width = 32, c.model.context = kContext, c.model.dropout = 0;
        c.train.dtype = "bf16";
        c.train.batch = 2;
        models::TrainingStep step(c, c.model.vocab, w, kGpu);
        for (int s = 0; s < kSteps; ++s) losses[graph].push_back(step.run(s, fill).loss.item());
      });
    EXPECT_EQ(losses[1], losses[0]) << type;
    EXPECT_LT(losses[0].back(), losses[0].front()) << type;
    // Forward and backward of all steps; captured ones count once.
    if constexpr (kernels::kHasCuda) {
      if (kernels::emulated_cuda()) {
        EXPECT_EQ(kernels::cuda::cudnn::attention_calls() - calls, 2 * (kSteps + 3)) << type;
      }
    }
  }
}

TEST(GraphTraining, EveryReplayDrawsMasksOfItsOwn) {
  SHEAF_NEEDS_GPU();
  std::vector<float> losses[2];
  for (bool graph : {false, true})
    on_gpu([&](World& w) {
      models::TrainConfig c = graph_config(graph);
      c.train.lr = c.train.min_lr = c.train.weight_decay = 0;  // only the masks change from step to step
      models::TrainingStep step(c, c.model.vocab, w, kGpu);
      const auto same_samples = [](int64_t, int64_t count, int32_t* in, int32_t* out) { fill_tiny(0, count, in, out); };
      for (int s = 0; s < kSteps; ++s) losses[graph].push_back(step.run(s, same_samples).loss.item());
    });
  EXPECT_EQ(losses[1], losses[0]);
  for (size_t s = 1; s < losses[1].size(); ++s) EXPECT_NE(losses[1][s], losses[1][s - 1]) << "step " << s;
}

TEST(GraphTraining, AReplayIsOneLaunchThatAllocatesNothing) {
  SHEAF_NEEDS_GPU();
  std::vector<int64_t> peaks[2];
  for (bool graph : {false, true})
    on_gpu([&](World& w) {
      models::TrainingStep step(graph_config(graph), tiny_config().model.vocab, w, kGpu);
      std::vector<MemoryStats> after;
      for (int s = 0; s < kSteps; ++s) {
        gpu_memory().reset_peak();
        step.run(s, fill_tiny);
        after.push_back(gpu_memory().stats());
        peaks[graph].push_back(after.back().peak);
      }
      const int settled = graph ? 2 : 1;  // memory freed in a capture serves nobody else, so that it may ask for more
      for (int s = settled; s < kSteps; ++s)
        EXPECT_EQ(after[s].reserved, after[settled].reserved) << "graph " << graph << ", step " << s;
      for (int s = 3; s < kSteps; ++s)
        EXPECT_EQ(after[s].allocations == after[2].allocations, graph) << "graph " << graph << ", step " << s;
    });
  for (int s = 1; s < kSteps; ++s) EXPECT_NEAR(peaks[true][s], peaks[false][s], 16) << "step " << s;
}

// Allocations between replays, evaluations, and values that outlive replays.
TEST(GraphTraining, OtherWorkAndReplaysDoNotTouchEachOther) {
  SHEAF_NEEDS_GPU();
  std::vector<int32_t> ids(300);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % 13);
  struct Run {
    std::vector<float> losses, norms;
    std::vector<double> evaluations;
    Values parameters;
  } runs[2];
  for (bool graph : {false, true})
    on_gpu([&](World& w) {
      models::TrainConfig c = graph_config(graph);
      c.train.micro_batches = 2;
      models::TrainingStep step(c, c.model.vocab, w, kGpu);
      const models::Tokens tokens = models::Tokens::from_ids(ids, c.model.vocab, "ids");
      const models::SequentialWindows windows(tokens, c.model.context, 0);
      std::vector<std::pair<Tensor, std::vector<float>>> kept;
      Run& run = runs[graph];
      for (int s = 0; s < kSteps; ++s) {
        const auto result = step.run(s, fill_tiny);
        run.losses.push_back(result.loss.item());
        run.norms.push_back(result.grad_norm.item());
        if (s % 2 == 0) run.evaluations.push_back(step.evaluate(windows));
        for (int64_t n : {1, 7, 60, 600, 4000}) {  // sizes like those of a step
          const std::vector<float> values(static_cast<size_t>(n), static_cast<float>(s));
          kept.emplace_back(Tensor::from(values, {n}).to(kGpu), values);
        }
        models::RecordedStep leaves;
        leaves.capture_leaves = true;
        if (s == 6) {  // not as a graph
          step.run(++s, fill_tiny, &leaves);
          EXPECT_GT(leaves.leaves.size(), 0u);
        }
      }
      for (const auto& [tensor, values] : kept) ASSERT_EQ(tensor.to_vector(), values);
      EXPECT_EQ(step.optimizer().steps(), kSteps);
      Whole whole;
      whole.collect(step.model(), false);
      run.parameters = whole.values();
    });
  EXPECT_EQ(runs[1].losses, runs[0].losses);
  EXPECT_EQ(runs[1].norms, runs[0].norms);
  EXPECT_EQ(runs[1].evaluations, runs[0].evaluations);
  EXPECT_EQ(max_difference(runs[1].parameters, runs[0].parameters), 0.0);
}

TEST(GraphTraining, TheTapeOfAReplayIsThatOfItsCapture) {
  SHEAF_NEEDS_GPU();
  std::string text[2];
  for (bool graph : {false, true})
    on_gpu([&](World& w) {
      models::TrainingStep step(graph_config(graph), tiny_config().model.vocab, w, kGpu);
      models::RecordedStep recorded;
      for (int s = 0; s < 5; ++s) step.run(s, fill_tiny, s == 4 ? &recorded : nullptr);
      text[graph] = to_text(recorded.tape);
      EXPECT_GE(recorded.loss, 0);
      EXPECT_GE(recorded.grad_norm, 0);
    });
  EXPECT_EQ(text[1], text[0]);
}

template <class E, class F>
void expect_error(F f, const std::string& part) {
  try {
    f();
    FAIL() << "no error";
  } catch (const E& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST(GraphTraining, NeedsAGpu) {
  expect_error<ConfigError>([] { train_tiny(graph_config(true), 1, 1); },
                            "[train] train.cuda_graph: this run computes on CPUs");
}

TEST(GraphTraining, RanksThatMeetOnTheHostHaveNone) {
  SHEAF_NEEDS_GPU();
  expect_error<ConfigError>([] { train_tiny(graph_config(true), 2, 1, {}, kGpu); },
                            "[train] train.cuda_graph: ranks talk over 'local'");
  // Without the trainer: a collective of ranks that meet on the host.
  expect_error<ConfigError>([] {
    run_local(2, [](World& w) {
      const Mesh mesh = w.mesh({{"data", 2}});
      const Tensor x = Tensor::scalar(1).to(kGpu);
      GpuCapture capture(*RankContext::current().gpu);
      mesh.runtime->reduce_lane(0).all_reduce(x.view().data, 1, kF32, Reduction::sum, "here");
    }, {.threads_per_rank = 1, .device = kGpu});
  }, "[all_reduce] here: a graph cannot hold this call: 'local' makes ranks meet on the host");
}

TEST(GraphTraining, ProductsAreNotTimedInACapture) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda)
    on_gpu([](World&) {
      const Tensor a = full({16, 32}, 1.0).to(kGpu), b = full({32, 16}, 1.0).to(kGpu);
      const kernels::cuda::TuneProducts tune;
      GpuCapture capture(*RankContext::current().gpu);
      expect_error<CudaError>([&] { matmul(a, b); }, "TuneProducts while a graph is captured");
    });
}

}  // namespace
}  // namespace sheaf::testing
