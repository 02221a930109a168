// Tensor: a cheap handle on a value. It has a type (dtype, global shape, layout), and the local part of its elements as
// a strided view of a storage. Handles are immutable to users; all mathematics is in autograd/ops.h.
#pragma once

#include <atomic>
#include <iosfwd>
#include <memory>
#include <utility>
#include <vector>

#include "sheaf/core/placement.h"
#include "sheaf/core/small_vector.h"
#include "sheaf/core/storage.h"
#include "sheaf/core/view.h"

namespace sheaf {

class Tensor {
 public:
  /// An undefined tensor: an absent optional argument.
  Tensor() = default;

  // --- construction without recording (constants and tests) ---
  /// Uninitialised local memory for a value of this type.
  static Tensor empty(const Type& type, Device device = Device::cpu(), MemoryKind where = MemoryKind::normal);
  /// A copy of host values in row-major order, without layout. T: double, float, int64_t, int32_t, uint8_t, ... ShapeError for another
  /// number of them than `shape` has.
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape);
  /// This rank's local rows of a value with a layout, from host values of the local shape (ShapeError) and of T's dtype (DTypeError).
  template <class T>
  static Tensor from_local(const std::vector<T>& local, const Type& type);
  static Tensor scalar(double value, DType dtype = kF32);
  /// A view of `base`'s storage, `byte_offset` bytes after its first element, dense in row-major order.
  static Tensor view_into(const Tensor& base, const Type& type, int64_t byte_offset);
  /// A tensor over given storage; `view.data` is ignored in favour of `byte_offset`.
  static Tensor over(std::shared_ptr<Storage> storage, int64_t byte_offset, const Type& type, const Shape& local_shape,
                     const Shape& local_strides);

  bool defined() const { return impl_ != nullptr; }
  explicit operator bool() const { return defined(); }

  const Type& type() const { return impl().type; }
  DType dtype() const { return type().dtype; }
  const Shape& shape() const { return type().shape; }  ///< global
  int64_t size(int dim) const { return shape().dim(dim); }  ///< negative: from the end; ShapeError without such a dimension
  int rank() const { return shape().rank(); }
  int64_t numel() const { return shape().numel(); }
  const Layout& layout() const { return type().layout; }
  Device device() const { return impl().storage->device(); }

  const Shape& local_shape() const { return impl().local_shape; }
  const Shape& local_strides() const { return impl().local_strides; }
  int64_t local_bytes() const { return local_shape().numel() * static_cast<int64_t>(size_of(dtype())); }
  int64_t byte_offset() const { return impl().byte_offset; }
  const std::shared_ptr<Storage>& storage() const { return impl().storage; }

  /// The local elements for a kernel; data is null on meta. Waits for a lane that still fills them.
  View view() const;
  /// The same without waiting: for a lane that will write there.
  View view_unsynced() const;
  bool is_contiguous() const;

  // --- reading; never communicates ---
  /// The one element as T. It must be one value of all ranks: without a layout, or Invariant on every mesh axis,
  /// including axes of one rank.
  template <class T = float>
  T item() const;
  /// The local elements in row-major order, converted to T.
  template <class T = float>
  std::vector<T> to_vector() const;
  /// A fresh dense copy of the local elements, a constant that belongs to no recording.
  Tensor clone() const;
  /// The same on another device; itself if it is there already. From a GPU, the host waits for everything enqueued there.
  Tensor to(Device device) const;
  std::string to_string() const;  ///< "f32[2,3] cpu" and rows

  // --- for the tape ---
  struct Impl {
    Type type;
    std::shared_ptr<Storage> storage;
    int64_t byte_offset;
    Shape local_shape, local_strides;
    uint64_t recording = 0;  ///< serial of the recording that made this value; 0 for none
    int32_t value = -1;      ///< its value id there
    bool is_parameter = false;  ///< the value of a trained parameter, in that recording: in others it would be a constant
  };
  const Impl& impl() const {
    if (!impl_) [[unlikely]] throw_undefined();
    return *impl_;
  }
  Impl& mutable_impl() { impl(); return *impl_; }
  const Impl* id() const { return impl_.get(); }
  /// The number of holders of this value: copies of this handle, itself included, plus owners of its memory, such as views.
  int64_t holders() const { return impl_.use_count() + impl().storage.use_count(); }
  /// Another handle on the same memory and type, not yet known to a recording.
  Tensor alias() const;

 private:
  explicit Tensor(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  [[noreturn]] static void throw_undefined();
  std::shared_ptr<Impl> impl_;
};

/// The results of ops.
using Tensors = SmallVector<Tensor, 4>;

/// Same dtype, shape and every local element equal (NaN differs from NaN).
bool equal(const Tensor& a, const Tensor& b);
/// Same type and the same bits in every local element.
bool identical(const Tensor& a, const Tensor& b);
std::ostream& operator<<(std::ostream& out, const Tensor& t);

}  // namespace sheaf
