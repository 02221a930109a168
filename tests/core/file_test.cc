#include "sheaf/core/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <vector>

#include "sheaf/core/atomic_file.h"
#include "sheaf/core/atomic_folder.h"
#include "sheaf/core/json.h"
#include "sheaf/core/mapped_files.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(File, ReadsRangesAndMaps) {
  ScratchFolder folder;
  write_file(folder / "a", "0123456789");
  const File file = File::open(folder / "a");
  char buffer[4] = {};
  file.read_at(3, buffer, 3);
  EXPECT_STREQ(buffer, "345");
  EXPECT_EQ(file.read_all(), "0123456789");
  EXPECT_EQ(file.map().text(), "0123456789");
  EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { file.read_at(8, buffer, 4); }), HasSubstr("2 bytes too early"));
  write_file(folder / "empty", "");
  EXPECT_EQ(File::open(folder / "empty").map().text(), "");
}

TEST(File, AMappedFileThatBecomesShorterIsNamed) {
  ScratchFolder folder;
  const std::string other = folder / "other", path = folder / "shrinks";
  for (const std::string& file : {other, path}) write_file(file, std::string(100'000, 'x'));
  const auto read_last = [&](bool still_mapped) {
    name_files_that_lose_pages();
    const Mapping first = File::open(other).map();
    Mapping map = File::open(path).map();
    if (!still_mapped) detail::forget_mapping(map.data());
    if (truncate(path.c_str(), 10) != 0) _exit(1);
    _exit(map.text()[99'000] == 'x' ? 2 : 3);
  };
  EXPECT_EXIT(read_last(true), ::testing::ExitedWithCode(74), "shrinks' became shorter while it was read, or its disk fails");
  write_file(path, std::string(100'000, 'x'));
  EXPECT_EXIT(read_last(false), ::testing::KilledBySignal(SIGBUS), "") << "a fault of other memory";
}

TEST(File, OpenThrowsWhatTheCallerMeans) {
  ScratchFolder folder;
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { File::open<DataError>(folder / "x"); }),
              HasSubstr("cannot open"));
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { File::open<DataError>(folder / std::string(300, 'x')); }), HasSubstr("too long"));
  testing::set_file_fault([](const char*, const char*) { return EMFILE; });
  EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { File::open<DataError>(folder / "x"); }), StartsWith("[file] cannot open"));
  testing::set_file_fault(nullptr);
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { File::open(folder / "pipe"); }), HasSubstr("regular"));
}

TEST(File, DigestIsThatOfXxh128sum) {
  ScratchFolder folder;
  // echo -n | xxh128sum
  EXPECT_EQ(digest_of_text("").xxh3, "99aa06d3014798d86001c324468d497f");
  const std::string text(3'000'001, 'q');
  FileWriter writer(folder / "a");
  writer.write(text.substr(0, 5));
  writer.write(text.substr(5));
  const FileDigest digest = writer.finish();
  EXPECT_EQ(digest, digest_of_text(text));
  EXPECT_EQ(digest, digest_of_file(folder / "a"));
  EXPECT_EQ(digest.bytes, 3'000'001);
}

int fail_sync(const char* operation, const char*) { return std::string_view(operation) == "sync" ? ENOSPC : 0; }

