// tools/quickstart, with a `bazel` that finds everything built: which folders it uses, and what it leaves alone.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Tree {
 public:
  Tree() {
    for (const char* sub : {"tools", "path", "bazel-bin/tools", "out"})
      fs::create_directories(folder_ / sub);
    for (const char* file : {"quickstart", "quickstart.toml", "header_links.sh"})
      fs::copy_file(std::string("tools/") + file, folder_ / "tools/" + file);
    fs::create_symlink(fs::absolute("tools/sheaf"), folder_ / "bazel-bin/tools/sheaf");
    std::ofstream(folder_ / "out/bible.txt") << testing::sample_text(3000);
    for (const char* program : {"path/bazel", "tools/make_corpus"}) {
      std::ofstream(folder_ / program) << "#!/bin/bash\n";
      fs::permissions(folder_ / program, fs::perms::owner_all);
    }
    keep("out/quickstart/keepsake");
  }
  void keep(const std::string& file) {
    fs::create_directories(fs::path(folder_ / file).parent_path());
    std::ofstream(folder_ / file) << "kept";
  }
  bool has(const std::string& file) const { return fs::exists(folder_ / file); }

  /// Runs it with a tiny model; returns its exit code.
  int run(const std::string& options) {
    const std::string command =
        "cd '" + folder_.path() + "' && PATH=\"$PWD/path:$PATH\" SHEAF_NO_SETUP=1 SHEAF_DEVICE=cpu " +
        "tools/quickstart --model.layers 1 --model.width 16 --model.context 16 --train.steps 2 "
        "--train.batch 4 --train.warmup 0 --generate.tokens 3 " +
        options + " >out.txt 2>err.txt";
    return WEXITSTATUS(std::system(command.c_str()));
  }
  std::string text(const std::string& file) const {
    std::stringstream text;
    text << std::ifstream(folder_ / file).rdbuf();
    return text.str();
  }

 private:
  ScratchFolder folder_;
};

TEST(Quickstart, ReplacesTheLastOne) {
  Tree tree;
  ASSERT_EQ(tree.run(""), 0) << tree.text("err.txt");
  EXPECT_FALSE(tree.has("out/quickstart/keepsake"));
  EXPECT_TRUE(tree.has("out/quickstart/checkpoints/step-2"));
  EXPECT_THAT(tree.text("out.txt"), HasSubstr("the run is in out/quickstart; try"));
  tree.keep("out/quickstart/keepsake");
  ASSERT_EQ(tree.run("--resume"), 0) << tree.text("err.txt");
  EXPECT_TRUE(tree.has("out/quickstart/keepsake"));
}

TEST(Quickstart, RemovesNothingThatItDoesNotUse) {
  Tree tree;
  EXPECT_EQ(tree.run("--trian.steps 3"), 64);
  EXPECT_THAT(tree.text("err.txt"), HasSubstr("did you mean \"train.steps\""));
  EXPECT_EQ(tree.run("--help"), 0);
  EXPECT_TRUE(tree.has("out/quickstart/keepsake"));
  tree.keep("else where/keepsake");
  ASSERT_EQ(tree.run("--output.folder 'else where'"), 0) << tree.text("err.txt");
  EXPECT_TRUE(tree.has("out/quickstart/keepsake"));
  EXPECT_TRUE(tree.has("else where/keepsake"));
  EXPECT_THAT(tree.text("out.txt"), HasSubstr("tape --config else\\ where/config.toml --world 8"));
  EXPECT_EQ(tree.run("--output.folder 'else where'"), 64);  // which contains a run now
  EXPECT_THAT(tree.text("err.txt"), HasSubstr("holds checkpoints of an earlier run"));
}

}  // namespace
}  // namespace sheaf
