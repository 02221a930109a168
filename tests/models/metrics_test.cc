#include "sheaf/models/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "sheaf/core/file.h"
#include "sheaf/core/json.h"
#include "sheaf/models/event_file.h"
#include "sheaf/tests/core/scratch_folder.h"

namespace sheaf::models {
namespace {

class Metrics : public ::testing::Test {
 protected:
  ScratchFolder folder;
  const std::string path = folder / "out/metrics.jsonl";
  std::string text() { return File::open(path).read_all(); }
};

TEST_F(Metrics, LinesRoundTrip) {
  const double loss = static_cast<double>(2.1234567f), lr = 0.1 + 0.2;
  {
    MetricsWriter writer(path);
    writer.write(1, {{"loss", loss}, {"lr", lr}, {"peak_bytes", int64_t{9007199254740993}}});
    writer.sync();
  }
  const Json line = Json::parse(text(), "t");
  EXPECT_EQ(line.at("step").as_int(), 1);
  EXPECT_EQ(line.at("loss").as_double(), loss);
  EXPECT_EQ(line.at("lr").as_double(), lr);
  EXPECT_EQ(line.at("peak_bytes").as_int(), 9007199254740993);
}

TEST_F(Metrics, NonFiniteIsNullAndFlagged) {
  MetricsWriter writer(path);
  const double inf = std::numeric_limits<double>::infinity();
  writer.write(3, {{"loss", NAN}, {"a", inf}, {"b", -inf}});
  EXPECT_EQ(text(),
            "{\"step\":3,\"loss\":null,\"loss_nonfinite\":\"nan\",\"a\":null,\"a_nonfinite\":\"inf\",\"b\":null,"
            "\"b_nonfinite\":\"-inf\"}\n");
}

TEST_F(Metrics, ResumeDropsWhatCameAfterTheCheckpoint) {
  {
    MetricsWriter writer(path);
    for (int64_t step = 1; step <= 5; ++step) writer.write(step, {{"loss", 1.0 / static_cast<double>(step)}});
    writer.write(5, {{"val_loss", 3.0}});
  }
  const std::string all = text();
  { MetricsWriter writer(path, 5); }
  EXPECT_EQ(text(), all);
  {
    MetricsWriter writer(path, 3);
    writer.write(4, {{"loss", 0.25}});
  }
  EXPECT_EQ(text(), "{\"step\":1,\"loss\":1.0}\n{\"step\":2,\"loss\":0.5}\n{\"step\":3,\"loss\":0.3333333333333333}\n"
                    "{\"step\":4,\"loss\":0.25}\n");
  { MetricsWriter writer(path); }
  EXPECT_EQ(text(), "");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "out"), {}), 1);
}

TEST_F(Metrics, CutOffAndSpoiledLinesGo) {
  make_folders(folder / "out");
  const std::string one = "{\"step\":1,\"loss\":1.0}\n";
  for (const std::string& tail : {std::string("{\"step\":2,\"lo"), std::string("{\"step\":2,\"loss\":1.0}"),
                                  std::string(40, '\0'), std::string("\n\n"), std::string("[]\n{\"step\":\"x\"}\n"),
                                  std::string("{\"step\":2\0\0\n", 12)}) {
    write_file(path, one + tail);
    { MetricsWriter writer(path, 10); }
    EXPECT_EQ(text(), one) << tail;
  }
}

TEST_F(Metrics, WhatStaysIsNotRead) {
  constexpr uintmax_t kLong = uintmax_t{1} << 40;
  make_folders(folder / "out");
  write_file(path, "");
  std::filesystem::resize_file(path, kLong);  // of zeros that take no room
  std::ofstream(path, std::ios::app) << "\n{\"step\":1}\n{\"step\":2}\n";
  { MetricsWriter writer(path, 1); }
  EXPECT_EQ(std::filesystem::file_size(path), kLong + 12);
}

