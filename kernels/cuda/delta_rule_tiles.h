// What kernels of the delta rule share: a chunk of a sequence, its gates, and products of 64 x 64 tiles in shared memory by a block of
// 256 threads. All matrices are cut to such tiles, with zeros past their ends: rows are tokens of a chunk, or elements of a key.
//
// Tiles are f32 (f64 for f64). In f32 and f64 products are made by multiply-adds. For bf16 and f16 tensor cores make them of each
// factor's two bf16 parts, which together have 16 of its bits: three products for one, whose sums are f32.
#pragma once

#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/cuda/tile_product.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/delta_rule_operands.h"

namespace sheaf::kernels::cuda::delta {

inline constexpr int kThreads = 256, kTile = 64;
static_assert(kTile == kDeltaChunk);

inline void check_operands(const char* who, const DeltaRuleOperands& x, const View& v, const View& state) {
  check_delta_rule(who, x, v, state);
  const int64_t width = x.q.shape[3], of_values = x.v.shape[3];
  check<ShapeError>(std::min(width, of_values) >= 1 && std::max(width, of_values) <= 256, "[", who, "] keys of ", width, " and values of ",
                    of_values, " elements; wants 1 to 256");
}

inline size_t compute_size(const DeltaRuleOperands& x) { return x.q.dtype == kF64 ? 8 : 4; }

/// [B, T, H, width], the last dimension dense; width = 1 for gates, [B, T, H].
template <class T>
struct Heads {
  T* data = nullptr;
  int64_t batch, time, head;  ///< strides
  Heads() = default;
  explicit Heads(const View& v) : data(v.as<T>()), batch(v.strides[0]), time(v.strides[1]), head(v.strides[2]) {}
  __device__ T* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * time + h * head; }
};

/// Where chunks begin: at each document's first token, and kTile tokens behind another that the document goes on for.
struct Chunks {
  const int32_t* begins = nullptr;  ///< null: there is one document
  int64_t batch = 0;                ///< stride
  int64_t tokens;

  explicit Chunks(const DeltaRuleOperands& x) : tokens(x.q.shape[1]) {
    if (given(x.begins) && x.begins.numel() > 0) begins = x.begins.as<const int32_t>(), batch = x.begins.strides[0];
  }
  /// The first token of t's document that is here. Whatever lies there, it is not behind t.
  __device__ int64_t document(int64_t b, int64_t t) const {
    const int64_t at = begins ? begins[b * batch + t] : 0;
    return at < 0 ? 0 : at < t ? at : t;
  }
  /// The first token of t's chunk.
  __device__ int64_t begin(int64_t b, int64_t t) const { return t - (t - document(b, t)) % kTile; }
  /// The first behind t, which may be -1, that begins a chunk; `tokens` if there is none. By a whole warp.
  __device__ int64_t next(int64_t b, int64_t t) const {
    const int64_t most = t + kTile < tokens ? t + kTile : tokens;
    if (!begins) return (t + kTile) / kTile * kTile < tokens ? (t + kTile) / kTile * kTile : tokens;
    for (int64_t first = t + 1; first < most; first += kWarp) {
      const int64_t s = first + threadIdx.x % kWarp;
      const unsigned found = __ballot_sync(kFullWarp, s < most && begin(b, s) == s);
      if (found) return first + __ffs(static_cast<int>(found)) - 1;
    }
    return most;
  }
  /// True if a state comes into the chunk that begins at t. No two such chunks have the same t / kTile.
  __device__ bool goes_on(int64_t b, int64_t t) const { return t == 0 || document(b, t) < t; }
};

/// What the forward leaves in the workspace, all of the compute type.
struct Kept {
  void *q_norms, *k_norms;  ///< what queries and keys are multiplied by, [B, T, G]; not touched if norm_eps is 0
  void *inverses, *shares;  ///< of each chunk and value head (1 + A)⁻¹ and P: a row for each token, [B, H, T, kTile]
  void *writes, *states;    ///< u, [B, H, T, E], and S before chunks, [B, H, slots, D, E] (Rule::slot); null: not wanted
};

/// One call's operands.
template <class T>
struct Rule {
  using C = Compute<T>;
  Chunks chunks;
  int64_t batch, tokens, key_heads, heads;
  int width, of_values;  ///< D and E
  C scale;
  Heads<const T> q, k, v;
  Heads<const C> decay, beta;
  const C* initial;             ///< null: zero
  const C *q_norms, *k_norms;  ///< null: they are taken as they are

