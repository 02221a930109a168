#include "sheaf/distributed/monitor.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// Rank 1 of two, which reads and speaks only when a test says so; rank 0 has a Monitor.
class OfTwo : public ::testing::Test {
 protected:
  void SetUp() override {
    peer = connect_to("127.0.0.1", monitor.port(), Clock::now() + seconds(5));
    send("greeting", FrameWriter().u8('h').u64(0x726f74696e6f6d66ull).u64(1).text("t"));
    monitor.start(Clock::now() + seconds(5), {});
    ASSERT_EQ(receive(), "w");
  }
  void send(const char* what, const FrameWriter& frame) { ASSERT_TRUE(send_frame(peer, frame.bytes(), Clock::now() + seconds(5))) << what; }
  std::string receive() { return receive_frame(peer, Clock::now() + seconds(5)).value_or("nothing"); }
  void post(uint64_t sequence) { monitor.post({.sequence = sequence, .what = std::string(300, 'x'), .send_counts = {}}); }

  const std::shared_ptr<FailureBoard> board = std::make_shared<FailureBoard>();
  Monitor monitor{0, 2, board, "127.0.0.1", "t", seconds(300)};
  Socket peer;
};

// As under a debugger: the connection has no room for all the notes of this time, and the kernel ends one that is full for 8 s.
TEST_F(OfTwo, APeerThatDoesNotReadForLongGoesOnLater) {
  const auto start = Clock::now();
  for (int i = 0; i < 2000; ++i) post(1);
  ASSERT_LT(Clock::now() - start, seconds(60)) << "waits up to a second for a peer that does not read";
  std::this_thread::sleep_for(seconds(11));
  ASSERT_FALSE(board->failed()) << board->failure()->reason;
  send("sign of life", FrameWriter().u8('a'));
  const auto late = Clock::now() + seconds(5);
  for (bool again = false; !again && Clock::now() < late;) {
    post(2);
    const std::string frame = receive();
    if (frame == "a") continue;
    FrameReader in(frame);
    ASSERT_EQ(in.u8(), 's');
    in.u64();
    again = in.u64() == 2;
    in.u64();
    ASSERT_EQ(in.text(), std::string(300, 'x'));
  }
  board->raise({0, ExitCode::kData, "no data"});
  std::string frame;
  while ((frame = receive()) != "nothing" && frame[0] != 'f') ASSERT_TRUE(frame[0] == 'a' || frame[0] == 's') << frame;
  FrameReader in(frame);
  EXPECT_EQ(in.u8(), 'f');
  in.u64();
  in.u64();
  EXPECT_EQ(in.text(), "no data");
}

TEST(FrameQueue, SendsTheRestOfAFrameLater) {
  const Socket listener = listen_on("127.0.0.1", 0);
  const Socket from = connect_to("127.0.0.1", local_port(listener), Clock::now() + seconds(5));
  const auto to = accept_from(listener, Clock::now() + seconds(5));
  FrameQueue queue;
  const std::string large(kMaxFrameBytes, 'x');
  int frames = 0;
  while (frames < 100 && queue.flush(from, Clock::now())) queue.push(large), ++frames;
  EXPECT_LT(frames, 100);
  queue.push("last");
  std::jthread reader([&] {
    for (int i = 0; i < frames; ++i) EXPECT_EQ(receive_frame(*to, Clock::now() + seconds(5)), large);
    EXPECT_EQ(receive_frame(*to, Clock::now() + seconds(5)), "last");
  });
  EXPECT_TRUE(queue.flush(from, Clock::now() + seconds(5)));
}

}  // namespace
}  // namespace sheaf
