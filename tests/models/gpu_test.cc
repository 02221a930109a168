// A small GPT trained on a GPU, by one rank and by several that share it: the CPU's guarantees that also hold there, and the CPU's numbers
// within rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "sheaf/models/generate_many.h"
#include "sheaf/models/gpt.h"
#include "sheaf/models/language_model.h"
#include "sheaf/models/llama.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/published_names.h"
#include "sheaf/models/published_weights.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

constexpr int kSteps = 4;
const Device kGpu = Device::cuda();

TrainedRun on_gpu(const models::TrainConfig& config, int world, int steps = kSteps) {
  return train_tiny(config, world, steps, {}, kGpu);
}

/// Of each rank, in the second step.
std::vector<int64_t> measured_peaks(const models::TrainConfig& config, int world) {
  std::vector<int64_t> peaks(static_cast<size_t>(world), 0);
  run_local(world, [&](World& w) {
    models::TrainingStep step(config, config.model.vocab, w, w.device(), tiny_options(config));
    Allocator& memory = *RankContext::current().memory(w.device());
    const int last = config.train.compile ? 3 : 1;
    for (int s = 0; s < last; ++s) step.run(s, tiny_data(config)).loss.item();
    memory.reset_peak();
    step.run(last, fill_tiny).loss.item();
    peaks[static_cast<size_t>(w.rank())] = memory.stats().peak;
  }, {.threads_per_rank = 1, .device = kGpu});
  return peaks;
}

TEST(GpuTraining, WeightsStartWithTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (int world : {1, 3})
    expect_same_bits(on_gpu(tiny_config(), world, 0), train_tiny(tiny_config(), 1, 0));
}

TEST(GpuTraining, LikelihoodsAreThoseOfTheCpu) {
  SHEAF_NEEDS_GPU();
  models::TrainConfig c = tiny_config();
  c.model.vocab = 256;
  const models::ChoiceQuestions q("", "tests/models/two_questions.jsonl", *models::make_byte_tokenizer(), {.context = c.model.context});
  const auto likelihoods = [&](int world, Device device) {
    std::vector<double> out;
    train_tiny(c, world, 0, [&](models::TrainingStep& step) {
      step.run(0, fill_tiny);
      const std::vector<double> mine = step.log_likelihoods(q);
      if (step.world().rank() == 0) out = mine;
    }, device);
    return out;
  };
  const std::vector<double> expected = likelihoods(1, Device::cpu());
  for (const int64_t tensor : {1, 2}) {
    c.sharding.tensor = tensor;
    const std::vector<double> actual = likelihoods(2, kGpu);
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-3) << tensor << ' ' << i;
  }
}

TEST(GpuTraining, PublishedWeightsArriveWithTheBitsOfTheCpu) {
  SHEAF_NEEDS_GPU();
  const models::ModelConfig config = tiny_config().model;
  const ScratchFolder folder;
  std::vector<std::vector<float>> values;
  std::vector<SafetensorsInput> tensors;
  for (const models::PublishedTensor& t : models::published_tensors(config)) {
    std::vector<float>& v = values.emplace_back(static_cast<size_t>(t.shape.numel()));
    for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 97) / 64 - static_cast<float>(values.size());
    tensors.push_back({t.name, kF32, t.shape, {std::as_bytes(std::span(v))}});
  }
  write_safetensors(folder / "model.safetensors", tensors);
  const auto load = [&](int world, Device device) {
    Whole whole;
    run_local(world, [&](World& w) {
      const auto model = models::make_language_model(config, 0);
      shard(*model, w.mesh({{"data", w.size()}}));
      materialize(*model, device);
      models::load_weights(*model, folder.path());
      whole.collect(*model, false);
    }, {.threads_per_rank = 1, .device = device});
    return whole.values();
  };
  const Values expected = load(1, Device::cpu());
  EXPECT_GT(max_magnitude(expected), 1);
  for (int world : {1, 3}) EXPECT_EQ(max_difference(load(world, kGpu), expected), 0.0);
}