  Rule(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const Kept& kept)
      : chunks(x), batch(x.q.shape[0]), tokens(x.q.shape[1]), key_heads(x.q.shape[2]), heads(x.v.shape[2]),
        width(static_cast<int>(x.q.shape[3])), of_values(static_cast<int>(x.v.shape[3])), scale(static_cast<C>(options.scale)), q(x.q),
        k(x.k), v(x.v), decay(x.decay), beta(x.beta), initial(given(x.initial) ? x.initial.as<const C>() : nullptr),
        q_norms(options.norm_eps != 0 ? static_cast<const C*>(kept.q_norms) : nullptr),
        k_norms(options.norm_eps != 0 ? static_cast<const C*>(kept.k_norms) : nullptr) {}

  __host__ __device__ int64_t group() const { return heads / key_heads; }
  __host__ __device__ int key_tiles() const { return static_cast<int>(blocks_for(width, kTile)); }
  __host__ __device__ int value_tiles() const { return static_cast<int>(blocks_for(of_values, kTile)); }
  /// Where a row of token t and value head h lies in arrays [B, H, T, ..] of the workspace.
  __device__ int64_t row(int64_t b, int64_t h, int64_t t) const { return (b * heads + h) * tokens + t; }
  /// Of b and h the place in [B, H, D, E]; of the state before the chunk that begins at t that in [B, H, slots, D, E].
  __device__ int64_t state(int64_t b, int64_t h) const { return (b * heads + h) * width * of_values; }
  __device__ int64_t slot(int64_t b, int64_t h, int64_t t) const {
    return ((b * heads + h) * blocks_for(tokens, kTile) + t / kTile) * width * of_values;
  }
};

__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline double exp_of(double x) { return ::exp(x); }

/// Below this, exp is 0. Such a decay cuts the state off.
template <class C>
inline constexpr C kCut = std::is_same_v<C, double> ? C(-746) : C(-104);

/// A chunk's gates in shared memory. Past its end decays are 0 and betas 0, so that its last token's are the tile's last.
/// Sums leave decays that cut out, and count them: so differences are of numbers.
template <class C>
struct Gates {
  C sum[kTile], beta[kTile];
  C gamma[kTile], left[kTile];  ///< of the state before the chunk what is left at a token; of a token's, behind the chunk
  int cuts[kTile];

  /// Λ_ij, j <= i.
  __device__ C between(int i, int j) const { return cuts[i] != cuts[j] ? C(0) : exp_of(sum[i] - sum[j]); }
  __device__ C gamma_of_chunk() const { return gamma[kTile - 1]; }
  __device__ bool is_cut(int i) const { return cuts[i] != (i > 0 ? cuts[i - 1] : 0); }

  /// Those of `count` tokens from t on. By the block, between its barriers.
  template <class T>
  __device__ void load(const Rule<T>& p, int64_t b, int64_t t, int64_t h, int count) {
    __syncthreads();
    if (threadIdx.x < kWarp) {
      C before = C(0);
      int cuts_before = 0;
      for (int first = 0; first < kTile; first += kWarp) {
        const int lane = static_cast<int>(threadIdx.x), i = first + lane;
        const C decay = i < count ? *p.decay.at(b, t + i, h) : C(0);
        const bool cut = decay <= kCut<C>;
        sum[i] = before + scan_warp(cut ? C(0) : decay, lane);
        cuts[i] = cuts_before + scan_warp(cut ? 1 : 0, lane);
        beta[i] = i < count ? *p.beta.at(b, t + i, h) : C(0);
        before = __shfl_sync(kFullWarp, sum[i], kWarp - 1), cuts_before = __shfl_sync(kFullWarp, cuts[i], kWarp - 1);
      }
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      const int i = static_cast<int>(threadIdx.x);
      gamma[i] = cuts[i] ? C(0) : exp_of(sum[i]);
      left[i] = between(kTile - 1, i);
    }
    __syncthreads();
  }
};

/// In f32 rows begin in different banks. In f64 there is no room for that, where states are largest.
template <class C>
struct Tile {
  static constexpr int kPitch = sizeof(C) == 4 ? kTile + 4 : kTile;
  alignas(16) C v[kTile][kPitch];

  __device__ void fill_zero() {
    for (int n = threadIdx.x; n < kTile * kTile; n += kThreads) v[n / kTile][n % kTile] = C(0);
  }
};

/// Rows [0, count) of a matrix into a tile, of each the first `width` elements: `row(r)` is where one begins, which is multiplied by
/// `factor(r)`.
template <class C, class Row, class Factor>
__device__ void load_tile(Tile<C>& tile, int64_t count, int64_t width, Row row, Factor factor) {
  using T = std::remove_cvref_t<decltype(*row(0))>;
  constexpr int kSize = Pack<T>::kSize, kPacks = kTile / kSize, kWide = Pack<C>::kSize;
#pragma unroll
  for (int n = threadIdx.x; n < kTile * kPacks; n += kThreads) {
    const int r = n / kPacks, at = n % kPacks * kSize;
    Pack<T> pack{};
    C by = C(0);
    if (r < count && at < width) pack = load_chunk(row(r), at, width), by = factor(r);
#pragma unroll
    for (int k = 0; k < kSize; k += kWide) {
      Pack<C> wide;
#pragma unroll
      for (int m = 0; m < kWide; ++m) wide.v[m] = convert_to<C>(pack.v[k + m]) * by;
      store_pack(&tile.v[r][at + k], wide);
    }
  }
}

