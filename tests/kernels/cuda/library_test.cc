#include "sheaf/kernels/cuda/library.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/error.h"

extern "C" int sheaf_test_answer(int add);    // of libsheaf_test_library.so.1
extern "C" int sheaf_test_question(int add);  // of no library

#define SHEAF_TEST_LIBRARY(F) F(sheaf_test_answer)
SHEAF_FORWARD_FUNCTIONS(kTestLibrary, SHEAF_TEST_LIBRARY)
#define SHEAF_OTHER_VERSION(F) F(sheaf_test_question)
SHEAF_FORWARD_FUNCTIONS(kOtherVersion, SHEAF_OTHER_VERSION)

namespace sheaf::kernels::cuda {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;
constexpr const char* kSoname = "libsheaf_test_library.so.1";
constexpr const char* kNowhere = "libsheaf_no_such_library.so.1";

/// A folder for one test; environment variables for library lookup are unset.
class CudaLibrary : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"SHEAF_CUDA_LIBRARIES", "CUDA_PATH", "VIRTUAL_ENV", "HOME"})
      unsetenv(name);
    const auto* const test = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::path(::testing::TempDir()) / "library_test" / test->name();
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string make(const char* folder) {
    fs::create_directories(root_ / folder);
    return (root_ / folder).string();
  }
  fs::path root_;
};

std::string error_of(const std::string& soname, std::span<const ForwardedFunction> functions) {
  try {
    load_library(soname, functions);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST_F(CudaLibrary, FoldersOfTheVariableThenOfToolkitsThenOfPython) {
  setenv("SHEAF_CUDA_LIBRARIES", "/a::/b", 1);
  setenv("CUDA_PATH", "/toolkit", 1);
  const std::string newest = make("venv/lib/python3.12/site-packages/nvidia/cudnn/lib");
  const std::string home = make("home/.local/lib/python3.9/site-packages/nvidia/nccl/lib");
  const std::string in_path = make("conda/lib/python3.13/site-packages/nvidia/cu13/lib");
  make("none/lib/python3.13/site-packages/nvidia/cu13/lib"), make("none/bin");  // no python3 there
  std::ofstream(make("conda/bin") + "/python3");
  const std::string linked = make("torch/lib/python3.13/site-packages/nvidia/cu13/lib");
  std::ofstream(make("torch/bin") + "/python3");
  fs::create_symlink(root_ / "torch/bin/python3", make("links/bin") + "/python3");
  std::string path = "/usr/bin";
  for (const char* bin : {"none/bin", "conda/bin", "links/bin"})
    path += ':' + (root_ / bin).string();
  setenv("PATH", path.c_str(), 1);
  setenv("VIRTUAL_ENV", (root_ / "venv").c_str(), 1);
  setenv("HOME", (root_ / "home").c_str(), 1);
  const LibraryFolders folders = library_folders();
  EXPECT_THAT(folders.before_loader, ::testing::ElementsAre("/a", "/b"));
  ASSERT_GE(folders.after_loader.size(), 4u);
  EXPECT_EQ(folders.after_loader[0], "/toolkit/lib64");
  const auto place = [&](const std::string& folder) {
    return std::find(folders.after_loader.begin(), folders.after_loader.end(), folder) -
           folders.after_loader.begin();
  };
  EXPECT_LT(0, place("/usr/local/cuda/lib64"));
  EXPECT_LT(place("/usr/local/cuda/lib64"), place(newest));
  EXPECT_LT(place(newest), place(in_path));
  EXPECT_LT(place(in_path), place(linked));
  EXPECT_LT(place(linked), place(home));
  for (const std::string& folder : folders.after_loader)
    EXPECT_EQ(folder.find((root_ / "none").string()), std::string::npos) << folder;
  EXPECT_EQ(folders.after_loader.back(), home);
}

TEST_F(CudaLibrary, WhatIsMissingIsNamedWithThePlaces) {
  EXPECT_THAT(error_of(kNowhere, kOtherVersion), HasSubstr("SHEAF_CUDA_LIBRARIES (not set)"));
  setenv("SHEAF_CUDA_LIBRARIES", "/of/my/own", 1);
  const std::string words = error_of(kNowhere, kOtherVersion);
  EXPECT_THAT(words, HasSubstr(kNowhere));
  EXPECT_THAT(words, HasSubstr("/of/my/own; the loader's folders ("));
  EXPECT_THAT(words, HasSubstr("/usr/local/cuda/lib64"));
  EXPECT_EQ(words.find('\n'), std::string::npos);
}

TEST_F(CudaLibrary, AFileThatIsNoLibraryIsSaidSo) {
  const std::string folder = make("broken");
  setenv("SHEAF_CUDA_LIBRARIES", folder.c_str(), 1);
  ASSERT_EQ(std::system(("echo no library > " + folder + '/' + kNowhere).c_str()), 0);
  EXPECT_THAT(error_of(kNowhere, kOtherVersion), HasSubstr("file too short"));
}

TEST_F(CudaLibrary, FunctionsAreThoseOfTheFirstFolderThatHasTheLibrary) {
  const std::string venv = make("venv/lib/python3.12/site-packages/nvidia/test/lib");
  fs::copy(fs::path("tests/kernels/cuda") / kSoname, venv);
  setenv("VIRTUAL_ENV", (root_ / "venv").c_str(), 1);
  EXPECT_THAT(error_of(kSoname, kOtherVersion),
              HasSubstr("nvidia/test/lib/libsheaf_test_library.so.1 has no sheaf_test_question"));
  load_library(kSoname, kTestLibrary);
  EXPECT_EQ(sheaf_test_answer(2), 42);
  fs::remove_all(venv);
  load_library(kSoname, kTestLibrary);  // does not look again
}

}  // namespace
}  // namespace sheaf::kernels::cuda
