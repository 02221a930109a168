// Blocks in pieces of a source: those that NCCL transfers, apart from the range of other blocks, and all where there is no range.
#include <cstdlib>
#include <map>

#include <gmock/gmock.h>

#include "sheaf/core/tensor.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/tests/kernels/cuda/on_gpu.h"

namespace sheaf {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

/// Adjacent pieces in one allocation, as may happen; `most` bytes in all.
class Pieces final : public PieceSource {
 public:
  explicit Pieces(size_t most) : most_(most) {
    if constexpr (kernels::kHasCuda) base_ = static_cast<char*>(kernels::cuda::allocate(most));
  }
  ~Pieces() override {
    EXPECT_EQ(freed, sizes.size());
    if constexpr (kernels::kHasCuda) kernels::cuda::free(base_);
  }
  void* allocate(int, size_t bytes) override {
    if (used_ + bytes > most_) return nullptr;
    sizes.push_back(bytes);
    return base_ + std::exchange(used_, used_ + bytes);
  }
  void free(void*) override { ++freed; }

  std::vector<size_t> sizes;
  size_t freed = 0;

 private:
  const size_t most_;
  char* base_ = nullptr;
  size_t used_ = 0;
};

template <class F>
void with_pool(size_t most, F&& f) {
  if constexpr (kernels::kHasCuda) {
    const auto source = std::make_shared<Pieces>(most);
    const auto memory = kernels::cuda::make_device_allocator(0);
    memory->set_wire(source);
    f(*memory, *source);
  }
}

/// The piece that contains a whole block.
size_t piece_of(kernels::cuda::DeviceAllocator& memory, const void* block, size_t bytes) {
  const std::vector<MemoryPiece> pieces = memory.wire_pieces();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto *base = static_cast<const char*>(pieces[i].base), *b = static_cast<const char*>(block);
    if (b >= base && b + bytes <= base + pieces[i].bytes) return i;
  }
  return SIZE_MAX;
}

TEST(PiecePool, BlocksLieInsidePieces) {
  SHEAF_NEEDS_GPU();
  with_pool(400 * kMiB, [](kernels::cuda::DeviceAllocator& memory, Pieces& source) {
    EXPECT_EQ(source.sizes, std::vector<size_t>{32 * kMiB});
    const auto take = [&](size_t bytes, size_t piece, MemoryKind kind = MemoryKind::wire) {
      void* const block = memory.allocate(bytes, kind);
      EXPECT_EQ(piece_of(memory, block, bytes), piece) << bytes;
      EXPECT_TRUE(memory.holds(block));
      return block;
    };
    void* const a = take(12 * kMiB, 0);
    void* const b = take(12 * kMiB, 0, MemoryKind::landing);
    take(12 * kMiB, SIZE_MAX, MemoryKind::normal);
    take(12 * kMiB, SIZE_MAX, MemoryKind::host_wire);
    void* const c = take(12 * kMiB, 1);  // 8 MiB of the first piece are free, right before the next
    take(12 * kMiB, 1);  // a piece for two of them
    EXPECT_EQ(source.sizes, (std::vector<size_t>{32 * kMiB, 24 * kMiB}));
    void* const large = take(100 * kMiB + 5, 2);
    EXPECT_EQ(source.sizes.back(), 102 * kMiB);
    EXPECT_EQ(memory.stats().live, static_cast<int64_t>(12 * kMiB * 6 + 100 * kMiB + 5));
    EXPECT_EQ(memory.stats().reserved, static_cast<int64_t>((32 + 24 + 102 + 32) * kMiB));
    memory.free(large, 100 * kMiB + 5);
    memory.free(c, 12 * kMiB);
    EXPECT_EQ(take(90 * kMiB, 2), large);
    EXPECT_EQ(take(12 * kMiB, 1), c);  // the first of two that fit equally well
    EXPECT_EQ(take(12 * kMiB, 2), static_cast<char*>(large) + 90 * kMiB);
    memory.free(a, 12 * kMiB);
    memory.free(b, 12 * kMiB);
    EXPECT_EQ(take(32 * kMiB, 0), a);  // merged
    EXPECT_EQ(memory.wire_pieces(2).size(), 1u);
    EXPECT_EQ(memory.wire_pieces(3).size(), 0u);
  });
}

TEST(PiecePool, WhatIsNotThereIsOutOfMemory) {
  SHEAF_NEEDS_GPU();
  with_pool(40 * kMiB, [](kernels::cuda::DeviceAllocator& memory, Pieces& source) {
    memory.allocate(20 * kMiB, MemoryKind::wire);
    memory.allocate(10 * kMiB, MemoryKind::wire);
    memory.allocate(6 * kMiB, MemoryKind::wire);  // 32 MiB are no longer available, but 6 are
    EXPECT_EQ(source.sizes, (std::vector<size_t>{32 * kMiB, 6 * kMiB}));
    EXPECT_THROW(memory.allocate(3 * kMiB, MemoryKind::wire), OutOfMemory);
    memory.allocate(3 * kMiB);
  });
  if constexpr (kernels::kHasCuda) {  // a source that yields nothing does not count
    const auto memory = kernels::cuda::make_device_allocator(0);
    EXPECT_THROW(memory->set_wire(std::make_shared<Pieces>(kMiB)), OutOfMemory);
    memory->free(memory->allocate(kMiB, MemoryKind::wire), kMiB);
    EXPECT_TRUE(memory->wire_pieces().empty());
  }
}