struct Once {  // as a factor
  __device__ int operator()(int) const { return 1; }
};

/// Rows of a dense matrix of the workspace.
template <class C>
__device__ void load_rows(Tile<C>& tile, const C* from, int64_t pitch, int64_t count, int64_t width) {
  load_tile(tile, count, width, [&](int r) { return from + r * pitch; }, [](int) { return C(1); });
}

/// Elements [d, d + kTile) of a chunk's keys, normalised, times factor(token of the chunk).
template <class T, class C, class Factor = Once>
__device__ void load_keys(const Rule<T>& p, Tile<C>& tile, int64_t b, int64_t t, int64_t g, int d, int count, Factor factor = {}) {
  const C* const norms = p.k_norms ? p.k_norms + (b * p.tokens + t) * p.key_heads + g : nullptr;
  load_tile(tile, count, p.width - d, [&](int i) { return p.k.at(b, t + i, g) + d; },
            [&](int i) { return (norms ? norms[i * p.key_heads] : C(1)) * static_cast<C>(factor(i)); });
}
template <class T, class C, class Factor = Once>
__device__ void load_queries(const Rule<T>& p, Tile<C>& tile, int64_t b, int64_t t, int64_t g, int d, int count, Factor factor = {}) {
  const C* const norms = p.q_norms ? p.q_norms + (b * p.tokens + t) * p.key_heads + g : nullptr;
  load_tile(tile, count, p.width - d, [&](int i) { return p.q.at(b, t + i, g) + d; },
            [&](int i) { return (norms ? norms[i * p.key_heads] : C(1)) * static_cast<C>(factor(i)); });
}

/// Columns [e, e + kTile) of a state [D, E] to and from its tiles; null: of zero.
template <class T, class C>
__device__ void load_state(const Rule<T>& p, Tile<C>* tiles, const C* from, int e) {
  for (int d = 0; d < p.key_tiles(); ++d)
    load_rows(tiles[d], from ? from + d * kTile * p.of_values + e : from, p.of_values, from ? p.width - d * kTile : 0, p.of_values - e);
}
template <class T, class C>
__device__ void store_state(const Rule<T>& p, const Tile<C>* tiles, C* to, int e) {
  const int width = p.of_values - e < kTile ? p.of_values - e : kTile;
  for (int n = threadIdx.x; n < p.width * kTile; n += kThreads) {
    const int d = n / kTile, c = n % kTile;
    if (c < width) to[d * p.of_values + e + c] = tiles[d / kTile].v[d % kTile][c];
  }
}

/// A thread's elements of a product of tiles, 4 x 4: with tensor cores those that mma.m16n8 gives it, of warps that stand 2 x 4; else
/// neighbours.
template <class T>
struct Sums {
  using C = Compute<T>;
  static constexpr bool kTensorCores = kIsNarrow<T>;
  C v[2][2][4] = {};

  __device__ C& at(int i, int j) { return v[i / 2][j / 2][i % 2 * 2 + j % 2]; }
  __device__ static int row(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return kTensorCores ? thread / (4 * kWarp) * 32 + i * 8 + thread % kWarp / 4 : thread / 16 * 4 + i;
  }
  __device__ static int column(int j) {
    const int thread = static_cast<int>(threadIdx.x);
    return kTensorCores ? thread / kWarp % 4 * 16 + j / 2 * 8 + thread % 4 * 2 + j % 2 : thread % 16 * 4 + j;
  }
  /// Which of the 16 threads that share a row this is.
  __device__ static int sharer() {
    const int thread = static_cast<int>(threadIdx.x);
    return kTensorCores ? thread / kWarp % 4 * 4 + thread % 4 : thread % 16;
  }
  /// f(i, row, column, sum) for each; i < 4 is the number of the row.
  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) f(i, row(i), column(j), at(i, j));
  }
};

#if !SHEAF_CUDA_EMULATED

/// x and y as bf16, and what that leaves of them.
__device__ inline void split(float x, float y, unsigned& high, unsigned& low) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(y), "f"(x));
  const float of_x = x - __uint_as_float(high << 16), of_y = y - __uint_as_float(high & 0xffff0000u);
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(of_y), "f"(of_x));
}