TEST(GpuTraining, GradientsInF64AtEveryWorld) {
  SHEAF_NEEDS_GPU();
  const Values expected = gradients_f64(1, "replicate", 7);
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (int world = 1; world <= 4; ++world)
      EXPECT_LE(max_difference(gradients_f64(world, strategy, 7, kGpu), expected), 1e-12 * max_magnitude(expected))
          << strategy << " at " << world;
  for (const Axes& axes : {Axes{{"replica", 2}, {"data", 2}}, Axes{{"data", 2}, {"model", 2}}, Axes{{"data", 1}, {"model", 2}},
                           Axes{{"secondary", 2}, {"data", 2}}, Axes{{"data", 2}, {"context", 2}}, Axes{{"context", 2}},
                           Axes{{"data", 1}, {"gathered", 3}}})
    EXPECT_LE(max_difference(gradients_f64(axes, "full_shard", 7, kGpu), expected), 1e-12 * max_magnitude(expected));
  for (const char* type : {"qwen3", "latent"}) {
    models::ModelConfig m = tiny_model(type, 4, type == std::string("latent") ? 4 : 2);
    m.end_of_text = 2;
    const Values whole = gradients_f64(Axes{{"data", 1}}, "replicate", 3, {}, m);
    EXPECT_LE(max_difference(gradients_f64(Axes{{"gathered", 3}}, "full_shard", 3, kGpu, m), whole), 1e-12 * max_magnitude(whole));
  }
}

TEST(GpuTraining, HessianProductsAreThoseOfTheCpu) {
  SHEAF_NEEDS_GPU();
  for (const char* type : {"gpt2", "qwen3", "latent"}) {
    const models::ModelConfig m = tiny_model(type, 4, 2);
    const HessianProducts expected = hessian_f64({{"data", 1}}, "replicate", 3, m);
    for (const Axes& axes : {Axes{{"data", 1}}, Axes{{"data", 2}, {"model", 2}}}) {
      const HessianProducts actual = hessian_f64(axes, "full_shard", 3, m, kGpu);
      EXPECT_LE(max_difference(actual.product, expected.product), 1e-11 * max_magnitude(expected.product)) << type;
      EXPECT_NEAR(actual.along, expected.along, 1e-11 * std::abs(expected.along)) << type;
    }
  }
}

TEST(GpuTraining, AllStrategiesAndPrefetchesHaveTheSameBits) {
  SHEAF_NEEDS_GPU();
  for (int world : {1, 2, 3}) {
    models::TrainConfig c = tiny_config();
    const TrainedRun expected = on_gpu(c, world);
    for (const char* strategy : {"shard_grad_op", "zero1", "replicate"}) {
      SCOPED_TRACE(str(strategy, " at ", world));
      c.sharding.strategy = strategy;
      expect_same_bits(on_gpu(c, world), expected);
    }
    c = tiny_config();
    c.sharding.prefetch_bytes = 0;
    expect_same_bits(on_gpu(c, world), expected);
  }
}

