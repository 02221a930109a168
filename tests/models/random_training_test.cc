// Random training: the separate guarantees of strategies, meshes, units, recomputation, programs and checkpoints, in combinations that
// nobody chose (random_training.h draws them). In f64 every way of training gives the numbers of one rank that does everything at once,
// also when resumed from another way's checkpoint; in f32, bf16 and f16 the bits depend only on the mesh and the order of sums. Steps take
// the bytes of their plans, and release them; tapes pass all checks; and impossible configurations are refused, with the same message as by
// a plan, before the end of the first step.
//
// A case is a seed; random_seeds() chooses the seeds: bazel test --test_env=SHEAF_SEED=1037 --test_env=SHEAF_SEEDS=1 ...
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/passes/without_sharding.h"
#include "sheaf/autograd/tape_diff.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/models/async_saver.h"
#include "sheaf/models/batch_sampler.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/step_profile.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/models/random_training.h"

namespace sheaf::testing {
namespace {

struct Trained {
  std::vector<std::vector<double>> numbers;  // of each rank: losses, norms, evaluations
  Values parameters = {};
  std::vector<int64_t> peaks = {};  // of the last step
  std::vector<Tape> tapes = {};     // of it
};

struct Part {
  DType masters = kF64;
  int from = 0;         // steps, starting from those in the folder
  int save_after = -1;  // steps, then saves to the folder
  std::string folder = {};
};

models::SequentialWindows validation(const models::TrainConfig& config) {
  std::vector<int32_t> ids;
  Draw draw(7);
  for (int i = 0; i < 31; ++i) ids.push_back(draw.below(static_cast<size_t>(config.model.vocab)));
  return {models::Tokens::from_ids(ids, config.model.vocab, "random"), config.model.context};
}

/// The run of one rank. As in the trainer: evaluations, saves and a measured step in between.
class Run {
 public:
  Run(const Way& way, const Part& part, World& world)
      : config_(way.config), part_(part), world_(world), saver_(world),
        step_(config_, config_.model.vocab, world, Device::cpu(), options_for(config_, part.masters)) {}

  void start() {
    if (part_.from == 0) return;
    const auto loaded = models::load_checkpoint(part_.folder, step_.model(), {&step_.optimizer()}, world_,
                                                 {.scaler = step_.scaler()});
    ASSERT_TRUE(loaded);
    ASSERT_EQ(loaded->step, part_.from);
  }

  void step(int s, std::vector<double>& numbers) {
    const auto fill = [&](int64_t first, int64_t count, int32_t* inputs, int32_t* targets) {
      fill_random(config_, first, count, inputs, targets);
    };
    const bool last = s + 1 == kRandomSteps;
    recorded_.capture_leaves = part_.masters == kF64;  // which needs memory that is in no plan
    std::optional<models::StepProfile> profile;
    if (s + 1 == config_.output.trace_step && !part_.folder.empty()) profile.emplace(world_);
    const auto result = step_.run(s, fill, last ? &recorded_ : nullptr);
    if (profile) profile->write(part_.folder + "/trace.json");
    numbers.push_back(result.loss.item<double>());
    const double norm = result.grad_norm.item<double>();  // in f16 not finite if the step is skipped
    numbers.push_back(std::isfinite(norm) ? norm : -1);
    if (last && recorded_.capture_leaves) replay_last(result);
  }

  void after(int s, std::vector<double>& numbers) {
    const int64_t every = config_.train.eval_every;
    if (s + 1 == kRandomSteps || (every > 0 && (s + 1) % every == 0)) numbers.push_back(step_.evaluate(validation(config_)));
    if (s + 1 != part_.save_after) return;
    const models::SaveOptions options{.scaler = step_.scaler()};
    if (config_.train.save_async) saver_.save(part_.folder, s + 1, step_.model(), {&step_.optimizer()}, options);
    else models::save_checkpoint(part_.folder, s + 1, step_.model(), {&step_.optimizer()}, world_, options);
  }

  void finish(Whole& whole, Tape& tape) {
    saver_.finish();
    whole.collect(step_.model(), false);
    tape = std::move(recorded_.tape);
  }

 private:
  void replay_last(const models::TrainingStep::Result& result) {
    const ValueId wanted[] = {recorded_.loss, recorded_.grad_norm};
    const auto again = replay(recorded_.tape, [&](ValueId v) { return recorded_.leaves.at(v); }, wanted);
    EXPECT_TRUE(identical(again[0], result.loss));
    EXPECT_TRUE(identical(again[1], result.grad_norm));
    recorded_.leaves.clear(), recorded_.memory.clear();
  }

