#include "sheaf/kernels/random.h"

#include "sheaf/kernels/cpu/blocks.h"

namespace sheaf::kernels::cpu {
namespace {

/// Bits for elements [index, index + n), n <= kBlock: whole Philox blocks in a loop that
/// vectorises, then the cut.
void words_u32(Key key, uint64_t index, int64_t n, uint32_t* words) {
  uint32_t w[4][kBlock / 4 + 1];
  const uint64_t first = index >> 2;
  const int64_t blocks =
      static_cast<int64_t>(((index + static_cast<uint64_t>(n) + 3) >> 2) - first);
  for (int64_t b = 0; b < blocks; ++b) {
    const philox::Block block = philox::block(key, first + static_cast<uint64_t>(b));
    for (int i = 0; i < 4; ++i) w[i][b] = block.word[i];
  }
  const int64_t skip = static_cast<int64_t>(index & 3);
  for (int64_t k = 0; k < n; ++k) words[k] = w[(k + skip) & 3][(k + skip) >> 2];
}
void words_u64(Key key, uint64_t index, int64_t n, uint64_t* words) {
  uint64_t w[2][kBlock / 2 + 1];
  const uint64_t first = index >> 1;
  const int64_t blocks =
      static_cast<int64_t>(((index + static_cast<uint64_t>(n) + 1) >> 1) - first);
  for (int64_t b = 0; b < blocks; ++b) {
    const philox::Block block = philox::block(key, first + static_cast<uint64_t>(b));
    for (int i = 0; i < 2; ++i) w[i][b] = uint64_t{block.word[2 * i + 1]} << 32 | block.word[2 * i];
  }
  const int64_t skip = static_cast<int64_t>(index & 1);
  for (int64_t k = 0; k < n; ++k) words[k] = w[(k + skip) & 1][(k + skip) >> 1];
}

/// Calls f(local flat index, global flat index, n) on pieces of [begin, end), n <= kBlock, that are
/// neighbours globally.
template <class F>
void for_global_runs(const Shape& local, const GlobalIndex& where, int64_t begin, int64_t end,
                     F&& f) {
  // The last dimensions that are held whole form one run with the dimension before them.
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
    f(i, static_cast<uint64_t>(global), n);
    i += n;
  }
}

void check_where(const char* who, const View& v, const GlobalIndex& where) {
  if (!is_floating(v.dtype)) fail<DTypeError>("[", who, "] is not defined for ", v.dtype);
  bool fits = where.global_shape.rank() == v.rank() && where.start.rank() == v.rank();
  // Dimension 0 may run beyond the global size: samples have no end.
  for (int i = 0; fits && i < v.rank(); ++i)
    fits = where.start[i] >= 0 && (i == 0 || where.start[i] + v.shape[i] <= where.global_shape[i]);
  check<ShapeError>(fits, "[", who, "] a block of ", v.shape, " at ", where.start,
                    " does not lie in ", where.global_shape);
}

/// values[n] = mean + std * normal_from(bits): the middle of the distribution for all, in vectors,
/// then what lies outside.
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

/// out = f(n, words) in double, for kernels that only write.
template <class Word, class Words, class F>
void generate(const View& out, const GlobalIndex& where, Words words, F f) {
  parallel_for(out.numel(), kGrain / 8, [&](int64_t begin, int64_t end) {
    Word bits[kBlock];
    double values[kBlock];
    Cursor cursor(out, begin);
    for_global_runs(out.shape, where, begin, end, [&](int64_t, uint64_t global, int64_t n) {
      words(global, n, bits);
      f(n, bits, values);
      cursor.write(n, values);
    });
  });
}

}  // namespace

void uniform(const View& out, DrawKey from, const GlobalIndex& where, double lo, double hi) {
  check_where("uniform", out, where);
  generate<uint32_t>(
      out, where,
      [key = from.derived(), first = from.first_index()](uint64_t global, int64_t n,
                                                         uint32_t* bits) {
        words_u32(key, first + global, n, bits);
      },
      [lo, range = hi - lo](int64_t n, const uint32_t* bits, double* values) {
        for (int64_t k = 0; k < n; ++k)
          values[k] = lo + range * static_cast<double>(uniform_from(bits[k]));
      });
}

void normal(const View& out, DrawKey from, const GlobalIndex& where, double mean, double std) {
  check_where("normal", out, where);
  generate<uint64_t>(
      out, where,
      [key = from.derived(), first = from.first_index()](uint64_t global, int64_t n,
                                                         uint64_t* bits) {
        words_u64(key, first + global, n, bits);
      },
      [mean, std](int64_t n, const uint64_t* bits, double* values) {
        normals(n, bits, mean, std, values);
      });
}

void dropout(const View& x, double p, DrawKey from, const GlobalIndex& where, const View& out) {
  check_where("dropout", x, where);
  check_shapes("dropout", out, x);
  check<ConfigError>(p >= 0.0 && p < 1.0, "[dropout] probability ", p, " is not in [0, 1)");
  // Dropped where 32 random bits, as a fraction, are below p.
  const uint64_t threshold = static_cast<uint64_t>(p * 0x1p32);
  const Key key = from.derived();
  const uint64_t first = from.first_index();
  auto run = [&]<class C>() {
    const C scale = static_cast<C>(1.0 / (1.0 - p));
    parallel_for(out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      uint32_t bits[kBlock];
      C values[kBlock];
      Cursor in(x, begin), to(out, begin);
      for_global_runs(out.shape, where, begin, end, [&](int64_t, uint64_t global, int64_t n) {
        words_u32(key, first + global, n, bits);
        in.read(n, values);
        for (int64_t k = 0; k < n; ++k) values[k] = bits[k] < threshold ? C(0) : values[k] * scale;
        to.write(n, values);
      });
    });
  };
  compute_type(x.dtype, out.dtype) == kF64 ? run.operator()<double>() : run.operator()<float>();
}

}  // namespace sheaf::kernels::cpu
