#include "sheaf/kernels/cuda/delta_rule_chunks.h"

// (1 + A)⁻¹ and P, which depend neither on the state nor on values, are computed for all chunks at once. Then a block processes 64
// columns of a value head's state, which are independent, and loops over the chunks in order, using only products.
namespace sheaf::kernels::cuda {
namespace delta {
namespace {

/// One warp per row of queries (blockIdx.y = 0) or keys.
template <class T>
__global__ void __launch_bounds__(kThreads) inverse_norms(Rows<const T> q, Rows<const T> k, double eps, Compute<T>* q_norms,
                                                          Compute<T>* k_norms) {
  using C = Compute<T>;
  const Rows<const T>& rows = blockIdx.y == 0 ? q : k;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= rows.count) return;
  const T* const x = rows[row];
  C sum = C(0);
  for (int64_t i = threadIdx.x % kWarp; i < rows.cols; i += kWarp) sum = fused_sum(convert_to<C>(x[i]), convert_to<C>(x[i]), sum);
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) (blockIdx.y == 0 ? q_norms : k_norms)[row] = C(1) / sqrt(sum + static_cast<C>(eps));
}

/// The inverse of 1 + a, with a strictly lower triangular, of which the first `count` rows matter: row by row of the result, four
/// neighbours sharing a column's sums. What is above a warp's first column is zero.
template <class C>
__device__ void invert(const Tile<C>& a, Tile<C>& inverse, int count) {
  const int column = static_cast<int>(threadIdx.x) / 4, part = static_cast<int>(threadIdx.x) % 4, first = column / 8 * 8;
  for (int i = part; i < first; i += 4) inverse.v[i][column] = C(0);
  for (int i = first; i < count; ++i) {
    C sum = C(0);
    for (int m = first + part; m < i; m += 4) sum = fused_sum(a.v[i][m], inverse.v[m][column], sum);
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (part == 0) inverse.v[i][column] = i < column ? C(0) : i == column ? C(1) : -sum;
    __syncwarp();
  }
}

// A block processes the chunks that begin in kTile tokens, with one key head and the value heads that read it.
template <class T>
__global__ void __launch_bounds__(kThreads, kHeld<Compute<T>>) prepare_chunks(Rule<T> p, Compute<T>* inverses, Compute<T>* shares) {
  using C = Compute<T>;
  auto* const factors = dynamic_shared<Factor<T>>();
  Factor<T>&x = factors[0], &y = factors[1];
  Tile<C>&a = reinterpret_cast<Tile<C>&>(x), &inverse = reinterpret_cast<Tile<C>&>(y);  // in the memory of keys and queries
  __shared__ Gates<C> gates;
  const int64_t places = blocks_for(p.tokens, kTile), pair = blockIdx.x / places, b = pair / p.key_heads, g = pair % p.key_heads;
  const int64_t place = blockIdx.x % places * kTile, end = place + kTile < p.tokens ? place + kTile : p.tokens;
  for (int64_t t = p.chunks.next(b, place - 1), behind; t < end; t = behind) {
    behind = p.chunks.next(b, t);
    const auto count = static_cast<int>(behind - t);
    Sums<T> of_keys, of_queries;  // k·k and q·k
    for (int d = 0; d < p.width; d += kTile) {
      __syncthreads();
      const auto k = keys(p, b, t, g, d, count);
      const auto q = queries(p, b, t, g, d, count);
      k.store(x), q.store(y);
      __syncthreads();
      multiply<false, false>(of_keys, x, x);
      multiply<false, false>(of_queries, y, x);
    }
    for (int64_t h = g * p.group(); h < (g + 1) * p.group(); ++h) {
      gates.load(p, b, t, h, count);
      const int64_t row = p.row(b, h, t);
      of_keys.each([&](int, int i, int j, C sum) { a.v[i][j] = j < i ? gates.beta[i] * gates.between(i, j) * sum : C(0); });
      of_queries.each([&](int, int i, int j, C sum) {
        if (i < count) shares[(row + i) * kTile + j] = j <= i ? p.scale * gates.between(i, j) * sum : C(0);
      });
      __syncthreads();
      invert(a, inverse, count);
      __syncthreads();
      for (int n = threadIdx.x; n < count * kTile; n += kThreads) inverses[row * kTile + n] = inverse.v[n / kTile][n % kTile];
    }
  }
}

/// Arrays of the loop over chunks; null if not needed.
template <class T>
struct Walk {
  using C = Compute<T>;
  const C *inverses, *shares;
  Heads<T> out;
  States<C> state;
  C *writes, *states;
};

// Columns [e, e + kTile) of the state of value head h are in the first tiles.
template <class T>
__global__ void __launch_bounds__(kThreads, kHeld<Compute<T>>) walk_chunks(Rule<T> p, Walk<T> w) {
  using C = Compute<T>;
  const State<T> state(dynamic_shared<char>(), p.key_tiles());
  Factor<T>&x = state.end()[0], &u = state.end()[1];
  __shared__ Gates<C> gates;
  const int e = static_cast<int>(blockIdx.x) % p.value_tiles() * kTile, width = p.of_values - e;
  const int64_t pair = blockIdx.x / p.value_tiles(), b = pair / p.heads, h = pair % p.heads, g = h / p.group();
  state.load(p, p.initial.at(b, h), e);
  for (int64_t t = 0, behind; t < p.tokens; t = behind) {
    behind = p.chunks.next(b, t);
    const auto count = static_cast<int>(behind - t);
    const int64_t row = p.row(b, h, t);
    gates.load(p, b, t, h, count);
    if (!p.chunks.goes_on(b, t)) state.load(p, nullptr, e);
    else if (t > 0 && w.states) state.store(p, w.states + p.slot(b, h, t), e);

    // u = (1 + A)⁻¹ beta (v - γ Sᵀk), and out = scale γ Sᵀq + P u; the count is 0 if not needed.
    const int wanted = w.out.data ? count : 0;
    Sums<T> answers, written, out;
    for (int d = 0; d < p.key_tiles(); ++d) {
      const auto k = keys(p, b, t, g, d * kTile, count);
      const auto q = queries(p, b, t, g, d * kTile, wanted);
      __syncthreads();
      k.store(x);
      __syncthreads();
      multiply<false, true>(answers, x, state[d]);
      if (!wanted) continue;
      __syncthreads();
      q.store(x);
      __syncthreads();
      multiply<false, true>(out, x, state[d]);
    }
    const auto inverse = rows(w.inverses + row * kTile, kTile, count, kTile);
    answers.put(u, [&](int, int i, int c, C answer) {
      return i < count && c < width ? gates.beta[i] * (convert_to<C>(p.v.at(b, t + i, h)[e + c]) - gates.gamma[i] * answer) : C(0);
    });
    __syncthreads();
    inverse.store(x);
    __syncthreads();
    const auto shares = rows(w.shares + row * kTile, kTile, wanted, kTile);
    multiply<false, true>(written, x, u);
    __syncthreads();
    shares.store(x);
    written.put(u, [&](int, int i, int c, C sum) {
      if (w.writes && i < count && c < width) w.writes[(row + i) * p.of_values + e + c] = sum;
      return sum;
    });
    __syncthreads();
    if (wanted) {
      out.each([&](int, int i, int, C& sum) { sum *= p.scale * gates.gamma[i]; });
      multiply<false, true>(out, x, u);
      out.each([&](int, int i, int c, C sum) {
        if (i < count && c < width) w.out.at(b, t + i, h)[e + c] = element<T>(sum);
      });
    }

    // S' = γ_last S + Σ Λ_last k uᵀ
    for (int d = 0; d < p.key_tiles(); ++d) {
      const auto k = keys(p, b, t, g, d * kTile, count, [&](int i) { return gates.left[i]; });
      __syncthreads();
      k.store(x);
      __syncthreads();
      Sums<T> added;
      multiply<true, true>(added, x, u);
      state.add(d, gates.gamma_of_chunk(), added);
    }
  }
  __syncthreads();
  if (w.state.data) state.store(p, w.state.at(b, h), e);
}

}  // namespace

