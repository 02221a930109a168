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
#include "sheaf/tests/models/checkpoint_ranks.h"

namespace sheaf::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using testing::Ranks;

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

int too_many_files(const char* operation, const char* path) {
  return std::string_view(operation) == "read" && std::string_view(path).ends_with("step-3/shard-00001-of-00002.safetensors") ? EMFILE : 0;
}

// A run goes on while its checkpoints are read, and keeps two.
TEST(CheckpointStore, CheckpointsThatARunRemovesMeanwhileAreNotMissed) {
  ScratchFolder folder;
  save(folder.path(), 1, 3);
  save(folder.path(), 2, 3);
  for (const int readers : {1, 2}) {
    const int newest = 3 * readers;  // those of the listing are gone when they are opened
    std::atomic<bool> saved = false;
    Ranks(readers).run([&](CheckpointGroup group) {
      group.of_first = [&, of_first = group.of_first](int64_t mine) {
        const int64_t given = of_first(mine);
        if (group.rank == 0 && given == newest - 1 && !saved.exchange(true))
          for (const int step : {newest, newest + 1}) save(folder.path(), step, 3);
        return given;
      };
      const auto checkpoint = Checkpoint::open_newest(folder.path(), no_warning, group);
      ASSERT_TRUE(checkpoint);
      EXPECT_EQ(checkpoint->step(), newest + 1);
    });
    EXPECT_TRUE(saved);
    if (readers == 1) save(folder.path(), 5, 3);
  }
}

TEST(CheckpointStore, AnOpenCheckpointOutlivesItsFolder) {
  ScratchFolder folder;
  save(folder.path(), 1, 3);
  std::barrier both(2);
  Ranks(2).run([&](CheckpointGroup group) {
    group.others_may_remove = true;
    auto checkpoint = Checkpoint::open_newest(folder.path(), no_warning, group);
    ASSERT_TRUE(checkpoint);
    both.arrive_and_wait();
    if (group.rank == 0) std::filesystem::remove_all(folder / "step-1");
    both.arrive_and_wait();
    Model(1).expect_in(*checkpoint);
  });
}

// It may be whole, and readable a moment later.
TEST(CheckpointStore, WhatCannotBeReadIsNotBroken) {
  ScratchFolder folder;
  for (const int step : {1, 2, 3}) save(folder.path(), step, 2, 0);
  std::filesystem::remove(folder / "step-2/manifest.json");
  testing::set_file_fault(too_many_files);
  for (const bool others_are_whole : {true, false}) {
    if (!others_are_whole) std::filesystem::remove(folder / "step-1/manifest.json");
    Ranks(2).run([&](const CheckpointGroup& group) {
      std::vector<std::string> warnings;
      const auto open = [&] { return Checkpoint::open_newest(folder.path(), [&](const std::string& line) { warnings.push_back(line); }, group); };
      if (others_are_whole) {
        const auto checkpoint = open();
        ASSERT_TRUE(checkpoint);
        EXPECT_EQ(checkpoint->step(), 1);
        EXPECT_THAT(checkpoint->broken(), ElementsAre(2));
        EXPECT_THAT(warnings, ElementsAre(HasSubstr(group.rank == 0 ? "step-2' is broken" : "step-3' cannot be read")));
      } else {
        EXPECT_THAT(message_of<IoError>(ExitCode::kIo, open), AllOf(StartsWith("[checkpoint] no whole checkpoint can be read"),
                                                                    HasSubstr(group.rank == 0 ? "another rank" : "Too many open files")));
      }
    });
  }
  testing::set_file_fault(nullptr);
}

int no_shards(const char* operation, const char* path) {
  return std::string_view(operation) == "read" && std::string_view(path).ends_with(".safetensors") ? EIO : 0;
}

TEST(CheckpointStore, TheNewestStateIsThatOfAManifest) {
  ScratchFolder folder;
  EXPECT_FALSE(Checkpoint::newest_state(folder.path()));
  for (const int step : {1, 2}) save_checkpoint(folder.path(), step, Model(step).pieces(0, 1), Json::Object{{"of", step}});
  testing::set_file_fault(no_shards);
  Ranks(2).run([&](const CheckpointGroup& group) { EXPECT_EQ(Checkpoint::newest_state(folder.path(), group).value().at("of").as_int(), 2); });
  std::filesystem::remove(folder / "step-2/manifest.json.xxh128");
  EXPECT_EQ(Checkpoint::newest_state(folder.path()).value().at("of").as_int(), 1);
  std::filesystem::remove(folder / "step-1/manifest.json");
  EXPECT_FALSE(Checkpoint::newest_state(folder.path()));
  testing::set_file_fault(nullptr);
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

TEST(CheckpointStore, AbandonedStepsDoNotCountAmongThoseThatAreKept) {
  ScratchFolder folder;
  const auto save_last = [&](int step, int64_t keep, const std::vector<int64_t>& abandoned) {
    save_checkpoint(folder.path(), step, Model(step).pieces(0, 1), {}, keep, {}, warn_on_stderr, abandoned);
  };
  for (const int step : {10, 13, 20, 30}) save(folder.path(), step, 1, 0);
  save_last(15, 0, {13, 20});
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(30, 20, 15, 13, 10)) << "all are kept";
  save_last(15, 2, {13, 15, 20});
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(30, 15, 10)) << "of later steps only those that are known";
  save_last(16, 2, {13, 20});
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(30, 16, 15));
}

