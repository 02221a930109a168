#include "sheaf/models/checkpoint_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/broken_manifest.h"

namespace sheaf::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// N ranks as threads.
class Ranks {
 public:
  explicit Ranks(int world) : world_(world), barrier_(world) {}
  template <class F>
  void run(F&& f) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_; ++rank) {
      threads.emplace_back([&, rank] {
        CheckpointGroup group{rank, world_, [&] { barrier_.arrive_and_wait(); }, {}};
        group.all_true = [&](bool mine) {
          if (!mine) all_ = false;
          barrier_.arrive_and_wait();
          const bool result = all_;
          barrier_.arrive_and_wait();
          all_ = true;
          barrier_.arrive_and_wait();
          return result;
        };
        f(group);
      });
    }
    for (auto& thread : threads) thread.join();
  }

 private:
  int world_;
  std::barrier<> barrier_;
  std::atomic<bool> all_{true};
};

// A small "model": global values that depend on the step; each rank holds a flat cut of every tensor.
struct Model {
  std::vector<float> a = std::vector<float>(35);
  std::vector<uint8_t> b = std::vector<uint8_t>(3);
  std::vector<double> scalar = {0.5};
  explicit Model(int step) {
    std::iota(a.begin(), a.end(), 100.0f * static_cast<float>(step));
    std::iota(b.begin(), b.end(), static_cast<uint8_t>(step));
  }
  std::vector<CheckpointPiece> pieces(int rank, int world) const {
    const auto cut = [&](int64_t n) { return Interval{n * rank / world, n * (rank + 1) / world}; };
    const Interval ia = cut(35), ib = cut(3);
    std::vector<CheckpointPiece> out = {{"a", DType::f32, {5, 7}, Runs::of(ia), a.data() + ia.begin},
                                        {"b", DType::u8, {3}, Runs::of(ib), b.data() + ib.begin},
                                        {"none", DType::bf16, {0, 4}, {}, nullptr}};
    if (rank == world - 1) out.push_back({"scalar", DType::f64, {}, Runs::of({0, 1}), scalar.data()});
    return out;
  }
  // Reads every interval of every tensor.
  void expect_in(Checkpoint& checkpoint) const {
    for (int64_t begin = 0; begin <= 35; ++begin) {
      for (int64_t end = begin; end <= 35; ++end) {
        std::vector<float> got(36, -1);
        checkpoint.read("a", begin, end, got.data());
        ASSERT_TRUE(std::equal(got.begin(), got.begin() + (end - begin), a.begin() + begin)) << begin << " " << end;
        ASSERT_EQ(got[static_cast<size_t>(end - begin)], -1);
      }
    }
    std::vector<uint8_t> got(3);
    checkpoint.read("b", 0, 3, got.data());
    EXPECT_EQ(got, b);
    double value = 0;
    checkpoint.read("scalar", 0, 1, &value);
    EXPECT_EQ(value, 0.5);
    EXPECT_EQ(checkpoint.at("none").shape, (Shape{0, 4}));
  }
};

void save(const std::string& folder, int step, int world, int64_t keep = 2) {
  const Model model(step);
  Ranks(world).run([&](const CheckpointGroup& group) {
    save_checkpoint(folder, step, model.pieces(group.rank, world), Json::Object{{"lr", 0.1}}, keep, group);
  });
}

std::string read_text(const std::string& path) { return File::open(path).read_all(); }

const auto no_warning = [](const std::string& text) { ADD_FAILURE() << text; };

TEST(CheckpointStore, AnyWorldReadsWhatAnyWorldWrote) {
  for (int world : {1, 2, 3, 5, 40}) {
    ScratchFolder folder;
    save(folder / "c", 12, world);
    for (int readers : {1, 2, 7}) {
      Ranks(readers).run([&](const CheckpointGroup& group) {
        auto checkpoint = Checkpoint::open_newest(folder / "c", no_warning, group);
        ASSERT_TRUE(checkpoint);
        EXPECT_EQ(checkpoint->step(), 12);
        EXPECT_EQ(checkpoint->world(), world);
        EXPECT_EQ(checkpoint->state().at("lr").as_double(), 0.1);
        Model(12).expect_in(*checkpoint);
      });
    }
  }
}