TEST(File, ReplaceKeepsTheOldContentWhenItFails) {
  ScratchFolder folder;
  replace_file(folder / "a", "old");
  testing::set_file_fault(fail_sync);
  EXPECT_THAT(message_of<IoError>(ExitCode::kIo, [&] { replace_file(folder / "a", "new"); }),
              HasSubstr("No space left"));
  testing::set_file_fault(nullptr);
  EXPECT_EQ(File::open(folder / "a").read_all(), "old");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

// Leftovers of killed processes have nobody's lock.
TEST(File, NewVersionsThatNobodyWritesAreRemoved) {
  ScratchFolder folder;
  for (const char* name : {"a.tmp-12", "a.tmp-notes", "ab.tmp-12"}) write_file(folder / name, "half");
  make_folders(folder / "a.tmp-13");
  PendingFile first(folder / "a");
  EXPECT_FALSE(path_exists(folder / "a.tmp-12"));
  for (const char* name : {"a.tmp-notes", "ab.tmp-12", "a.tmp-13"}) EXPECT_TRUE(path_exists(folder / name)) << "not one of a";

  write_file(first.name(), "first");
  {
    const PendingFile abandoned(folder / "a");
    EXPECT_NE(abandoned.name(), first.name());
    EXPECT_TRUE(path_exists(first.name())) << "it is being written";
  }
  replace_file(folder / "a", "second");
  EXPECT_EQ(File::open(folder / "a").read_all(), "second");
  first.commit();
  EXPECT_EQ(File::open(folder / "a").read_all(), "first");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 4) << "a, and the three";
}

TEST(AtomicFolder, CommitsAndReplaces) {
  ScratchFolder folder;
  const std::string target = folder / "sub/step-3";
  const int64_t tag = fresh_tag();
  std::string pending = begin_folder(target, tag);
  EXPECT_EQ(pending, pending_path(target, tag));
  write_file(pending + "/a", "first");
  EXPECT_FALSE(path_exists(target));
  commit_folder(pending, target);
  EXPECT_EQ(File::open(target + "/a").read_all(), "first");

  pending = begin_folder(target);
  write_file(pending + "/a", "second");
  commit_folder(pending, target);
  EXPECT_EQ(File::open(target + "/a").read_all(), "second");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "sub"), {}), 1);
}

std::vector<std::string> operations;
int note_operation(const char* operation, const char* path) {
  const std::string name = std::filesystem::path(path).filename().string();
  operations.push_back(std::string(operation) + " " + name.substr(0, name.find(".tmp-")) +
                       (name.find(".tmp-") == std::string::npos ? "" : ".tmp"));
  return 0;
}

// A kill cannot show that data had reached the disk; the order of the calls can.
TEST(AtomicFolder, SyncsFilesAndFolderThenRenamesThenSyncsTheParent) {
  ScratchFolder folder;
  make_folders(folder / "out");
  operations.clear();
  testing::set_file_fault(note_operation);
  const std::string pending = begin_folder(folder / "out/step-1");
  write_file(pending + "/a", "text");
  commit_folder(pending, folder / "out/step-1");
  testing::set_file_fault(nullptr);
  EXPECT_THAT(operations, ElementsAre("mkdir out", "mkdir step-1.tmp", "sync out", "open a", "write a", "sync a", "sync step-1.tmp",
                                      "rename step-1", "sync out"));
}

TEST(AtomicFolder, LeftoversGoWithTheNextSave) {
  ScratchFolder folder;
  const std::string left = begin_folder(folder / "step-1");
  make_folders(folder / "step-1.tmp-12-345");  // as older versions named it
  make_folders(folder / "notes.tmp-mine");
  const std::string pending = begin_folder(folder / "step-2");
  EXPECT_NE(left, pending);
  EXPECT_FALSE(path_exists(left));
  EXPECT_FALSE(path_exists(folder / "step-1.tmp-12-345"));
  EXPECT_TRUE(path_exists(pending));
  EXPECT_TRUE(path_exists(folder / "notes.tmp-mine"));
}

TEST(AtomicFolder, ListsStepsNewestFirst) {
  ScratchFolder folder;
  for (const char* name : {"step-2", "step-10", "step-9", "step-07", "step-", "step-1x", "step-3.tmp-1-2", "step--4"}) {
    make_folders(folder / name);
  }
  write_file(folder / "step-11", "a file");
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(10, 9, 2));
  EXPECT_THAT(list_steps(folder / "none"), ElementsAre());
  const auto error = [](const std::string& path) {
    return message_of<IoError>(ExitCode::kIo, [&] { list_steps(path); });
  };
  EXPECT_THAT(error(folder / "step-11"), HasSubstr("step-11': Not a directory"));
  EXPECT_THAT(error(folder / std::string(300, 'x')), HasSubstr("xxx': File name too long"));
}