  const models::TrainConfig& config_;
  const Part& part_;
  World& world_;
  models::AsyncSaver saver_;
  models::TrainingStep step_;
  models::RecordedStep recorded_;
};

Trained train(const Way& way, const Part& part) {
  const auto ranks = static_cast<size_t>(way.world);
  Trained out{.numbers = std::vector<std::vector<double>>(ranks), .peaks = std::vector<int64_t>(ranks), .tapes = std::vector<Tape>(ranks)};
  Whole whole;
  std::atomic<int> steps = 0;
  try {
    run_local(way.world, [&](World& w) {
      Allocator& memory = *RankContext::current().memory(Device::cpu());
      const int64_t before = memory.stats().live;
      const auto rank = static_cast<size_t>(w.rank());
      {
        Run run(way, part, w);
        run.start();
        int64_t live = 0;
        for (int s = part.from; s < kRandomSteps; ++s) {
          memory.reset_peak();
          run.step(s, out.numbers[rank]);
          out.peaks[rank] = memory.stats().peak;
          ++steps;
          if (s == part.from || way.config.train.compile) live = memory.stats().live;
          EXPECT_EQ(memory.stats().live, live) << "bytes after step " << s;
          run.after(s, out.numbers[rank]);
        }
        run.finish(whole, out.tapes[rank]);
      }
      EXPECT_EQ(memory.stats().live, before) << "bytes that stay";
    }, {.bytes_per_second = way.bytes_per_second, .timeout = std::chrono::seconds(60), .threads_per_rank = way.threads});
  } catch (...) {
    EXPECT_EQ(steps, 0) << "steps before the error";
    throw;
  }
  for (const std::vector<double>& numbers : out.numbers) EXPECT_EQ(numbers, out.numbers[0]);
  out.parameters = whole.values();
  return out;
}

void expect_near(const Trained& got, const Trained& want, double tolerance) {
  const std::vector<double>&a = got.numbers[0], &b = want.numbers[0];
  for (size_t i = 1; i <= a.size(); ++i)  // from the end: a resumed run has fewer
    EXPECT_NEAR(a[a.size() - i], b[b.size() - i], tolerance * std::max(1.0, std::abs(b[b.size() - i])))
        << "the last but " << i - 1 << " of " << b.size() << " numbers";
  for (const auto& [name, values] : want.parameters)
    EXPECT_LE(max_difference({{name, got.parameters.at(name)}}, {{name, values}}), tolerance) << name;
}

/// The message with which its plan is refused; "" if it is not.
std::string refusal_of(const Way& way) {
  try {
    models::plan_step(way.config, way.config.model.vocab, 0, way.world, way.threads, "local");
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), static_cast<int>(ExitCode::kConfig)) << error.what();
    return error.what();
  }
  return "";
}

void expect_refused(const Way& way, const std::string& message) {
  try {
    train(way, {});
    ADD_FAILURE() << "trains, but its plan is refused: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), message);
  }
}

/// Its tape without sharding is the step of one rank.
void expect_one_device(const Way& way, const Trained& trained) {
  const models::ShardingConfig& s = way.config.sharding;
  if (s.pipeline > 1 || s.tensor > 1 || s.experts > 1) return;  // ops of their own
  const bool gathers = s.context_comm == "all_gather";
  if (!gathers && s.context > models::resolved(way.config.model).kv_heads) return;  // copies of key heads
  if (s.context > 1 && way.config.model.experts > 0) return;    // capacities are counted per rank's part of a sequence
  if (s.context > 1 && way.config.model.lora_rank > 0) return;  // deferred weight gradients: two layers' in another order
  // The gradient of tensors computed from gathered latents is Partial, and partial sums are not rounded.
  if (s.context > 1 && gathers && way.config.model.kv_lora_rank > 0 && way.config.train.fp8 != "none") return;
  if (way.config.train.compile && way.config.train.fuse) return;  // which ops are fused depends on placements
  models::TrainConfig one = way.config;
  one.sharding = {};
  one.sharding.context_comm = s.context_comm;
  const Tape expected = without_sharding(models::plan_step(one, one.model.vocab, 0, 1, way.threads, "local").tape);
  for (const Tape& tape : trained.tapes) {
    const auto difference = first_difference(expected, without_sharding(tape));
    EXPECT_FALSE(difference) << difference->to_string();
  }
}

void expect_planned(const Way& way, const Trained& trained) {
  const std::vector<int64_t> planned = models::plan_peaks(way.config, way.config.model.vocab, way.world, way.threads, "local");
  if (way.config.sharding.memory_budget == 0) {
    EXPECT_EQ(trained.peaks, planned);
  } else {  // ranks keep only what all of them have room for, and a plan knows only one rank
    models::TrainConfig plain = way.config;
    plain.sharding.memory_budget = 0;
    const std::vector<int64_t> without = models::plan_peaks(plain, plain.model.vocab, way.world, way.threads, "local");
    EXPECT_LE(*std::ranges::max_element(trained.peaks),
              std::max(*std::ranges::max_element(planned), *std::ranges::max_element(without)));
  }
  for (const Tape& t : trained.tapes)
    for (const Finding& f : check_tape(t)) ADD_FAILURE() << f.to_string();
  expect_one_device(way, trained);
  const int stages = static_cast<int>(way.config.sharding.pipeline), ranks = way.world / stages;
  for (int stage = 0; stage < stages; ++stage) {  // each has its own collectives, in its own order
    std::vector<const Tape*> tapes;
    for (int rank = 0; rank < ranks; ++rank) tapes.push_back(&trained.tapes[static_cast<size_t>(stage * ranks + rank)]);
    for (const Finding& f : check_collectives(tapes)) ADD_FAILURE() << f.to_string();
  }
}