TEST_F(Metrics, OneLineForPeople) {
  EXPECT_EQ(progress_line({120, 2000, 2.12345, 1e-3, 0.874, 12345.4, 192}),
            "step  120/2000  loss 2.1235  lr 1.00e-03  norm 0.87  12,345 tok/s  left 3m12s");
  EXPECT_EQ(progress_line({1, 20, 2, 0, 0, 999, -1}), "step  1/20  loss 2.0000  lr 0.00e+00  norm 0.00  999 tok/s");
  EXPECT_THAT(progress_line({1, 20, 2, 0, 0, 1234567, 7260}), ::testing::HasSubstr("1,234,567 tok/s  left 2h01m"));
  EXPECT_THAT(progress_line({.loss_scale = 32768, .skipped = 1}), ::testing::EndsWith(" tok/s  skipped, loss scale 32768"));
  EXPECT_THAT(progress_line({.loss_scale = 0x1p40, .skipped = 2, .steps_since = 10}),
              ::testing::EndsWith("  2 of 10 skipped, loss scale 1099511627776"));
  EXPECT_THAT(progress_line({.loss_scale = 32768}), ::testing::EndsWith(" tok/s"));
}

// Bit by bit, by its definition.
uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
  }
  return ~crc;
}

TEST(EventFiles, SumsAreCastagnolis) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  for (const char* text : {"", "a", "The quick brown fox"}) EXPECT_EQ(crc32c(text), slow_crc32c(text)) << text;
}

// The events in a file, each as bytes, after checks of their frames.
std::vector<std::string> events_in(const std::string& path) {
  const std::string all = File::open(path).read_all();
  const auto sum = [&](size_t at) {
    uint32_t value;
    std::memcpy(&value, &all[at], sizeof value);
    value -= 0xa282ead8u;
    return (value >> 17) | (value << 15);
  };
  std::vector<std::string> events;
  for (size_t at = 0; at < all.size();) {
    uint64_t length;
    std::memcpy(&length, &all[at], sizeof length);
    EXPECT_EQ(sum(at + 8), slow_crc32c(all.substr(at, 8)));
    events.push_back(all.substr(at + 12, length));
    EXPECT_EQ(sum(at + 12 + length), slow_crc32c(events.back()));
    at += length + 16;
  }
  return events;
}

std::vector<std::string> in_order(const std::string& folder) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::ranges::sort(paths);
  return paths;
}

// TensorBoard reads them in the order of their names, though the clock may have gone back, or be another host's.
TEST(EventFiles, ALaterOneIsReadLater) {
  const ScratchFolder folder;
  const std::string of_tomorrow = folder / "events.out.tfevents.4000000000.host.1";
  for (const char* other : {"/events.out.tfevents.99999999999999999999.host.1", "/events.out.tfevents.profile-empty", "/notes.txt"})
    std::ofstream(folder / other);
  std::ofstream{of_tomorrow};
  for (const int64_t step : {1, 2}) EventFile(folder / "", step);
  const std::vector<std::string> paths = in_order(folder / "");
  ASSERT_EQ(paths.size(), 6u);
  EXPECT_EQ(paths[0], of_tomorrow);
  EXPECT_THAT(paths[1], ::testing::HasSubstr("/events.out.tfevents.4000000001."));
  EXPECT_THAT(paths[2], ::testing::HasSubstr("/events.out.tfevents.4000000002."));
}

TEST(EventFiles, HaveTheBytesOfEvents) {
  const ScratchFolder folder;
  {
    EventFile file(folder / "tensorboard", 301);
    file.write(300, std::vector<Metric>{{"loss", 0.5}, {"tokens", int64_t{3}}});
    EventFile(folder / "tensorboard", 302);  // in the same second
  }
  const std::vector<std::string> paths = in_order(folder / "tensorboard");
  ASSERT_EQ(paths.size(), 2u);
  EXPECT_THAT(paths[0], ::testing::HasSubstr("/events.out.tfevents."));
  const std::vector<std::string> events = events_in(paths[0]);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].substr(9), "\x1a\x0d" "brain.Event:2");
  EXPECT_EQ(events[1].substr(9), std::string("\x10\xad\x02" "\x3a\x02\x08\x01", 7)) << "from step 301 on nothing counts that was there";
  EXPECT_EQ(events[2].substr(9), std::string("\x10\xac\x02" "\x2a\x1c" "\x0a\x0b\x0a\x04loss\x15\0\0\0\x3f" "\x0a\x0d\x0a\x06tokens\x15\0\0\x40\x40", 33));
  for (const std::string& event : events) {
    double time;
    std::memcpy(&time, &event[1], sizeof time);
    EXPECT_EQ(event[0], 0x09);
    EXPECT_GT(time, 1.7e9);
    EXPECT_LT(time, 1e11);
  }
}

}  // namespace
}  // namespace sheaf::models
