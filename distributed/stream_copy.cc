#include "sheaf/distributed/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace sheaf {
namespace {

constexpr size_t kVector = sizeof(__m256i);

}  // namespace

void stream_copy(void* to, const void* from, size_t bytes) {
  auto* y = static_cast<char*>(to);
  auto* x = static_cast<const char*>(from);
  const size_t head = std::min(bytes, (kVector - reinterpret_cast<uintptr_t>(y) % kVector) % kVector);
  std::memcpy(y, x, head);
  y += head, x += head, bytes -= head;
  for (; bytes >= 4 * kVector; y += 4 * kVector, x += 4 * kVector, bytes -= 4 * kVector) {
    const auto* in = reinterpret_cast<const __m256i*>(x);
    auto* out = reinterpret_cast<__m256i*>(y);
    const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
    _mm256_stream_si256(out, a), _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c), _mm256_stream_si256(out + 3, d);
  }
  _mm_sfence();  // no other store orders these
  std::memcpy(y, x, bytes);
}

}  // namespace sheaf
