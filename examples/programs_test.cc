// Runs the example programs as a user would, and checks their output.
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "sheaf/distributed/launcher.h"

namespace examples {
namespace {

struct Result {
  int code;
  std::string output;
  /// The number after the last occurrence of `label`, or the first.
  double number(const std::string& label, bool first = false) const {
    const size_t at = first ? output.find(label) : output.rfind(label);
    return at == std::string::npos ? NAN : std::stod(output.substr(at + label.size()));
  }
};

// As `sheaf launch --nproc-per-node RANKS --threads-per-rank 1 -- COMMAND`.
Result launch(int ranks, const std::vector<std::string>& command) {
  const std::string path = ::testing::TempDir() + "/output";
  const int file = open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600), out = dup(1);
  dup2(file, 1);
  const int code =
      sheaf::distributed::launch({.nproc = ranks, .threads_per_rank = 1, .command = command});
  dup2(out, 1);
  close(file);
  close(out);
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return {code, text.str()};
}

TEST(TrainGpt, LearnsOnOneRankAndOnTwo) {
  double losses[2];
  for (int ranks : {1, 2}) {
    const Result r = launch(ranks, {"examples/train_gpt", "LICENSE", "60"});
    ASSERT_EQ(r.code, 0) << r.output;
    const double first = r.number("step 0  loss ", true);
    losses[ranks - 1] = r.number("step 59  loss ");
    EXPECT_NEAR(first, 4.2, 0.2) << "the logarithm of the number of characters; " << r.output;
    EXPECT_LT(losses[ranks - 1], 2.8) << r.output;
  }
  EXPECT_NEAR(losses[0], losses[1], 1e-2);
}

// Ranks that hold a part of every vector get the result of one rank; later, where steps overshoot, roundings grow.
TEST(Sharpness, GrowsToTheEdgeOfStability) {
  double first[2];
  for (int ranks : {1, 2}) {
    const Result r = launch(ranks, {"examples/sharpness", "LICENSE", "240"});
    ASSERT_EQ(r.code, 0) << r.output;
    first[ranks - 1] = r.number("sharpness ", true);
    const double last = r.number("of 2 / lr ");
    EXPECT_TRUE(last > 0.7 && last < 1.8) << r.output;
    EXPECT_LT(r.number("loss "), 2.6) << r.output;
  }
  EXPECT_NEAR(first[0], first[1], 1e-3 * std::abs(first[0]));
}

TEST(Sharpness, RefusesWhatIsNoRate) {
  for (const char* word : {"", "fast", "0", "-0.1"})
    EXPECT_EQ(launch(1, {"examples/sharpness", "LICENSE", "2", word}).code, 64) << word;
}

TEST(TrainGpt, SaysWhatIsMissing) {
  EXPECT_EQ(launch(1, {"examples/train_gpt", "no such file"}).code, 65);
}

TEST(Programs, RefuseWhatIsNoNumber) {
  for (const char* word : {"", "two", "1e3", "99999999999999999999"}) {
    EXPECT_EQ(launch(1, {"examples/train_gpt", "LICENSE", word}).code, 64) << word;
    EXPECT_EQ(launch(1, {"examples/sharpness", "LICENSE", word}).code, 64) << word;
    EXPECT_EQ(launch(1, {"examples/classifier", word}).code, 64) << word;
    EXPECT_EQ(launch(1, {"examples/classifier", "1", "", word}).code, 64) << word;
  }
}

TEST(Classifier, LearnsOnOneToThreeRanks) {
  for (const char* ranks : {"1", "2", "3"}) {
    const Result r = launch(1, {"examples/classifier", ranks});
    ASSERT_EQ(r.code, 0) << r.output;
    EXPECT_GE(r.number("unseen points "), 0.98) << ranks << " ranks: " << r.output;
  }
}

TEST(Classifier, ResumesWithAnotherNumberOfRanks) {
  const std::string folder = ::testing::TempDir() + "/spirals";
  const Result stopped = launch(1, {"examples/classifier", "2", folder, "20"});
  ASSERT_EQ(stopped.code, 0) << stopped.output;
  EXPECT_LT(stopped.number("unseen points "), 0.98) << "hardly begun: " << stopped.output;
  const Result resumed = launch(1, {"examples/classifier", "3", folder});
  ASSERT_EQ(resumed.code, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("resumed from " + folder + "/step-20"), std::string::npos);
  EXPECT_GE(resumed.number("unseen points "), 0.98) << resumed.output;
}

}  // namespace
}  // namespace examples
