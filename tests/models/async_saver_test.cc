// Saving while training goes on: a checkpoint has the state at the time of save(), and a failing disk is reported.
#include "sheaf/models/async_saver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/file.h"
#include "sheaf/models/plan.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"

namespace sheaf::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A tiny training run on one rank of several, and its saver.
struct Job {
  models::TrainingStep step;
  models::AsyncSaver saver;
  std::string warning;  // the last one
  int64_t done = 0;
  explicit Job(World& w, const char* strategy = "full_shard") : step(config(strategy), 13, w, w.device()), saver(w) {}
  static models::TrainConfig config(const char* strategy) {
    models::TrainConfig c = tiny_config();
    c.sharding.strategy = strategy;
    return c;
  }
  void train(int64_t steps) {
    for (int64_t end = done + steps; done < end; ++done) step.run(done, fill_tiny).loss.item();
  }
  void save(const std::string& folder, int64_t keep = 2) {
    saver.save(folder, done, step.model(), {&step.optimizer()}, {.keep = keep, .warn = [this](const std::string& line) { warning = line; }});
  }
};

TEST(AsyncSaver, SavesWhatWasAndNotWhatIs) {
  for (const char* strategy : {"full_shard", "replicate"})
    for (int world : {1, 3}) {
      const ScratchFolder folder;
      run_local(world, [&](World& w) {
        Job run(w, strategy);
        run.train(2);
        models::save_checkpoint(folder / "sync", 2, run.step.model(), {&run.step.optimizer()}, w);
        run.save(folder / "async");
        run.train(3);
        run.saver.finish();
        run.save(folder / "async");  // in the same memory
        run.train(1);
        run.saver.finish();
        run.saver.finish();  // there is nothing to wait for
      }, {.threads_per_rank = 1});
      EXPECT_THAT(list_steps(folder / "async"), ElementsAre(5, 2));
      const auto tensors = [&](const std::string& of, int64_t step) {
        auto checkpoint = models::Checkpoint::open(step_folder(folder / of, step));
        std::map<std::string, std::string> bytes;
        for (const auto& [name, info] : checkpoint.tensors()) {
          std::string& all = bytes[name];
          all.resize(static_cast<size_t>(info.shape.numel()) * size_of(info.dtype));
          checkpoint.read(name, 0, info.shape.numel(), all.data());
        }
        return bytes;
      };
      EXPECT_EQ(tensors("async", 2), tensors("sync", 2));
      EXPECT_NE(tensors("async", 5), tensors("sync", 2));
    }
}

std::atomic<bool> held = false, failing = false;
int hold(const char*, const char* path) {
  while (held && std::string_view(path).find("shard-") != std::string_view::npos)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return failing && std::string_view(path).find("shard-00001") != std::string_view::npos ? ENOSPC : 0;
}
// While it lives, shard files are not written as long as `held` is set, and rank 1's cannot be if `failing` is.
struct SlowDisk {
  SlowDisk() { set_file_fault(hold); }
  ~SlowDisk() {
    held = failing = false;
    set_file_fault(nullptr);
  }
};

TEST(AsyncSaver, ReturnsBeforeAnythingIsWrittenAndWaitsForTheSaveBefore) {
  const ScratchFolder folder;
  const SlowDisk disk;
  held = true;
  run_local(2, [&](World& w) {
    Job run(w);
    run.train(1);
    run.save(folder.path(), 1);
    run.train(2);  // collectives of steps during a save in flight
    run.saver.check();
    EXPECT_THAT(list_steps(folder.path()), IsEmpty());
    w.communicator().barrier("test").sync();
    held = false;
    run.save(folder.path(), 1);
    EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
    run.saver.finish();
    EXPECT_THAT(list_steps(folder.path()), ElementsAre(3));
  }, {.threads_per_rank = 1});
}

std::atomic<int> countdown = 0;
int fail_when_due(const char* operation, const char*) {
  return std::string_view(operation) != "look" && countdown-- == 0 ? ENOSPC : 0;
}

TEST(AsyncSaver, DiskFullAtEveryFileOperation) {
  const ScratchFolder folder;
  int failures = 0;
  run_local(1, [&](World& w) {
    Job run(w);
    run.train(1);
    run.save(folder.path());
    run.saver.finish();
    run.train(1);
    for (int k = 0;; ++k) {
      countdown = k;
      set_file_fault(fail_when_due);
      run.warning = "";
      std::string reason;
      try {
        run.save(folder.path());
        run.saver.finish();
      } catch (const IoError& error) {
        EXPECT_EQ(error.exit_code(), 74);
        reason = error.what();
      }
      set_file_fault(nullptr);
      if (reason.empty() && !run.warning.empty()) reason = str("cannot save all: ", run.warning);
      EXPECT_EQ(models::Checkpoint::open(step_folder(folder.path(), 1)).step(), 1);
      if (reason.empty()) break;
      EXPECT_THAT(reason, HasSubstr("cannot save"));
      EXPECT_THAT(reason, HasSubstr("No space left"));
      std::filesystem::remove_all(step_folder(folder.path(), 2));
      ++failures;
    }
  }, {.threads_per_rank = 1});
  EXPECT_GE(failures, 15);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(2, 1));
}

std::atomic<int> looks_in_vain = 0;
int see_nothing_at_first(const char* operation, const char* path) {
  const bool of_rank_1 = std::string_view(path).find("shard-00001") != std::string_view::npos;
  return std::string_view(operation) == "look" && of_rank_1 && looks_in_vain-- > 0 ? ENOENT : 0;
}

