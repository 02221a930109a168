// SmallVector: a vector that keeps its first elements inside itself, for lists that an op call makes and drops.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>

namespace sheaf {

/// The parts of std::vector that ops need; up to N elements without an allocation.
template <class T, size_t N>
class SmallVector {
 public:
  SmallVector() = default;
  explicit SmallVector(size_t size) {
    reserve(size);
    for (size_t i = 0; i < size; ++i) emplace_back();
  }
  SmallVector(std::initializer_list<T> values) {
    reserve(values.size());
    for (const T& v : values) emplace_back(v);
  }
  SmallVector(SmallVector&& other) noexcept { steal(other); }
  SmallVector& operator=(SmallVector&& other) noexcept {
    if (this != &other) {
      drop();
      steal(other);
    }
    return *this;
  }
  SmallVector(const SmallVector&) = delete;
  SmallVector& operator=(const SmallVector&) = delete;
  ~SmallVector() { drop(); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T& back() { return data_[size_ - 1]; }

  template <class... Args>
  T& emplace_back(Args&&... args) {
    if (size_ == capacity_) [[unlikely]] {
      // An argument may be an element: it is read before the old memory is freed.
      T value{std::forward<Args>(args)...};
      grow(2 * capacity_);
      return *std::construct_at(data_ + size_++, std::move(value));
    }
    T* p = ::new (static_cast<void*>(data_ + size_)) T{std::forward<Args>(args)...};
    ++size_;
    return *p;
  }
  void push_back(const T& value) { emplace_back(value); }
  void push_back(T&& value) { emplace_back(std::move(value)); }
  void clear() {
    std::destroy(begin(), end());
    size_ = 0;
  }
  void reserve(size_t capacity) {
    if (capacity > capacity_) grow(capacity);
  }

 private:
  T* own() { return reinterpret_cast<T*>(memory_); }
  void grow(size_t capacity) {
    T* larger = std::allocator<T>().allocate(capacity);
    std::uninitialized_move(begin(), end(), larger);
    release();
    data_ = larger;
    capacity_ = capacity;
  }
  void release() {
    std::destroy(begin(), end());
    if (data_ != own()) std::allocator<T>().deallocate(data_, capacity_);
  }
  void drop() {
    release();
    data_ = own();
    size_ = 0;
    capacity_ = N;
  }
  void steal(SmallVector& other) {  // into an empty one
    if (other.data_ == other.own()) {
      std::uninitialized_move(other.begin(), other.end(), data_);
      size_ = other.size_;
      other.clear();
    } else {
      data_ = std::exchange(other.data_, other.own());
      size_ = std::exchange(other.size_, 0);
      capacity_ = std::exchange(other.capacity_, N);
    }
  }

  alignas(T) std::byte memory_[N * sizeof(T)];
  T* data_ = own();
  size_t size_ = 0, capacity_ = N;
};

}  // namespace sheaf