/// multiply() by mma.m16n8k16.
template <bool kRowsInner, bool kColumnsInner, class T>
__device__ void multiply_by_parts(Sums<T>& sums, const Tile<float>& a, const Tile<float>& b) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll 1
  for (int k = lane % 4 * 2; k < kTile; k += 16) {
    unsigned a_high[2][4], a_low[2][4], b_high[2][2], b_low[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int r = Sums<T>::row(m * 2 + n % 2), at = k + n / 2 * 8;
        if constexpr (kRowsInner) split(a.v[at][r], a.v[at + 1][r], a_high[m][n], a_low[m][n]);
        else split(a.v[r][at], a.v[r][at + 1], a_high[m][n], a_low[m][n]);
      }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = Sums<T>::column(m * 2) - lane % 4 * 2 + lane / 4, at = k + n * 8;
        if constexpr (kColumnsInner) split(b.v[at][c], b.v[at + 1][c], b_high[m][n], b_low[m][n]);
        else split(b.v[c][at], b.v[c][at + 1], b_high[m][n], b_low[m][n]);
      }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        part_products::multiply_add<bf16>(sums.v[m][n], a_low[m], b_high[n][0], b_high[n][1]);
        part_products::multiply_add<bf16>(sums.v[m][n], a_high[m], b_low[n][0], b_low[n][1]);
        part_products::multiply_add<bf16>(sums.v[m][n], a_high[m], b_high[n][0], b_high[n][1]);
      }
  }
}

#endif

template <class C>
__device__ void load_four(C (&to)[4], const C* from) {
  constexpr int kSize = Pack<C>::kSize;
#pragma unroll
  for (int n = 0; n < 4; n += kSize) {
    const Pack<C> pack = load_pack(from + n);
#pragma unroll
    for (int m = 0; m < kSize; ++m) to[n + m] = pack.v[m];
  }
}

/// sums += a b. Rows of the product are a's rows or, kRowsInner, its columns; columns are b's rows or, kColumnsInner, its columns.
template <bool kRowsInner, bool kColumnsInner, class T, class C>
__device__ void multiply(Sums<T>& sums, const Tile<C>& a, const Tile<C>& b) {
#if !SHEAF_CUDA_EMULATED
  if constexpr (Sums<T>::kTensorCores) return multiply_by_parts<kRowsInner, kColumnsInner>(sums, a, b);
  else
#endif
  if constexpr (Sums<T>::kTensorCores) {
    for (int k = 0; k < kTile; ++k)
      sums.each([&](int, int r, int c, C& sum) { sum = fused_sum(kRowsInner ? a.v[k][r] : a.v[r][k], kColumnsInner ? b.v[k][c] : b.v[c][k], sum); });
  } else {
    const int row = Sums<T>::row(0), column = Sums<T>::column(0);
#pragma unroll 1
    for (int k = 0; k < kTile; k += 4) {
      C x[4][4], y[4][4];  // by lines of the tiles
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        load_four(x[n], kRowsInner ? &a.v[k + n][row] : &a.v[row + n][k]);
        load_four(y[n], kColumnsInner ? &b.v[k + n][column] : &b.v[column + n][k]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sums.at(i, j) = fused_sum(kRowsInner ? x[n][i] : x[i][n], kColumnsInner ? y[n][j] : y[j][n], sums.at(i, j));
    }
  }
}

/// Takes arrays of `size` bytes an element from a workspace, or adds up what they take.
struct Carve {
  Carver carver;
  size_t size;
  void* operator()(int64_t count) { return carver.take<char>(count * static_cast<int64_t>(size)); }
};
struct Measure {
  size_t size, bytes = 0;
  void* operator()(int64_t count) {
    bytes += line_align(static_cast<size_t>(count) * size);
    return nullptr;
  }
};

/// Elements of states before chunks, [B, H, slots, D, E].
inline int64_t states_of(const DeltaRuleOperands& x) {
  return x.q.shape[0] * x.v.shape[2] * blocks_for(x.q.shape[1], kTile) * x.q.shape[3] * x.v.shape[3];
}
template <class Take>
Kept kept_of(const DeltaRuleOperands& x, bool for_backward, Take& take) {
  const int64_t norms = x.q.shape[0] * x.q.shape[1] * x.q.shape[2], rows = x.decay.numel();
  Kept out{};
  out.q_norms = take(norms), out.k_norms = take(norms);
  out.inverses = take(rows * kTile), out.shares = take(rows * kTile);
  if (for_backward) out.writes = take(x.v.numel()), out.states = take(states_of(x));
  return out;
}

/// Fills `kept`, and computes the result and the last state if these have a shape.
void forward(const char* who, const Stream& stream, const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out,
             const View& state, const Kept& kept);

}  // namespace sheaf::kernels::cuda::delta