TEST(CheckpointStore, ShardsArePlainSafetensors) {
  ScratchFolder folder;
  save(folder.path(), 3, 1);
  SafetensorsFile whole = SafetensorsFile::open(folder / "step-3/shard-00000-of-00001.safetensors");
  EXPECT_EQ(whole.at("a").shape, (Shape{5, 7}));
  EXPECT_EQ(whole.metadata().at("sheaf.step"), "3");
  save(folder.path(), 4, 2);
  EXPECT_EQ(SafetensorsFile::open(folder / "step-4/shard-00001-of-00002.safetensors").at("a[17:35]").shape, (Shape{18}));
  // Nothing but shards, manifest and checksum.
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "step-4"), {}), 4);
}

// Older programs can read flat cuts, and their files can be read: none of these bytes may ever change.
TEST(CheckpointStore, OfFlatCutsTheBytesAreFixed) {
  ScratchFolder folder;
  save(folder.path(), 3, 2);
  EXPECT_EQ(read_text(folder / "step-3/manifest.json"),
            R"({"format":"sheaf-checkpoint","version":1,"step":3,"world":2,"files":[)"
            R"({"name":"shard-00000-of-00002.safetensors","bytes":285,"xxh3":"eadc2a68eb209653f323aa83c87b2582"},)"
            R"({"name":"shard-00001-of-00002.safetensors","bytes":354,"xxh3":"42debfb637cfe78fc0c49ffc0e481136"}],)"
            R"("state":{"lr":0.1},"tensors":{"a":{"dtype":"f32","shape":[5,7],"parts":[[0,0,17],[1,17,35]]},)"
            R"("b":{"dtype":"u8","shape":[3],"parts":[[0,0,1],[1,1,3]]},)"
            R"("none":{"dtype":"bf16","shape":[0,4],"parts":[]},"scalar":{"dtype":"f64","shape":[],"parts":[[1,0,1]]}}})"
            "\n");
}

TEST(CheckpointStore, KeepsTheNewest) {
  ScratchFolder folder;
  EXPECT_FALSE(Checkpoint::open_newest(folder / "none", no_warning));
  EXPECT_FALSE(Checkpoint::open_newest(folder.path(), no_warning));
  for (int step : {1, 2, 3, 4}) save(folder.path(), step, 2);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(4, 3));
  save(folder.path(), 5, 1, 0);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(5, 4, 3));
  // A step saved again replaces the old one; later steps are neither counted nor removed.
  save(folder.path(), 4, 3);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(5, 4, 3));
  Checkpoint four = Checkpoint::open(folder / "step-4");
  EXPECT_EQ(four.world(), 3);
  Model(4).expect_in(four);
}

TEST(CheckpointStore, PiecesMustCoverExactlyOnce) {
  ScratchFolder folder;
  const float values[4] = {};
  const auto reason = [&](std::vector<CheckpointPiece> pieces) {
    return message_of<CheckpointError>(ExitCode::kData, [&] { save_checkpoint(folder.path(), 1, pieces, {}); });
  };
  EXPECT_THAT(reason({{"a", DType::f32, {4}, Runs::of({0, 3}), values}}), HasSubstr("\"a\": 3 elements of 4"));
  EXPECT_THAT(reason({{"a", DType::f32, {4}, Runs::of({0, 1}), values}, {"a", DType::f32, {4}, Runs::of({2, 4}), values}}),
              HasSubstr("element 1 is missing"));
  EXPECT_THAT(reason({{"a", DType::f32, {4}, Runs::of({0, 3}), values}, {"a", DType::f32, {4}, Runs::of({2, 4}), values}}),
              HasSubstr("element 2 is there twice"));
  EXPECT_THAT(reason({{"a", DType::f32, {4}, Runs::of({0, 3}), values}, {"a", DType::f32, {5}, Runs::of({3, 5}), values}}),
              HasSubstr("f32[4] on one rank and f32[5] on another"));
  EXPECT_THAT(reason({{"a", DType::f32, {4}, Runs::of({0, 4}), values}, {"a", DType::f32, {4}, Runs::of({0, 4}), values}}),
              HasSubstr("appears twice"));
  EXPECT_THAT(list_steps(folder.path()), IsEmpty());
}