TEST(AtomicFolder, CanBeCheckedBeforeItIsNeeded) {
  ScratchFolder folder;
  check_writable(folder / "a/b");
  EXPECT_FALSE(path_exists(folder / "a/b"));
  make_folders(folder / "a/b/step-1");
  check_writable(folder / "a/b");
  EXPECT_THAT(list_steps(folder / "a/b"), ElementsAre(1));
  write_file(folder / "file", "");
  const auto error = [](const std::string& path) {
    return message_of<IoError>(ExitCode::kIo, [&] { check_writable(path); });
  };
  EXPECT_THAT(error(folder / "file"), HasSubstr("file': Not a directory"));
  EXPECT_THAT(error(folder / std::string(300, 'x')), HasSubstr("xxx': File name too long"));
  EXPECT_THAT(error("/proc/checkpoints"), HasSubstr("/proc/checkpoints"));  // which even root cannot create
}

// An old file system, and one that fails when the new version is about to replace the old one.
int without_exchange(const char* operation, const char*) { return std::string_view(operation) == "exchange" ? EINVAL : 0; }
int fail_to_replace(const char* operation, const char* path) {
  return std::string_view(operation) == "rename" && std::string_view(path).ends_with("/step-1") ? EIO
                                                                                                : without_exchange(operation, path);
}

TEST(AtomicFolder, ReplacesWithoutExchangeOrLeavesAllAsItWas) {
  ScratchFolder folder;
  const std::string target = folder / "step-1";
  const auto save = [&](const std::string& text, testing::FileFault fault) {
    const std::string pending = begin_folder(target);
    write_file(pending + "/a", text);
    testing::set_file_fault(fault);
    try {
      commit_folder(pending, target);
    } catch (const IoError&) {
      testing::set_file_fault(nullptr);
      throw;
    }
    testing::set_file_fault(nullptr);
  };
  save("old", nullptr);
  EXPECT_THROW(save("new", fail_to_replace), IoError);
  EXPECT_EQ(File::open(target + "/a").read_all(), "old");
  save("new", without_exchange);
  EXPECT_EQ(File::open(target + "/a").read_all(), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

// A reader that finds no target between the two renames, and restores the old version.
int restores_to_come = 0;
int reader_between_renames(const char* operation, const char* path) {
  if (std::string_view(operation) == "rename" && std::string_view(path).ends_with("/step-1") && restores_to_come-- > 0) recover_folder(path);
  return without_exchange(operation, path);
}

TEST(AtomicFolder, AReaderMayRestoreTheOldVersionWhileItIsReplaced) {
  ScratchFolder folder;
  const std::string target = folder / "step-1";
  for (const char* text : {"old", "new"}) {
    const std::string pending = begin_folder(target);
    write_file(pending + "/a", text);
    restores_to_come = std::string_view(text) == "new" ? 3 : 0;
    testing::set_file_fault(reader_between_renames);
    commit_folder(pending, target);
    testing::set_file_fault(nullptr);
  }
  EXPECT_EQ(File::open(target + "/a").read_all(), "new");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

int kill_at = 0;
int kill_when_due(const char*, const char*) {
  if (kill_at-- == 0) raise(SIGKILL);
  return 0;
}
int kill_when_due_without_exchange(const char* operation, const char* path) {
  return kill_when_due(operation, path), without_exchange(operation, path);
}

// Kills the process before every single system call of a replacement: the folder is the old or the new one, never a mix, both for a reader
// that recovers it first and for the next save.
TEST(AtomicFolder, KilledAnywhereItIsOldOrNew) {
  for (const auto& [exchange, recover] : {std::pair(true, true), {true, false}, {false, true}, {false, false}}) {
    ScratchFolder folder;
    const std::string target = folder / "step-1";
    const auto save = [&](const std::string& text) {
      const std::string pending = begin_folder(target);
      write_file(pending + "/a", text);
      write_file(pending + "/b", text);
      commit_folder(pending, target);
    };
    const auto expect_whole = [&](int k) {
      const std::string a = File::open(target + "/a").read_all(), b = File::open(target + "/b").read_all();
      EXPECT_EQ(a, b) << k;
      EXPECT_TRUE(a == "old" || a == "new") << k;
    };
    save("old");
    int killed = 0, gaps = 0;
    for (int k = 0;; ++k) {
      const pid_t child = fork();
      if (child == 0) {
        kill_at = k;
        testing::set_file_fault(exchange ? kill_when_due : kill_when_due_without_exchange);
        save("new");
        _exit(0);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      EXPECT_THAT(list_steps(folder.path()), ElementsAre(1)) << k;
      gaps += !path_exists(target);
      if (recover) recover_folder(target);
      else begin_folder(folder / "step-2");
      expect_whole(k);
      if (WIFEXITED(status)) break;
      ++killed;
      save("old");
    }
    EXPECT_GE(killed, 12);
    EXPECT_EQ(gaps, exchange ? 0 : 1);
    EXPECT_EQ(File::open(target + "/a").read_all(), "new");
    begin_folder(target);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2) << "the folder and a pending one";
  }
}

TEST(Json, RoundTripAndOrder) {
  const std::string text = R"({"b":[1,-2,3.5,true,null],"a":{"x\n\"":"é"}})";
  const Json json = Json::parse(text, "t");
  EXPECT_EQ(json.dump(), text);
  EXPECT_EQ(json.at("b").as_array()[1].as_int(), -2);
  EXPECT_EQ(json.at("b").as_array()[0].as_double(), 1.0);
  EXPECT_EQ(json.find("c"), nullptr);
  Json made;
  made.set("k", 0.1).set("k", 2);
  EXPECT_EQ(made.dump(), R"({"k":2})");
}