TEST(GpuTraining, FollowsTheCpu) {
  SHEAF_NEEDS_GPU();
  struct Case {
    const char* dtype;
    double dropout;
    int micro_batches;
    const char* reduced = "f32";
    const char* fp8 = "none";
  };
  for (const Case& k : {Case{"f32", 0.0, 1}, Case{"f32", 0.2, 2}, Case{"bf16", 0.2, 1}, Case{"bf16", 0.2, 2, "bf16"}, Case{"bf16", 0.0, 2, "int8"},
                        Case{"bf16", 0.0, 1, "f32", "activations"}, Case{"bf16", 0.2, 2, "bf16", "all"}}) {
    SCOPED_TRACE(str(k.dtype, ", dropout ", k.dropout, ", micro-batches ", k.micro_batches, ", reduced in ", k.reduced, ", fp8 ", k.fp8));
    models::TrainConfig c = tiny_config();
    c.train.fp8 = k.fp8;
    if (c.train.fp8 != "none") c.model.width = 32;  // FP8 products need multiples of 16
    c.train.dtype = k.dtype;
    c.sharding.reduce_dtype = k.reduced;
    c.sharding.gather_int8 = c.sharding.reduce_dtype == "int8";
    c.model.dropout = k.dropout;
    c.train.micro_batches = k.micro_batches;
    const TrainedRun gpu = on_gpu(c, 2, 12), cpu = train_tiny(c, 2, 12);
    const double bound = c.train.dtype == "f32" ? 1e-4 : 2e-2;
    ASSERT_EQ(gpu.losses.size(), cpu.losses.size());
    for (size_t s = 0; s < cpu.losses.size(); ++s) {
      EXPECT_NEAR(gpu.losses[s], cpu.losses[s], bound * std::abs(cpu.losses[s])) << "step " << s;
      EXPECT_NEAR(gpu.norms[s], cpu.norms[s], 10 * bound * std::abs(cpu.norms[s])) << "step " << s;
    }
  }
}

TEST(GpuTraining, MuonHasItsBitsInAllStrategiesThePeakOfThePlanAndTheCpusNumbers) {
  SHEAF_NEEDS_GPU();
  models::TrainConfig c = tiny_config();
  c.train.optimizer = "muon";
  c.train.lr = 0.02;
  for (int world : {1, 3}) {
    const TrainedRun expected = on_gpu(c, world);
    for (const char* strategy : {"zero1", "replicate"}) {
      models::TrainConfig other = c;
      other.sharding.strategy = strategy;
      expect_same_bits(on_gpu(other, world), expected);
    }
    const TrainedRun cpu = train_tiny(c, world, kSteps);
    for (size_t s = 0; s < cpu.losses.size(); ++s) EXPECT_NEAR(expected.losses[s], cpu.losses[s], 1e-4 * cpu.losses[s]) << s;
    EXPECT_LE(max_difference(expected.parameters, cpu.parameters), 1e-3);
    EXPECT_EQ(measured_peaks(c, world), models::plan_peaks(c, c.model.vocab, world, 1, "local", kGpu));
  }
}

TEST(GpuTraining, MixturesOfExpertsHaveTheGradientsTheBitsAndThePeakOfThePlan) {
  SHEAF_NEEDS_GPU();
  for (const models::ModelConfig& model : {tiny_mixture(0), tiny_mixture(1.1), tiny_gpt_oss(), tiny_qwen3_next(1)}) {
    models::TrainConfig c = tiny_config();
    c.model = model;
    const Values expected = gradients_f64(Axes{{"data", 1}}, "replicate", 7, {}, c.model);
    for (const Axes& axes : {Axes{{"data", 1}}, Axes{{"data", 1}, {"expert", 2}}, Axes{{"data", 2}, {"expert", 2}}})
      EXPECT_LE(max_difference(gradients_f64(axes, "full_shard", 7, kGpu, c.model), expected), 1e-12 * max_magnitude(expected));
    for (const int ranks : {1, 2}) {
      c.sharding.experts = ranks;
      const TrainedRun gpu = on_gpu(c, 2 * ranks), cpu = train_tiny(c, 2 * ranks, kSteps);
      for (size_t s = 0; s < cpu.losses.size(); ++s) EXPECT_NEAR(gpu.losses[s], cpu.losses[s], 1e-4 * cpu.losses[s]) << s;
      for (const char* strategy : {"zero1", "replicate"}) {
        models::TrainConfig other = c;
        other.sharding.strategy = strategy;
        expect_same_bits(on_gpu(other, 2 * ranks), gpu);
      }
      for (const char* dtype : {"f32", "bf16"}) {
        c.train.dtype = dtype;
        EXPECT_EQ(measured_peaks(c, 2 * ranks), models::plan_peaks(c, c.model.vocab, 2 * ranks, 1, "local", kGpu));
      }
      c.train.dtype = "f32";
    }
  }
}

