#include "sheaf/tests/poison.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "sheaf/core/rank_context.h"

namespace sheaf::testing {
namespace {

class PoisonAllocator final : public Allocator {
 public:
  /// `gpu`: the GPU whose memory it is; null for host memory.
  PoisonAllocator(std::shared_ptr<Allocator> inner, int byte, Gpu* gpu = nullptr)
      : inner_(std::move(inner)), byte_(byte), gpu_(gpu) {}
  void* allocate(size_t bytes, MemoryKind where) override {
    void* p = inner_->allocate(bytes, where);
    if (!p || !bytes) return p;
    if (!gpu_) return std::memset(p, byte_, bytes);
    // Test tensors are not larger. A product's workspace is, and filling all of it would take long.
    const std::vector<char> poison(std::min(bytes, size_t{1} << 20), static_cast<char>(byte_));
    gpu_->copy(gpu_->compute(), p, poison.data(), poison.size(), Gpu::Copy::to_device);
    return p;
  }
  void free(void* block, size_t bytes) override { inner_->free(block, bytes); }
  MemoryStats stats() const override { return inner_->stats(); }
  void reset_peak() override { inner_->reset_peak(); }
  void add_wire(SharedRange range) override { inner_->add_wire(std::move(range)); }

 private:
  std::shared_ptr<Allocator> inner_;
  int byte_;
  Gpu* gpu_;
};

/// The same GPU with poisoned memory.
class PoisonGpu final : public Gpu {
 public:
  PoisonGpu(std::shared_ptr<Gpu> inner, int byte)
      : inner_(std::move(inner)),
        memory_(std::make_shared<PoisonAllocator>(inner_->memory(), byte, inner_.get())),
        host_memory_(std::make_shared<PoisonAllocator>(inner_->host_memory(), byte, inner_.get())) {}
  Device device() const override { return inner_->device(); }
  std::string name() const override { return inner_->name(); }
  const std::shared_ptr<Allocator>& memory() const override { return memory_; }
  const std::shared_ptr<Allocator>& host_memory() const override { return host_memory_; }
  bool holds(const void* address) const override { return inner_->holds(address); }
  void set_wire(std::shared_ptr<PieceSource> source) override { inner_->set_wire(std::move(source)); }
  std::vector<MemoryPiece> wire_pieces(size_t known) const override { return inner_->wire_pieces(known); }
  const Stream& compute() const override { return inner_->compute(); }
  const Stream& copies() const override { return inner_->copies(); }
  const Stream& d2h() const override { return inner_->d2h(); }
  Stream make_lane() override { return inner_->make_lane(); }
  void destroy_lane(const Stream& lane) override { inner_->destroy_lane(lane); }
  void copy(const Stream& stream, void* to, const void* from, size_t bytes, Copy kind) override {
    inner_->copy(stream, to, from, bytes, kind);
  }
  void sync(const Stream& stream) override { inner_->sync(stream); }
  Event record(const Stream& stream) override { return inner_->record(stream); }
  std::shared_ptr<const DeviceTime> note_time(const Stream& stream) override { return inner_->note_time(stream); }
  void begin_capture() override { inner_->begin_capture(); }
  std::unique_ptr<GpuGraph> end_capture() override { return inner_->end_capture(); }
  void abandon_capture() noexcept override { inner_->abandon_capture(); }
  bool capturing() const override { return inner_->capturing(); }
  void at_replays(const void* caller, Replayed f) override { inner_->at_replays(caller, std::move(f)); }

 private:
  std::shared_ptr<Gpu> inner_;
  std::shared_ptr<Allocator> memory_, host_memory_;
};

}  // namespace

PoisonScope::PoisonScope(int byte) : previous_(RankContext::current().cpu), previous_gpu_(RankContext::current().gpu) {
  RankContext::current().cpu = std::make_shared<PoisonAllocator>(previous_, byte);
  if (previous_gpu_) RankContext::current().gpu = std::make_shared<PoisonGpu>(previous_gpu_, byte);
}
PoisonScope::~PoisonScope() {
  RankContext::current().cpu = previous_;
  RankContext::current().gpu = previous_gpu_;
}

}  // namespace sheaf::testing