// Damages every file of the newest checkpoint in every way: the error names it, and the previous checkpoint is used.
TEST(CheckpointStore, BrokenNewestIsNamedAndTheOneBeforeItUsed) {
  ScratchFolder folder;
  save(folder.path(), 1, 2);
  save(folder.path(), 2, 2);
  int cases = 0;
  for (const char* file : {"shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors", "manifest.json",
                           "manifest.json.xxh128"}) {
    const std::string path = folder / "step-2/" + file;
    const std::string good = read_text(path);
    std::vector<std::string> damaged = {"", good + "x", good.substr(0, good.size() - 1)};
    std::mt19937 random(7);
    for (int i = 0; i < 40; ++i) {
      damaged.push_back(good);
      damaged.back()[random() % good.size()] ^= static_cast<char>(1u << random() % 8);
      damaged.push_back(good.substr(0, random() % good.size()));
    }
    damaged.push_back("GONE");
    for (const auto& content : damaged) {
      if (content == "GONE") std::filesystem::remove(path);
      else write_file(path, content);
      std::mutex mutex;
      std::vector<std::string> warnings;  // of all ranks
      const auto warn = [&](const std::string& text) {
        std::lock_guard lock(mutex);
        warnings.push_back(text);
      };
      Ranks(content == "GONE" ? 3 : 1).run([&](const CheckpointGroup& group) {
        auto checkpoint = Checkpoint::open_newest(folder.path(), warn, group);
        ASSERT_TRUE(checkpoint);
        EXPECT_EQ(checkpoint->step(), 1);
      });
      ASSERT_EQ(warnings.size(), 1u);
      EXPECT_THAT(warnings[0], HasSubstr("step-2' is broken"));
      EXPECT_THAT(warnings[0], HasSubstr(std::string(file).substr(0, 13)));  // the checksum is the manifest's
      EXPECT_THAT(warnings[0].find('\n'), std::string::npos);
      ++cases;
    }
    write_file(path, good);
  }
  EXPECT_EQ(cases, 4 * 84);
  EXPECT_EQ(Checkpoint::open_newest(folder.path(), no_warning)->step(), 2);
  for (const char* step : {"step-1", "step-2"}) {
    std::filesystem::resize_file(folder / step + std::string("/shard-00001-of-00002.safetensors"), 50);
  }
  EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData,
                                          [&] { Checkpoint::open_newest(folder.path(), [](const std::string&) {}); }),
              HasSubstr("no whole checkpoint is left"));
}

// Manifests with a matching checksum and hostile content.
TEST(CheckpointStore, HostileManifests) {
  ScratchFolder folder;
  save(folder.path(), 2, 2);
  const testing::BrokenManifest manifest(folder / "step-2");
  const auto reason = [&](const std::string& from, const std::string& to) { return manifest.reason(from, to); };
  EXPECT_THAT(reason("shard-00000", "../00000"), HasSubstr("is not called shard-00000"));
  EXPECT_THAT(reason("\"version\":1", "\"version\":2"), HasSubstr("version 2, this program reads 1"));
  EXPECT_THAT(reason("\"step\":2", "\"step\":3"), HasSubstr("that of step 3"));
  EXPECT_THAT(reason("\"step\":2", "\"step\":2,\"step\":2"), HasSubstr("duplicate key"));
  EXPECT_THAT(reason("\"world\":2", "\"world\":-1"), HasSubstr("2 files of a world of -1"));
  EXPECT_THAT(reason("[5,7]", "[72057594037927936,72057594037927936]"), HasSubstr("unusable shape"));
  EXPECT_THAT(reason("[5,7]", "[5,-7]"), HasSubstr("unusable shape"));
  EXPECT_THAT(reason("[5,7]", "[5,8]"), HasSubstr("35 elements of 40"));
  EXPECT_THAT(reason("[1,17,35]", "[2,17,35]"), HasSubstr("in file 2"));
  EXPECT_THAT(reason("[1,17,35]", "[1,18,35]"), HasSubstr("element 17 is missing"));
  EXPECT_THAT(reason("[1,17,35]", "[1,17,36]"), HasSubstr("elements 17 to 36"));
  EXPECT_THAT(reason("[1,17,35]", "[1,17]"), HasSubstr("not [file, begin, end]"));
  EXPECT_THAT(reason("\"f32\"", "\"f31\""), HasSubstr("unknown dtype \"f31\""));
  EXPECT_THAT(reason("\"files\"", "\"fles\""), HasSubstr("lacks the field 'files'"));
}