// Frozen parameters have no masters in bf16, and a frozen head has no gradient.
TEST(GpuTraining, AdaptersHaveTheBitsOfAllStrategiesThePeakOfThePlanAndTheCpusNumbers) {
  SHEAF_NEEDS_GPU();
  for (const auto& [type, dtype] : {std::pair{"gpt2", "f32"}, {"untied llama", "bf16"}}) {
    SCOPED_TRACE(str(type, " in ", dtype));
    models::TrainConfig c = tiny_config();
    c.model = tiny_model(type, 4, 2);
    c.model.lora_rank = 3;
    c.train.dtype = dtype;
    c.train.lr = 1e-2;
    const double bound = c.train.dtype == "f32" ? 1e-4 : 2e-2;
    for (const int world : {1, 3}) {
      const TrainedRun gpu = on_gpu(c, world), cpu = train_tiny(c, world, kSteps);
      for (size_t s = 0; s < cpu.losses.size(); ++s) EXPECT_NEAR(gpu.losses[s], cpu.losses[s], bound * cpu.losses[s]) << s;
      for (const char* strategy : {"zero1", "replicate"}) {
        models::TrainConfig other = c;
        other.sharding.strategy = strategy;
        expect_same_bits(on_gpu(other, world), gpu);
      }
      EXPECT_EQ(measured_peaks(c, world), models::plan_peaks(c, c.model.vocab, world, 1, "local", kGpu));
    }
    c.sharding.context = 4;  // with copies of Llama's two key heads
    for (const char* comm : {"all_to_all", "all_gather"}) {
      c.sharding.context_comm = comm;
      const TrainedRun gpu = on_gpu(c, 4), cpu = train_tiny(c, 4, kSteps);
      for (size_t s = 0; s < cpu.losses.size(); ++s) {
        EXPECT_NEAR(gpu.losses[s], cpu.losses[s], bound * cpu.losses[s]) << s;
        EXPECT_NEAR(gpu.norms[s], cpu.norms[s], 4 * bound * cpu.norms[s]) << s;
      }
      EXPECT_EQ(measured_peaks(c, 4), models::plan_peaks(c, c.model.vocab, 4, 1, "local", kGpu)) << comm;
    }
  }
}

// Heads of 256 elements, windows with their own rotary base, gates of gelu, more norms.
TEST(GpuTraining, GemmaHasTheBitsOfAllStrategiesThePeakOfThePlanAndTheCpusNumbers) {
  SHEAF_NEEDS_GPU();
  models::TrainConfig c = tiny_config();
  c.model = tiny_model("untied llama", 2, 1);
  c.model.head_dim = 256;
  c.model.window = 4, c.model.full_attention_every = 2, c.model.window_rope_theta = 50;
  c.model.gelu_gate = c.model.post_norms = c.model.scale_embedding = c.model.qk_norm = true;
  for (const char* dtype : {"f32", "bf16"}) {
    c.train.dtype = dtype;
    const TrainedRun gpu = on_gpu(c, 2), cpu = train_tiny(c, 2, kSteps);
    for (size_t s = 0; s < cpu.losses.size(); ++s)
      EXPECT_NEAR(gpu.losses[s], cpu.losses[s], (c.train.dtype == "f32" ? 1e-4 : 2e-2) * cpu.losses[s]) << s;
    models::TrainConfig other = c;
    other.sharding.strategy = "replicate";
    expect_same_bits(on_gpu(other, 2), gpu);
    EXPECT_EQ(measured_peaks(c, 2), models::plan_peaks(c, c.model.vocab, 2, 1, "local", kGpu));
  }
}

