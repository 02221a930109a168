#include "sheaf/distributed/reduce.h"

#include <algorithm>
#include <type_traits>

namespace sheaf {
namespace {

// Sums are taken block by block in a small array, so that the inner loops are plain and `out` may alias a source.
constexpr int64_t kBlock = 1024;

template <class T>
struct Accumulator {
  using type = T;
};
template <> struct Accumulator<bf16> { using type = float; };
template <> struct Accumulator<f16> { using type = float; };
// Signed overflow is undefined, unsigned wraps to the same bits.
template <> struct Accumulator<int64_t> { using type = uint64_t; };
template <> struct Accumulator<int32_t> { using type = uint32_t; };
template <> struct Accumulator<int8_t> { using type = uint8_t; };

template <Reduction R, class A>
A combine(A a, A b) {
  if constexpr (R == Reduction::sum) return static_cast<A>(a + b);
  if constexpr (R == Reduction::max) return (a > b || a != a) ? a : b;
  if constexpr (R == Reduction::min) return (a < b || a != a) ? a : b;
}

template <class T, class A, Reduction R>
void reduce_as(T* out, std::span<const void* const> sources, int64_t count) {
  A sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(first[i]);
    for (const void* source : sources.subspan(1)) {
      const T* x = static_cast<const T*>(source) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = combine<R>(sum[i], static_cast<A>(x[i]));
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
}

}  // namespace

void reduce_in_order(void* out, std::span<const void* const> sources, int64_t count, DType dtype, Reduction reduction) {
  if (dtype == DType::boolean) {  // as bytes of 0 and 1: or is max, and is min
    dtype = DType::u8;
    if (reduction == Reduction::sum) reduction = Reduction::max;
  }
  visit_dtype("reduce", dtype, [&]<class T>() {
    T* y = static_cast<T*>(out);
    using Sum = typename Accumulator<T>::type;
    // Order, unlike a sum, depends on the sign.
    using Order = std::conditional_t<std::is_integral_v<T>, T, Sum>;
    switch (reduction) {
      case Reduction::sum: return reduce_as<T, Sum, Reduction::sum>(y, sources, count);
      case Reduction::max: return reduce_as<T, Order, Reduction::max>(y, sources, count);
      case Reduction::min: return reduce_as<T, Order, Reduction::min>(y, sources, count);
    }
  });
}

}  // namespace sheaf
