// Random runs of the trainer, with tasks and ways that random_training.h draws: a run that a signal stops on some rank, and that resumes in
// another way on the same mesh, ends with the bits of an uninterrupted run, whose peaks are those of its plan; and its numbers are close to
// those of one rank on the same data.
//
// A case is a seed; random_seeds() chooses the seeds: bazel test --test_env=SHEAF_SEED=1037 --test_env=SHEAF_SEEDS=1 ...
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <thread>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/file.h"
#include "sheaf/core/safetensors.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/models/plan.h"
#include "sheaf/models/model_checkpoint.h"
#include "sheaf/models/published_names.h"
#include "sheaf/models/published_weights.h"
#include "sheaf/models/token_file.h"
#include "sheaf/models/trainer.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/models/random_training.h"

namespace sheaf::testing {
namespace {

/// Rank 0's report. `stop_after`: a signal is sent to rank `stopped` after this number of steps.
models::TrainReport run(const Way& way, const std::string& folder, bool resume = false, int stop_after = -1, int stopped = 0) {
  models::TrainConfig config = way.config;
  config.output.folder = folder;
  models::TrainReport out;
  run_local(way.world, [&](World& w) {
    int64_t asked = 0;
    models::Trainer trainer(config, w, Device::cpu(), {.resume = resume, .warn = [](const std::string& line) { ADD_FAILURE() << line; }});
    models::TrainReport report = trainer.run([&] { return ++asked == stop_after && w.rank() == stopped ? 15 : 0; });
    if (w.rank() == 0) out = std::move(report);
  }, {.bytes_per_second = way.bytes_per_second, .timeout = std::chrono::seconds(60), .threads_per_rank = way.threads});
  return out;
}

/// Initial weights in a published format, for models whose architecture has one.
void draw_weights(models::TrainConfig& task, const ScratchFolder& folder, Draw& draw) {
  std::vector<models::PublishedTensor> tensors;
  try {
    tensors = models::published_tensors(models::resolved(task.model));
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), static_cast<int>(ExitCode::kConfig)) << error.what();
    return;
  }
  std::vector<std::vector<float>> values;
  std::vector<SafetensorsInput> inputs;
  for (const models::PublishedTensor& t : tensors) {
    if (!inputs.empty() && inputs.back().name == t.name) continue;  // another part of the same tensor
    std::vector<float>& v = values.emplace_back(static_cast<size_t>(t.shape.numel()));
    for (float& x : v) x = static_cast<float>(draw.below(200) - 100) / 1000 + (t.shape.rank() == 1 ? 1 : 0);
    inputs.push_back({t.name, kF32, t.shape, {std::as_bytes(std::span(v))}});
  }
  task.model.weights = folder / "model.safetensors";
  write_safetensors(task.model.weights, inputs);
}

/// In examples only a part of the tokens is trained on.
void draw_tokens(models::TrainConfig& task, Draw& draw) {
  const auto vocab = static_cast<size_t>(task.model.vocab);
  std::vector<int32_t> ids(77);
  for (int32_t& id : ids) id = draw.below(vocab);
  if (!task.data.examples) return models::write_token_file(task.data.train_file, ids, task.model.vocab);
  if (!task.data.separate_documents) task.data.separate_documents = true, task.data.end_of_text = draw.below(vocab);
  std::vector<models::MarkedToken> marked;
  for (const int32_t id : ids) marked.push_back(static_cast<models::MarkedToken>(id) | (draw.one_in(2) ? models::kReadOnly : 0));
  marked[1] &= ~models::kReadOnly;  // there are targets, however short a window is
  for (const int32_t id : {1, 2, static_cast<int32_t>(task.data.end_of_text)}) marked.push_back(static_cast<models::MarkedToken>(id));
  models::TokenFileWriter writer(task.data.train_file, task.model.vocab, static_cast<int32_t>(task.data.end_of_text));
  writer.write_examples(marked);
  writer.finish();
}

class RandomTrainer : public ::testing::TestWithParam<int> {
 protected:
  static void TearDownTestSuite() { EXPECT_LE(2 * refused, drawn) << "most configurations can be trained"; }
  static inline int drawn = 0, refused = 0;
};