// Islands of two ranks each; masters in the host's memory are rows of a tensor there.
TEST(GpuTraining, IslandsHaveTheBitsOfAllStrategiesThePeakOfThePlanAndTheCpusNumbers) {
  SHEAF_NEEDS_GPU();
  for (const char* dtype : {"f32", "bf16", "int8"}) {
    SCOPED_TRACE(dtype);
    models::TrainConfig c = tiny_config();
    c.train.batch = 8;
    c.train.islands = 2, c.train.inner_steps = 2;
    c.train.outer_dtype = dtype;
    const TrainedRun gpu = on_gpu(c, 4), cpu = train_tiny(c, 4, kSteps);
    for (size_t s = 0; s < cpu.losses.size(); ++s) EXPECT_NEAR(gpu.losses[s], cpu.losses[s], 1e-4 * cpu.losses[s]) << s;
    for (const char* other : {"replicate", "program", "offloaded"}) {
      SCOPED_TRACE(other);
      models::TrainConfig changed = c;
      const std::string_view what = other;
      if (what == "replicate") changed.sharding.strategy = "replicate";
      if (what == "program") changed.train.compile = true;
      if (what == "offloaded") changed.train.offload_parameters = true;
      expect_same_bits(on_gpu(changed, 4), gpu);
    }
    EXPECT_EQ(measured_peaks(c, 4), models::plan_peaks(c, c.model.vocab, 4, 1, "local", kGpu));
    // With islands of one rank each a step may be captured: outer steps are outside the graph.
    models::TrainConfig graph = c;
    graph.train.cuda_graph = true;
    expect_same_bits(on_gpu(graph, 2, 6), on_gpu(c, 2, 6));
  }
}

// Data that changes from step to step is read on the device.
TEST(GpuTraining, ExamplesHaveTheBitsOfAllStrategiesThePeakOfThePlanAndTheCpusNumbers) {
  SHEAF_NEEDS_GPU();
  for (const char* type : {"gpt2", "untied llama"}) {
    SCOPED_TRACE(type);
    models::TrainConfig c = tiny_config();
    c.model = tiny_model(type, 4, 2);
    c.model.end_of_text = 5;
    c.data.examples = true;
    for (const int world : {1, 3}) {
      const TrainedRun gpu = on_gpu(c, world), cpu = train_tiny(c, world, kSteps);
      for (size_t s = 0; s < cpu.losses.size(); ++s) EXPECT_NEAR(gpu.losses[s], cpu.losses[s], 1e-4 * cpu.losses[s]) << s;
      for (const bool compile : {true, false}) {
        models::TrainConfig other = c;
        other.train.compile = compile;
        if (!compile) other.sharding.strategy = "zero1";
        expect_same_bits(on_gpu(other, world), gpu);
      }
      EXPECT_EQ(measured_peaks(c, world), models::plan_peaks(c, c.model.vocab, world, 1, "local", kGpu));
    }
  }
}