void forward(const char* who, const Stream& stream, const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out,
             const View& state, const Kept& kept) {
  visit_floating(who, x.q.dtype, [&]<class T>() {
    using C = Compute<T>;
    Rule<T> p(x, options, kept);
    if (options.norm_eps != 0) {
      const auto q = rows_of<const T>(who, x.q), k = rows_of<const T>(who, x.k);
      launch(who, stream, {.blocks = blocks_for(q.count, kThreads / kWarp), .threads = kThreads, .blocks_y = 2}, inverse_norms<T>, q, k,
             options.norm_eps, static_cast<C*>(kept.q_norms), static_cast<C*>(kept.k_norms));
    }
    launch(who, stream,
           {.blocks = p.batch * p.key_heads * blocks_for(p.tokens, kTile), .threads = kThreads, .shared_bytes = 2 * sizeof(Factor<T>)},
           prepare_chunks<T>, p, static_cast<C*>(kept.inverses), static_cast<C*>(kept.shares));
    Walk<T> walk{static_cast<const C*>(kept.inverses), static_cast<const C*>(kept.shares), {}, States<C>(state),
                 static_cast<C*>(kept.writes), static_cast<C*>(kept.states)};
    if (given(out)) walk.out = Heads<T>(out);
    else walk.out.data = nullptr;
    launch(who, stream,
           {.blocks = p.batch * p.heads * p.value_tiles(), .threads = kThreads,
            .shared_bytes = p.key_tiles() * sizeof(StateTile<T>) + 2 * sizeof(Factor<T>)},
           walk_chunks<T>, p, walk);
  });
}

}  // namespace delta

size_t delta_rule_workspace(const DeltaRuleOperands& x, const View& out, const View& state) {
  delta::check_operands("delta_rule", x, out, state);
  delta::Measure measure{delta::compute_size(x)};
  delta::kept_of(x, false, measure);
  return measure.bytes;
}

void delta_rule(const Stream& stream, const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& out, const View& state,
                Workspace workspace) {
  const char* who = "delta_rule";
  delta::check_operands(who, x, out, state);
  delta::Carve carve{Carver(who, workspace), delta::compute_size(x)};
  delta::forward(who, stream, x, options, out, state, delta::kept_of(x, false, carve));
}

}  // namespace sheaf::kernels::cuda
