// step: whole training steps: forward, backward, clipping and AdamW. Other programs run the same cases by these names. On a GPU they
// are compared with the roofline at the rates measured in this run. Steps that run as a program (and on a GPU, with a step so small
// that launches count, as a CUDA graph) are compared with the same steps without.
#include <algorithm>

#include "sheaf/core/gpu.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/runtime.h"
#include "sheaf/models/step_profile.h"
#include "sheaf/tools/bench/attention_call.h"
#include "sheaf/tools/bench/gpu_time.h"
#include "sheaf/tools/bench/roofline.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

// Steps alternate with the machine's peak arithmetic. The peer is a step's operations alone at that peak.
void measure_turns(Session& session, const models::TrainConfig& config, const Session::Sample& step,
                   const Session::Sample& peak, Line& line) {
  auto [steps, peaks] = session.turns(step, peak);
  Probe& probe = session.probe();
  const DType dtype = config.train.dtype == "bf16" ? kBF16 : kF32;
  const double flops = models::flops_per_step(config), seconds = quantile(steps, 0.5);
  const double piece_rate = probe.flops_per_piece(dtype) / quantile(peaks, 0.5);
  line.samples_s = std::move(steps);
  line.peer = probe.arithmetic();
  line.peer_value = flops / piece_rate;
  line.gflops = flops / seconds / 1e9;
  line.arithmetic = dtype;
  line.more = {
      {"tokens/s", static_cast<double>(config.train.batch * config.model.context) / seconds}};
  if (!session.on_gpu()) {
    line.more.insert(line.more.end(), {{"GFLOP/s", line.gflops}, {"GFLOP/step", flops / 1e9}});
    return;
  }
  const double full = models::flops_per_step(config, models::CountAttention::full) / seconds,
               sheet = 1e9 * datasheet_gflops(RankContext::current().gpu->name());
  const auto percent = [&](const char* what, double flops_per_second, double of) {
    if (of > 0) line.more.emplace_back(what, 100 * flops_per_second / of);
  };
  line.more.emplace_back("TFLOP/s", line.gflops / 1e3);
  percent("MFU %", flops / seconds, piece_rate);
  percent("MFU % with full attention", full, piece_rate);
  percent("MFU % of the data sheet", flops / seconds, sheet);
  percent("MFU % of the data sheet with full attention", full, sheet);
}

// Traces where a step's time goes: in one additional step, because tracing slows it a little.
void trace(const Session& session, World& world, std::string_view name,
           const Session::Sample& step) {
  if (session.options().traces.empty()) return;
  models::StepProfile profile(world);
  step();
  const std::string file = str(session.options().traces, "/step_", name, ".trace.json");
  session.say(str("step/", name, ": ", profile.write(file), "; its time line is in ", file));
}

// A step takes too long for Google Benchmark's calibration, and steps differ: the first allocates, from the second on the order of
// gathers is known.
void measure_on_cpu(Session& session, std::string_view name, Line& line) {
  const bool quick = session.options().quick;
  const models::TrainConfig config =
      training_config(name, quick ? tiny_model() : std::vector<std::string>{});
  World world = solo_world();
  models::TrainingStep step(config, config.model.vocab, world, Device::cpu());
  const models::FillBatch fill = random_tokens(config);
  int64_t done = 0;
  const Session::Sample one = [&] {
    const double begin = now();
    step.run(done++, fill).loss.item();
    return now() - begin;
  };
  Probe& probe = session.probe();
  const Session::Sample peak = [&] {
    return probe.flops_per_piece(kF32) / probe.read().gflops / 1e9;
  };
  for (int warm = quick ? 2 : 4; warm > 0; --warm) one();
  measure_turns(session, config, one, peak, line);
  trace(session, world, name, one);
}

std::string described(const Fitted& fitted) {
  const models::TrainConfig& c = fitted.config;
  std::string text = str(c.train.micro_batches, " x ", c.train.batch / c.train.micro_batches, " x ",
                         c.model.context, " tokens");
  if (c.model.layers != fitted.layers)
    text += str(", only ", c.model.layers, " of ", fitted.layers, " layers fit");
  return text;
}

// Free bytes of the GPU.
int64_t free_memory() {
  if constexpr (kernels::kHasCuda) return static_cast<int64_t>(kernels::cuda::memory_info().free);
  return 0;
}

// The rates of attention in isolation on a GPU, at the shape of the step's micro-batch.
Rates attention_rates(Session& session, const models::TrainConfig& config) {
  const models::ModelConfig m = models::resolved(config.model);
  const AttentionSize size{std::min<int64_t>(config.train.batch / config.train.micro_batches, 16),
                           m.context, m.heads, m.kv_heads, m.head_dim};
  const DType dtype = config.train.dtype == "bf16" ? kBF16 : kF32;
  Rates rates;
  run_local(1,
            [&](World&) {
              const AttentionCall call(dtype, size, session.device());
              const Stream stream = session.stream();
              call.forward(stream), call.backward(stream);  // creates the plans
              const auto rate = [&](bool backward) {
                return AttentionCall::flops(size, backward) / median_of_five([&] {
                         return gpu_seconds(
                             [&] { backward ? call.backward(stream) : call.forward(stream); });
                       });
              };
              rates.attention_forward = rate(false);
              rates.attention_backward = rate(true);
            },
            {.threads_per_rank = session.machine().threads, .device = session.device()});
  return rates;
}

// The step against the roofline at the rates of this run.
void compare_with_roofline(Session& session, const models::TrainConfig& config, int64_t parameters,
                           Rates rates, Line& line) {
  const double seconds = quantile(line.samples_s, 0.5);
  rates.products = line.gflops * 1e9 * seconds / line.peer_value;
  rates.copy = session.probe().best().copy_gbs * 1e9;
  const double least = roofline_seconds(config, parameters, rates);
  line.more.insert(line.more.end(), {{"roofline s", least},
                                     {"% of the roofline", 100 * least / seconds},
                                     {"attention TFLOP/s", rates.attention_forward / 1e12},
                                     {"backward", rates.attention_backward / 1e12}});
}

