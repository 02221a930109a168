#include "sheaf/kernels/random.h"

#include "sheaf/kernels/cpu/blocks.h"

namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE {
namespace {

using namespace sheaf::kernels::cpu;

/// Words of this size in a block of Philox's 128 bits, and the buffer size that words() needs.
template <class Word>
constexpr int64_t kWords = 16 / sizeof(Word);
template <class Word>
constexpr int64_t kRoom = kBlock + kWords<Word>;

/// Word i of a block; the type of the last argument gives its size.
uint32_t word_of(const philox::Block& block, int i, uint32_t) { return block.word[i]; }
uint64_t word_of(const philox::Block& block, int i, uint64_t) {
  return uint64_t{block.word[2 * i + 1]} << 32 | block.word[2 * i];
}

/// The bits of elements [index, index + n), n <= kBlock, somewhere in `room`: whole Philox blocks,
/// in two loops that vectorise.
template <class Word>
const Word* words(Key key, uint64_t index, int64_t n, Word* room) {
  constexpr int64_t kEach = kWords<Word>;
  Word w[kEach][kBlock / kEach + 1];
  const uint64_t first = index / kEach;
  const int64_t skip = static_cast<int64_t>(index % kEach), blocks = (skip + n + kEach - 1) / kEach;
  for (int64_t b = 0; b < blocks; ++b) {
    const philox::Block block = philox::block(key, first + static_cast<uint64_t>(b));
    for (int i = 0; i < kEach; ++i) w[i][b] = word_of(block, i, Word());
  }
  for (int64_t b = 0; b < blocks; ++b)
    for (int i = 0; i < kEach; ++i) room[b * kEach + i] = w[i][b];
  return room + skip;
}

/// Calls f(global flat index, n) on pieces of [begin, end), n <= kBlock, that are contiguous globally, in order.
template <class F>
void for_global_runs(const Shape& local, const GlobalIndex& where, int64_t begin, int64_t end,
                     F&& f) {
  // Trailing dimensions that are held whole form one run with the dimension before them.
  int64_t run = 1;
  int d = local.rank() - 1;
  for (; d >= 0; --d) {
    run *= local[d];
    if (local[d] != where.global_shape[d]) break;
  }
  const Shape strides = where.global_shape.contiguous_strides();
  for (int64_t i = begin; i < end;) {
    int64_t global = 0, rest = i;
    for (int k = local.rank() - 1; k >= 0; --k) {
      global += (where.start[k] + rest % local[k]) * strides[k];
      rest /= local[k];
    }
    const int64_t n = std::min({kBlock, end - i, run - i % run});
    f(static_cast<uint64_t>(global), n);
    i += n;
  }
}

void check_where(const char* who, const View& v, const GlobalIndex& where) {
  if (!is_floating(v.dtype)) fail<DTypeError>("[", who, "] is not defined for ", v.dtype);
  bool fits = where.global_shape.rank() == v.rank() && where.start.rank() == v.rank();
  // Dimension 0 may extend beyond the global size: the number of samples is unbounded.
  for (int i = 0; fits && i < v.rank(); ++i)
    fits = where.start[i] >= 0 && (i == 0 || where.start[i] + v.shape[i] <= where.global_shape[i]);
  check<ShapeError>(fits, "[", who, "] a block of ", v.shape, " at ", where.start,
                    " does not lie in ", where.global_shape);
}

/// values[n] = mean + std * normal_from(bits): first as if all were in the middle of the distribution, in vectors,
/// then the elements outside it.
void normals(int64_t n, const uint64_t* bits, double mean, double std, double* values) {
  double p[kBlock];
  for (int64_t k = 0; k < n; ++k) {
    p[k] = detail::cell_from(bits[k]);
    values[k] = mean + std * detail::normal_quantile_middle(p[k] - 0.5);
  }
  for (int64_t k = 0; k < n; ++k)
    if (const double q = p[k] - 0.5; q < -detail::kMiddle || q > detail::kMiddle)
      values[k] = mean + std * detail::normal_quantile_tail(p[k], q);
}

/// out = f(n, bits) in double, for kernels that only write.
template <class Word, class F>
void generate(const View& out, const DrawKey& from, const GlobalIndex& where, F f) {
  const Key key = from.derived();
  const uint64_t first = from.first_index();
  parallel_for(out.numel(), kGrain / 8, [&](int64_t begin, int64_t end) {
    Word room[kRoom<Word>];
    double values[kBlock];
    Cursor cursor(out, begin);
    for_global_runs(out.shape, where, begin, end, [&](uint64_t global, int64_t n) {
      f(n, words(key, first + global, n, room), values);
      cursor.write(n, values);
    });
  });
}

/// to[n] = from[n] * scale, or 0 if bits are below the threshold. An unneeded multiplication costs less than a branch.
template <class C>
void drop(int64_t n, const uint32_t* bits, uint32_t threshold, C scale, const C* from, C* to) {
#pragma GCC ivdep
  for (int64_t k = 0; k < n; ++k) {
    const C kept = from[k] * scale;
    to[k] = bits[k] < threshold ? C(0) : kept;
  }
}

}  // namespace

void uniform(const View& out, DrawKey from, const GlobalIndex& where, double lo, double hi) {
  check_where("uniform", out, where);
  generate<uint32_t>(out, from, where,
                     [lo, range = hi - lo](int64_t n, const uint32_t* bits, double* values) {
                       for (int64_t k = 0; k < n; ++k)
                         values[k] = lo + range * static_cast<double>(uniform_from(bits[k]));
                     });
}

void normal(const View& out, DrawKey from, const GlobalIndex& where, double mean, double std) {
  check_where("normal", out, where);
  generate<uint64_t>(out, from, where,
                     [mean, std](int64_t n, const uint64_t* bits, double* values) {
                       normals(n, bits, mean, std, values);
                     });
}

void dropout(const View& x, double p, DrawKey from, const GlobalIndex& where, const View& out) {
  check_where("dropout", x, where);
  check_shapes("dropout", out, x);
  check<ConfigError>(p >= 0.0 && p < 1.0, "[dropout] probability ", p, " is not in [0, 1)");
  // Dropped where 32 random bits, as a fraction, are below p.
  const uint32_t threshold = static_cast<uint32_t>(p * 0x1p32);
  const Key key = from.derived();
  const uint64_t first = from.first_index();
  auto run = [&]<class C>() {
    const C scale = static_cast<C>(1.0 / (1.0 - p));
    parallel_for(out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      uint32_t room[kRoom<uint32_t>];
      BlockInput<C> in(x, begin);
      BlockOutput<C> to(out, begin);
      for_global_runs(out.shape, where, begin, end, [&](uint64_t global, int64_t n) {
        drop(n, words(key, first + global, n, room), threshold, scale, in.next(n), to.next(n));
        to.done(n);
      });
    });
  };
  compute_type(x.dtype, out.dtype) == kF64 ? run.operator()<double>() : run.operator()<float>();
}

}  // namespace sheaf::kernels::SHEAF_SIMD_NAMESPACE