TEST(CheckpointStore, RefusesNumbersThatAreNone) {
  ScratchFolder folder;
  save(folder.path(), 1, 1);
  const auto refused = [&](int64_t step, int64_t keep) {
    return message_of<ConfigError>(ExitCode::kConfig, [&] { save_checkpoint(folder.path(), step, Model(1).pieces(0, 1), {}, keep); });
  };
  EXPECT_THAT(refused(2, -1), HasSubstr("keep -1"));
  EXPECT_THAT(refused(-1, 2), HasSubstr("step -1"));
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
}

// What a folder lists may lag behind on one of the machines: that rank's view lacks the newest step, for longer than it has patience.
TEST(CheckpointStore, RanksThatListDifferentStepsOpenTheSame) {
  ScratchFolder folder;
  for (const int step : {1, 2, 3}) save(folder / "c", step, 2, 0);
  make_folders(folder / "late");
  for (const int step : {1, 2}) std::filesystem::create_symlink(step_folder(folder / "c", step), step_folder(folder / "late", step));
  for (const int late_rank : {0, 1, 2}) {
    std::atomic<int> warnings = 0;
    Ranks(3).run([&](CheckpointGroup group) {
      group.patience = std::chrono::milliseconds(20);
      const std::string view = folder / (group.rank == late_rank ? "late" : "c");
      const auto checkpoint = Checkpoint::open_newest(view, [&](const std::string&) { ++warnings; }, group);
      ASSERT_TRUE(checkpoint);
      EXPECT_EQ(checkpoint->step(), 2);
      EXPECT_EQ(Checkpoint::open_step(view, 1, group).step(), 1);
      EXPECT_THROW(Checkpoint::open_step(view, 3, group), CheckpointError);
    });
    EXPECT_EQ(warnings, late_rank == 0 ? 0 : 1);
  }
}

TEST(CheckpointStore, AFolderThatRank0CannotListIsAnErrorOnAllRanks) {
  ScratchFolder folder;
  save(folder / "c", 1, 2, 0);
  write_file(folder / "file", "no folder");
  Ranks(3).run([&](const CheckpointGroup& group) {
    const std::string view = folder / (group.rank == 0 ? "file" : "c");
    const auto matches = HasSubstr(group.rank == 0 ? "[folder] cannot list '" : "rank 0 cannot list '");
    EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { Checkpoint::open_newest(view, warn_on_stderr, group); }), matches);
    EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { Checkpoint::open_step(view, 1, group); }), matches);
    // Nor need others list it.
    const std::string other = folder / (group.rank == 0 ? "c" : "file");
    EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, [&] { Checkpoint::open_step(other, 2, group); }), HasSubstr("; there are 1"));
  });
}

std::atomic<int> looks_in_vain = 0;
int see_nothing_at_first(const char* operation, const char*) {
  return std::string_view(operation) == "look" && looks_in_vain-- > 0 ? ENOENT : 0;
}

// NFS may remember for a while that its parent was not there.
TEST(CheckpointStore, ARankMaySeeThePendingFolderLate) {
  ScratchFolder folder;
  looks_in_vain = 3;
  testing::set_file_fault(see_nothing_at_first);
  save(folder.path(), 1, 2);
  testing::set_file_fault(nullptr);
  EXPECT_LT(looks_in_vain, 0);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
}

