// Recycled: memory for small objects that are created and dropped at every op, such as a tensor's handle.
#pragma once

#include <cstddef>
#include <new>

namespace sheaf {

/// The freed blocks of one size on this thread. malloc caches seven blocks per size; a recording holds and drops thousands of handles
/// at once.
template <size_t kBytes>
class FreeList {
 public:
  static void* take() {
#if !defined(SHEAF_ASAN) && !defined(SHEAF_TSAN)  // they watch malloc's blocks
    if (Block* block = list_.first) {
      list_.first = block->next;
      --list_.blocks;
      return block;
    }
#endif
    return ::operator new(kBytes);
  }

  /// For any thread. Blocks allocated on one thread and dropped on another must not pile up: beyond kKept they are freed.
  static void give(void* memory) {
#if !defined(SHEAF_ASAN) && !defined(SHEAF_TSAN)
    if (list_.blocks < list_.room) {
      auto* block = static_cast<Block*>(memory);
      block->next = list_.first;
      list_.first = block;
      ++list_.blocks;
      return;
    }
    if (!list_.met) {
      list_.met = true;
      list_.room = kKept;
      static thread_local const AtThreadsEnd end;
    }
#endif
    ::operator delete(memory, kBytes);
  }

 private:
  static constexpr int kKept = 4096;
  struct Block {
    Block* next;
  };
  static_assert(kBytes >= sizeof(Block));
  struct List {
    Block* first = nullptr;
    int blocks = 0, room = 0;
    bool met = false;
  };
  struct AtThreadsEnd {  // objects that are dropped even later are not kept
    ~AtThreadsEnd() {
      list_.room = 0;
      while (list_.first) ::operator delete(take(), kBytes);
    }
  };
  static inline constinit thread_local List list_{};  // no constructor: reaching it costs nothing
};

/// The allocator for std::allocate_shared.
template <class T>
struct Recycled {
  using value_type = T;
  Recycled() = default;
  template <class U>
  Recycled(const Recycled<U>&) {}
  T* allocate(size_t) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    return static_cast<T*>(FreeList<sizeof(T)>::take());
  }
  void deallocate(T* p, size_t) { FreeList<sizeof(T)>::give(p); }
  template <class U>
  bool operator==(const Recycled<U>&) const { return true; }
};

}  // namespace sheaf