TEST(Json, NumbersRoundTrip) {
  for (double value : {0.1, 1.0, -0.0, 1e-300, 5e-324, 1.7976931348623157e308, 123456789.125, 1e22, 3.0000000000000004}) {
    const double back = Json::parse(json_number(value), "t").as_double();
    EXPECT_EQ(std::signbit(back), std::signbit(value));
    EXPECT_EQ(back, value) << json_number(value);
  }
  EXPECT_EQ(json_number(NAN), "null");
  EXPECT_EQ(json_string("a\xff\x01"), "\"a\uFFFD\\u0001\"");
}

TEST(Json, Refuses) {
  const auto reason = [](const std::string& text) {
    return message_of<DataError>(ExitCode::kData, [&] { Json::parse(text, "the origin"); });
  };
  EXPECT_THAT(reason(R"({"a":1,"\u0061":2})"), HasSubstr("the origin: duplicate key \"a\""));
  EXPECT_THAT(reason("9223372036854775808"), HasSubstr("out of range"));
  EXPECT_THAT(reason("36893488147419103232"), HasSubstr("out of range"));
  EXPECT_THAT(reason(std::string(1000, '[')), HasSubstr("too deeply"));
  EXPECT_THAT(reason("{} {}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(reason(std::string("{}\0", 3)), HasSubstr("zero byte"));
  EXPECT_THAT(reason("NaN"), HasSubstr("not valid JSON"));
  EXPECT_THAT(reason(""), HasSubstr("not valid JSON"));
  EXPECT_THAT(reason("\"\xff\""), HasSubstr("not valid JSON"));
  EXPECT_THROW(Json::parse("4.0", "t").as_int(), DataError);
}

}  // namespace
}  // namespace sheaf
