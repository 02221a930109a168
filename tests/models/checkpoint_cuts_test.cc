// Tensors that are cut along a dimension and then flat, like weights under tensor parallelism: checkpoints written with any cut can be read
// with any other.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/core/atomic_folder.h"
#include "sheaf/models/checkpoint_manifest.h"
#include "sheaf/tests/core/scratch_folder.h"
#include "sheaf/tests/models/broken_manifest.h"
#include "sheaf/tests/models/checkpoint_ranks.h"
#include "sheaf/tests/models/cuts.h"

namespace sheaf::models {
namespace {

using testing::Cut;
using testing::cuts;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Shape kShapes[] = {{7, 5}, {2, 9}, {11, 2}, {3, 4, 5}, {6}, {1, 4}, {}};

std::string name_of(const Shape& shape) { return "w" + shape.to_string(); }
// A value that identifies an element of a tensor.
float value_at(const Shape& shape, int64_t i) { return static_cast<float>(1000 * shape.numel() + i); }

std::vector<float> values_of(const Shape& shape, const Runs& runs) {
  std::vector<float> out;
  for (int64_t i = 0; i < runs.numel(); ++i) out.push_back(value_at(shape, runs.at(i)));
  return out;
}

void save(const std::string& folder, const Cut& cut) {
  testing::Ranks(cut.world()).run([&](const CheckpointGroup& group) {
    std::vector<CheckpointPiece> pieces;
    for (const Shape& shape : kShapes)
      for (const Runs& runs : cut.runs(shape, group.rank)) {
        const auto values = std::make_shared<std::vector<float>>(values_of(shape, runs));
        pieces.push_back({name_of(shape), DType::f32, shape, runs, values->data(), values});
      }
    save_checkpoint(folder, 1, pieces, {}, 0, group);
  });
}

void expect_read(Checkpoint& checkpoint, const Shape& shape, const Runs& runs) {
  std::vector<float> got(static_cast<size_t>(runs.numel()) + 1, -1);
  checkpoint.read(name_of(shape), runs, got.data());
  ASSERT_EQ(got.back(), -1);
  got.pop_back();
  ASSERT_EQ(got, values_of(shape, runs))
      << str(shape, ": ", runs.begin, " ", runs.size, " ", runs.count, " ", runs.stride);
}

TEST(CheckpointCuts, AnyCutReadsWhatAnyCutWrote) {
  for (const Cut& written : cuts()) {
    SCOPED_TRACE("written as " + written.to_string());
    ScratchFolder folder;
    save(folder.path(), written);
    Checkpoint checkpoint = Checkpoint::open(folder / "step-1");
    for (const Shape& shape : kShapes) {
      for (const Cut& read : cuts())
        for (int rank = 0; rank < read.world(); ++rank)
          for (const Runs& runs : read.runs(shape, rank))
            ASSERT_NO_FATAL_FAILURE(expect_read(checkpoint, shape, runs)) << read.to_string();
      const int64_t n = shape.numel();
      for (int64_t begin = 0; begin <= n; ++begin)
        for (int64_t end = begin; end <= n; ++end)
          ASSERT_NO_FATAL_FAILURE(expect_read(checkpoint, shape, Runs::of({begin, end})));
      // Runs that no cut makes.
      for (int64_t stride : {3, 4, 7})
        for (int64_t begin = 0; begin < 6; ++begin)
          for (int64_t size : {1, 2, 3})
            for (int64_t count = 2; begin + (count - 1) * stride + size <= n; ++count)
              ASSERT_NO_FATAL_FAILURE(expect_read(checkpoint, shape, {begin, size, count, stride}));
      std::vector<float> whole;
      for (const auto& span : checkpoint.data(name_of(shape))) {
        const size_t before = whole.size();
        whole.resize(before + span.size() / sizeof(float));
        std::memcpy(whole.data() + before, span.data(), span.size());
      }
      ASSERT_EQ(whole, values_of(shape, Runs::of({0, n}))) << shape.to_string();
    }
  }
}

// Rows that are far apart in the file, close together, and longer than what is read at a time.
TEST(CheckpointCuts, RowsOfAnyLength) {
  ScratchFolder folder;
  for (const Shape& shape : {Shape{3, 200'000}, Shape{40, 5'000}, Shape{5'000, 24}}) {
    const auto columns = [&](int rank, int ranks) {
      const int64_t mine = OwnershipMap::even(1).owned_size(rank, ranks, shape);
      return runs_of(OwnershipMap::even(1), rank, ranks, shape, {0, shape[0] * mine});
    };
    std::vector<int32_t> values(static_cast<size_t>(shape.numel()));
    std::iota(values.begin(), values.end(), 0);
    for (int parts : {1, 2, 3}) {
      std::vector<CheckpointPiece> pieces;
      for (int part = 0; part < parts; ++part)
        for (const auto& [runs, at] : columns(part, parts)) {
          const auto mine = std::make_shared<std::vector<int32_t>>();
          for (int64_t i = 0; i < runs.numel(); ++i) mine->push_back(values[runs.at(i)]);
          pieces.push_back({"w", DType::i32, shape, runs, mine->data(), mine});
        }
      save_checkpoint(folder.path(), 1, pieces, {});
      Checkpoint checkpoint = Checkpoint::open(folder / "step-1");
      for (int readers : {1, 2, 5})
        for (int reader = 0; reader < readers; ++reader)
          for (const auto& [runs, at] : columns(reader, readers)) {
            std::vector<int32_t> got(static_cast<size_t>(runs.numel()));
            checkpoint.read("w", runs, got.data());
            for (int64_t i = 0; i < runs.numel(); ++i) ASSERT_EQ(got[i], runs.at(i));
          }
    }
  }
}

TEST(CheckpointCuts, HowColumnsAreStored) {
  ScratchFolder folder;
  save(folder.path(), {1, 2, 1});
  const auto file = SafetensorsFile::open(folder / "step-1/shard-00001-of-00002.safetensors");
  EXPECT_EQ(file.at("w[7,5][2:3:7:5]").shape, (Shape{7, 3}));
  EXPECT_EQ(file.at("w[1,4][2:4]").shape, (Shape{2}));
  const std::string manifest = File::open(folder / "step-1/manifest.json").read_all();
  EXPECT_THAT(manifest, HasSubstr(R"("w[7,5]":{"dtype":"f32","shape":[7,5],"parts":[[0,0,2,7,5],[1,2,3,7,5]]})"));
  EXPECT_THAT(manifest, HasSubstr(R"("w[1,4]":{"dtype":"f32","shape":[1,4],"parts":[[0,0,2],[1,2,4]]})"));
}

TEST(CheckpointCuts, MustCoverExactlyOnce) {
  ScratchFolder folder;
  const float values[64] = {};
  const auto reason = [&](const std::vector<Runs>& all) {
    std::vector<CheckpointPiece> pieces;
    for (const Runs& runs : all) pieces.push_back({"a", DType::f32, {6, 5}, runs, values});
    return message_of<CheckpointError>(ExitCode::kData, [&] { save_checkpoint(folder.path(), 1, pieces, {}); });
  };
  EXPECT_THAT(reason({{0, 2, 6, 5}}), HasSubstr("\"a\": element 2 is missing"));
  EXPECT_THAT(reason({{0, 2, 6, 5}, {2, 2, 6, 5}}), HasSubstr("element 4 is missing"));
  EXPECT_THAT(reason({{0, 2, 6, 5}, {2, 3, 5, 5}}), HasSubstr("27 elements of 30"));
  EXPECT_THAT(reason({{0, 2, 6, 5}, {2, 3, 2, 5}, {17, 3, 3, 5}}), HasSubstr("element 12 is missing"));
  EXPECT_THAT(reason({{0, 3, 6, 5}, {2, 3, 6, 5}}), HasSubstr("element 2 is there twice"));
  EXPECT_THAT(reason({{0, 2, 6, 5}, {2, 3, 4, 5}, {17, 3, 3, 5}}), HasSubstr("element 17 is there twice"));
  EXPECT_THAT(reason({{0, 2, 6, 5}, {2, 3, 6, 5}, Runs::of({13, 16})}), HasSubstr("element 13 is there twice"));
  EXPECT_THAT(reason({{0, 1, 6, 5}, {3, 2, 6, 5}, Runs::of({1, 3}), {6, 2, 4, 5}, Runs::of({25, 28})}),
              HasSubstr("element 25 is there twice"));
  EXPECT_THAT(reason({{0, 1, 15, 2}, {1, 4, 6, 5}}),
              HasSubstr("cut in rows of 2 elements in one part and of 5 in another"));
  EXPECT_THAT(reason({{0, 3, 7, 5}}), HasSubstr("7 runs of 3 elements, 5 apart, from element 0 of [6,5]"));
  EXPECT_THAT(reason({{4, 3, 5, 5}}), HasSubstr("5 runs of 3 elements"));
  EXPECT_THAT(reason({{0, 3, 4, 7}}), HasSubstr("4 runs of 3 elements, 7 apart"));
  EXPECT_THAT(list_steps(folder.path()), IsEmpty());
  // Blocks that overlap in every way, and runs that form an interval.
  EXPECT_EQ(reason({{0, 2, 3, 5}, {2, 3, 2, 5}, {12, 2, 4, 5}, Runs::of({14, 15}), {15, 1, 3, 5}, Runs::of({16, 17}),
                    {19, 1, 2, 5}, Runs::of({21, 22}), {26, 1, 1, 9}, {29, 1, 1, 0}}),
            "no exception");
  EXPECT_EQ(reason({{0, 10, 2, 10}, {20, 5, 2, 5}}), "no exception");
  EXPECT_THAT(list_steps(folder.path()), ElementsAre(1));
}

// Random parts, most of which nearly cover the tensor: acceptance, and the element that the error names, match a count element by element.
TEST(CheckpointCuts, CoverageIsWhatCountingFinds) {
  const Shape shape{4, 3};
  const int64_t n = shape.numel();
  std::vector<Runs> all;
  for (int64_t begin = 0; begin < n; ++begin) {
    for (int64_t end = begin + 1; end <= n; ++end) all.push_back(Runs::of({begin, end}));
    for (int64_t size = 1; size < 3 && begin % 3 + size <= 3; ++size)
      for (int64_t count = 2; begin / 3 + count <= 4; ++count) all.push_back({begin, size, count, 3});
  }
  std::mt19937 random(3);
  const auto any = [&] { return all[random() % all.size()]; };
  int covers = 0, twice = 0, missing = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::vector<int> times(static_cast<size_t>(n));
    std::vector<Runs> parts;
    const auto add = [&](const Runs& runs, int sign) {
      for (int64_t e = 0; e < runs.numel(); ++e) times[static_cast<size_t>(runs.at(e))] += sign;
    };
    const auto fits = [&](const Runs& runs) {
      for (int64_t e = 0; e < runs.numel(); ++e)
        if (times[static_cast<size_t>(runs.at(e))]) return false;
      return true;
    };
    for (int tries = 0; tries < 500 && std::ranges::count(times, 0); ++tries)
      if (const Runs runs = any(); fits(runs)) add(runs, 1), parts.push_back(runs);
    if (random() % 2) add(parts.back(), -1), parts.pop_back();
    if (random() % 4 == 0) add(parts.emplace_back(any()), 1);
    Checkpoint::Tensors tensors;
    const std::string message = message_of<CheckpointError>(ExitCode::kData, [&] {
      add_part(tensors, "a", DType::f32, shape, {});
      for (const Runs& runs : parts) add_part(tensors, "a", DType::f32, shape, {0, runs});
      check_coverage(tensors);
    });
    const auto first = [&](auto&& is) { return std::ranges::find_if(times, is) - times.begin(); };
    if (std::ranges::all_of(times, [](int t) { return t == 1; })) {
      ASSERT_EQ(message, "no exception");
      ++covers;
    } else if (message.ends_with(" is there twice")) {
      const size_t begin = message.find("element ") + 8;
      ASSERT_GT(times.at(std::stoul(message.substr(begin))), 1) << message;
      ++twice;
    } else {
      const int64_t gap = first([](int t) { return t == 0; });
      const bool last = std::ranges::all_of(times.begin() + gap, times.end(), [](int t) { return t == 0; });
      ASSERT_THAT(message, HasSubstr(last ? str(": ", gap, " elements of 12") : str("element ", gap, " is missing")));
      ++missing;
    }
  }
  EXPECT_GT(covers, 5000);
  EXPECT_GT(twice, 1000);
  EXPECT_GT(missing, 5000);
}

// Manifests with a matching checksum and numbers that overflow, overlap, or would take forever.
TEST(CheckpointCuts, HostileManifests) {
  ScratchFolder folder;
  save(folder.path(), {1, 2, 1});
  const testing::BrokenManifest manifest(folder / "step-1");
  const auto reason = [&](const std::string& from, const std::string& to) { return manifest.reason(from, to); };
  const std::string part = "[1,2,3,7,5]";
  EXPECT_EQ(reason(part, part), "no exception");
  EXPECT_THAT(reason(part, "[2,2,3,7,5]"), HasSubstr("in file 2"));
  EXPECT_THAT(reason(part, "[1,2,3,7]"), HasSubstr("not [file, begin, end] or [file, begin, size, count, stride]"));
  EXPECT_THAT(reason(part, "[1,2,3,7,5.0]"), HasSubstr("expected an integer, found 5.0"));
  EXPECT_THAT(reason(part, "[1,2,3,6,5]"), HasSubstr("32 elements of 35"));
  EXPECT_THAT(reason(part, "[1,1,4,7,5]"), HasSubstr("element 1 is there twice"));
  EXPECT_THAT(reason(part, "[1,2,3,7,5],[1,2,3,7,5]"), HasSubstr("element 2 is there twice"));
  EXPECT_THAT(reason(part, "[1,2,35,1,5]"), HasSubstr("a part of 1 runs"));
  EXPECT_THAT(reason(part, "[1,2,3,0,5]"), HasSubstr("a part of 0 runs"));
  EXPECT_THAT(reason(part, "[1,2,3,-7,5]"), HasSubstr("a part of -7 runs"));
  for (const char* numbers :
       {"-2,3,7,5", "2,-3,7,5", "2,0,7,5", "2,3,7,-5", "2,3,7,0", "2,3,7,1", "2,5,7,5", "2,4,7,5", "2,3,8,5", "2,3,7,35",
        "2,3,2,70", "2,3,9223372036854775807,5", "9223372036854775807,3,7,5", "2,9223372036854775807,7,5",
        "2,3,7,9223372036854775807", "2,3,3074457345618258603,3", "-9223372036854775808,3,7,5",
        "2,-9223372036854775808,7,5", "2,3,7,-9223372036854775808"})
    EXPECT_THAT(reason(part, str("[1,", numbers, "]")), HasSubstr("tensor \"w[7,5]\":")) << numbers;
  // A tensor of 2^56 elements, every second of which is in one part: without the others it is refused, and quickly.
  const std::string huge = R"("w[7,5]":{"dtype":"f32","shape":[36028797018963968,2],"parts":[[0,0,1,36028797018963968,2])";
  const std::string old = R"("w[7,5]":{"dtype":"f32","shape":[7,5],"parts":[[0,0,2,7,5],[1,2,3,7,5])";
  EXPECT_THAT(reason(old, huge), HasSubstr("element 1 is missing"));
  EXPECT_THAT(reason(old, huge + ",[1,1,1,36028797018963967,2]"),
              HasSubstr("72057594037927935 elements of 72057594037927936"));
  EXPECT_THAT(reason(old, huge + ",[1,1,1,36028797018963968,2],[1,36028797018963968,36028797018963969]"),
              HasSubstr("element 36028797018963968 is there twice"));
  // Complete according to the manifest, but the file has no such tensor.
  ASSERT_TRUE(manifest.replace(old, huge + ",[1,1,1,36028797018963968,2]"));
  Checkpoint checkpoint = Checkpoint::open(folder / "step-1");
  float value;
  const auto no_tensor = [&](auto&& f) {
    EXPECT_THAT(message_of<CheckpointError>(ExitCode::kData, f), HasSubstr("has no tensor"));
  };
  no_tensor([&] { checkpoint.read("w[7,5]", 0, 1, &value); });
  no_tensor([&] { checkpoint.data("w[7,5]"); });
}

}  // namespace
}  // namespace sheaf::models