std::atomic<int> countdown = 0;
int kill_when_due(const char*, const char*) {
  if (countdown-- == 0) kill(getpid(), SIGKILL);
  return 0;
}
int fail_when_due(const char*, const char*) { return countdown-- == 0 ? ENOSPC : 0; }

// Kills all ranks before every file operation of a save in turn: the recovered step is the last committed one, or the new one if its rename
// was reached; nothing else is ever read, and the next save cleans up.
TEST(CheckpointStore, KilledAtEveryFileOperation) {
  ScratchFolder folder;
  save(folder.path(), 1, 2);
  save(folder.path(), 2, 2);
  int killed = 0, old_step = 0, new_step = 0;
  for (int k = 0;; ++k) {
    const pid_t child = fork();
    if (child == 0) {
      countdown = k;
      testing::set_file_fault(kill_when_due);
      save(folder.path(), 3, 2);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    auto checkpoint = Checkpoint::open_newest(folder.path(), no_warning);
    ASSERT_TRUE(checkpoint);
    ASSERT_TRUE(checkpoint->step() == 2 || checkpoint->step() == 3);
    ++(checkpoint->step() == 2 ? old_step : new_step);
    Model(static_cast<int>(checkpoint->step())).expect_in(*checkpoint);
    if (WIFEXITED(status)) break;
    ++killed;
    std::filesystem::remove_all(folder / "step-3");
    save(folder.path(), 1, 1, 0);
  }
  EXPECT_GE(killed, 25);
  EXPECT_GE(old_step, 20);
  EXPECT_GE(new_step, 2);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(3, 2));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
}

int kill_when_due_without_exchange(const char* operation, const char* path) {
  return kill_when_due(operation, path), std::string_view(operation) == "exchange" ? EINVAL : 0;
}

// A step that is saved again exists at all times, also where a file system cannot exchange two folders.
TEST(CheckpointStore, KilledWhileAStepIsSavedAgain) {
  ScratchFolder folder;
  save(folder.path(), 1, 2);
  save(folder.path(), 2, 2);
  int killed = 0, gaps = 0;
  for (int k = 0;; ++k) {
    const pid_t child = fork();
    if (child == 0) {
      countdown = k;
      testing::set_file_fault(kill_when_due_without_exchange);
      save(folder.path(), 2, 1);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    gaps += !path_exists(folder / "step-2");
    Ranks(3).run([&](const CheckpointGroup& group) {
      auto checkpoint = Checkpoint::open_newest(folder.path(), no_warning, group);
      ASSERT_TRUE(checkpoint);
      ASSERT_EQ(checkpoint->step(), 2);
      Model(2).expect_in(*checkpoint);
    });
    if (WIFEXITED(status)) break;
    ++killed;
    save(folder.path(), 2, 2);
  }
  EXPECT_GE(killed, 15);
  EXPECT_EQ(gaps, 1);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
}

// The disk fills up at every operation in turn: exit code 74, and the old checkpoints stay.
TEST(CheckpointStore, DiskFullAtEveryFileOperation) {
  ScratchFolder folder;
  save(folder.path(), 1, 1);
  int failures = 0;
  for (int k = 0;; ++k) {
    countdown = k;
    testing::set_file_fault(fail_when_due);
    std::string reason;
    try {
      const Model model(2);
      save_checkpoint(folder.path(), 2, model.pieces(0, 1), {}, 2);
    } catch (const IoError& error) {
      EXPECT_EQ(error.exit_code(), 74);
      reason = error.what();
    }
    testing::set_file_fault(nullptr);
    Model(1).expect_in(*std::make_unique<Checkpoint>(Checkpoint::open(folder / "step-1")));
    if (reason.empty()) break;
    EXPECT_THAT(reason, HasSubstr("cannot save"));
    EXPECT_THAT(reason, HasSubstr("No space left"));
    std::filesystem::remove_all(folder / "step-2");
    ++failures;
  }
  EXPECT_GE(failures, 15);
}

}  // namespace
}  // namespace sheaf::models