TEST_P(RandomTrainer, GoesOnAsIfNobodyHadStopped) {
  Draw draw(static_cast<uint64_t>(GetParam()));
  const ScratchFolder folder;
  models::TrainConfig task = drawn_task(draw);
  task.data.train_file = task.data.val_file = folder / "tokens.bin";
  draw_tokens(task, draw);
  task.train.log_every = draw.of<int64_t>({1, 2});
  task.train.save_every = draw.of<int64_t>({0, 1, 2});
  task.train.eval_tokens = draw.of<int64_t>({0, 20});
  const bool wide = draw.one_in(4);
  if (wide) draw_widths(task.model, 16, draw);
  if (draw.one_in(2)) draw_weights(task, folder, draw);
  Way way = drawn_way(task, draw);
  way.config.train.dtype = draw.of<std::string>({"f32", "f32", "bf16", "f16"});
  way.config.train.loss_scale = 1024;
  way.config.train.state_dtype = draw.of<std::string>({"f32", "f32", "bf16"});
  draw_sent(way.config.sharding, draw);
  if (wide) way.config.train.fp8 = draw.of<std::string>({"activations", "all"});
  const bool exact = GetParam() % 2 == 0;  // rounding hides small mistakes
  if (exact) {
    way.config.train.dtype = way.config.train.state_dtype = way.config.sharding.reduce_dtype = "f32";
    way.config.train.fp8 = "none", way.config.sharding.gather_int8 = false;
  }
  Way twin = drawn_twin(way, draw);
  if (draw.one_in(3)) {  // with islands
    task.train.inner_steps = draw.of<int64_t>({1, 2, 3});
    task.train.outer_dtype = draw.of<std::string>({"f32", "f32", "bf16", "int8"});
    if (exact) task.train.outer_dtype = "f32";
    for (models::TrainConfig* c : {&task, &way.config, &twin.config}) {
      *c = models::islands_of(*c, 2);
      c->train.inner_steps = task.train.inner_steps;
      c->train.outer_dtype = task.train.outer_dtype;
    }
    way.world *= 2, twin.world *= 2;
  }
  SCOPED_TRACE(to_string(way));
  ++drawn;
  models::TrainReport whole;
  try {
    whole = run(way, folder / "whole");
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), static_cast<int>(ExitCode::kConfig)) << error.what();
    std::cout << error.what() << '\n';
    ++refused;
    return;
  }
  EXPECT_EQ(whole.done, kRandomSteps);
  if (way.config.sharding.memory_budget == 0) {
    EXPECT_EQ(whole.peaks, models::plan_peaks(way.config, task.model.vocab, way.world, way.threads, "local"));
  }
  task.train.dtype = way.config.train.dtype;
  task.train.loss_scale = way.config.train.loss_scale;
  task.train.state_dtype = way.config.train.state_dtype;
  task.train.fp8 = way.config.train.fp8;
  const models::TrainReport one = run({.world = static_cast<int>(task.train.islands), .config = task}, folder / "one");
  // In bf16 a sum over ranks is rounded differently; with few targets their loss shows it.
  const double tolerance = !rounds(way.config) ? 1e-3 : task.data.examples ? 0.3 : 0.1;
  EXPECT_NEAR(whole.train_loss, one.train_loss, tolerance);
  EXPECT_NEAR(whole.val_loss, one.val_loss, tolerance);

  const int stop_after = 1 + draw.below(kRandomSteps - 1), stopped = draw.below(static_cast<size_t>(way.world));
  const models::TrainReport part = run(way, folder / "stopped", false, stop_after, stopped);
  EXPECT_EQ(part.stopped_by, 15);
  EXPECT_LE(part.done - stop_after, way.world > 1 && task.train.log_every > 1 ? 1 : 0);
  SCOPED_TRACE(str("stopped after step ", part.done, "; goes on on ", to_string(twin)));
  try {
    const models::TrainReport rest = run(twin, folder / "stopped", true);
    EXPECT_EQ(rest.steps_here, kRandomSteps - part.done);
    if (rest.steps_here > 0) {
      EXPECT_EQ(rest.train_loss, whole.train_loss);
    }
    EXPECT_EQ(rest.val_loss, whole.val_loss);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), static_cast<int>(ExitCode::kConfig)) << error.what();
    std::cout << error.what() << '\n';
  }
}

