// `sheaf export` writes the tensors that the ranks held, in one file that any safetensors reader accepts.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/models/checkpoint_store.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/cuts.h"
#include "sheaf/tests/tools/sheaf_process.h"

namespace sheaf {
namespace {

using ::testing::HasSubstr;
using testing::run_sheaf;

struct TrainedFolder : ScratchFolder {
  explicit TrainedFolder(int ranks) {
    std::ofstream(*this / "corpus.txt") << testing::sample_text(3000);
    std::vector<std::string> words = {"train", "--data.corpus", *this / "corpus.txt", "--output.folder", *this / "run",
                                      "--quiet"};
    for (const char* w : {"--model.layers", "2", "--model.heads", "2", "--model.width", "18", "--model.context", "16",
                          "--train.batch", "6", "--train.steps", "4", "--train.save_every", "2"})
      words.emplace_back(w);
    const auto r = run_sheaf(ranks == 1 ? words : testing::on_ranks(ranks, words));
    EXPECT_EQ(r.code, 0) << r.err;
  }
  auto exported(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words = {"export", *this / "run", *this / "model.safetensors"};
    words.insert(words.end(), more.begin(), more.end());
    return run_sheaf(words);
  }
};

TEST(Export, HoldsEveryWeightWhole) {
  for (int ranks : {1, 3})
    for (int64_t step : {2, 4}) {
      SCOPED_TRACE(str(ranks, " ranks, step ", step));
      const TrainedFolder run(ranks);
      const auto r = step == 4 ? run.exported() : run.exported({"--step", "2"});
      ASSERT_EQ(r.code, 0) << r.err;
      EXPECT_THAT(r.out, HasSubstr(str("/step-", step)));
      auto checkpoint = models::Checkpoint::open(run / str("run/checkpoints/step-", step));
      const auto file = SafetensorsFile::open(run / "model.safetensors");
      EXPECT_EQ(file.metadata().at("format"), "pt");
      EXPECT_EQ(file.metadata().at("step"), str(step));
      size_t weights = 0;
      for (const auto& [name, info] : checkpoint.tensors()) {
        if (name.starts_with("optimizer.")) continue;
        ++weights;
        EXPECT_EQ(file.at(name).shape, info.shape) << name;
        std::vector<float> expected(static_cast<size_t>(info.shape.numel())), actual(expected.size(), NAN);
        checkpoint.read(name, 0, info.shape.numel(), expected.data());
        file.read(name, 0, info.shape.numel(), actual.data());
        EXPECT_EQ(actual, expected) << name;
      }
      EXPECT_GT(weights, 10u);
      EXPECT_EQ(file.tensors().size(), weights);
      for (const auto& entry : std::filesystem::directory_iterator(run.path()))
        EXPECT_EQ(entry.path().filename().string().find(".tmp"), std::string::npos) << entry.path();
    }
}

// The exported file is the same, byte for byte, however the ranks that wrote the checkpoint had cut its tensors.
TEST(Export, DoesNotShowHowTensorsWereCut) {
  const TrainedFolder run(1);
  const std::string checkpoints = run / "run/checkpoints";
  const auto files = [&] {
    EXPECT_EQ(run.exported({"--format", "sheaf"}).code, 0);
    const auto published = run_sheaf({"export", run / "run", run / "published", "--format", "huggingface"});
    EXPECT_EQ(published.code, 0) << published.err;
    return std::pair(digest_of_file(run / "model.safetensors"), digest_of_file(run / "published/model.safetensors"));
  };
  const auto expected = files();
  for (const testing::Cut& cut : {testing::Cut{1, 2, 1}, testing::Cut{1, 3, 2}, testing::Cut{0, 2, 2},
                                  testing::Cut{1, 2, 2, testing::Cut::Kind::uneven}}) {
    auto before = models::Checkpoint::open(checkpoints + "/step-4");
    std::vector<models::CheckpointPiece> pieces;
    size_t strided = 0;
    for (const auto& [name, info] : before.tensors())
      for (int rank = 0; rank < cut.world(); ++rank)
        for (const Runs& runs : cut.runs(info.shape, rank)) {
          const auto bytes = std::make_shared<std::vector<char>>(static_cast<size_t>(runs.numel()) * size_of(info.dtype));
          before.read(name, runs, bytes->data());
          pieces.push_back({name, info.dtype, info.shape, runs, bytes->data(), bytes});
          strided += !runs.is_interval();
        }
    EXPECT_EQ(strided > 0, cut.dim == 1);
    models::save_checkpoint(checkpoints, 4, pieces, before.state());
    EXPECT_EQ(files(), expected) << cut.to_string();
  }
}

TEST(Export, SaysWhatIsMissing) {
  const TrainedFolder run(1);
  const auto step = run.exported({"--step", "3"});
  EXPECT_EQ(step.code, 65) << step.err;
  EXPECT_THAT(step.err, HasSubstr("no checkpoint of step 3 in '"));
  EXPECT_THAT(step.err, HasSubstr("; there are "));
  const auto folder = run_sheaf({"export", run / "nowhere", run / "model.safetensors"});
  EXPECT_EQ(folder.code, 65) << folder.err;
  EXPECT_THAT(folder.err, HasSubstr("no checkpoint in"));
  const auto target = run_sheaf({"export", run / "run", run / "no/folder/model.safetensors"});
  EXPECT_EQ(target.code, 74) << target.err;
  // Nor are other people's files.
  const auto corpus = run_sheaf({"export", run / "run", run / "corpus.txt"});
  EXPECT_EQ(corpus.code, 64) << corpus.err;
  EXPECT_THAT(corpus.err, HasSubstr("corpus.txt' exists and was not written by sheaf export"));
  EXPECT_EQ(run.exported().code, 0);
  EXPECT_EQ(run.exported().code, 0) << "its own may be replaced";
  std::filesystem::create_directory(run / "parts");
  std::ofstream(run / "parts/model.safetensors.index.json") << "{}";
  const auto parts = run_sheaf({"export", run / "run", run / "parts", "--format", "huggingface"});
  EXPECT_EQ(parts.code, 64) << parts.err;
  EXPECT_THAT(parts.err, HasSubstr("index.json': weights in parts"));
  std::filesystem::create_directory(run / "theirs");
  std::ofstream(run / "theirs/tokenizer.json") << "{}";
  const auto theirs = run_sheaf({"export", run / "run", run / "theirs", "--format", "huggingface"});
  EXPECT_EQ(theirs.code, 64) << theirs.err;
  EXPECT_THAT(theirs.err, HasSubstr("theirs' has a tokenizer.json, which was not written by sheaf export"));
  EXPECT_EQ(File::open(run / "theirs/tokenizer.json").read_all(), "{}");
  EXPECT_FALSE(std::filesystem::exists(run / "theirs/config.json"));
  const auto own = run_sheaf({"export", run / "run", run / "own", "--format", "huggingface"});
  EXPECT_EQ(own.code, 0) << own.err;
  EXPECT_EQ(run_sheaf({"export", run / "run", run / "own", "--format", "huggingface"}).code, 0) << "its own may be replaced";
  EXPECT_EQ(run_sheaf({"export", run / "run", ""}).code, 64);
  // Only regular files are replaced, and no partial file stays.
  ASSERT_EQ(mkfifo((run / "pipe").c_str(), 0600), 0);
  for (const char* name : {"pipe", "run"}) {
    const auto taken = run_sheaf({"export", run / "run", run / name});
    EXPECT_EQ(taken.code, 74) << taken.err;
    EXPECT_THAT(taken.err, HasSubstr(str("/", name, "' is no regular file")));
    for (const auto& entry : std::filesystem::directory_iterator(run.path()))
      EXPECT_EQ(entry.path().filename().string().find(".tmp"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace sheaf
