// Every collective with every dtype and awkward counts, checked element by element against its formula. Used for all kinds of
// communicators; the digest of all outputs shows that they agree bitwise.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "sheaf/core/communicator.h"
#include "sheaf/distributed/world.h"

namespace sheaf::testing {

inline uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 33);
}

/// Element i of rank r's input: floats whose sums round differently in every order. Without a division, as it is called a hundred million
/// times.
template <class T>
T sample(int rank, int64_t i, int salt) {
  const uint64_t h = scramble(static_cast<uint64_t>(i) * 1315423911u + static_cast<uint64_t>(rank) * 2654435761u +
                              static_cast<uint64_t>(salt));
  if constexpr (std::is_same_v<T, bool>) return h < (uint64_t{1} << 62);
  else if constexpr (std::is_integral_v<T>) return static_cast<T>(h);
  else return static_cast<T>(static_cast<float>(static_cast<int>(h & 0x3ffff) - 0x20000) * (h >> 62 ? 1.0e-2f : 1.0e-5f));
}

/// The sum of term(0), ..., term(n - 1).
template <class T, class Term>
T reduce_reference(int n, Reduction reduction, Term&& term) {
  if constexpr (std::is_same_v<T, bool>) {
    bool any = false, all = true;
    for (int r = 0; r < n; ++r) any |= term(r), all &= term(r);
    return reduction == Reduction::min ? all : any;
  } else if constexpr (std::is_integral_v<T>) {
    T y = term(0);
    for (int r = 1; r < n; ++r)
      y = reduction == Reduction::sum   ? static_cast<T>(static_cast<uint64_t>(y) + static_cast<uint64_t>(term(r)))
          : reduction == Reduction::max ? std::max(y, term(r))
                                        : std::min(y, term(r));
    return y;
  } else {
    using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
    A y = static_cast<A>(term(0));
    for (int r = 1; r < n; ++r) {
      const A x = static_cast<A>(term(r));
      y = reduction == Reduction::sum ? y + x : reduction == Reduction::max ? std::max(y, x) : std::min(y, x);
    }
    return static_cast<T>(y);
  }
}

/// The memory that buffers are in; mixed: some in one kind, some in the other, differently on each rank.
enum class BufferMemory { normal, wire, mixed };

/// The expected order of sums: in rank order, bit by bit; or in the transport's own order, which then has no reductions of u16 (NCCL).
enum class SumOrder { of_ranks, any };