TEST(PiecePool, AGraphKeepsItsBlocksThere) {
  SHEAF_NEEDS_GPU();
  with_pool(100 * kMiB, [](kernels::cuda::DeviceAllocator& memory, Pieces&) {
    memory.begin_capture();
    void* const a = memory.allocate(kMiB, MemoryKind::wire);
    memory.free(a, kMiB);
    EXPECT_EQ(memory.allocate(kMiB, MemoryKind::landing), a);  // again, within the capture
    memory.free(a, kMiB);
    void* const normal = memory.allocate(kMiB);
    EXPECT_EQ(piece_of(memory, normal, kMiB), SIZE_MAX);
    memory.free(normal, kMiB);
    std::shared_ptr<void> graph = memory.end_capture();
    EXPECT_EQ(memory.stats().live, static_cast<int64_t>(kMiB));  // its peak
    void* const b = memory.allocate(kMiB, MemoryKind::wire);
    EXPECT_NE(b, a);
    memory.free(b, kMiB);
    graph = nullptr;
    EXPECT_EQ(memory.stats().live, 0);
    void* const whole = memory.allocate(32 * kMiB, MemoryKind::wire);
    EXPECT_EQ(piece_of(memory, whole, 32 * kMiB), 0u);  // all of it is free again
    memory.free(whole, 32 * kMiB);
  });
}

// In place of the range, where the driver cannot map memory.
TEST(PiecePool, HoldsAllBlocksWhereMemoryCannotBeMapped) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    const auto source = std::make_shared<Pieces>(100 * kMiB);
    const auto memory = kernels::cuda::make_device_allocator(0, /*can_map=*/false);
    void* const a = memory->allocate(20 * kMiB);
    void* const b = memory->allocate(50 * kMiB + 1);
    EXPECT_EQ(memory->stats().reserved, static_cast<int64_t>((20 + 52) * kMiB));
    memory->set_wire(source);
    void* const wire = memory->allocate(kMiB, MemoryKind::wire);
    EXPECT_EQ(piece_of(*memory, wire, kMiB), 0u);
    for (void* block : {a, b}) {
      EXPECT_EQ(piece_of(*memory, block, kMiB), SIZE_MAX) << "not on the wire";
      EXPECT_TRUE(memory->holds(block));
    }
    EXPECT_FALSE(memory->holds(source.get()));
    memory->free(b, 50 * kMiB + 1);
    memory->free(wire, kMiB);

    memory->begin_capture();
    void* const c = memory->allocate(30 * kMiB);
    EXPECT_EQ(c, b) << "taken from the larger piece";
    memory->free(c, 30 * kMiB);
    std::shared_ptr<void> graph = memory->end_capture();
    void* const d = memory->allocate(20 * kMiB);
    EXPECT_EQ(d, static_cast<char*>(b) + 30 * kMiB) << "the rest of it belongs to the graph";
    graph = nullptr;
    memory->free(d, 20 * kMiB);
    EXPECT_EQ(memory->allocate(52 * kMiB), b) << "merged";
    memory->free(b, 52 * kMiB);
    memory->free(a, 20 * kMiB);
    EXPECT_EQ(memory->stats().live, 0);
    EXPECT_EQ(memory->stats().reserved, static_cast<int64_t>((20 + 52 + 32) * kMiB));
    EXPECT_THROW(memory->allocate(size_t{1} << 50), OutOfMemory);
  }
}

// Only the emulated driver can be told to refuse.
TEST(PiecePool, IsTheFallbackOfADriverThatRefuses) {
  SHEAF_NEEDS_GPU();
  if (!kernels::emulated_cuda()) GTEST_SKIP() << "a driver that maps memory";
  if constexpr (kernels::kHasCuda) {
    setenv("SHEAF_EMULATED_RANGES", "0", 1);
    const auto memory = kernels::cuda::make_device_allocator(0);
    ::testing::internal::CaptureStderr();
    void* const block = memory->allocate(kMiB);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                ::testing::HasSubstr("cuda:0 cannot map memory into one range ([reserve] not supported (emulated GPU)): it is allocated in pieces"));
    unsetenv("SHEAF_EMULATED_RANGES");
    EXPECT_EQ(memory->stats().reserved, static_cast<int64_t>(32 * kMiB));
    EXPECT_EQ(memory->allocate(kMiB), static_cast<char*>(block) + kMiB);
    memory->free(static_cast<char*>(block) + kMiB, kMiB);
    memory->free(block, kMiB);
  }
}

}  // namespace
}  // namespace sheaf