/// The result of train.recompute fit, with a budget between its largest and smallest peak.
void fit(Way& way, Draw& draw) {
  models::TrainConfig& c = way.config;
  c.train.recompute_blocks = -1, c.train.offload_activations = false, c.sharding.memory_budget = 0;
  int64_t peaks[2];
  for (const bool block : {false, true}) {
    c.train.recompute = block ? "block" : "none";
    peaks[block] = models::plan_step(c, c.model.vocab, way.world - 1, way.world, way.threads, "local").peak.bytes;
  }
  c.train.recompute = "fit";
  c.sharding.memory_budget = peaks[1] + (peaks[0] - peaks[1]) * draw.below(5) / 4;
  try {
    c = models::fit_recompute(c, c.model.vocab, way.world, way.threads, "local");
  } catch (const OutOfMemory&) {  // other ranks need more
    c.train.recompute = "block", c.sharding.memory_budget = 0;
  }
}

class RandomTraining : public ::testing::TestWithParam<int> {};

TEST_P(RandomTraining, HasTheNumbersOfOneRank) {
  Draw draw(static_cast<uint64_t>(GetParam()));
  models::TrainConfig task = drawn_task(draw);
  if (task.train.optimizer == "adamw" && draw.one_in(4)) {
    task.model.mtp_layers = 0;
    task.model.lora_rank = 1 + draw.below(5), task.model.lora_layers = draw.of<std::string>({"all", "attention", "mlp"});
  }
  // Frozen weights of a model with adapters may be stored in blocks, whose rows must be whole blocks, and products may be in FP8.
  const bool in_blocks = task.model.lora_rank > 0 && draw.one_in(2), wide = in_blocks || draw.one_in(3);
  if (wide) draw_widths(task.model, in_blocks ? kBlockSize : 16, draw);
  if (in_blocks) task.model.quantize = draw.of<std::string>({"int8", "nf4"});
  const Way way = drawn_way(task, draw), other = drawn_way(task, draw);
  const auto save_after = 1 + draw.below(kRandomSteps - 1);
  SCOPED_TRACE(to_string(way));
  if (const std::string message = refusal_of(way); !message.empty()) {
    std::cout << message << '\n';
    return expect_refused(way, message);
  }
  const ScratchFolder folder;
  const Trained want = train({.config = task}, {});
  expect_near(train(way, {.save_after = save_after, .folder = folder.path()}), want, 1e-9);
  if (refusal_of(other).empty()) {
    SCOPED_TRACE(str("goes on after step ", save_after, " on ", to_string(other)));
    expect_near(train(other, {.from = save_after, .folder = folder.path()}), want, 1e-9);
  }
  Way rounded = way;
  rounded.config.train.dtype = draw.of<std::string>({"f32", "f32", "f32", "bf16", "bf16", "f16"});
  rounded.config.train.loss_scale = draw.of<double>({1024, 1024, 0x1p30});
  draw_sent(rounded.config.sharding, draw);
  rounded.config.train.state_dtype = draw.of<std::string>({"f32", "f32", "bf16"});
  if (wide) rounded.config.train.fp8 = draw.of<std::string>({"none", "activations", "all"});
  if (const std::string message = refusal_of(rounded); !message.empty()) return expect_refused(rounded, message);  // FP8 cuts by 16
  const ScratchFolder rounded_folder;
  const Trained bits = train(rounded, {.masters = kF32, .save_after = save_after, .folder = rounded_folder.path()});
  expect_planned(rounded, bits);
  const double rounding = task.model.layers > 4 ? 1e-2 : 1e-3;  // which deep models of tiny widths amplify
  if (!rounds(rounded.config))
    expect_near({.numbers = bits.numbers}, {.numbers = want.numbers}, rounding);
  Way twin = drawn_twin(rounded, draw);
  if (!refusal_of(twin).empty()) return;
  if (draw.one_in(4)) fit(twin, draw);
  const int from = draw.one_in(3) ? save_after : 0;
  SCOPED_TRACE(str("the same bits from step ", from, " on ", to_string(twin)));
  const Trained same = train(twin, {.masters = kF32, .from = from, .folder = rounded_folder.path()});
  const std::vector<double>&tail = same.numbers[0], &all = bits.numbers[0];
  EXPECT_EQ(tail, std::vector(all.end() - std::ssize(tail), all.end()));
  EXPECT_EQ(max_difference(same.parameters, bits.parameters), 0);
  if (from == 0) expect_planned(twin, same);  // otherwise prefetch may not know the order yet, or there is no program yet
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTraining, ::testing::ValuesIn(random_seeds(40)), [](const auto& seed) { return str(seed.param); });

}  // namespace
}  // namespace sheaf::testing