models::TrainConfig small_task(models::ModelConfig model, const ScratchFolder& folder, Draw& draw) {
  models::TrainConfig task;
  task.model = std::move(model);
  task.model.context = 5, task.model.vocab = 13;
  task.data.train_file = task.data.val_file = folder / "tokens.bin";
  draw_tokens(task, draw);
  return task;
}

// With a learning rate of 0 nothing changes, and all islands together have the losses of one rank.
TEST(Trainer, IslandsBeginWithTheWeightsAndSayWhatAllOfThemSee) {
  Draw draw(7);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("llama", 4, 2), folder, draw);
  draw_weights(task, folder, draw);
  ASSERT_FALSE(task.model.weights.empty());
  task.train.steps = 4, task.train.batch = 8, task.train.lr = task.train.min_lr = 0;
  const models::TrainReport one = run({.config = task}, folder / "one");
  task.train.islands = 2, task.train.inner_steps = 2;
  task.output.keep_best = true;
  const models::TrainReport two = run({.world = 4, .config = task}, folder / "two");
  EXPECT_NEAR(two.val_loss, one.val_loss, 1e-6);
  EXPECT_NEAR(two.train_loss, one.train_loss, 1e-6);
  ASSERT_TRUE(two.best);
  task.train.islands = 1;
  task.train.inner_steps = models::TrainConfig().train.inner_steps;
  models::TrainConfig best = task;
  best.model.weights.clear();
  run_local(1, [&](World& w) {
    models::TrainingStep step(best, 13, w, Device::cpu());
    EXPECT_TRUE(models::load_checkpoint(folder / "two/best/checkpoints", step.model(), {}, w));
    models::TrainingStep start(best, 13, w, Device::cpu());
    models::load_weights(start.model(), models::PublishedFiles::open(task.model.weights));
    EXPECT_EQ(shards(step.model()), shards(start.model()));
  });
}

// A run that ends where it was stopped, in the middle of a round, ends with the parameters of the last outer step.
TEST(Trainer, IslandsThatEndInARoundHaveOneModel) {
  Draw draw(8);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("gpt2", 4, 4), folder, draw);
  task.train.batch = 8, task.train.lr = 1e-2, task.train.warmup = 0, task.train.schedule = "constant";
  task.train.islands = 2, task.train.inner_steps = 2, task.train.eval_every = 0;
  task.output.keep_best = true;
  const auto with_steps = [&](int64_t steps) {
    Way way{.world = 4, .config = task};
    way.config.train.steps = steps;
    return way;
  };
  const models::TrainReport two = run(with_steps(2), folder / "two");
  const models::TrainReport stopped = run(with_steps(4), folder / "stopped", false, 3, 1);
  EXPECT_EQ(stopped.done, 3);
  const models::TrainReport ended = run(with_steps(3), folder / "stopped", true);
  EXPECT_EQ(ended.steps_here, 0);
  EXPECT_EQ(ended.val_loss, two.val_loss);
  // The best weights are a model without optimizer state.
  const models::Checkpoint best = models::Checkpoint::open(folder / "two/best/checkpoints/step-2");
  for (const auto& [name, info] : best.tensors()) EXPECT_FALSE(name.starts_with("optimizer.")) << name;
}

// The time-out is for ranks that are at work together, not for files.
int slow_on_first(const char* operation, const char* path) {
  const std::string_view name(path);
  const bool removes = std::string_view(operation) == "remove" && name.ends_with("step-1.tmp-5");
  const bool begins = std::string_view(operation) == "open" && name.find("/metrics.jsonl") != name.npos;
  if (removes || begins) std::this_thread::sleep_for(std::chrono::seconds(4));
  return 0;
}

