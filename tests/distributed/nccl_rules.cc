#include "sheaf/tests/distributed/nccl_rules.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/runtime.h"

namespace sheaf::testing {

class NcclRules::Memory final : public PieceSource {
 public:
  explicit Memory(std::shared_ptr<NcclRules> rules) : rules_(std::move(rules)) {}

  void* allocate(int device, size_t bytes) override {
    if constexpr (kernels::kHasCuda) {
      try {
        kernels::cuda::use_device(device);
        void* const piece = kernels::cuda::allocate(bytes);
        std::lock_guard lock(rules_->mutex_);
        rules_->pieces_[static_cast<char*>(piece)] = {this, pieces_++, bytes};
        return piece;
      } catch (const OutOfMemory&) {
      }
    }
    return nullptr;
  }
  void free(void* piece) override {
    {
      std::lock_guard lock(rules_->mutex_);
      EXPECT_EQ(rules_->pieces_.erase(static_cast<char*>(piece)), 1u) << "freed, but not allocated here";
      for (const auto& [comm, registered] : rules_->registered_)
        EXPECT_FALSE(registered.contains(static_cast<char*>(piece))) << "freed while it is registered";
    }
    if constexpr (kernels::kHasCuda) kernels::cuda::free(piece);
  }

 private:
  const std::shared_ptr<NcclRules> rules_;
  size_t pieces_ = 0;
};

NcclRules::~NcclRules() { EXPECT_TRUE(pieces_.empty()) << pieces_.size() << " pieces were never freed"; }

std::shared_ptr<PieceSource> NcclRules::memory() { return std::make_shared<Memory>(shared_from_this()); }

void* NcclRules::add(const void* comm, void* base, int64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto piece = pieces_.find(static_cast<char*>(base));
  if (piece == pieces_.end() || piece->second.bytes != static_cast<size_t>(bytes)) {
    ADD_FAILURE() << bytes << " bytes that are no whole piece are registered";
    return nullptr;
  }
  EXPECT_TRUE(registered_[comm].insert(*piece).second) << "registered twice";
  ++registrations_;
  return base;
}

void NcclRules::remove(const void* comm, void* registration) {
  std::lock_guard lock(mutex_);
  EXPECT_EQ(registered_[comm].erase(static_cast<char*>(registration)), 1u) << "deregistered, but not registered";
}

void NcclRules::ended(const void* comm) {
  std::lock_guard lock(mutex_);
  EXPECT_TRUE(registered_[comm].empty()) << "a communicator ended with registrations";
}

void NcclRules::forget(const void* comm) {
  std::lock_guard lock(mutex_);
  registered_.erase(comm);
}

std::optional<NcclRules::Place> NcclRules::note(const void* comm, const std::string& kind, const void* buffer,
                                                int64_t bytes) {
  const auto* const begin = static_cast<const char*>(buffer);
  std::lock_guard lock(mutex_);
  const std::map<const char*, Piece>& known = registered_[comm];
  const auto after = known.upper_bound(begin);
  std::optional<Place> place;
  if (after != known.begin()) {
    const auto& [base, piece] = *std::prev(after);
    if (begin + bytes <= base + piece.bytes) place = {piece.number, static_cast<size_t>(begin - base)};
  }
  Moved& moved = moved_[kind];
  ++(place ? moved.in_place : moved.copied);
  if (!place) moved.largest_copied = std::max(moved.largest_copied, bytes);
  return place;
}

void NcclRules::compare(const std::vector<std::optional<Place>>& places) {
  const bool in_place = places[0].has_value();
  bool equal = true;
  for (const std::optional<Place>& p : places) {
    EXPECT_EQ(p.has_value(), in_place) << "one rank has registered its buffer and another has not";
    equal = equal && p == places[0];
  }
  std::lock_guard lock(mutex_);
  unequal_ += !equal;
}

void NcclRules::joined(const Gpu* gpu) {
  std::lock_guard lock(mutex_);
  ++callers_[gpu].communicators;
}

void NcclRules::left(const Gpu* gpu) {
  std::lock_guard lock(mutex_);
  if (--callers_[gpu].communicators == 0) callers_.erase(gpu);
}

void NcclRules::issued(const Gpu* gpu) {
  std::lock_guard lock(mutex_);
  Caller& caller = callers_[gpu];
  if (!caller.thread) caller.thread = std::this_thread::get_id();
  EXPECT_EQ(*caller.thread, std::this_thread::get_id()) << "two threads call NCCL for one GPU";
}

NcclRules::Moved NcclRules::moved(const std::string& kind) const {
  std::lock_guard lock(mutex_);
  const auto it = moved_.find(kind);
  return it == moved_.end() ? Moved{} : it->second;
}
int64_t NcclRules::registrations() const {
  std::lock_guard lock(mutex_);
  return registrations_;
}
int64_t NcclRules::at_unequal_offsets() const {
  std::lock_guard lock(mutex_);
  return unequal_;
}

}  // namespace sheaf::testing