template <class T>
class Buffer {  // since std::vector<bool> is no array
 public:
  Buffer(int64_t n, MemoryKind where)
      : size(n), bytes_(static_cast<size_t>(n + 1) * sizeof(T)), memory_(RankContext::current().cpu),
        data_(static_cast<T*>(memory_->allocate(bytes_, where))) {
    std::memset(static_cast<void*>(data_), 0, bytes_);
  }
  ~Buffer() { memory_->free(data_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const int64_t size;
  T* get() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  const size_t bytes_;
  const std::shared_ptr<Allocator> memory_;
  T* const data_;
};

class Battery {
 public:
  explicit Battery(Communicator& comm, BufferMemory memory = BufferMemory::normal, SumOrder order = SumOrder::of_ranks)
      : comm_(comm), me_(comm.rank()), n_(comm.size()), memory_(memory), order_(order) {}

  uint64_t digest() const { return digest_; }

  void run(int64_t large_bytes) {
    for (int d = 0; d < kNumDTypes; ++d)
      visit_dtype("battery", static_cast<DType>(d), [&]<class T>() {
        for (int64_t scale : {7, 600}) all_ops<T>(scale);
      });
    for (int64_t scale : {0, 1}) all_ops<float>(scale);
    large_ops<float>(large_bytes / 4);
    large_ops<bf16>(large_bytes / 2 + 1);
    comm_.barrier("battery").sync();
  }

 private:
  /// Uneven, with an empty rank from three ranks on; with scale 0 everything is empty, with scale 1 almost everything.
  std::vector<int64_t> uneven(int64_t scale) const {
    std::vector<int64_t> counts(n_);
    for (int r = 0; r < n_; ++r) counts[r] = r == 1 && n_ >= 3 ? 0 : scale + (scale ? (r * 5) % 3 : 0);
    return counts;
  }

  MemoryKind where() {
    if (memory_ != BufferMemory::mixed) return memory_ == BufferMemory::wire ? MemoryKind::wire : MemoryKind::normal;
    return scramble(static_cast<uint64_t>(++buffers_ * n_ + me_)) % 2 ? MemoryKind::wire : MemoryKind::normal;
  }

  template <class T>
  void absorb(Buffer<T>& y) {
    for (int64_t i = 0; i < y.size; ++i) {
      uint64_t bits = 0;
      std::memcpy(&bits, &y[i], sizeof(T));
      digest_ = scramble(digest_ * 31 + bits + 1);
    }
  }

  template <class T>
  static bool same(T a, T b) {
    using Bytes = std::array<std::byte, sizeof(T)>;
    return std::bit_cast<Bytes>(a) == std::bit_cast<Bytes>(b);
  }

  template <class T>
  void all_ops(int64_t scale) {
    const std::vector<int64_t> counts = uneven(scale);
    const std::vector<int64_t> equal(static_cast<size_t>(n_), scale);
    const bool reduces = order_ == SumOrder::of_ranks || !std::is_same_v<T, uint16_t>;
    for (const std::vector<int64_t>& c : {counts, equal}) {
      gather<T>(c);
      if (reduces) scatter<T>(c);
    }
    for (Reduction r : {Reduction::sum, Reduction::max, Reduction::min})
      if (reduces) reduce<T>(scale * n_ + (scale ? 1 : 0), r);
    exchange<T>(scale);
    broadcast<T>(scale);
  }

  /// Collectives that are executed piece by piece if they are large.
  template <class T>
  void large_ops(int64_t scale) {
    gather<T>(uneven(scale));
    scatter<T>(uneven(scale));
    reduce<T>(scale, Reduction::sum);
  }

  template <class T>
  void gather(const std::vector<int64_t>& counts) {
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const int64_t mine = std::accumulate(counts.begin(), counts.begin() + me_, int64_t{0});
    for (bool in_place : {false, true}) {
      Buffer<T> in(counts[me_], where()), out(total, where());
      T* from = in_place ? out.get() + mine : in.get();
      for (int64_t i = 0; i < counts[me_]; ++i) from[i] = sample<T>(me_, i, 1);
      comm_.all_gather(from, out.get(), counts, dtype_of<T>, "battery.gather").sync();
      int64_t at = 0, wrong = 0;
      for (int r = 0; r < n_; ++r)
        for (int64_t i = 0; i < counts[r]; ++i) wrong += !same(out[at++], sample<T>(r, i, 1));
      EXPECT_EQ(wrong, 0) << "all_gather " << name(dtype_of<T>) << " of " << total << (in_place ? " in place" : "");
      absorb(out);
    }
  }

  template <class T>
  T reduced(int64_t i, int salt, Reduction reduction) const {
    return reduce_reference<T>(n_, reduction, [&](int r) { return sample<T>(r, i, salt); });
  }

  template <class T>
  bool agrees(T got, int64_t i, int salt, Reduction reduction) const {
    const T expected = reduced<T>(i, salt, reduction);
    if constexpr (is_floating(dtype_of<T>)) {
      if (order_ == SumOrder::any && reduction == Reduction::sum) {
        // Every addition rounds once.
        constexpr double kEpsilon[] = {0x1p-52, 0x1p-23, 0x1p-7, 0x1p-10};  // f64, f32, bf16, f16
        double magnitude = 0;
        for (int r = 0; r < n_; ++r) magnitude += std::abs(real(sample<T>(r, i, salt)));
        return std::abs(real(got) - real(expected)) <= n_ * kEpsilon[static_cast<int>(dtype_of<T>)] * magnitude;
      }
    }
    return same(got, expected);
  }
  template <class T>
  static double real(T x) {
    if constexpr (std::is_same_v<T, double>) return x;
    else return static_cast<double>(static_cast<float>(x));
  }

  template <class T>
  void scatter(const std::vector<int64_t>& counts) {
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const int64_t mine = std::accumulate(counts.begin(), counts.begin() + me_, int64_t{0});
    for (bool in_place : {false, true}) {
      Buffer<T> in(total, where()), separate(counts[me_], where());
      for (int64_t i = 0; i < total; ++i) in[i] = sample<T>(me_, i, 2);
      T* out = in_place ? in.get() + mine : separate.get();
      comm_.reduce_scatter(in.get(), out, counts, dtype_of<T>, "battery.scatter").sync();
      int64_t wrong = 0;
      for (int64_t i = 0; i < counts[me_]; ++i) wrong += !agrees(out[i], mine + i, 2, Reduction::sum);
      EXPECT_EQ(wrong, 0) << "reduce_scatter " << name(dtype_of<T>) << " of " << total << (in_place ? " in place" : "");
      // A rank's own results differ between ranks: gather them, so that digests are comparable.
      Buffer<T> all(total, where());
      comm_.all_gather(out, all.get(), counts, dtype_of<T>, "battery.scatter").sync();
      absorb(all);
    }
  }

  template <class T>
  void reduce(int64_t count, Reduction reduction) {
    Buffer<T> data(count, where());
    for (int64_t i = 0; i < count; ++i) data[i] = sample<T>(me_, i, 3);
    comm_.all_reduce(data.get(), count, dtype_of<T>, reduction, "battery.reduce").sync();
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; ++i) wrong += !agrees(data[i], i, 3, reduction);
    EXPECT_EQ(wrong, 0) << "all_reduce " << name(dtype_of<T>) << " of " << count;
    absorb(data);
  }

  template <class T>
  void exchange(int64_t scale) {
    // Rank a sends scale + a - b elements to rank b (none if that is negative, or if b is the next rank).
    const auto count = [&](int a, int b) { return (a + 1) % n_ == b ? 0 : std::max<int64_t>(0, scale + a - b); };
    std::vector<int64_t> send(n_), recv(n_);
    for (int r = 0; r < n_; ++r) send[r] = count(me_, r), recv[r] = count(r, me_);
    Buffer<T> in(std::accumulate(send.begin(), send.end(), int64_t{0}), where());
    Buffer<T> out(std::accumulate(recv.begin(), recv.end(), int64_t{0}), where());
    for (int64_t r = 0, at = 0; r < n_; ++r)
      for (int64_t i = 0; i < send[r]; ++i) in[at++] = sample<T>(me_, i, 10 + static_cast<int>(r));
    comm_.all_to_all(in.get(), send, out.get(), recv, dtype_of<T>, "battery.exchange").sync();
    int64_t wrong = 0;
    for (int64_t r = 0, at = 0; r < n_; ++r)
      for (int64_t i = 0; i < recv[r]; ++i) wrong += !same(out[at++], sample<T>(static_cast<int>(r), i, 10 + me_));
    EXPECT_EQ(wrong, 0) << "all_to_all " << name(dtype_of<T>);
  }

  template <class T>
  void broadcast(int64_t count) {
    for (int root = 0; root < n_; ++root) {
      Buffer<T> data(count, where());
      for (int64_t i = 0; i < count; ++i) data[i] = sample<T>(me_, i, 4);
      comm_.broadcast(data.get(), count * static_cast<int64_t>(sizeof(T)), root, "battery.broadcast").sync();
      int64_t wrong = 0;
      for (int64_t i = 0; i < count; ++i) wrong += !same(data[i], sample<T>(root, i, 4));
      EXPECT_EQ(wrong, 0) << "broadcast " << name(dtype_of<T>) << " from " << root;
      absorb(data);
    }
  }

  Communicator& comm_;
  const int me_, n_;
  const BufferMemory memory_;
  const SumOrder order_;
  int64_t buffers_ = 0;
  uint64_t digest_ = 1;
};

}  // namespace sheaf::testing
