#include "sheaf/core/tensor.h"

#include <cstring>
#include <ostream>

#include "sheaf/core/rank_context.h"
#include "sheaf/core/recycled.h"
#include "sheaf/core/transfer.h"

namespace sheaf {
namespace {

// Calls f(pointer to element) in row-major order of the view.
template <class F>
void for_each_element(const View& v, F&& f) {
  const int64_t n = v.numel();
  if (n == 0) return;
  const auto size = static_cast<int64_t>(size_of(v.dtype));
  Shape index = Shape::filled(v.rank(), 0);
  char* p = static_cast<char*>(v.data);
  for (int64_t i = 0; i < n; ++i) {
    f(p);
    for (int d = v.rank() - 1; d >= 0; --d) {
      p += v.strides[d] * size;
      if (++index[d] < v.shape[d]) break;
      p -= v.strides[d] * v.shape[d] * size;
      index[d] = 0;
    }
  }
}

template <class To, class From>
To convert(From from) {
  if constexpr (std::is_same_v<From, bf16> || std::is_same_v<From, f16>) return static_cast<To>(static_cast<float>(from));
  else if constexpr (std::is_same_v<To, bf16> || std::is_same_v<To, f16>) return To(static_cast<float>(from));
  else return static_cast<To>(from);
}

// The elements where the host can read them; `keep` holds a copy of those of a GPU.
View readable(const Tensor& t, const char* who, Tensor& keep) {
  if (t.device().is_meta()) fail<LifetimeError>("[", who, "] ", t.type(), " is on the meta device: it has no elements");
  keep = t.to(Device::cpu());
  return keep.view();
}

}  // namespace

void Tensor::throw_undefined() { fail<LifetimeError>("use of an undefined tensor: it was never set, or was moved from"); }

Tensor Tensor::over(std::shared_ptr<Storage> storage, int64_t byte_offset, const Type& type, const Shape& local_shape,
                    const Shape& local_strides) {
  return Tensor(std::allocate_shared<Impl>(Recycled<Impl>(), type, std::move(storage), byte_offset, local_shape,
                                           local_strides));
}

Tensor Tensor::empty(const Type& type, Device device, MemoryKind where) {
  const Shape local = type.local_shape();
  if (!byte_size(size_of(type.dtype), type.shape))  // of the whole; a rank has a part
    fail<ShapeError>("[empty] ", type, ": sizes are not below 0, and bytes fit 63 bits");
  return over(Storage::allocate(device, local.numel() * static_cast<int64_t>(size_of(type.dtype)), where), 0, type,
              local, local.contiguous_strides());
}

Tensor Tensor::view_into(const Tensor& base, const Type& type, int64_t byte_offset) {
  const Shape local = type.local_shape();
  if (local.numel() == 0) byte_offset = 0;  // if the value is elsewhere, so is its base
  const int64_t end = base.byte_offset() + byte_offset + local.numel() * static_cast<int64_t>(size_of(type.dtype));
  if (byte_offset < 0 || end > base.storage()->bytes())
    fail<ShapeError>("[view] ", type, " at byte ", byte_offset, " does not fit into ", base.type());
  return over(base.storage(), base.byte_offset() + byte_offset, type, local, local.contiguous_strides());
}

Tensor Tensor::alias() const {
  return over(storage(), byte_offset(), type(), local_shape(), local_strides());
}

View Tensor::view() const {
  const Impl& i = impl();
  char* data = i.storage->data();
  return {data ? data + i.byte_offset : nullptr, i.type.dtype, i.local_shape, i.local_strides};
}

View Tensor::view_unsynced() const {
  const Impl& i = impl();
  char* data = i.storage->data_unsynced();
  return {data ? data + i.byte_offset : nullptr, i.type.dtype, i.local_shape, i.local_strides};
}

bool Tensor::is_contiguous() const { return view_unsynced().contiguous(); }

template <class T>
Tensor Tensor::from(const std::vector<T>& values, const Shape& shape) {
  return from_local(values, Type{dtype_of<T>, shape, {}});
}

template <class T>
Tensor Tensor::from_local(const std::vector<T>& local, const Type& type) {
  Tensor t = empty({dtype_of<T>, type.shape, type.layout});
  if (static_cast<int64_t>(local.size()) != t.local_shape().numel())
    fail<ShapeError>("[tensor] ", local.size(), " values for ", t.type(), ", of which ",
                     !type.layout.mesh() ? str("there are ", t.numel())
                                         : str("rank ", RankContext::current().rank, " has ", t.local_shape(), ": from_local() takes this ",
                                               "rank's part; of the whole, write redistribute(Tensor::from(values, shape), layout)"));
  if (type.dtype != dtype_of<T>) fail<DTypeError>("[tensor] values of ", dtype_of<T>, " for ", type);
  T* out = t.view().as<T>();
  for (size_t i = 0; i < local.size(); ++i) out[i] = local[i];
  return t;
}

Tensor Tensor::scalar(double value, DType dtype) {
  Tensor t = empty({dtype, {}, {}});
  visit_dtype("scalar", dtype, [&]<class T>() { *t.view().as<T>() = convert<T>(value); });
  return t;
}

template <class T>
T Tensor::item() const {
  if (numel() != 1) fail<ShapeError>("[item] ", type(), " has ", numel(), " elements, not one");
  const Layout& l = layout();
  // An axis of one rank is treated like any other: a program that reads it would fail on several ranks.
  for (int a = 0; a < l.num_axes(); ++a)
    if (!l[a].is_invariant())
      fail<PlacementError>("[item] ", type(), " is not one value of all ranks of mesh axis ", l.mesh()->name(a), ": write ",
                           "redistribute(x, \"", l.mesh()->name(a), "\", Placement::invariant()).item()");
  Tensor keep;
  const View v = readable(*this, "item", keep);
  return visit_dtype("item", dtype(), [&]<class E>() { return convert<T>(*v.as<E>()); });
}

template <class T>
std::vector<T> Tensor::to_vector() const {
  Tensor keep;
  const View v = readable(*this, "to_vector", keep);
  std::vector<T> out;
  out.reserve(v.numel());
  visit_dtype("to_vector", dtype(), [&]<class E>() {
    for_each_element(v, [&](char* p) { out.push_back(convert<T>(*reinterpret_cast<E*>(p))); });
  });
  return out;
}

Tensor Tensor::clone() const {
  if (device().is_cuda() && !view().contiguous()) return to(Device::cpu()).clone().to(device());
  const Shape& local = local_shape();
  Tensor t = over(Storage::allocate(device(), local_bytes()), 0, type(), local, local.contiguous_strides());
  if (device().is_meta()) return t;
  const View from = view();
  const size_t size = size_of(dtype());
  char* to = static_cast<char*>(t.view().data);
  if (from.contiguous()) {
    transfer(device(), to, device(), from.data, static_cast<size_t>(local_bytes()));
  } else {
    for_each_element(from, [&](char* p) { std::memcpy(to, p, size); to += size; });
  }
  return t;
}

Tensor Tensor::to(Device target) const {
  if (device() == target) return *this;
  if (device().is_meta() || target.is_meta())
    fail<ConfigError>("[to] ", type(), " cannot go from ", device().to_string(), " to ", target.to_string());
  // One copy of the bytes between first and last element, strides kept.
  const View from = view();
  const int64_t bytes = from.extent_bytes();
  Tensor out = over(Storage::allocate(target, bytes), 0, type(), local_shape(), local_strides());
  transfer(target, out.view().data, device(), from.data, static_cast<size_t>(bytes));
  return out;
}

std::string Tensor::to_string() const {
  if (!defined()) return "undefined";
  std::string out = str(type(), " ", device().to_string());
  if (!(local_shape() == shape())) out += " local " + local_shape().to_string();
  if (device().is_meta()) return out;
  Tensor keep;
  View v = readable(*this, "to_string", keep);
  const int64_t row = v.shape.rank() ? std::max<int64_t>(v.shape.back(), 1) : 1, all = v.numel();
  // Only a corner with the first elements is read: tensors may be large.
  constexpr int64_t kShown = 64;
  for (int64_t d = v.shape.rank() - 1, inner = 1; d >= 0; --d) {
    const int64_t size = v.shape[d];
    v.shape[d] = std::min(size, (kShown + inner - 1) / inner);
    inner *= std::max<int64_t>(size, 1);
  }
  int64_t i = 0;
  visit_dtype("to_string", dtype(), [&]<class E>() {
    for_each_element(v, [&](char* p) {
      if (i < kShown) out += (i % row == 0 ? std::string("\n  ") : std::string(" ")) + str(convert<double>(*reinterpret_cast<E*>(p)));
      ++i;
    });
  });
  if (all > kShown) out += " ...";
  return out;
}

std::ostream& operator<<(std::ostream& out, const Tensor& t) { return out << t.to_string(); }

bool equal(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || !(a.shape() == b.shape()) || !(a.local_shape() == b.local_shape())) return false;
  if (a.dtype() == kI64) return a.to_vector<int64_t>() == b.to_vector<int64_t>();  // not all of them are doubles
  return a.to_vector<double>() == b.to_vector<double>();
}

