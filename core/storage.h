// Storage: a block of memory with one owner count, shared by the tensors that view it.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "sheaf/core/allocator.h"
#include "sheaf/core/device.h"
#include "sheaf/core/event.h"
#include "sheaf/core/memory_ledger.h"

namespace sheaf {

/// Rows [begin, end) of a value that is being received, all dimensions but the last taken as one, or heads [begin, end) of keys and of
/// values. They are complete after `event` and after `unpack`, if not null, has moved them: the waiting rank's thread calls it.
struct IncomingRows {
  int64_t begin, end;
  Event event = {};
  std::function<void()> unpack = {};
  bool of_heads = false;
};

/// Not thread-safe beyond its reference count: only one rank's compute thread touches it, lanes see raw pointers.
class Storage {
 public:
  /// Takes `bytes` bytes from the current rank's allocator for `device`.
  static std::shared_ptr<Storage> allocate(Device device, int64_t bytes, MemoryKind where = MemoryKind::normal);
  Storage(Device device, int64_t bytes, MemoryKind where, std::shared_ptr<Allocator> allocator);
  /// Externally owned memory: place() sets its address, before the first use and whenever it changes.
  Storage(Device device, int64_t bytes) : device_(device), bytes_(bytes) {}
  ~Storage() { release(); }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  Device device() const { return device_; }
  MemoryKind where() const { return where_; }
  int64_t bytes() const { return bytes_; }
  bool discarded() const { return !why_discarded_.empty(); }

  /// The memory, null on meta. Waits for the lane that fills it (on a GPU, the rank's stream does, not the host);
  /// throws LifetimeError if it was discarded.
  char* data() {
    if (pending_) [[unlikely]] settle();
    if (!why_discarded_.empty()) [[unlikely]] throw_discarded();
    return data_;
  }
  /// The memory, which a lane may still be filling.
  char* data_unsynced() const { return data_; }

  /// Frees the memory now, even if tensors still refer to it; `why` completes "use of a value that was discarded".
  void discard(std::string why);
  /// Sets the address of externally owned memory, while no lane fills it.
  void place(char* data) { data_ = data; }
  /// A lane fills this storage; data() waits for `event`.
  void filled_by(Event event) { ready_ = std::move(event); pending_ = true; }
  /// The same, in pieces, which arrive in their order. Until all have, `lent` keeps memory alive for the lane and
  /// for them.
  void filled_in_pieces(std::vector<IncomingRows> pieces, std::vector<std::shared_ptr<Storage>> lent);
  /// These pieces, until somebody has waited for all.
  std::span<const IncomingRows> pieces() const { return pieces_; }
  std::span<const std::shared_ptr<Storage>> lent() const { return lent_; }
  /// Waits for pieces up to this one, unless that was done before.
  void settle_piece(size_t i);
  /// The event of the lane that may still be filling it; null if there is none to wait for.
  const Event* filling() const { return pending_ ? &ready_ : nullptr; }
  /// Waits for the lane that fills it, if any.
  void settle();

  /// The holder that `log` recorded for this memory; kNobody if none.
  MemoryLog::HolderId holder_in(const MemoryLog& log) const { return log_.get() == &log ? holder_ : MemoryLog::kNobody; }
  /// Counts deliberate changes in place (a step, an assignment, store_into, add_into), so that a backward can detect that a value it
  /// saved is gone.
  uint64_t version() const { return version_; }
  void changed() { ++version_; }

 private:
  void release();
  void wait_for(const Event& event) const;
  [[noreturn]] void throw_discarded() const;

  Device device_;
  MemoryKind where_ = MemoryKind::normal;
  bool pending_ = false;
  int64_t bytes_;
  uint64_t version_ = 0;
  char* data_ = nullptr;
  std::shared_ptr<Allocator> allocator_;  // null once released, or if the memory is externally owned
  std::shared_ptr<MemoryLog> log_;        // the log that knows of it; null: none
  MemoryLog::HolderId holder_ = MemoryLog::kNobody;
  Event ready_;
  std::vector<IncomingRows> pieces_;
  size_t pieces_here_ = 0;
  std::vector<std::shared_ptr<Storage>> lent_;
  std::string why_discarded_;
};

}  // namespace sheaf
