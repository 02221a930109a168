// Algorithms of products on a GPU: timed in the first step of a training run, the same on all ranks, saved in checkpoints and restored from
// them before anything is computed.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/file.h"
#include "sheaf/kernels/cuda/product.h"
#include "sheaf/models/checkpoint_store.h"
#include "sheaf/models/product_choices.h"
#include "sheaf/models/trainer.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/parity.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

using ::testing::HasSubstr;
using Lines = std::set<std::string>;

const Device kGpu = Device::cuda();

Lines lines_of(const std::string& text) {
  Lines out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.insert(line);
  return out;
}
Lines choices_now() { return lines_of(models::product_choices(kGpu)); }
Lines minus(const Lines& a, const Lines& b) {
  Lines out;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::inserter(out, out.end()));
  return out;
}

/// Collectives of this rank that share choices, so far.
int64_t calls_to_share(models::TrainingStep& step) {
  const auto& lane = dynamic_cast<const CommunicatorBase&>(step.mesh().runtime->gather_lane(0));
  const std::vector<FlightEntry> calls = lane.flight_record();
  return std::count_if(calls.begin(), calls.end(),
                       [](const FlightEntry& e) { return e.what.find("product_choices") != e.what.npos; });
}

TEST(ProductChoicesOfRanks, BecomeThoseOfTheFirstRankThatMadeThem) {
  if constexpr (!kernels::kHasCuda) {
    GTEST_SKIP() << "not run: built without CUDA";
  } else {
    constexpr int kRanks = 3;
    const auto shape = [](int64_t m) { return kernels::cuda::ProductShape{.m = m, .n = 8, .k = 8}; };
    std::vector<std::string> texts(kRanks);
    run_local(kRanks, [&](World& w) {
      const auto rank = static_cast<uint64_t>(w.rank());
      kernels::cuda::ProductChoices mine;  // the table of a separate GPU
      mine.set(shape(1), {.algorithm = {10 + rank}});
      if (rank > 0) mine.set(shape(2), {.algorithm = {20 + rank}});
      mine.set(shape(100 + w.rank()), {.algorithm = {30 + rank}});
      models::share_product_choices(w.mesh({{"data", kRanks}}).runtime->gather_lane(0), mine.text("here"),
                                    [&](std::string_view text) { mine.read("here", text); });
      EXPECT_EQ(mine.find(shape(1))->algorithm[0], 10u);
      EXPECT_EQ(mine.find(shape(2))->algorithm[0], 21u);
      for (uint64_t r = 0; r < kRanks; ++r)
        EXPECT_EQ(mine.find(shape(100 + static_cast<int64_t>(r)))->algorithm[0], 30 + r);
      texts[w.rank()] = mine.text("here");
    });
    EXPECT_EQ(texts[1], texts[0]);
    EXPECT_EQ(texts[2], texts[0]);
  }
}

TEST(ProductChoicesOfAStep, AreTimedInTheFirstOneAlone) {
  SHEAF_NEEDS_GPU();
  if (!kernels::emulated_cuda()) GTEST_SKIP() << "what was timed shows in the emulation's choices alone";
  for (bool tune : {false, true}) {
    models::TrainConfig c = tiny_config();
    c.model.width = tune ? 28 : 36;  // products that occur nowhere else in this test
    c.train.tune_products = tune;
    const Lines before = choices_now();
    run_local(2, [&](World& w) {
      models::TrainingStep step(c, c.model.vocab, w, kGpu);
      step.run(0, fill_tiny);
      if (w.rank() == 0) {
        const Lines made = minus(choices_now(), before);
        EXPECT_GT(made.size(), 5u);
        for (const std::string& line : made)
          EXPECT_THAT(line, ::testing::AnyOf(HasSubstr(tune ? " : 0000000000000002" : " : 0000000000000001"),
                                             HasSubstr(" : plain")));
      }
      EXPECT_FALSE(kernels::cuda::TuneProducts::active());
      const Lines after = choices_now();
      step.run(1, fill_tiny);
      EXPECT_EQ(choices_now(), after);
      EXPECT_EQ(calls_to_share(step), 2);  // lengths and texts, once
    }, {.threads_per_rank = 1, .device = kGpu});
  }
}