// Ranks that share a GPU behave as stages of a pipeline do on separate GPUs.
TEST(GpuTraining, PipelinesHaveTheBitsOfOneRankAndThePeakOfThePlan) {
  SHEAF_NEEDS_GPU();
  models::TrainConfig c = tiny_pipeline(1);
  for (const Axes& axes : {Axes{{"stage", 3, true}, {"data", 1}}, Axes{{"stage", 2, true}, {"data", 2}}})
    EXPECT_LE(max_difference(gradients_f64(axes, "full_shard", 7, kGpu, c.model), gradients_f64(Axes{{"data", 1}}, "replicate", 7, {}, c.model)),
              1e-12);
  const TrainedRun one = on_gpu(c, 1), two = on_gpu(c, 2), cpu = train_tiny(c, 1, kSteps);
  for (size_t s = 0; s < cpu.losses.size(); ++s) EXPECT_NEAR(one.losses[s], cpu.losses[s], 1e-4 * cpu.losses[s]) << s;
  for (const char* strategy : {"full_shard", "zero1"}) {
    c.sharding.strategy = strategy;
    for (const int count : {2, 3}) {
      SCOPED_TRACE(str(strategy, " in ", count));
      c.sharding.pipeline = count;
      expect_same_bits(on_gpu(c, count), one);
      if (c.sharding.strategy == "full_shard") expect_same_bits(on_gpu(c, 2 * count), two);
      EXPECT_EQ(measured_peaks(c, count), models::plan_peaks(c, c.model.vocab, count, 1, "local", kGpu));
    }
  }
  c.train.compile = true;
  expect_same_bits(on_gpu(c, 3), one);
  c.sharding.pipeline = c.sharding.pipeline_runs = 2;
  for (const bool compile : {true, false})
    for (const char* schedule : {"1f1b", "zero_bubble"}) {
      SCOPED_TRACE(str(schedule, compile ? " as a program" : ""));
      c.train.compile = compile, c.sharding.pipeline_schedule = schedule;
      expect_same_bits(on_gpu(c, 2), one);
      EXPECT_EQ(measured_peaks(c, 2), models::plan_peaks(c, c.model.vocab, 2, 1, "local", kGpu));
    }
}

TEST(GpuTraining, MemorySettlesWithTheSecondStep) {
  SHEAF_NEEDS_GPU();
  run_local(2, [](World& w) {
    models::TrainingStep step(tiny_config(), tiny_config().model.vocab, w, w.device());
    Allocator& memory = *RankContext::current().memory(w.device());
    std::vector<int64_t> peaks, reserved;
    for (int s = 0; s < 5; ++s) {
      memory.reset_peak();
      step.run(s, fill_tiny).loss.item();
      peaks.push_back(memory.stats().peak), reserved.push_back(memory.stats().reserved);
    }
    for (int s = 2; s < 5; ++s) {
      EXPECT_EQ(peaks[s], peaks[1]);
      EXPECT_EQ(reserved[s], reserved[1]) << "asked of the device in step " << s;
    }
  }, {.threads_per_rank = 1, .device = kGpu});
}

// Both the prediction and the measurement count what Sheaf requests from the device's allocator.
void expect_planned_peaks(const std::string& dtype, const std::string& strategy, int world) {
  SCOPED_TRACE(str(dtype, ' ', strategy, " at ", world));
  models::TrainConfig c = tiny_config();
  c.train.dtype = dtype;
  c.train.micro_batches = 2;
  c.model.dropout = world == 2 ? 0.2 : 0;
  c.sharding.strategy = strategy;
  if (world >= 4 && strategy != "replicate") {
    c.sharding.replicas = 2;
    c.sharding.secondary = world == 6;
  }
  if (world == 3) c.sharding.reduce_dtype = "bf16";
  if (world == 6) c.sharding.reduce_dtype = "int8", c.sharding.gather_int8 = true;
  if (dtype == "bf16" && world < 3) c.model.width = 48, c.train.fp8 = world == 1 ? "activations" : "all";
  const auto plan = [&](Device device) { return models::plan_peaks(c, c.model.vocab, world, 1, "local", device); };
  if (world % 2 == 0) c.train.compile = true;  // runs two eager steps, and then a program
  EXPECT_EQ(measured_peaks(c, world), plan(kGpu));
  EXPECT_NE(plan(kGpu), plan(Device::cpu())) << "a CPU's kernels want other workspaces";
}

TEST(GpuTraining, ThePlanIsThePeakToTheByte) {
  SHEAF_NEEDS_GPU();
  for (const char* strategy : {"full_shard", "shard_grad_op", "zero1", "replicate"})
    for (const int world : {1, 2, 3, 4, 6}) expect_planned_peaks("f32", strategy, world);
  for (const char* strategy : {"full_shard", "zero1"})
    for (const int world : {1, 2, 3, 6}) expect_planned_peaks("bf16", strategy, world);
}

