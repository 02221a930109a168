// NcclRules: what NCCL demands of registered memory and of its callers, checked in calls of its stand-ins. A violation fails the running
// test.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "sheaf/core/gpu.h"

namespace sheaf::testing {

class NcclRules : public std::enable_shared_from_this<NcclRules> {
 public:
  /// A buffer's place in its rank's registered memory.
  struct Place {
    size_t piece, offset;
    bool operator==(const Place&) const = default;
  };
  /// How buffers of one kind, such as "all_gather out", were transferred, over all ranks.
  struct Moved {
    int64_t in_place = 0, copied = 0;
    int64_t largest_copied = 0;  ///< bytes
  };

  ~NcclRules();
  /// Memory of one rank.
  std::shared_ptr<PieceSource> memory();

  // --- of a communicator: any address that stands for it ---
  /// `base` is that of a piece, which is registered whole, and once.
  void* add(const void* comm, void* base, int64_t bytes);
  void remove(const void* comm, void* registration);
  /// Finalized: nothing may be registered any more.
  void ended(const void* comm);
  /// Aborted: NCCL drops its registrations itself.
  void forget(const void* comm);
  /// Notes a transfer of `kind`; nothing if NCCL would copy the buffer.
  std::optional<Place> note(const void* comm, const std::string& kind, const void* buffer, int64_t bytes);
  /// Notes the places of one call's buffer on all members of a communicator: registered by all or by none.
  void compare(const std::vector<std::optional<Place>>& places);

  // --- of a rank: its GPU ---
  /// A communicator exists from now on, or no longer.
  void joined(const Gpu* gpu);
  void left(const Gpu* gpu);
  /// Calls of all communicators of a GPU come from one thread, as long as there are any communicators.
  void issued(const Gpu* gpu);

  Moved moved(const std::string& kind) const;
  int64_t registrations() const;       ///< so far
  int64_t at_unequal_offsets() const;  ///< calls so far whose buffers are elsewhere on other ranks

 private:
  class Memory;
  struct Piece {
    const Memory* owner;
    size_t number, bytes;  // index and size among its owner's
  };

  mutable std::mutex mutex_;
  std::map<const char*, Piece> pieces_;
  std::map<const void*, std::map<const char*, Piece>> registered_;  // by communicator
  struct Caller {
    int communicators = 0;
    std::optional<std::thread::id> thread;
  };
  std::map<const Gpu*, Caller> callers_;
  std::map<std::string, Moved> moved_;
  int64_t registrations_ = 0, unequal_ = 0;
};

}  // namespace sheaf::testing
