// ShmCommunicator: ranks that are processes of one host, through memory that all of them map.
//
// [Note: how bytes are sent] All ranks pull. A rank's input is in its wire memory (see MemoryKind), and peers copy or sum it from
// there: one copy. Input elsewhere goes through the rank's staging, window by window. A call consists of meetings with reading in
// between: at the first one every rank has announced its call and the location of its input; at the last one all have read, and the
// inputs are returned to their owners.
//
//   wire:    announce · meet · read everything · meet
//   staged:  announce, fill half 0 · meet · read half 0, fill half 1 · meet · read half 1, fill half 0 · ... · meet
//
// Two halves and one meeting per window are enough: a rank that fills a half for the second time has passed a meeting
// at which its readers arrived after reading it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "sheaf/distributed/communicator_base.h"
#include "sheaf/distributed/job.h"
#include "sheaf/distributed/shm_meeting.h"
#include "sheaf/distributed/shm_segment.h"
#include "sheaf/distributed/stuck_notes.h"

namespace sheaf {

/// The segments of the ranks of this host, by rank of the job; null for ranks elsewhere.
using ShmSegments = std::vector<std::shared_ptr<ShmSegment>>;

class ShmCommunicator final : public CommunicatorBase {
 public:
  /// Collective over the group: its members find each other's control words through the job's store. Takes its staging
  /// from the current rank's wire memory.
  ShmCommunicator(CommunicatorGroup group, std::shared_ptr<Job> job, std::shared_ptr<const ShmSegments> segments);
  ~ShmCommunicator() override;

  std::string_view kind() const override { return "shm"; }
  bool takes_own_cores() const override { return true; }
  int64_t staging_bytes() const override { return staging_bytes_; }

 private:
  /// Bytes of one rank's input that another one reads.
  struct Piece {
    int64_t begin, bytes;
  };
  struct Window;  // what can be read between two meetings

  void run(const Collective& call) override;
  void exchange(const Collective& call);
  void announce(const Collective& call);
  void meet(const Collective& call);
  void tell_other_hosts();
  void check_agreement(const Collective& call) const;
  template <class PieceOf, class Read>
  void stream(const Collective& call, bool same_for_all, PieceOf&& piece, Read&& read);
  template <class PieceOf>
  void copy_pieces(const Collective& call, bool same_for_all, const std::vector<int64_t>& places, PieceOf&& piece);
  void reduce_slices(const Collective& call, const std::vector<int64_t>& cuts, std::byte* out);
  std::vector<int> missing(const std::vector<int>& absent) const;

  ShmSegment& segment(int member) const { return *(*segments_)[group_.members[member]]; }
  static std::unique_ptr<ShmMeeting> connect(const CommunicatorGroup& group, Job& job, const ShmSegments& segments,
                                             const void* staging, std::function<void()> on_nap);

  const std::shared_ptr<Job> job_;
  const std::shared_ptr<const ShmSegments> segments_;
  const std::shared_ptr<Allocator> allocator_;
  const bool spans_hosts_;  // the job
  const int64_t staging_bytes_;
  std::byte* staging_;
  StuckNotes notes_;
  std::unique_ptr<ShmMeeting> meeting_;
  int subscription_;

  // State of the running call.
  const Collective* running_ = nullptr;
  AwakeTimer timer_;
  std::chrono::steady_clock::time_point next_note_;
  bool announced_ = false;
  int windows_ = 0;
};

}  // namespace sheaf