// A model whose planned memory is at most `bytes`.
void measure_on_gpu(Session& session, std::string_view name, int64_t bytes, Line& line) {
  const bool quick = session.options().quick;
  const Fitted fitted =
      fit_to_gpu(training_config(name, quick ? tiny_model() : std::vector<std::string>{}), bytes);
  const models::TrainConfig& config = fitted.config;
  line.note = described(fitted);
  const Rates rates = attention_rates(session, config);
  // A world whose memory is returned to the GPU afterwards.
  run_local(
      1,
      [&](World& world) {
        models::TrainingStep step(config, config.model.vocab, world, world.device());
        const models::FillBatch fill = random_tokens(config);
        int64_t done = 0;
        const Session::Sample one = [&] { return gpu_seconds([&] { step.run(done++, fill); }); };
        Probe& probe = session.probe();
        const Session::Sample peak = [&] { return gpu_seconds([&] { probe.run_flops(kBF16); }); };
        for (int warm = quick ? 3 : 5; warm > 0; --warm) {
          if (one() > 1) warm = std::min(warm, 3);  // long steps are warm by then
          peak();
        }
        Allocator& memory = *RankContext::current().memory(world.device());
        memory.reset_peak();
        measure_turns(session, config, one, peak, line);
        const auto gib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
        const MemoryStats stats = memory.stats();
        line.more.insert(line.more.end(), {{"GiB live", gib(stats.peak)},
                                           {"predicted", gib(fitted.planned_peak)},
                                           {"reserved", gib(stats.reserved)}});
        trace(session, world, name, one);
        compare_with_roofline(session, config, step.num_parameters(), rates, line);
      },
      {.threads_per_rank = session.machine().threads, .device = session.device()});
}

// The plan does not include fragmentation, nor the memory of CUDA's libraries: a tenth is reserved for those at first.
void measure_what_fits(Session& session, std::string_view name, Line& line) {
  for (double part = 0.9;; part -= 0.1) try {
      const int64_t bytes = static_cast<int64_t>(part * static_cast<double>(free_memory()));
      return measure_on_gpu(session, name, bytes, line);
    } catch (const OutOfMemory& e) {
      if (part < 0.5) throw;
      session.say(str("step/", name, ": ", e.what(), "; with less"));
    }
}

// A step with an option of [train] and without it, alternating.
void measure_option(Session& session, std::string_view name, std::vector<std::string> overrides,
                    const std::string& option, const std::string& peer, Line& line) {
  if (session.options().quick) overrides = tiny_model();
  const auto config = [&](const char* value) {
    std::vector<std::string> all = overrides;
    all.push_back("--train." + option + "=" + value);
    return training_config(name, all);
  };
  struct Steps {
    Steps(const models::TrainConfig& c, World& world)
        : step(c, c.model.vocab, world, world.device()), fill(random_tokens(c)) {}
    double one() {
      const auto enqueue = [&] {
        const double begin = now();
        result = step.run(done++, fill);
        host.push_back(now() - begin);
      };
      if (step.world().device().is_cuda()) return gpu_seconds(enqueue);
      enqueue();
      return host.back();
    }
    models::TrainingStep step;
    models::FillBatch fill;
    models::TrainingStep::Result result;
    int64_t done = 0;
    std::vector<double> host;
  };
  const auto measure = [&](World& world) {
    Steps with(config("true"), world), without(config("false"), world);
    for (int warm = 6; warm > 0; --warm) with.one(), without.one();
    with.host.clear(), without.host.clear();
    auto [own, peers] = session.turns([&] { return with.one(); }, [&] { return without.one(); });
    const double tokens = static_cast<double>(with.step.tokens_per_step());
    line.samples_s = std::move(own);
    line.peer = peer;
    line.peer_value = quantile(peers, 0.5);
    line.more = {{"tokens/s", tokens / quantile(line.samples_s, 0.5)}};
    if (session.on_gpu())
      line.more.insert(line.more.end(), {{"host ms", 1e3 * quantile(with.host, 0.5)},
                                         {"host ms without", 1e3 * quantile(without.host, 0.5)}});
  };
  run_local(1, measure,
            {.threads_per_rank = session.machine().threads, .device = session.device()});
}

}  // namespace

void step_suite(Session& session) {
  for (const TrainingCase& c : training_cases(session.device()))
    session.line("step", c.name, Unit::seconds, [&](Line& line) {
      (session.on_gpu() ? measure_what_fits : measure_on_cpu)(session, c.name, line);
    });
  const auto option = [&](const char* line_name, const char* name, const char* overrides,
                          const char* what, const char* peer) {
    session.line("step", line_name, Unit::seconds, [&](Line& line) {
      measure_option(session, name, {overrides}, what, peer, line);
    });
  };
  if (session.on_gpu()) {
    option("gpt2-124m-bf16-4x1024-graph", "gpt2-124m-bf16-512x1024", "--train.batch=4", "cuda_graph",
           "the step without a graph");
    option("gpt2-124m-bf16-4x1024-program", "gpt2-124m-bf16-512x1024", "--train.batch=4", "compile",
           "the eager step");
  } else {
    option("nanogpt-f32-12x64-program", "nanogpt-f32-12x64", "--train.batch=12", "compile",
           "the eager step");
    option("gpt2-124m-f32-1x1024-program", "gpt2-124m-f32-1x1024", "--train.batch=1", "compile",
           "the eager step");
  }
}

}  // namespace sheaf::bench