TEST(Trainer, ARankMayTakeLongOverItsFiles) {
  Draw draw(9);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("gpt2", 4, 4), folder, draw);
  task.train.batch = 8, task.train.steps = 1;
  task.output.folder = folder / "run";
  make_folders(task.output.folder + "/checkpoints/step-1.tmp-5");  // of a save that failed
  set_file_fault(slow_on_first);
  run_local(2, [&](World& w) {
    models::Trainer trainer(task, w, Device::cpu());
    EXPECT_EQ(trainer.run().done, 1);
  }, {.timeout = std::chrono::seconds(2), .threads_per_rank = 1});
  set_file_fault(nullptr);
}

models::TrainConfig task_of_tokens(const ScratchFolder& folder) {
  Draw draw(9);
  models::TrainConfig task = small_task(tiny_model("gpt2", 4, 4), folder, draw);
  task.train.steps = 1;
  task.output.folder = folder / "run";
  return task;
}

std::string refusal(const models::TrainConfig& task) {
  return message_of<ConfigError>(ExitCode::kConfig, [&] { run_local(1, [&](World& w) { models::Trainer(task, w, Device::cpu()); }); });
}

// Before it loads anything: a launcher's retry after a failure there would continue that run.
TEST(Trainer, AnEarlierRunIsRefusedFirst) {
  const ScratchFolder folder;
  models::TrainConfig task = task_of_tokens(folder);
  task.data.train_file = folder / "missing.bin";
  for (const char* checkpoint : {"/best/checkpoints/step-3", "/checkpoints/step-3"}) {
    make_folders(task.output.folder + checkpoint);
    EXPECT_THAT(refusal(task), ::testing::HasSubstr("holds checkpoints of an earlier run"));
    std::filesystem::remove_all(task.output.folder);
  }
}

std::string folder_of_another;
int another_run_ends(const char* operation, const char* path) {
  if (std::string_view(operation) == "mkdir" && path == folder_of_another)  // just before this one locks it
    std::filesystem::create_directories(folder_of_another + "/checkpoints/step-3");
  return 0;
}

// It had the folder's lock when this one came, and gave it up while this one read its data.
TEST(Trainer, ARunThatEndsMeanwhileIsNotOverwritten) {
  const ScratchFolder folder;
  const models::TrainConfig task = task_of_tokens(folder);
  folder_of_another = task.output.folder;
  set_file_fault(another_run_ends);
  const std::string said = refusal(task);
  set_file_fault(nullptr);
  EXPECT_THAT(said, ::testing::HasSubstr("run/checkpoints holds checkpoints of an earlier run"));
  EXPECT_FALSE(path_exists(task.output.folder + "/metrics.jsonl"));
}

int too_many_files(const char* operation, const char* path) {
  return std::string_view(operation) == "read" && std::string_view(path).ends_with("step-4/shard-00001-of-00002.safetensors") ? EMFILE : 0;
}

TEST(Trainer, AnotherRunGoesOn) {
  Draw draw(9);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("gpt2", 4, 4), folder, draw);
  task.train.batch = 8, task.train.steps = 4;
  const auto train = [&](const char* name, int stops) {
    task.output.folder = folder / name;
    models::TrainReport out;
    run_local(1, [&](World& w) {
      models::Trainer trainer(task, w, Device::cpu());
      for (int i = 1; i <= stops; ++i) {
        EXPECT_EQ(trainer.run([] { return 15; }).done, i);
        EXPECT_EQ(trainer.stopped_by(), 15);
      }
      out = trainer.run();
      EXPECT_EQ(trainer.stopped_by(), 0);
    });
    EXPECT_EQ(out.done, 4);
    return out;
  };
  const models::TrainReport whole = train("whole", 0), parts = train("parts", 2);
  EXPECT_EQ(parts.train_loss, whole.train_loss);
  EXPECT_EQ(parts.val_loss, whole.val_loss);
}

// The next save removes broken ones, and not what another rank could not read for a moment.
TEST(Trainer, ACheckpointThatCannotBeReadStays) {
  Draw draw(9);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("gpt2", 4, 4), folder, draw);
  task.train.batch = 8, task.train.steps = 4, task.train.save_every = 2;
  task.output.folder = folder / "run";
  const LocalOptions ranks{.timeout = std::chrono::seconds(60), .threads_per_rank = 1};
  run_local(2, [&](World& w) { models::Trainer(task, w, Device::cpu()).run(); }, ranks);
  set_file_fault(too_many_files);
  run_local(2, [&](World& w) {
    models::Trainer trainer(task, w, Device::cpu(), {.resume = true});
    EXPECT_EQ(trainer.run([] { return 15; }).done, 3);
  }, ranks);
  set_file_fault(nullptr);
  EXPECT_THAT(list_steps(task.output.folder + "/checkpoints"), ::testing::ElementsAre(4, 3, 2));
}

