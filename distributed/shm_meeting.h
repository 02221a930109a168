// ShmMeeting: how the ranks of one communicator meet in shared memory, and the data that they exchange there.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "sheaf/distributed/awake_timer.h"
#include "sheaf/distributed/failure_board.h"

namespace sheaf {

/// One rank's words in one communicator, in its segment's control memory, initially zero. Only the owner writes to them, except for
/// the bell; the first member's bell serves all.
struct ShmControl {
  static constexpr size_t kWhatBytes = 512;

  alignas(64) std::atomic<uint64_t> meetings;  ///< the number of meetings at which the owner has arrived
  std::atomic<uint32_t> left;                  ///< 1: it will attend no more meetings
  int64_t staging;                             ///< offset of its staging in its wire memory

  alignas(64) std::atomic<uint32_t> bell;  ///< changes when sleepers should check again
  std::atomic<uint32_t> sleepers;

  // The call that the owner is executing. It changes between the last meeting of one call and the first of the next.
  alignas(64) uint64_t sequence;
  uint64_t fingerprint;
  int64_t source;         ///< offset of its input in its wire memory; negative: it is staged
  char what[kWhatBytes];  ///< Collective::to_string(), cut off
  int64_t counts[];       ///< all_to_all: elements sent to each rank, then received from each

  static size_t bytes(int members) { return sizeof(ShmControl) + 2 * sizeof(int64_t) * static_cast<size_t>(members); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

/// A rank's published state, at the start of its control memory.
struct ShmRank {
  std::atomic<int64_t> waited_at;  ///< nanoseconds of the host's steady clock: when one of its lanes was last waiting for others
};

/// One member's side of the meetings. meet() is for the communicator's lane; leave() and wake() for any thread.
class ShmMeeting {
 public:
  /// `ranks` and `controls` are those of the members, in the group's order. meet() sleeps for at most a tenth of a second at a time
  /// and calls `on_nap` before each sleep.
  ShmMeeting(std::vector<ShmControl*> controls, std::vector<ShmRank*> ranks, int index, std::function<void()> on_nap)
      : controls_(std::move(controls)), ranks_(std::move(ranks)), index_(index), on_nap_(std::move(on_nap)) {}

  enum class Outcome { all_here, failed, left, timed_out };
  /// Announces this member and sleeps until all have arrived, or `timer` shows `longest`. Afterwards all can read what members wrote
  /// before they arrived.
  /// `absent` receives those that are missing (timed_out) or gone (left). A member whose outcome is not all_here never attends the
  /// next meeting: so no member passes that one, whatever it has read meanwhile.
  Outcome meet(AwakeTimer& timer, AwakeTimer::Clock::duration longest, const FailureBoard& board, std::vector<int>& absent);

  /// True if some lane of this member was waiting for others a moment ago.
  bool is_waiting(int member) const;
  const ShmControl& control(int member) const { return *controls_[member]; }
  ShmControl& own() { return *controls_[index_]; }

  void leave();
  /// Wakes all sleepers to check again: call it after the board has changed.
  void wake();

 private:
  bool gone(int member, uint64_t meeting) const;

  const std::vector<ShmControl*> controls_;
  const std::vector<ShmRank*> ranks_;
  const int index_;
  const std::function<void()> on_nap_;
  uint64_t meeting_ = 0;
};

}  // namespace sheaf
