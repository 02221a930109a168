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
  if (pending_) {  // the lane still writes: the block may not be reused before it is done
    try { settle(); } catch (const std::exception&) {}  // the failure reaches whoever waits for the lane itself
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

void Storage::settle() {
  if (!pending_) return;
  // On a GPU only the rank's stream goes behind the lane; the host does not stop.
  if (device_.is_cuda()) ready_.order(RankContext::current().gpu_of(device_).compute());
  else ready_.sync();
  pending_ = false;  // a lane that failed has not filled it: later reads throw, too
}

void Storage::throw_discarded() const { fail<LifetimeError>("use of a value that was discarded: ", why_discarded_); }

}  // namespace sheaf
