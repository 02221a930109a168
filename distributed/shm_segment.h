// ShmSegment: memory of one rank that the other ranks of its host map. It is a memfd, which has no name: when the last
// process that maps it ends, however it ends, it is gone.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "sheaf/core/allocator.h"
#include "sheaf/distributed/failure_board.h"
#include "sheaf/distributed/socket.h"

namespace sheaf {

/// [control words | wire memory]. All ranks may write to the control words, only the owner to the wire memory.
class ShmSegment {
 public:
  /// Address space for control words; only the used part takes memory.
  static constexpr size_t kControlBytes = size_t{64} << 20;

  /// A new segment of this rank with `wire_bytes` (address space, not memory) of wire memory. IoError if the system refuses.
  static std::shared_ptr<ShmSegment> create(int rank, size_t wire_bytes);
  /// A peer's segment, from the descriptor it sent. IoError if that is not a segment.
  static std::shared_ptr<ShmSegment> map(Socket memory);
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  char* control(size_t offset) const { return control_ + offset; }
  /// Takes zeroed control words permanently: peers may read them long after their communicator is gone. Returns their
  /// offset; CommError when kControlBytes are used up.
  size_t take_control(size_t bytes);

  const char* wire(int64_t offset) const { return wire_ + offset; }
  /// The offset of `block` in the wire memory; negative if it is elsewhere.
  int64_t wire_offset(const void* block) const;
  /// The wire memory for an allocator; own segment only.
  static SharedRange wire_range(const std::shared_ptr<ShmSegment>& own);

  const Socket& memory() const { return memory_; }
  /// Closes the descriptor when all peers have theirs; the mapping stays.
  void close_memory() { memory_.close(); }

 private:
  ShmSegment(Socket memory, bool own);

  Socket memory_;
  char* control_ = nullptr;
  char* wire_ = nullptr;
  size_t wire_bytes_ = 0;
  size_t control_used_ = 0;
};

/// Passes descriptors between the ranks of one host: a Unix socket in the abstract namespace, which leaves no file, with a random
/// name. It serves processes of this user only.
class ShmExchange {
 public:
  ShmExchange();  ///< listens; IoError if it cannot
  /// The name that peers connect to.
  const std::string& name() const { return name_; }
  /// Sends `own` to the other ranks of this host and receives theirs; `names` are their name(), by rank of the job, empty for ranks
  /// elsewhere. Entry `rank` of the result is `own`, those of ranks elsewhere are null. IoError if a peer does not answer by
  /// `deadline`, belongs to another user, or the job fails meanwhile.
  std::vector<std::shared_ptr<ShmSegment>> swap(int rank, const std::vector<std::string>& names,
                                                const std::shared_ptr<ShmSegment>& own, const FailureBoard& board,
                                                Deadline deadline);

 private:
  std::string name_;
  Socket listener_;
};

/// Identifies the host and the namespaces that ranks must share to pass descriptors to each other.
std::string host_identity();

}  // namespace sheaf
