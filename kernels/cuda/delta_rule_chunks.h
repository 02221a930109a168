// Shared code of the delta-rule kernels: the operands of a call, where its chunks begin, and a chunk's gates, keys, queries and state as
// tiles (delta_rule_tiles.h), whose rows are tokens of the chunk or elements of a key.
#pragma once

#include "sheaf/kernels/cuda/delta_rule_tiles.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/delta_rule_operands.h"

namespace sheaf::kernels::cuda::delta {

static_assert(kTile == kDeltaChunk);

/// The number of blocks whose registers a multiprocessor must hold.
template <class C>
inline constexpr int kHeld = sizeof(C) == 4 ? 2 : 1;

inline void check_operands(const char* who, const DeltaRuleOperands& x, const View& v, const View& state) {
  check_delta_rule(who, x, v, state);
  const int64_t width = x.q.shape[3], of_values = x.v.shape[3];
  check<ShapeError>(x.v.shape[2] > 0 || x.q.shape[2] == 0, "[", who, "] no value heads with ", x.q.shape[2], " key heads");
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

/// Where chunks begin: at each document's first token, and every kTile tokens from there within the document.
struct Chunks {
  const int32_t* begins = nullptr;  ///< null: there is one document
  int64_t batch = 0;                ///< stride
  int64_t tokens;

  explicit Chunks(const DeltaRuleOperands& x) : tokens(x.q.shape[1]) {
    if (given(x.begins) && x.begins.numel() > 0) begins = x.begins.as<const int32_t>(), batch = x.begins.strides[0];
  }
  /// The first token of t's document in this call. Whatever values `begins` has, it is not after t.
  __device__ int64_t document(int64_t b, int64_t t) const {
    const int64_t at = begins ? begins[b * batch + t] : 0;
    return at < 0 ? 0 : at < t ? at : t;
  }
  /// The first token of t's chunk.
  __device__ int64_t begin(int64_t b, int64_t t) const { return t - (t - document(b, t)) % kTile; }
  /// The first token after t (t may be -1) that begins a chunk; `tokens` if there is none. Called by a whole warp.
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
  /// True if the chunk that begins at t continues from a state. No two such chunks have the same t / kTile.
  __device__ bool goes_on(int64_t b, int64_t t) const { return t == 0 || document(b, t) < t; }
};

/// Results of the forward in the workspace, all of the compute type.
struct Kept {
  void *q_norms, *k_norms;  ///< the factors of queries and keys, [B, T, G]; not touched if norm_eps is 0
  void *inverses, *shares;  ///< (1 + A)⁻¹ and P of each chunk and value head: a row for each token, [B, H, T, kTile]
  void *writes, *states;    ///< u, [B, H, T, E], and S before chunks, [B, H, slots, D, E] (Rule::slot); null: not needed
};

/// States [B, H, D, E], each dense; there may be none.
template <class C>
struct States {
  C* data;
  int64_t of_sequence, of_head;
  explicit States(const View& v)
      : data(given(v) ? v.as<C>() : nullptr), of_sequence(given(v) ? v.strides[0] : 0), of_head(given(v) ? v.strides[1] : 0) {}
  /// Null if there are none.
  __device__ C* at(int64_t b, int64_t h) const { return data ? data + b * of_sequence + h * of_head : nullptr; }
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
  States<const C> initial;     ///< none: zero
  const C *q_norms, *k_norms;  ///< null: not normalised

  Rule(const DeltaRuleOperands& x, const DeltaRuleOptions& options, const Kept& kept)
      : chunks(x), batch(x.q.shape[0]), tokens(x.q.shape[1]), key_heads(x.q.shape[2]), heads(x.v.shape[2]),
        width(static_cast<int>(x.q.shape[3])), of_values(static_cast<int>(x.v.shape[3])), scale(static_cast<C>(options.scale)), q(x.q),
        k(x.k), v(x.v), decay(x.decay), beta(x.beta), initial(x.initial),
        q_norms(options.norm_eps != 0 ? static_cast<const C*>(kept.q_norms) : nullptr),
        k_norms(options.norm_eps != 0 ? static_cast<const C*>(kept.k_norms) : nullptr) {}

  __host__ __device__ int64_t group() const { return heads / key_heads; }
  __host__ __device__ int key_tiles() const { return static_cast<int>(blocks_for(width, kTile)); }
  __host__ __device__ int value_tiles() const { return static_cast<int>(blocks_for(of_values, kTile)); }
  /// The row of token t and value head h in arrays [B, H, T, ..] of the workspace.
  __device__ int64_t row(int64_t b, int64_t h, int64_t t) const { return (b * heads + h) * tokens + t; }
  /// The index of the state before the chunk that begins at t, in [B, H, slots, D, E].
  __device__ int64_t slot(int64_t b, int64_t h, int64_t t) const {
    return ((b * heads + h) * blocks_for(tokens, kTile) + t / kTile) * width * of_values;
  }
};

__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline double exp_of(double x) { return ::exp(x); }

/// Below this, exp is 0: such a decay resets the state.
template <class C>
inline constexpr C kCut = std::is_same_v<C, double> ? C(-746) : C(-104);

/// A chunk's gates in shared memory. Past its end decays and betas are 0, so that values for the tile's last token are those for the
/// chunk's last.
template <class C>
struct Gates {
  C sum[kTile], beta[kTile];    ///< sum: of the decays up to a token, without those that reset, so that differences are finite
  C gamma[kTile], left[kTile];  ///< γ_i, and Λ_last,i
  int cuts[kTile];              ///< how many decays up to a token reset the state

  /// Λ_ij, j <= i.
  __device__ C between(int i, int j) const { return cuts[i] != cuts[j] ? C(0) : exp_of(sum[i] - sum[j]); }
  __device__ C gamma_of_chunk() const { return gamma[kTile - 1]; }
  __device__ bool is_cut(int i) const { return cuts[i] != (i > 0 ? cuts[i - 1] : 0); }

  /// Loads the gates of `count` tokens from t on, with a barrier before and after.
  template <class T>
  __device__ void load(const Rule<T>& p, int64_t b, int64_t t, int64_t h, int count) {
    __syncthreads();
    if (threadIdx.x < kWarp) {
      const int lane = static_cast<int>(threadIdx.x);
      C decays[2], betas[2], before = C(0);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int i = n * kWarp + lane;
        decays[n] = i < count ? *p.decay.at(b, t + i, h) : C(0), betas[n] = i < count ? *p.beta.at(b, t + i, h) : C(0);
      }
      int cuts_before = 0;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int i = n * kWarp + lane;
        const bool cut = decays[n] <= kCut<C>;
        sum[i] = before + scan_warp(cut ? C(0) : decays[n], lane);
        cuts[i] = cuts_before + scan_warp(cut ? 1 : 0, lane);
        beta[i] = betas[n];
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

/// Elements [from, from + kTile) of the rows of `count` tokens from t on, which have `width`, times factor(token of the chunk).
template <class T, class By>
__device__ Arriving<Compute<T>, T> head(const Heads<const T>& x, int64_t b, int64_t t, int64_t h, int count, int from, int width,
                                        By factor) {
  return {count, width - from, [&](int i) { return x.at(b, t + i, h) + from; }, factor};
}

template <class C>
struct One {  // as a factor
  __device__ C operator()(int) const { return C(1); }
};

/// A chunk's keys as used in products, normalised if requested.
template <class T, class By = One<Compute<T>>>
__device__ Arriving<Compute<T>, T> keys(const Rule<T>& p, int64_t b, int64_t t, int64_t g, int d, int count, By factor = {}) {
  const Compute<T>* const norms = p.k_norms ? p.k_norms + (b * p.tokens + t) * p.key_heads + g : nullptr;
  return head(p.k, b, t, g, count, d, p.width, [&](int i) { return norms ? norms[i * p.key_heads] * factor(i) : factor(i); });
}
template <class T, class By = One<Compute<T>>>
__device__ Arriving<Compute<T>, T> queries(const Rule<T>& p, int64_t b, int64_t t, int64_t g, int d, int count, By factor = {}) {
  const Compute<T>* const norms = p.q_norms ? p.q_norms + (b * p.tokens + t) * p.key_heads + g : nullptr;
  return head(p.q, b, t, g, count, d, p.width, [&](int i) { return norms ? norms[i * p.key_heads] * factor(i) : factor(i); });
}

/// Parts, and a third one for the 8 bits of f32 that two parts lose.
struct AllParts : Parts {
  unsigned rest[kTile][kPitch / 2];

  __device__ float get(int i, int j) const { return value(high[i][j / 2], j) + (value(low[i][j / 2], j) + value(rest[i][j / 2], j)); }
  template <int kCount>
  __device__ void put(int i, int j, const float (&x)[kCount]) {
    Parts::put(i, j, x);
#pragma unroll
    for (int k = 0; k < kCount; k += 2) {
      const unsigned of_high = high[i][(j + k) / 2], of_low = low[i][(j + k) / 2];
      rest[i][(j + k) / 2] = pair_of<bf16>(x[k] - value(of_high, 0) - value(of_low, 0), x[k + 1] - value(of_high, 1) - value(of_low, 1));
    }
  }
};

/// A state's tile: a factor of products with full precision.
template <class T>
using StateTile = std::conditional_t<kIsNarrow<T>, AllParts, Factor<T>>;

/// Columns [e, e + kTile) of a state [D, E], in tiles.
template <class T>
struct State {
  using C = Compute<T>;
  StateTile<T>* tiles;
  int count;

  __device__ State(void* memory, int key_tiles) : tiles(static_cast<StateTile<T>*>(memory)), count(key_tiles) {}
  __device__ const Factor<T>& operator[](int d) const { return tiles[d]; }
  /// The memory after its tiles.
  __device__ Factor<T>* end() const { return reinterpret_cast<Factor<T>*>(tiles + count); }

  /// From memory; null: zeros.
  __device__ void load(const Rule<T>& p, const C* from, int e) const {
    for (int d = 0; d < count; ++d)
      rows(from ? from + d * kTile * p.of_values + e : from, p.of_values, from ? p.width - d * kTile : 0, p.of_values - e).store(tiles[d]);
  }
  __device__ void store(const Rule<T>& p, C* to, int e) const {
    const int width = p.of_values - e < kTile ? p.of_values - e : kTile;
    for (int n = threadIdx.x; n < p.width * kTile; n += kThreads) {
      const int d = n / kTile, c = n % kTile;
      if (c < width) to[d * p.of_values + e + c] = tiles[d / kTile].get(d % kTile, c);
    }
  }
  /// Tile d becomes `decay` times itself plus `added`.
  __device__ void add(int d, C decay, Sums<T>& added) const {
    added.put(tiles[d], [&](int, int i, int c, C sum) { return fused_sum(decay, tiles[d].get(i, c), sum); });
  }
};

/// Takes arrays of `size` bytes per element from a workspace, or adds up their sizes.
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

/// Number of elements in the states before chunks.
inline int64_t states_of(const DeltaRuleOperands& x) {
  return x.q.shape[0] * x.v.shape[2] * blocks_for(x.q.shape[1], kTile) * x.q.shape[3] * x.v.shape[3];
}
/// Some are for the backward only.
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