/// Runs of a tiny model with checkpoints in a folder.
struct Runs : ScratchFolder {
  explicit Runs(int64_t width) : width(width) {
    std::ofstream corpus(*this / "corpus.txt");
    for (int i = 0; i < 600; ++i) corpus << static_cast<char>('a' + i * i % 13);
  }
  std::string train(int64_t steps, bool tune, Device device, bool resume = false) const {
    models::TrainConfig c = tiny_config();
    c.model.vocab = 0;
    c.model.width = width;
    c.train.steps = steps;
    c.train.schedule = "constant";
    c.train.tune_products = tune;
    c.data.corpus = *this / "corpus.txt";
    c.output.folder = path();
    std::string printed;
    run_local(1, [&](World& w) {
      models::TrainOptions options;
      options.resume = resume;
      options.print = [&](const std::string& line) { printed += line + "\n"; };
      models::Trainer(c, w, device, options).run();
    }, {.threads_per_rank = 1, .device = device});
    return printed;
  }
  /// Empty if there are none.
  std::string kept_choices() const {
    const auto checkpoint = models::Checkpoint::open_newest(checkpoints(), [](const std::string&) {});
    const Json* kept = checkpoint->state().find("product_choices");
    return kept ? kept->as_string() : std::string();
  }
  /// Changes them in the newest checkpoint, with a matching checksum.
  void write_choices(int64_t step, const std::string& text) const {
    const std::string file = str(checkpoints(), "/step-", step, "/manifest.json");
    Json manifest = Json::parse(File::open<IoError>(file).read_all(), file);
    Json state = manifest.at("state");
    manifest.set("state", state.set("product_choices", text));
    const std::string words = manifest.dump();
    std::ofstream(file) << words;
    std::ofstream(file + ".xxh128") << digest_of_text(words).xxh3 << "  manifest.json\n";
  }
  std::string checkpoints() const { return *this / "checkpoints"; }

  const int64_t width;  // tests in one process share choices, unless their products differ
};

TEST(ProductChoicesOfARun, AreInItsCheckpointsAndTakenFromThem) {
  SHEAF_NEEDS_GPU();
  Runs estimated(44), timed(44);
  estimated.train(2, false, kGpu);
  timed.train(2, true, kGpu);
  const std::string kept = timed.kept_choices();
  EXPECT_THAT(kept, HasSubstr("sheaf products 1 "));
  EXPECT_GT(lines_of(kept).size(), 5u);
  // As a process with other choices.
  EXPECT_GT(models::take_product_choices(kGpu, estimated.kept_choices()), 0);
  if (kernels::emulated_cuda()) {
    EXPECT_NE(minus(lines_of(kept), choices_now()), Lines{});
  }
  EXPECT_THAT(timed.train(3, true, kGpu, true), ::testing::Not(HasSubstr("made again")));
  EXPECT_EQ(minus(lines_of(kept), choices_now()), Lines{});
  EXPECT_EQ(minus(lines_of(kept), lines_of(timed.kept_choices())), Lines{});
}

TEST(ProductChoicesOfARun, OfAnotherGpuAreMadeAgain) {
  SHEAF_NEEDS_GPU();
  Runs runs(52);
  runs.train(2, true, kGpu);
  runs.write_choices(2, "sheaf products 1 cuBLASLt 1 on another GPU\nwhatever it says\n");
  EXPECT_THAT(runs.train(3, true, kGpu, true), HasSubstr("algorithms for products are of another GPU or cuBLASLt"));
  EXPECT_THAT(runs.kept_choices(), ::testing::Not(HasSubstr("another GPU")));
}

TEST(ProductChoicesOfARun, ThatAreDamagedAreAnError) {
  SHEAF_NEEDS_GPU();
  Runs runs(60);
  runs.train(2, true, kGpu);
  runs.write_choices(2, runs.kept_choices() + "f32 f32 n n\n");
  EXPECT_THAT(message_of<DataError>(ExitCode::kData, [&] { runs.train(3, true, kGpu, true); }),
              ::testing::AllOf(HasSubstr("[resume] "),
                               HasSubstr("step-2/manifest.json: [products] not a choice: f32 f32 n n")));
}

TEST(ProductChoicesOfARun, AreNotThereOnACpu) {
  Runs runs(68);
  for (bool tune : {false, true}) {
    runs.train(tune ? 3 : 2, tune, Device::cpu(), tune);
    EXPECT_EQ(runs.kept_choices(), "");
  }
  if constexpr (kernels::kHasCuda)
    if (kernels::cuda::device_count() > 0) {  // nor are a GPU's choices passed on
      runs.train(4, true, kGpu, true);
      EXPECT_NE(runs.kept_choices(), "");
      runs.train(5, true, Device::cpu(), true);
      EXPECT_EQ(runs.kept_choices(), "");
    }
}

}  // namespace
}  // namespace sheaf::testing
