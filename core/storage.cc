#include "sheaf/core/storage.h"

#include "sheaf/core/error.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/recycled.h"

namespace sheaf {

std::shared_ptr<Storage> Storage::allocate(Device device, int64_t bytes, MemoryKind where) {
  return std::allocate_shared<Storage>(Recycled<Storage>(), device, bytes, where, RankContext::current().memory(device, where));
}

Storage::Storage(Device device, int64_t bytes, MemoryKind where, std::shared_ptr<Allocator> allocator)
    : device_(device), where_(where), bytes_(bytes), allocator_(std::move(allocator)) {
  data_ = static_cast<char*>(allocator_->allocate(bytes, where));
  if (const auto& log = RankContext::current().memory_log) [[unlikely]] {
    log_ = log;
    holder_ = log_->take(*allocator_, bytes_);
  }
}

void Storage::release() {
  if (pending_) {  // the lane is still writing: the block may not be reused before it is done
    try { settle(); } catch (const std::exception&) {}  // the failure is reported to those who wait for the lane itself
  }
  if (!allocator_) return;
  allocator_->free(data_, bytes_);
  if (log_) [[unlikely]] log_->give_back(*allocator_, bytes_, holder_);
  allocator_ = nullptr;
  log_ = nullptr;
  data_ = nullptr;
}

void Storage::discard(std::string why) {
  release();
  why_discarded_ = std::move(why);
}

void Storage::filled_in_pieces(std::vector<IncomingRows> pieces, std::vector<std::shared_ptr<Storage>> lent) {
  filled_by(pieces.empty() ? Event() : pieces.back().event);
  pieces_ = std::move(pieces);
  pieces_here_ = 0;
  lent_ = std::move(lent);
}

// On a GPU only the rank's stream waits for the lane; the host does not.
void Storage::wait_for(const Event& event) const {
  if (device_.is_cuda()) event.order(RankContext::current().gpu_of(device_).compute());
  else event.sync();
}

void Storage::settle_piece(size_t i) {
  for (; pieces_here_ <= i; ++pieces_here_) {
    const IncomingRows& piece = pieces_[pieces_here_];
    wait_for(piece.event);
    if (piece.unpack) piece.unpack();
  }
}

void Storage::settle() {
  if (!pending_) return;
  if (pieces_.empty()) wait_for(ready_);
  else settle_piece(pieces_.size() - 1);
  pending_ = false;  // a lane that failed has not filled it: later reads throw, too
  pieces_.clear();
  lent_.clear();
}

void Storage::throw_discarded() const { fail<LifetimeError>("use of a value that was discarded: ", why_discarded_); }

}  // namespace sheaf