// NFS may remember for a while that a file was not there.
TEST(AsyncSaver, WaitsForPartsThatItDoesNotSeeYet) {
  const ScratchFolder folder;
  looks_in_vain = 12;  // more than fit into the time until all ranks know that both have written
  set_file_fault(see_nothing_at_first);
  run_local(2, [&](World& w) {
    Job run(w);
    run.train(1);
    run.save(folder.path());
    run.saver.finish();
    EXPECT_LT(looks_in_vain.load(), 0);
    EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
  }, {.threads_per_rank = 1});
  set_file_fault(nullptr);
}

TEST(AsyncSaver, ADiskThatFailsOneRankFailsAllAndTheNextSaveSucceeds) {
  const ScratchFolder folder;
  const SlowDisk disk;
  failing = true;
  run_local(3, [&](World& w) {
    Job run(w);
    run.train(1);
    run.save(folder.path());
    try {
      run.saver.finish();
      ADD_FAILURE() << "no error on rank " << w.rank();
    } catch (const IoError& error) {
      EXPECT_THAT(error.what(), HasSubstr(w.rank() == 1 ? "No space left" : "another rank could not write its part"));
    }
    w.communicator().barrier("test").sync();
    failing = false;
    w.communicator().barrier("test").sync();
    EXPECT_THAT(list_steps(folder.path()), IsEmpty());
    run.save(folder.path());
    run.saver.finish();
    EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
  }, {.threads_per_rank = 1});
}

int fail_then_see_nothing_at_first(const char* operation, const char* path) {
  return std::string_view(operation) == "look" ? see_nothing_at_first(operation, path) : hold(operation, path);
}

// Nothing of a failure is left to the save after it, not even if its parts are late to be seen.
TEST(AsyncSaver, AfterAFailureWaitsForPartsAsBefore) {
  const ScratchFolder folder;
  const SlowDisk disk;
  set_file_fault(fail_then_see_nothing_at_first);
  looks_in_vain = 0;
  failing = true;
  run_local(2, [&](World& w) {
    Job run(w);
    run.train(1);
    run.save(folder.path());
    EXPECT_THROW(run.saver.finish(), IoError);
    w.communicator().barrier("test").sync();
    failing = false, looks_in_vain = 12;
    w.communicator().barrier("test").sync();
    run.save(folder.path());
    run.saver.finish();
    EXPECT_NO_THROW(run.saver.check());
    EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
  }, {.threads_per_rank = 1});
}

// A note is seen only when it is complete, and the checkpoint may be committed before its rank looks again.
int slow_folder_of_rank_1(const char* operation, const char* path) {
  if (std::string_view(operation) == "sync" && std::string_view(path).find("shard-") == std::string_view::npos &&
      RankContext::current().rank == 1)
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  return 0;
}

TEST(AsyncSaver, ACommitMayComeBeforeAnotherRanksLastLook) {
  const ScratchFolder folder;
  set_file_fault(slow_folder_of_rank_1);
  run_local(3, [&](World& w) {
    Job run(w);
    run.train(1);
    run.save(folder.path());
    run.saver.finish();
  }, {.threads_per_rank = 1});
  set_file_fault(nullptr);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
}

TEST(AsyncSaver, IsRefusedInARecording) {
  run_local(1, [](World& w) {
    Job run(w);
    Recording recording;
    EXPECT_THROW(run.save("nowhere"), LifetimeError);
  });
}

// Rank 0 saves what the plan says that it holds.
TEST(AsyncSaver, ThePlanKnowsTheCopy) {
  for (const auto& [strategy, context] : {std::pair{"full_shard", 1}, {"full_shard", 2}, {"replicate", 1}}) {
    models::TrainConfig c = Job::config(strategy);
    c.sharding.context = context;
    run_local(4, [&](World& w) {
      models::TrainingStep step(c, 13, w, w.device());
      if (w.rank() != 0) return;
      int64_t bytes = 0;
      for (const models::CheckpointPiece& p : models::checkpoint_pieces(step.model(), {&step.optimizer()}))
        bytes += p.runs.numel() * static_cast<int64_t>(size_of(p.dtype));
      const int64_t planned = models::plan_step(c, 13, 0, 4, 1, "local").state_bytes;
      EXPECT_LE(bytes, planned);
      EXPECT_GE(static_cast<double>(bytes), 0.9 * static_cast<double>(planned));  // except padding
    }, {.threads_per_rank = 1});
  }
}

// The rank learns of the failure in a step, without communication.
TEST(AsyncSaver, CheckTellsTheRankThatFailed) {
  const ScratchFolder folder;
  const SlowDisk disk;
  failing = true;
  run_local(2, [&](World& w) {
    Job run(w);
    run.save(folder.path());
    if (w.rank() == 0) run.saver.check();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    bool told = w.rank() == 0;
    while (!told && std::chrono::steady_clock::now() < until) {
      try {
        run.saver.check();
      } catch (const IoError&) {
        told = true;
      }
    }
    EXPECT_TRUE(told);
  }, {.threads_per_rank = 1});  // rank 0 gives up, though it waits for rank 1's part
  EXPECT_THAT(list_steps(folder.path()), IsEmpty());
}

// The snapshot needs memory in addition to a step's: whether both fit is checked before the first step.
TEST(AsyncSaver, TheCopyCounts) {
  models::TrainConfig c = tiny_config();
  c.train.save_async = true;
  run_local(1, [&](World& w) { models::check_memory(c, 13, w); });
  c.model.layers = 12;
  c.model.width = 8192;
  c.model.heads = 64;
  run_local(1, [&](World& w) {
    try {
      models::check_memory(c, 1 << 20, w);
      GTEST_SKIP() << "this machine has the memory";
    } catch (const OutOfMemory& error) {
      EXPECT_THAT(error.what(), HasSubstr("the copy that is saved included"));
    }
  });
}

}  // namespace
}  // namespace sheaf::testing