std::atomic<bool> locks = false;
std::atomic<int> reads_before = 0;
int note_reads_before_the_lock(const char* operation, const char* path) {
  const std::string_view what(operation), name(path);
  if (what == "mkdir" && name.ends_with("/run")) locks = true;
  if (what == "read" && name.ends_with("-of-00001.safetensors") && !locks) ++reads_before;
  return 0;
}

// A checkpoint is large, and which weights they were is said by its manifest.
TEST(Trainer, WeightsThatAreGoneAreLookedUpWithoutReadingShards) {
  Draw draw(9);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("llama", 4, 4), folder, draw);
  draw_weights(task, folder, draw);
  ASSERT_FALSE(task.model.weights.empty());
  task.train.batch = 8, task.train.steps = 1;
  task.output.folder = folder / "run";
  const auto run_once = [&](bool resume) {
    run_local(1, [&](World& w) { EXPECT_EQ(models::Trainer(task, w, Device::cpu(), {.resume = resume}).run().done, 1); });
  };
  run_once(false);
  std::filesystem::remove(task.model.weights);
  set_file_fault(note_reads_before_the_lock);
  run_once(true);
  set_file_fault(nullptr);
  EXPECT_TRUE(locks);
  EXPECT_EQ(reads_before, 0);
}

// The lock of a host that has lost power may outlive it.
TEST(Trainer, OnlyARunThatGoesOnWaitsForTheLock) {
  Draw draw(9);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("gpt2", 4, 4), folder, draw);
  task.train.batch = 8, task.train.steps = 1;
  task.output.folder = folder / "run";
  make_folders(task.output.folder);
  auto other = std::make_unique<FileLock>(task.output.folder + "/.lock");
  const auto run_once = [&](bool resume, std::chrono::seconds patience) {
    std::string warning;
    run_local(2, [&](World& w) {
      const auto warn = [&](const std::string& line) { warning = line; };
      EXPECT_EQ(models::Trainer(task, w, Device::cpu(), {.resume = resume, .lock_patience = patience, .warn = warn}).run().done, 1);
    }, {.timeout = std::chrono::seconds(10), .threads_per_rank = 1});
    return warning;
  };
  EXPECT_THROW(run_once(false, std::chrono::seconds(3600)), ConfigError);
  EXPECT_THROW(run_once(true, std::chrono::seconds(1)), ConfigError);
  std::jthread ends([&] {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    other.reset();
  });
  EXPECT_THAT(run_once(true, std::chrono::seconds(3600)), ::testing::HasSubstr("/run' is locked"));
  ends.join();
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Which takes many plans; of large models each takes minutes.
TEST(Trainer, FitsWhatIsComputedAgainOnce) {
  Draw draw(9);
  const ScratchFolder folder;
  models::TrainConfig task = small_task(tiny_model("gpt2", 4, 4), folder, draw);
  task.model.layers = 14;
  task.train.batch = 9, task.train.steps = 1;
  task.train.recompute = "fit", task.sharding.memory_budget = int64_t{1} << 40;
  task.output.folder = folder / "run";
  run_local(3, [&](World& w) {
    const double begin = thread_seconds();
    models::fit_recompute(task, 13, 3, 1, "local");
    const double fits = thread_seconds();
    const models::Trainer trainer(task, w, Device::cpu());
    EXPECT_EQ(trainer.fitted().train.recompute, "none");
    EXPECT_LE(thread_seconds() - fits, 2.5 * (fits - begin));
  }, {.timeout = std::chrono::seconds(60), .threads_per_rank = 1});
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTrainer, ::testing::ValuesIn(random_seeds(12)), [](const auto& seed) { return str(seed.param); });

}  // namespace
}  // namespace sheaf::testing
