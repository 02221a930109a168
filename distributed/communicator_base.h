// CommunicatorBase: what all communicators share. Checks arguments, numbers and fingerprints the calls, counts bytes, keeps a flight
// recorder, formats the errors, and runs the calls in order on its own lane, or on the rank's thread if that waits.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/distributed/collective.h"
#include "sheaf/distributed/failure_board.h"
#include "sheaf/distributed/lane.h"

namespace sheaf {

/// The members of one communicator.
struct CommunicatorGroup {
  std::string name;          ///< equal on all members, unlike that of any other group: "(data=4)/data/0/gather"
  std::vector<int> members;  ///< world ranks, in the group's order
  int index = 0;             ///< this rank's index among them
  int world = 1;             ///< ranks of the whole job

  int size() const { return static_cast<int>(members.size()); }
  int world_rank() const { return members[index]; }
};

/// What a rank waits for while it connects a group, for messages: "rank 3 to connect (data=4)/data/0/gather".
inline std::string waits_for(const CommunicatorGroup& group, int member) {
  return str("rank ", group.members[static_cast<size_t>(member)], " to connect ", group.name);
}

/// A call, by its number: what is told of one that is stuck.
struct FlightEntry {
  uint64_t sequence;
  uint64_t fingerprint;
  std::string what;  ///< Collective::to_string()
};

class CommunicatorBase : public Communicator {
 public:
  static constexpr size_t kFlightEntries = 256;

  int rank() const final { return group_.index; }
  int size() const final { return group_.size(); }

  Event all_gather(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                   std::string_view path) final;
  Event reduce_scatter(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                       std::string_view path) final;
  Event all_reduce(void* data, int64_t count, DType dtype, Reduction reduction, std::string_view path) final;
  Event all_to_all(const void* in, std::span<const int64_t> send_counts, void* out,
                   std::span<const int64_t> recv_counts, DType dtype, std::string_view path) final;
  Event broadcast(void* data, int64_t bytes, int root, std::string_view path) final;
  Event barrier(std::string_view path) final;

  void abort(const std::string& reason) final;
  uint64_t sequence() const final;
  uint64_t fingerprint() const final;
  int64_t bytes_received() const final;

  void wait_before_next_call(const Event& event) final { behind_.push_back(event); }
  void next_call_is_awaited() final { waited_for_ = true; }
  void next_call_has_no_deadline() final { has_deadline_ = false; }
  void label_next_call(std::string values) final { of_ = std::move(values); }
  /// The last calls, oldest first.
  std::vector<FlightEntry> flight_record() const;

 protected:
  CommunicatorBase(CommunicatorGroup group, std::shared_ptr<FailureBoard> board)
      : group_(std::move(group)), board_(std::move(board)) {}

  /// Does the work of one call, on the lane's thread or that of a rank that waits for it; called only for groups of two or more.
  virtual void run(const Collective& call) = 0;
  /// The same for buffers on the rank's GPU: enqueues the work there and returns the point where it is done.
  virtual std::shared_ptr<const DevicePoint> run_on_gpu(const Collective&) { return nullptr; }
  /// False if only host buffers can be communicated; else run_on_gpu() is implemented.
  virtual bool moves_gpu_memory() const { return false; }
  /// Enqueues a checked and numbered call. The default passes it to the lane, or runs it at once in a group of one or if the rank
  /// waits for it.
  virtual Event dispatch(std::shared_ptr<Collective> call);
  /// The lane of calls on GPUs, if it is not that of calls on the host.
  virtual LaneThread* gpu_lane() { return nullptr; }
  /// Finishes queued calls and ends the lane; derived destructors call it first, since run() is theirs.
  void finish_lane() { lane_.reset(); }

  std::optional<FlightEntry> flight_entry(uint64_t sequence) const;

  // Errors: "[op] rank 1 of 3: <what> at sequence 17 (path)".
  CommError error(const Collective& call, ExitCode code, const std::string& what) const;
  /// Poisons the job with this rank as the one that failed, and throws.
  [[noreturn]] void raise(const Collective& call, ExitCode code, const std::string& what) const;
  /// Throws the failure that poisons the job, formatted for this call.
  [[noreturn]] void throw_failure(const Collective& call, const JobFailure& failure) const;
  void throw_if_failed(const Collective& call) const;
  /// The effects of a failure may arrive before its reason, which the monitor's connections bring: waits for that, and throws it.
  /// Returns after kExplanationTime, or when `over` is true.
  void await_explanation(const Collective& call, const std::function<bool()>& over) const;
  static constexpr std::chrono::seconds kExplanationTime{1};
  /// Poisons the job with another member as the one that failed, unless it has failed already, and throws.
  [[noreturn]] void raise_lost(const Collective& call, int member, const std::string& how) const;
  [[noreturn]] void raise_timeout(const Collective& call, double seconds, const std::vector<int>& missing) const;
  std::string ranks_text(const std::vector<int>& indices) const;  ///< "2, 4": world ranks of these members

  const CommunicatorGroup group_;
  const std::shared_ptr<FailureBoard> board_;

 private:
  Event submit(Collective call);
  void check_counts(const char* op, std::span<const int64_t> counts) const;
  std::shared_ptr<const DevicePoint> execute(const Collective& call);

  mutable std::mutex mutex_;  // guards the members below: written by the rank's thread, read by others
  uint64_t sequence_ = 0;
  uint64_t fingerprint_ = 0;
  int64_t bytes_received_ = 0;
  std::deque<FlightEntry> flight_;
  std::vector<Event> behind_;         // events that the next call must follow; only for the rank's thread, as is the next member
  bool waited_for_ = false;           // whether the rank's thread waits for the next call
  bool has_deadline_ = true;          // whether the next call has one
  std::string of_;                    // names the next call's values
  std::unique_ptr<LaneThread> lane_;  // made by the first call that needs it
};

/// Any call in a group of one: a copy, or nothing. On a GPU, ordered by the rank's stream.
void run_alone(const Collective& call);

}  // namespace sheaf
