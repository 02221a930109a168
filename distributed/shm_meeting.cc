#include "sheaf/distributed/shm_meeting.h"

#include <algorithm>
#include <ctime>

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace sheaf {
namespace {

using std::chrono::nanoseconds;

// About two microseconds, for peers that are about to arrive. Beyond that the core is left to threads that compute.
constexpr int kSpins = 50;
// By design no wake-up is lost; this bounds the cost of a rank that died between two instructions.
constexpr auto kNap = std::chrono::milliseconds(100);
constexpr auto kWaitingLife = std::chrono::milliseconds(500);

// Shared, not FUTEX_PRIVATE: the sleepers are in other processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

int64_t now_nanoseconds() { return nanoseconds(AwakeTimer::Clock::now().time_since_epoch()).count(); }

}  // namespace

// All loads and stores here are sequentially consistent. So of members that arrive at the same time at least one sees all others, and
// rings; and the kernel tells a sleeper that the ringer did not see that the bell has changed.
ShmMeeting::Outcome ShmMeeting::meet(AwakeTimer& timer, AwakeTimer::Clock::duration longest, const FailureBoard& board,
                                     std::vector<int>& absent) {
  const uint64_t meeting = ++meeting_;
  const int n = static_cast<int>(controls_.size());
  own().meetings = meeting;
  int here = 0;
  const auto all_here = [&] {
    while (here < n && controls_[here]->meetings >= meeting) ++here;
    return here == n;
  };
  if (all_here()) {
    wake();
    return Outcome::all_here;
  }
  for (int i = 0; i < kSpins; ++i) {
    _mm_pause();
    if (all_here()) return Outcome::all_here;
  }
  ShmControl& door = *controls_[0];
  while (true) {
    const uint32_t bell = door.bell;
    if (all_here()) return Outcome::all_here;
    if (board.failed()) return Outcome::failed;
    for (int i = 0; i < n; ++i)
      if (gone(i, meeting)) absent.push_back(i);
    if (!absent.empty()) return Outcome::left;
    const auto left = std::chrono::duration_cast<nanoseconds>(longest - timer.look());
    if (left.count() <= 0) {
      for (int i = 0; i < n; ++i)
        if (controls_[i]->meetings < meeting) absent.push_back(i);
      return absent.empty() ? Outcome::all_here : Outcome::timed_out;
    }
    ranks_[index_]->waited_at = now_nanoseconds();
    on_nap_();
    const timespec nap{0, static_cast<long>(std::min<nanoseconds>(left, kNap).count())};
    ++door.sleepers;
    futex(door.bell, FUTEX_WAIT, bell, &nap);
    --door.sleepers;
  }
}

bool ShmMeeting::gone(int member, uint64_t meeting) const {
  // In this order: a member that has left attends no meeting after that.
  return controls_[member]->left && controls_[member]->meetings < meeting;
}

bool ShmMeeting::is_waiting(int member) const {
  return now_nanoseconds() - ranks_[member]->waited_at < nanoseconds(kWaitingLife).count();
}

void ShmMeeting::leave() {
  own().left = 1;
  wake();
}

void ShmMeeting::wake() {
  ShmControl& door = *controls_[0];
  ++door.bell;
  if (door.sleepers > 0) futex(door.bell, FUTEX_WAKE, INT32_MAX, nullptr);
}

}  // namespace sheaf