// A rank that is started again goes on with what another one has just saved.
TEST(CheckpointStore, ARankMaySeeTheNewestCheckpointLate) {
  ScratchFolder folder;
  save(folder / "c", 1, 2, 0);
  save(folder / "c", 2, 2, 0);
  make_folders(folder / "late");
  for (const bool newest : {true, false}) {
    std::filesystem::remove(step_folder(folder / "late", 2));
    looks_in_vain = 3;
    testing::set_file_fault([](const char* operation, const char* path) {
      if (see_nothing_at_first(operation, path)) return ENOENT;
      const std::filesystem::path late = std::filesystem::path(path).parent_path();  // now it is seen
      if (std::string_view(operation) == "look") std::filesystem::create_directory_symlink(late.parent_path().parent_path() / "c/step-2", late);
      return 0;
    });
    Ranks(2).run([&](const CheckpointGroup& group) {
      const std::string view = folder / (group.rank == 1 ? "late" : "c");
      if (newest) {
        const auto checkpoint = Checkpoint::open_newest(view, no_warning, group);
        ASSERT_TRUE(checkpoint);
        EXPECT_EQ(checkpoint->step(), 2);
      } else {
        EXPECT_EQ(Checkpoint::open_step(view, 2, group).step(), 2);
      }
    });
    testing::set_file_fault(nullptr);
  }
}

TEST(CheckpointStore, ARankWithAnotherFileSystemIsTold) {
  ScratchFolder folder;
  Ranks(2).run([&](CheckpointGroup group) {
    group.patience = std::chrono::milliseconds(20);
    const std::string mine = folder / (group.rank == 0 ? "a" : "b");
    const std::string message = message_of<IoError>(ExitCode::kIo, [&] { PendingCheckpoint::begin(mine, 1, group); });
    if (group.rank == 0) EXPECT_THAT(message, HasSubstr("another rank does not see the folder that rank 0 has made"));
    else EXPECT_THAT(message, AllOf(HasSubstr("rank 1 cannot see"), HasSubstr("do all ranks see the same file system?")));
  });
}

// So that ranks whose callers catch it stay in step.
TEST(CheckpointStore, WhatOneRankCannotWriteIsAnErrorOnAll) {
  struct Case {
    int culprit;
    const char* others;
    testing::FileFault fault;
  };
  const Case cases[] = {{0, "rank 0 could not make a folder for it",
                         [](const char* operation, const char*) { return std::string_view(operation) == "mkdir" ? ENOSPC : 0; }},
                        {1, "another rank could not write its part",
                         [](const char*, const char* path) { return std::string_view(path).ends_with("00001-of-00003.safetensors") ? ENOSPC : 0; }},
                        {0, "rank 0 could not commit it",
                         [](const char*, const char* path) { return std::string_view(path).ends_with("manifest.json") ? ENOSPC : 0; }}};
  for (const Case& c : cases) {
    ScratchFolder folder;
    testing::set_file_fault(c.fault);
    Ranks(3).run([&](const CheckpointGroup& group) {
      EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { save_checkpoint(folder / "c", 1, {}, {}, 0, group); }),
                  HasSubstr(group.rank == c.culprit ? "No space left on device" : c.others));
    });
    testing::set_file_fault(nullptr);
    EXPECT_THAT(list_steps(folder / "c"), ElementsAre());
  }
}

int fail_to_remove(const char* operation, const char* path) {
  const std::string name = std::filesystem::path(path).filename();
  const bool moved_away = std::string_view(operation) == "rename" && name.find(".tmp-") != std::string::npos;
  return moved_away || std::string_view(operation) == "remove" ? EPERM : 0;
}

TEST(CheckpointStore, WhatCannotBeRemovedIsAWarning) {
  ScratchFolder folder;
  std::vector<std::string> warnings;
  const auto save_one = [&](int step) {
    warnings.clear();
    save_checkpoint(folder.path(), step, Model(step).pieces(0, 1), {}, 1, {}, [&](const std::string& line) { warnings.push_back(line); });
  };
  save_one(1);
  testing::set_file_fault(fail_to_remove);
  save_one(2);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("step-1.tmp-")));
  save_one(2);  // exchanged with the older one, which stays under its temporary name
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("cannot remove"), HasSubstr("step-1.tmp-")));
  save_one(3);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("cannot remove"), HasSubstr("step-2.tmp-"), HasSubstr("step-1.tmp-")));
  testing::set_file_fault(nullptr);
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(3, 2, 1));
  for (const int step : {1, 2, 3}) {
    Checkpoint checkpoint = Checkpoint::open(step_folder(folder.path(), step));
    Model(step).expect_in(checkpoint);
  }
  save_one(4);
  EXPECT_THAT(warnings, IsEmpty());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

// The disk fails at every operation in turn: exit code 74, and the old checkpoints stay; a warning if it was removing something.
TEST(CheckpointStore, DiskFullAtEveryFileOperation) {
  ScratchFolder folder;
  save(folder.path(), 1, 1);
  int failures = 0;
  for (int k = 0;; ++k) {
    countdown = k;
    testing::set_file_fault(fail_when_due);
    std::string reason;
    const auto warn = [&](const std::string& line) { reason = str("cannot save all: ", line); };
    try {
      const Model model(2);
      save_checkpoint(folder.path(), 2, model.pieces(0, 1), {}, 2, {}, warn);
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