// The logits at each token after a prompt of 70, read one by one, against those of one pass over all tokens.
template <class M, class Config>
void expect_cached_logits(Config config, DType dtype, double bound) {
  config.layers = 2, config.heads = 4, config.width = 64, config.context = 80, config.vocab = 61;
  M model(config);
  materialize(model, kGpu, {.seed = 3, .dtype = dtype});
  std::vector<int32_t> text;
  for (int i = 0; i < 80; ++i) text.push_back((i * i + 5 * i + i / 3) % 61);
  const Tensor tokens = Tensor::from(text, {1, 80}).to(kGpu), all = model.logits(tokens);
  nn::KeyValueCache cache(80);
  while (cache.length() < 80) {
    const int64_t end = std::max<int64_t>(70, cache.length() + 1);
    const Tensor next = model.next_logits(slice(tokens, 1, cache.length(), end), cache);
    EXPECT_LE(max(abs(next - slice(all, 1, end - 1, end))).template item<double>(), bound) << str(dtype, " at ", end);
  }
  EXPECT_GT(max(abs(all)).template item<double>(), 0.1);
}

TEST(GpuGeneration, CachedKeysAndValuesGiveTheLogitsOfOnePass) {
  SHEAF_NEEDS_GPU();
  run_local(1, [](World&) {
    for (const auto& [dtype, bound] : {std::pair(kF32, 1e-5), std::pair(kBF16, 3e-2)}) {
      expect_cached_logits<models::Gpt>(models::GptConfig(), dtype, bound);
      expect_cached_logits<models::Llama>(models::LlamaConfig(), dtype, bound);  // two query heads a key head
      models::LlamaConfig qwen3;
      qwen3.head_dim = 24, qwen3.qk_norm = true;
      expect_cached_logits<models::Llama>(qwen3, dtype, bound);
      models::LlamaConfig windowed;
      windowed.window = 20, windowed.full_attention_every = 2;
      expect_cached_logits<models::Llama>(windowed, dtype, bound);
    }
  }, {.device = kGpu});
}

// Left-padded rows, also when half of them have ended: each prompt gets the same samples as alone, and as on the CPU.
TEST(GpuGeneration, ManyPromptsGetWhatEachGetsAlone) {
  SHEAF_NEEDS_GPU();
  models::GptConfig gpt;
  gpt.layers = 2, gpt.heads = 2, gpt.width = 32, gpt.context = 24, gpt.vocab = 17;
  models::LlamaConfig llama;
  llama.layers = 2, llama.heads = 4, llama.kv_heads = 2, llama.width = 64, llama.context = 24, llama.vocab = 17, llama.window = 7;
  const std::vector<std::vector<int32_t>> prompts = {{1, 2, 3}, {4}, {5, 6, 7, 8, 9, 10, 11, 12}, {13, 14}, {3, 3, 3, 3, 3}};
  const std::vector<int32_t> ends = {2, 9};
  models::GenerateConfig draws;
  draws.tokens = 14, draws.temperature = 1;
  const auto made = [&](models::Decoder& model, Device device, int64_t at_once) {
    materialize(model, device, {.seed = 3});
    return models::generate_many(model, prompts, draws, {.context = 24, .vocab = 17, .ends = ends, .at_once = at_once});
  };
  const auto check = [&]<class Model>(const auto& config) {
    Model alone(config), together(config), on_cpu(config);
    const auto want = made(on_cpu, Device::cpu(), 1), one = made(alone, kGpu, 1), all = made(together, kGpu, 8);
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(all[i].tokens, one[i].tokens) << i;
      EXPECT_EQ(all[i].tokens, want[i].tokens) << i;
    }
  };
  run_local(1, [&](World&) {
    check.template operator()<models::Gpt>(gpt);
    check.template operator()<models::Llama>(llama);
  }, {.device = kGpu});
}

}  // namespace
}  // namespace sheaf::testing