bool identical(const Tensor& a, const Tensor& b) {
  if (!(a.type() == b.type()) || !(a.local_shape() == b.local_shape())) return false;
  const Tensor x = a.to(Device::cpu()).clone(), y = b.to(Device::cpu()).clone();  // dense
  return std::memcmp(x.view().data, y.view().data, x.local_bytes()) == 0;
}

#define SHEAF_INSTANTIATE(T)                                                  \
  template Tensor Tensor::from(const std::vector<T>&, const Shape&);          \
  template Tensor Tensor::from_local(const std::vector<T>&, const Type&);     \
  template T Tensor::item() const;                                            \
  template std::vector<T> Tensor::to_vector() const;
SHEAF_INSTANTIATE(double)
SHEAF_INSTANTIATE(float)
SHEAF_INSTANTIATE(bf16)
SHEAF_INSTANTIATE(f16)
SHEAF_INSTANTIATE(int64_t)
SHEAF_INSTANTIATE(int32_t)
SHEAF_INSTANTIATE(uint32_t)
SHEAF_INSTANTIATE(uint16_t)
SHEAF_INSTANTIATE(uint8_t)
SHEAF_INSTANTIATE(int8_t)
SHEAF_INSTANTIATE(bool)
#undef SHEAF_INSTANTIATE

}  // namespace sheaf
