#include "sheaf/core/allocator.h"

#include <cstring>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sheaf/core/arena.h"
#include "sheaf/core/error.h"

namespace sheaf {
namespace {

/// A memory range shared by the ranks of one host.
struct Shared {
  explicit Shared(size_t bytes) : bytes(bytes), file(memfd_create("allocator_test", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0);
    base = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
  }
  ~Shared() {
    munmap(base, bytes);
    close(file);
  }
  SharedRange range() const { return {base, bytes, {}}; }
  bool holds(const void* p) const { return p >= base && p < base + bytes; }
  int64_t resident() const {
    struct stat status;
    fstat(file, &status);
    return status.st_blocks * 512;
  }

  const size_t bytes;
  const int file;
  char* base;
};

constexpr size_t kMiB = size_t{1} << 20;

TEST(Allocator, WireBlocksLieInTheSharedRange) {
  const Shared shared(64 * kMiB);
  const auto memory = make_cpu_allocator();
  void* before = memory->allocate(100, MemoryKind::wire);  // nothing of that kind exists yet
  memory->add_wire(shared.range());
  void* wire = memory->allocate(100, MemoryKind::wire);
  void* normal = memory->allocate(100);
  EXPECT_FALSE(shared.holds(before));
  EXPECT_TRUE(shared.holds(wire));
  EXPECT_FALSE(shared.holds(normal));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(wire) % 128, 0u);
  memory->free(before, 100);
  memory->free(normal, 100);
  EXPECT_EQ(memory->allocate(50, MemoryKind::wire), static_cast<char*>(wire) + 128);
  EXPECT_TRUE(shared.holds(memory->allocate(50, MemoryKind::host_wire)));
  void* landing = memory->allocate(50, MemoryKind::landing);
  EXPECT_FALSE(shared.holds(landing));
  memory->free(landing, 50);
}

TEST(Allocator, CountsBothKindsTogether) {
  const Shared shared(64 * kMiB);
  const auto memory = make_cpu_allocator();
  memory->add_wire(shared.range());
  void* a = memory->allocate(1000, MemoryKind::wire);
  void* b = memory->allocate(500);
  EXPECT_EQ(memory->stats().live, 1500);
  memory->free(a, 1000);
  void* c = memory->allocate(200, MemoryKind::wire);
  EXPECT_EQ(memory->stats().live, 700);
  EXPECT_EQ(memory->stats().peak, 1500);
  EXPECT_EQ(memory->stats().allocations, 3);
  memory->free(b, 500);
  memory->free(c, 200);
  EXPECT_EQ(memory->stats().live, 0);
}

TEST(Allocator, AFullRangeFallsBackToNormalMemory) {
  const Shared shared(kMiB);
  const auto memory = make_cpu_allocator();
  memory->add_wire(shared.range());
  void* first = memory->allocate(kMiB / 2, MemoryKind::wire);
  void* second = memory->allocate(kMiB, MemoryKind::wire);
  EXPECT_TRUE(shared.holds(first));
  EXPECT_FALSE(shared.holds(second));
  memory->free(second, kMiB);
  memory->free(first, kMiB / 2);
  void* whole = memory->allocate(kMiB, MemoryKind::wire);
  EXPECT_TRUE(shared.holds(whole));
  memory->free(whole, kMiB);
}

TEST(Allocator, GivesPagesOfSharedMemoryBack) {
  const Shared shared(256 * kMiB);
  const auto memory = make_cpu_allocator();
  memory->add_wire(shared.range());
  void* once = memory->allocate(64 * kMiB, MemoryKind::wire);
  void* small = memory->allocate(kMiB, MemoryKind::wire);
  std::memset(once, 1, 64 * kMiB);
  std::memset(small, 1, kMiB);
  memory->free(once, 64 * kMiB);
  EXPECT_GE(shared.resident(), static_cast<int64_t>(65 * kMiB));
  // The free block is too small for this allocation. Of its pages, a sixteenth of the peak and 8 MiB may stay, and do.
  void* large = memory->allocate(100 * kMiB, MemoryKind::wire);
  EXPECT_NEAR(static_cast<double>(shared.resident()) / kMiB, 1 + 101.0 / 16 + 8, 2.1);
  EXPECT_EQ(static_cast<char*>(small)[12345], 1);
  std::memset(large, 1, 100 * kMiB);
  EXPECT_LE(static_cast<double>(shared.resident()) / kMiB, 101 + 101.0 / 16 + 8);
  memory->free(large, 100 * kMiB);
  memory->free(small, kMiB);
}

// Pages that every step would return and fault in again are kept, within an eighth.
TEST(Arena, KeepsPagesThatAreNeededAgain) {
  Arena arena;
  void* const stays = arena.allocate(8 * kMiB);
  void* block = arena.allocate(24 * kMiB);
  void* const kept = arena.allocate(172 * kMiB);  // in between, so that what follows is a hole
  std::vector<double> resident;
  for (int step = 0; step < 60; ++step) {
    arena.free(block, 24 * kMiB);
    void* const larger = arena.allocate(25 * kMiB);  // has no room in the hole
    resident.push_back(static_cast<double>(arena.resident()) / kMiB);
    arena.free(larger, 25 * kMiB);
    block = arena.allocate(24 * kMiB);
  }
  EXPECT_LE(resident.front(), 205 + 205.0 / 16 + 8);
  EXPECT_EQ(resident.back(), 229);
  EXPECT_EQ(resident[40], 229);
  for (const auto& [p, size] : {std::pair{stays, 8 * kMiB}, {block, 24 * kMiB}, {kept, 172 * kMiB}}) arena.free(p, size);
}

#if !defined(SHEAF_ASAN) && !defined(SHEAF_TSAN)
// Batch systems bound the address space (ulimit -v).
TEST(Allocator, TakesTheAddressSpaceThatThereIs) {
  const pid_t child = fork();
  if (child == 0) {
    const auto under = [](size_t bytes, auto&& f) {
      const rlimit limit{bytes, bytes};
      if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
      f();
    };
    under(3000 * kMiB, [] {
      const auto one = make_cpu_allocator(), two = make_cpu_allocator();  // as two ranks in one process
      for (const auto& memory : {one, two}) std::memset(memory->allocate(100 * kMiB), 1, 100 * kMiB);
      try {
        one->allocate(4000 * kMiB);
        _exit(3);
      } catch (const OutOfMemory&) {
      }
    });
    under(60 * kMiB, [] {
      try {
        make_cpu_allocator()->allocate(1);
        _exit(4);
      } catch (const OutOfMemory& e) {
        if (std::string(e.what()).find("ulimit -v") == std::string::npos) _exit(5);
      }
    });
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}
#endif

}  // namespace
}  // namespace sheaf
