// Monitor: the side channel of a job of processes. Every rank keeps a plain TCP connection to every other; it reports who failed and
// why, who is blocked in which collective, who has left, and who gives no sign of life.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "sheaf/distributed/failure_board.h"
#include "sheaf/distributed/socket.h"

namespace sheaf {

/// "I have been waiting in this collective for a while", for others to compare with their own calls.
struct StuckNote {
  uint64_t group = 0;  ///< hash of the communicator's name
  uint64_t sequence = 0;
  uint64_t fingerprint = 0;
  std::string what;          ///< Collective::to_string()
  std::vector<int64_t> send_counts;  ///< all_to_all only
  std::chrono::steady_clock::time_point received = {};  ///< set by the receiver
};

/// A peer's connection that ends without a farewell means that it died. This rank's failures, and those that it learns of, are sent
/// to all peers, so all ranks know of a dead or throwing peer within milliseconds, whatever they wait for.
class Monitor {
 public:
  static constexpr std::chrono::milliseconds kTick{100};
  /// A stuck rank repeats its note every kNotePeriod.
  static constexpr std::chrono::milliseconds kNotePeriod{500}, kNoteLife{3000};
  /// A rank may have waited a while before it stopped: is_waiting() is conclusive only after a wait of `time`.
  static constexpr bool knows_who_waits(std::chrono::milliseconds time) { return time > kNoteLife + kNotePeriod; }

  /// `timeout`: how long a peer may give no sign of life, during an OpenEnded wait.
  Monitor(int rank, int world, std::shared_ptr<FailureBoard> board, const std::string& host, std::string token,
          std::chrono::milliseconds timeout);
  /// Says farewell and closes.
  ~Monitor();
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// The port that higher ranks connect to.
  int port() const { return local_port(listener_); }
  /// Connects to a lower rank. `check`, here and below, throws if one of the ranks that are waited for never comes.
  void connect(int peer, const std::string& host, int port, Deadline deadline, const Check& check);
  /// Waits for the higher ranks, then starts watching. CommError(kTimeout) names those that did not connect.
  void start(Deadline deadline, const Check& check);

  void post(const StuckNote& note);
  /// The last note of `peer` about `group`.
  std::optional<StuckNote> note(uint64_t group, int peer) const;
  /// True if `peer` has said within kNoteLife that it waits in some collective of any group.
  bool is_waiting(int peer) const;
  /// True once `peer` has said farewell.
  bool has_left(int peer) const { return peers_[peer].left; }

  /// While one exists, a peer whose process is stopped is a failure of the job. For waits without a deadline: only others know it then.
  class OpenEnded {
   public:
    OpenEnded(Monitor& monitor, bool is) : monitor_(is ? &monitor : nullptr) { if (monitor_) ++monitor_->open_ended_; }
    ~OpenEnded() { if (monitor_) --monitor_->open_ended_; }
    OpenEnded(const OpenEnded&) = delete;
    OpenEnded& operator=(const OpenEnded&) = delete;

   private:
    Monitor* const monitor_;
  };

  /// `tick` runs on the monitor's thread every kTick, until unwatch() returns.
  int watch(std::function<void()> tick);
  void unwatch(int id);

 private:
  struct Peer {
    Socket socket = {};
    FrameBuffer frames = {};
    std::mutex send_mutex = {};
    FrameQueue outgoing = {};        // guarded by send_mutex
    std::atomic<size_t> unread = 0;  // bytes of notes that it may not have read: sent since it last gave a sign of life
    std::atomic<bool> left = false;
    bool closed = false;
    int64_t silent_ticks = 0;  // of this rank, so that a stop of its own process is not held against others
  };
  void loop();
  void read(int peer);
  void show_and_check_life();
  void handle(int peer, const std::string& frame);
  void note_to_all(const std::string& frame);
  void tell_all(const std::string& news);
  std::optional<int> greeted_rank(const Socket& socket, Deadline deadline) const;

  const int rank_, world_;
  const std::shared_ptr<FailureBoard> board_;
  const std::string token_;
  const int64_t longest_silence_;  // in ticks
  std::atomic<int> open_ended_ = 0;
  int64_t ticks_ = 0;
  Socket listener_;
  std::vector<Peer> peers_;
  Socket wake_;
  mutable std::mutex notes_mutex_;
  std::map<std::pair<uint64_t, int>, StuckNote> notes_;
  std::mutex watchers_mutex_;  // held while ticks run
  std::map<int, std::function<void()>> watchers_;
  int next_watcher_ = 0;
  int subscription_ = -1;
  std::thread thread_;
};

}  // namespace sheaf
