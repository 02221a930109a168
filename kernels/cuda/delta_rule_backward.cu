#include "sheaf/kernels/cuda/delta_rule_chunks.h"

// For a chunk, with S the state before it, dS' the gradient of the state after it, and (1 + A) u = r = beta (v - γ Sᵀk):
//
//   du = Pᵀ dout + Λ_last dS'ᵀk      dr = (1 + A)⁻ᵀ du      dv = beta dr      dP = dout uᵀ (j <= i)      dA = -dr uᵀ (j < i)
//   dS = γ_last dS' + Σ scale γ_i q_i dout_iᵀ - Σ beta_i γ_i k_i dr_iᵀ
//   dq = scale γ S dout + Σ_j scale Λ_ij dP_ij k_j
//   dk = beta (-γ S dr + Σ_j Λ_ij dA_ij k_j) + (Λ_last dS' u + Σ_i scale Λ_ij dP_ij q_i + Σ_i Λ_ij dA_ij beta_i k_i)
//
// du, dr and dS are computed in a loop from the last chunk to the first, 64 columns per block, and left in the workspace. Everything
// else is then computed for all chunks at once, from all columns. γ_i and Λ_ij contain the sum of decays up to i, Λ_ji and Λ_last,i
// its negative: so its gradient is q·dq plus k times the first part of dk minus k times the second. For the last token, Λ_last and
// γ_last contribute, too. A decay's gradient is the sum of these from its token on.
namespace sheaf::kernels::cuda {
namespace delta {
namespace {

/// Gradients, and arrays of the workspace; null if absent.
template <class T>
struct Gradients {
  using C = Compute<T>;
  const C *inverses, *shares, *writes, *states;  // Kept
  Heads<const T> dout;
  States<const C> dlast;  ///< of the last state
  C *dvalues, *dstates;   ///< dr, [B, H, T, E]; dS, laid out as `states`
  Heads<T> dv;
  States<C> dinitial;
  Heads<C> ddecay, dbeta;
  C *dq, *dk;  ///< before the normalisation, [B, T, G, D]
};

template <class T>
__global__ void __launch_bounds__(kThreads, kHeld<Compute<T>>) walk_back(Rule<T> p, Gradients<T> w) {
  using C = Compute<T>;
  const State<T> dstate(dynamic_shared<char>(), p.key_tiles());
  Factor<T>&x = dstate.end()[0], &dout = dstate.end()[1], &du = dstate.end()[2];
  __shared__ Gates<C> gates;
  const int e = static_cast<int>(blockIdx.x) % p.value_tiles() * kTile, width = p.of_values - e;
  const int64_t pair = blockIdx.x / p.value_tiles(), b = pair / p.heads, h = pair % p.heads, g = h / p.group();
  dstate.load(p, w.dlast.at(b, h), e);
  for (int64_t behind = p.tokens, t; behind > 0; behind = t) {
    t = p.chunks.begin(b, behind - 1);
    const auto count = static_cast<int>(behind - t);
    const int64_t row = p.row(b, h, t);
    gates.load(p, b, t, h, count);
    if (behind < p.tokens && !p.chunks.goes_on(b, behind)) dstate.load(p, nullptr, e);

    Sums<T> sums, dr;
    {
      const auto of_dout = head(w.dout, b, t, h, count, e, p.of_values, One<C>());
      const auto shares = rows(w.shares + row * kTile, kTile, count, kTile);
      of_dout.store(dout), shares.store(x);
    }
    __syncthreads();
    multiply<true, true>(sums, x, dout);
    for (int d = 0; d < p.key_tiles(); ++d) {
      const auto k = keys(p, b, t, g, d * kTile, count, [&](int i) { return gates.left[i]; });
      __syncthreads();
      k.store(x);
      __syncthreads();
      multiply<false, true>(sums, x, dstate[d]);
    }
    const auto inverse = rows(w.inverses + row * kTile, kTile, count, kTile);
    sums.put(du, [](int, int, int, C sum) { return sum; });
    __syncthreads();
    inverse.store(x);
    __syncthreads();
    multiply<true, true>(dr, x, du);
    __syncthreads();
    dr.put(du, [&](int, int i, int c, C sum) {
      if (i < count && c < width) {
        w.dvalues[(row + i) * p.of_values + e + c] = sum;
        w.dv.at(b, t + i, h)[e + c] = element<T>(gates.beta[i] * sum);
      }
      return sum;
    });
    for (int d = 0; d < p.key_tiles(); ++d) {
      const auto q = queries(p, b, t, g, d * kTile, count, [&](int i) { return p.scale * gates.gamma[i]; });
      const auto k = keys(p, b, t, g, d * kTile, count, [&](int i) { return -gates.beta[i] * gates.gamma[i]; });
      Sums<T> added;
      __syncthreads();
      q.store(x);
      __syncthreads();
      multiply<true, true>(added, x, dout);
      __syncthreads();
      k.store(x);
      __syncthreads();
      multiply<true, true>(added, x, du);
      dstate.add(d, gates.gamma_of_chunk(), added);
    }
    __syncthreads();
    if (t > 0 && p.chunks.goes_on(b, t)) dstate.store(p, w.dstates + p.slot(b, h, t), e);
  }
  __syncthreads();
  if (w.dinitial.data) dstate.store(p, w.dinitial.at(b, h), e);
}

// A block processes the chunks that begin in kTile tokens, with one key head and the value heads that read it, whose parts of dq and
// dk are added in order, each element by one thread.
template <class T>
__global__ void __launch_bounds__(kThreads, kHeld<Compute<T>>) chunk_gradients(Rule<T> p, Gradients<T> w) {
  using C = Compute<T>;
  auto* const factors = dynamic_shared<Factor<T>>();
  Factor<T>&of_shares = factors[0], &of_keys = factors[1], &x = factors[2], &y = factors[3], &z = factors[4];
  __shared__ Gates<C> gates;
  __shared__ C of_warps[kThreads / kWarp];
  const int64_t places = blocks_for(p.tokens, kTile), pair = blockIdx.x / places, b = pair / p.key_heads, g = pair % p.key_heads;
  const int64_t place = blockIdx.x % places * kTile, end = place + kTile < p.tokens ? place + kTile : p.tokens;
  const int64_t group = p.group(), first_head = g * group;  // a division, which the compiler would repeat for each element
  for (int64_t t = p.chunks.next(b, place - 1), behind; t < end; t = behind) {
    behind = p.chunks.next(b, t);
    const auto count = static_cast<int>(behind - t);
    for (int64_t h = first_head; h < first_head + group; ++h) {
      gates.load(p, b, t, h, count);
      const C *state = nullptr, *dstate = nullptr;  // before the chunk; gradient of the state after it
      if (t == 0) state = p.initial.at(b, h);
      else if (p.chunks.goes_on(b, t)) state = w.states + p.slot(b, h, t);
      if (behind == p.tokens) dstate = w.dlast.at(b, h);
      else if (p.chunks.goes_on(b, behind)) dstate = w.dstates + p.slot(b, h, behind);
      const C *writes = w.writes + p.row(b, h, t) * p.of_values, *dvalues = w.dvalues + p.row(b, h, t) * p.of_values;
      // This thread's contributions to its rows' gradients of beta and of the sum of decays, and to the last token's extra part.
      C dbeta[4] = {}, dsum[4] = {}, last = C(0);

      Sums<T> dshares, dkeys;
      for (int e = 0; e < p.of_values; e += kTile) {
        const int width = p.of_values - e;
        __syncthreads();
        head(w.dout, b, t, h, count, e, p.of_values, One<C>()).store(x);
        rows(writes + e, p.of_values, count, width).store(y), rows(dvalues + e, p.of_values, count, width).store(z);
        __syncthreads();
        multiply<false, false>(dshares, x, y);
        multiply<false, false>(dkeys, z, y);
        dkeys.each([&](int n, int i, int c, C) {
          if (i < count && c < width) dbeta[n] = fused_sum(z.get(i, c), convert_to<C>(p.v.at(b, t + i, h)[e + c]), dbeta[n]);
        });
      }
      dshares.put(of_shares, [&](int, int i, int j, C sum) { return j <= i ? p.scale * gates.between(i, j) * sum : C(0); });
      dkeys.put(of_keys, [&](int, int i, int j, C sum) { return j < i ? -gates.between(i, j) * sum : C(0); });
      if (state && dstate)
        for (int n = threadIdx.x; n < p.width * p.of_values; n += kThreads) last = fused_sum(state[n], dstate[n], last);
      last *= gates.gamma_of_chunk();

      for (int d = 0; d < p.width; d += kTile) {
        Sums<T> dq, dk, dk_behind;  // dk without beta; dk's second part
        for (int e = 0; e < p.of_values; e += kTile) {
          const int width = p.of_values - e;
          if (state) {
            __syncthreads();
            head(w.dout, b, t, h, count, e, p.of_values, One<C>()).store(x), rows(dvalues + e, p.of_values, count, width).store(y);
            rows(state + d * p.of_values + e, p.of_values, p.width - d, width).store(z);
            __syncthreads();
            multiply<false, false>(dq, x, z);
            multiply<false, false>(dk, y, z);
          }
          if (dstate) {
            __syncthreads();
            rows(writes + e, p.of_values, count, width).store(x);
            rows(dstate + d * p.of_values + e, p.of_values, p.width - d, width).store(z);
            __syncthreads();
            multiply<false, false>(dk_behind, x, z);
          }
        }
        __syncthreads();
        keys(p, b, t, g, d, count).store(x), queries(p, b, t, g, d, count).store(y);
        keys(p, b, t, g, d, count, [&](int i) { return gates.beta[i]; }).store(z);
        __syncthreads();
        dq.each([&](int, int i, int, C& sum) { sum *= p.scale * gates.gamma[i]; });
        dk.each([&](int, int i, int, C& sum) { sum *= -gates.gamma[i]; });
        dk_behind.each([&](int, int i, int c, C& sum) {
          sum *= gates.left[i];
          last = fused_sum(x.get(i, c), sum, last);
        });
        multiply<false, true>(dq, of_shares, x);
        multiply<false, true>(dk, of_keys, x);
        multiply<true, true>(dk_behind, of_shares, y);
        multiply<true, true>(dk_behind, of_keys, z);
        dq.each([&](int n, int i, int c, C sum) { dsum[n] = fused_sum(y.get(i, c), sum, dsum[n]); });
        dk.each([&](int n, int i, int c, C& sum) {
          dbeta[n] = fused_sum(x.get(i, c), sum, dbeta[n]);
          sum *= gates.beta[i];
          dsum[n] = fused_sum(x.get(i, c), sum, dsum[n]);
        });
        dk_behind.each([&](int n, int i, int c, C sum) { dsum[n] = fused_sum(-x.get(i, c), sum, dsum[n]); });
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int i = Sums<T>::row(n), c = Sums<T>::column(m) + d;
            if (i >= count || c >= p.width) continue;
            const int64_t at = (((b * p.tokens + t + i) * p.key_heads) + g) * p.width + c;
            const bool first = h == first_head;
            w.dq[at] = dq.at(n, m) + (first ? C(0) : w.dq[at]);
            w.dk[at] = dk.at(n, m) + dk_behind.at(n, m) + (first ? C(0) : w.dk[at]);
          }
      }

      last = block_sum(last, of_warps);
      __syncthreads();
      auto &dsums = reinterpret_cast<Tile<C>&>(x), &dbetas = reinterpret_cast<Tile<C>&>(y);
#pragma unroll
      for (int n = 0; n < 4; ++n) dsums.v[Sums<T>::row(n)][Sums<T>::sharer()] = dsum[n], dbetas.v[Sums<T>::row(n)][Sums<T>::sharer()] = dbeta[n];
      __syncthreads();
      auto& by_token = reinterpret_cast<Tile<C>&>(z).v[0];
      const int i = static_cast<int>(threadIdx.x);
      if (i < count) {
        C of_sum = C(0), of_beta = C(0);
        for (int n = 0; n < 16; ++n) of_sum += dsums.v[i][n], of_beta += dbetas.v[i][n];
        by_token[i] = of_sum;
        *w.dbeta.at(b, t + i, h) = of_beta;
      }
      __syncthreads();
      if (i < count) {
        C sum = last;
        for (int n = count - 1; n >= i; --n) sum += by_token[n];
        const bool decays = !gates.is_cut(i) && (state || i > 0);
        *w.ddecay.at(b, t + i, h) = decays ? sum : C(0);  // not rounding errors of a sum that is zero
      }
    }
  }
}

/// For queries or keys: the gradient after their normalisation, and where the result is stored.
template <class T>
struct Normalised {
  Rows<const T> x;
  const Compute<T>* norms;  ///< null: no normalisation
  const Compute<T>* dy;
  Rows<T> dx;
};

/// One warp per row of queries (blockIdx.y = 0) or keys. With y = norm x: dx = norm (dy - y (y·dy)).
template <class T>
__global__ void __launch_bounds__(kThreads) store_gradients(Normalised<T> q, Normalised<T> k) {
  using C = Compute<T>;
  const Normalised<T>& of = blockIdx.y == 0 ? q : k;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= of.x.count) return;
  const T* const x = of.x[row];
  const C *const dy = of.dy + row * of.x.cols, norm = of.norms ? of.norms[row] : C(1);
  C dot = C(0);
  if (of.norms) {
    for (int64_t i = threadIdx.x % kWarp; i < of.x.cols; i += kWarp) dot = fused_sum(norm * convert_to<C>(x[i]), dy[i], dot);
    dot = warp_sum(dot);
  }
  T* const dx = of.dx[row];
  for (int64_t i = threadIdx.x % kWarp; i < of.x.cols; i += kWarp) dx[i] = element<T>(norm * (dy[i] - norm * convert_to<C>(x[i]) * dot));
}

/// The workspace of a backward.
struct Arrays {
  Kept kept;
  void *dvalues, *dstates, *dq, *dk;
};
template <class Take>
Arrays arrays_of(const DeltaRuleOperands& x, Take& take) {
  Arrays out;
  out.kept = kept_of(x, true, take);
  out.dvalues = take(x.v.numel()), out.dstates = take(states_of(x));
  out.dq = take(x.q.numel()), out.dk = take(x.k.numel());
  return out;
}

template <class T>
void backward(const char* who, const Stream& stream, const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout,
              const View& dstate, const DeltaRuleGradients& d, const Arrays& arrays) {
  using C = Compute<T>;
  forward(who, stream, x, options, View{}, View{}, arrays.kept);
  const Rule<T> p(x, options, arrays.kept);
  const auto get = [](void* array) { return static_cast<C*>(array); };
  const Gradients<T> w{get(arrays.kept.inverses), get(arrays.kept.shares), get(arrays.kept.writes), get(arrays.kept.states),
                       Heads<const T>(dout), States<const C>(dstate), get(arrays.dvalues), get(arrays.dstates),
                       Heads<T>(d.v), States<C>(d.initial), Heads<C>(d.decay), Heads<C>(d.beta),
                       get(arrays.dq), get(arrays.dk)};
  static_assert(sizeof(Gates<C>) + 256 / kTile * sizeof(StateTile<T>) + 3 * sizeof(Factor<T>) <= kBlocksSharedBytes, "256 elements a key");
  launch(who, stream,
         {.blocks = p.batch * p.heads * p.value_tiles(), .threads = kThreads,
          .shared_bytes = p.key_tiles() * sizeof(StateTile<T>) + 3 * sizeof(Factor<T>)},
         walk_back<T>, p, w);
  launch(who, stream,
         {.blocks = p.batch * p.key_heads * blocks_for(p.tokens, kTile), .threads = kThreads, .shared_bytes = 5 * sizeof(Factor<T>)},
         chunk_gradients<T>, p, w);
  const Normalised<T> q{rows_of<const T>(who, x.q), p.q_norms, w.dq, rows_of<T>(who, d.q)},
      k{rows_of<const T>(who, x.k), p.k_norms, w.dk, rows_of<T>(who, d.k)};
  launch(who, stream, {.blocks = blocks_for(q.x.count, kThreads / kWarp), .threads = kThreads, .blocks_y = 2}, store_gradients<T>, q, k);
}

}  // namespace
}  // namespace delta

size_t delta_rule_backward_workspace(const DeltaRuleOperands& x, const View& dout, const View& dstate, const DeltaRuleGradients& d) {
  delta::check_operands("delta_rule_backward", x, dout, dstate);
  check_delta_rule_backward("delta_rule_backward", x, dout, dstate, d);
  delta::Measure measure{delta::compute_size(x)};
  delta::arrays_of(x, measure);
  return measure.bytes;
}

void delta_rule_backward(const Stream& stream, const DeltaRuleOperands& x, const DeltaRuleOptions& options, const View& dout,
                         const View& dstate, const DeltaRuleGradients& d, Workspace workspace) {
  const char* who = "delta_rule_backward";
  delta::check_operands(who, x, dout, dstate);
  check_delta_rule_backward(who, x, dout, dstate, d);
  delta::Carve carve{Carver(who, workspace), delta::compute_size(x)};
  const delta::Arrays arrays = delta::arrays_of(x, carve);
  visit_floating(who, x.q.dtype, [&]<class T>() { delta::backward<T>(who, stream, x, options, dout, dstate, d, arrays); });
}

}  // namespace sheaf::kernels::cuda
