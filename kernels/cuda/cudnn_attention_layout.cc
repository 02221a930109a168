#include <limits>
#include <vector>

#include "sheaf/core/error.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/cudnn_attention.h"

namespace sheaf::kernels::cuda::cudnn {
namespace {

constexpr int64_t kUnit = 8;  // elements in 16 bytes

bool aligned(const View& v) {
  bool out = v.rank() == 4 && v.strides[3] == 1 && reinterpret_cast<uintptr_t>(v.data) % 16 == 0;
  for (int d = 0; d < 3 && out; ++d) out = v.strides[d] % kUnit == 0 && v.strides[d] > 0;
  return out;
}

/// Part `i` of `parts` equal ones along dimension `dim`, if there is a view.
View part_of(View v, int dim, int64_t parts, int64_t i) {
  if (v.rank() == 0) return v;
  v.shape[dim] /= parts;
  if (v.data)
    v.data =
        v.as<char>() + i * v.shape[dim] * v.strides[dim] * static_cast<int64_t>(size_of(v.dtype));
  return v;
}

/// Heads are dimension 2, dimension 1 for lse.
void cut(const Attention& a, int dim, int64_t parts, std::vector<Attention>& out) {
  for (int64_t i = 0; i < parts; ++i) {
    Attention& part = out.emplace_back(a);
    for (View* v : {&part.q, &part.k, &part.v, &part.out, &part.dout, &part.dq, &part.dk, &part.dv})
      *v = part_of(*v, dim, parts, i);
    part.lse = part_of(a.lse, dim == 0 ? 0 : 1, parts, i);
    if (dim == 0) part.begins = part_of(a.begins, 0, parts, i);
  }
}

}  // namespace

std::vector<Attention> parts_of(const Attention& a) {
  if (a.dout.rank() == 0 || !a.deterministic) return {a};
  constexpr int64_t kTile = 128;  // keys
  const int64_t batch = a.q.shape[0], tokens = a.q.shape[1], heads = a.q.shape[2],
                groups = a.k.shape[2], keys = (a.k.shape[1] + kTile - 1) / kTile * kTile,
                sequence = heads * tokens * keys * static_cast<int64_t>(size_of(a.q.dtype));
  const auto fewest = [&](int64_t size, int64_t bytes) {  // equal parts of `size`, `bytes` in total
    int64_t parts = 1;
    while (parts < size && (size % parts != 0 || bytes / parts > a.most_workspace)) ++parts;
    return parts;
  };
  const int64_t by_batch = fewest(batch, batch * sequence),
                by_heads = by_batch < batch ? 1 : fewest(groups, sequence);
  std::vector<Attention> sequences, out;
  cut(a, 0, by_batch, sequences);
  for (const Attention& s : sequences) cut(s, 2, by_heads, out);
  return out;
}

std::string layout_refusal(const Attention& a) {
  const bool backward = a.dout.rank() != 0;
  if (a.q.dtype != kBF16 && a.q.dtype != kF16) return str("for bf16 and f16, not ", a.q.dtype);
  if (!a.causal) return "causal attention only";
  if (a.softcap != 0) return "scores without a softcap only";
  std::vector<const View*> operands{&a.q, &a.k, &a.v, &a.out};
  if (backward) operands.insert(operands.end(), {&a.dout, &a.dq, &a.dk, &a.dv});
  for (const View* v : operands) {
    if (v->dtype != a.q.dtype) return "operands of one type only";
    if (!aligned(*v))
      return str(
          "operands need four dimensions, the last dense, all rows at multiples of 16 "
          "bytes: ",
          v->shape, " with strides ", v->strides);
  }
  const Shape &q = a.q.shape, &k = a.k.shape, &v = a.v.shape, &out = a.out.shape;
  const bool matches = k == Shape{q[0], k[1], k[2], q[3]} && v == Shape{k[0], k[1], k[2], v[3]} &&
                       out == Shape{q[0], q[1], q[2], v[3]} && k[2] > 0 && q[2] % k[2] == 0 &&
                       (!backward || (a.dout.shape == out && a.dq.shape == q && a.dk.shape == k &&
                                      a.dv.shape == v));
  if (!matches)
    return str("shapes of queries ", q, ", keys ", k, " and values ", v, " do not fit together");
  if (k[1] < q[1]) return str("as many keys as queries or more only, not ", k[1], " for ", q[1]);
  if (q.numel() == 0 || v.numel() == 0) return "nothing to compute";
  for (const int64_t tokens : {q[1], k[1]})
    if (tokens % 64 != 0) return str("tried for whole blocks of 64 tokens only, not for ", tokens);
  // NVIDIA's own frontend hides scores beyond the last key or query with a mask for lengths. We have none, and the kernel for Hopper
  // fills a half block with scores of 0, whose weights overflow if all other scores of a row are far below
  // (https://github.com/NVIDIA/cudnn-frontend/pull/628 of keys, https://github.com/NVIDIA/cudnn-frontend/issues/1072 of queries).
  for (const int64_t tokens : {q[1], k[1]})
    if (backward && tokens % 128 != 0) return str("backward for whole blocks of 128 tokens only, not for ", tokens);
  // cuDNN plans others of up to 256 elements, too. Except for DeepSeek's, NVIDIA's own Transformer Engine refuses the backward pass
  // if both are 128 or more and differ: a bug since 9.11.
  const bool narrow = q[3] % 8 == 0 && q[3] <= 128 && v[3] % 8 == 0 && v[3] <= 128;
  if (!narrow && !(q[3] == 192 && v[3] == 128))
    return str("heads of 8, 16, .., 128 elements, or of 192 with values of 128, not of ", q[3],
               " with values of ", v[3]);
  const View& lse = a.lse;
  const Shape lse_rows = lse_strides(a);
  if (lse.dtype != kF32 || lse.shape != Shape{q[0], q[2], q[1]} || lse_rows[2] != 1 ||
      lse_rows[0] <= 0 || lse_rows[0] % 4 != 0 || lse_rows[1] <= 0 || lse_rows[1] % 4 != 0 ||
      reinterpret_cast<uintptr_t>(lse.data) % 16 != 0)
    return str("lse must be f32[B, H, T], rows at multiples of 16 bytes: ", lse.shape, " of ", lse.dtype,
               " with strides ", lse.strides);
  const View& begins = a.begins;
  if (begins.rank() != 0 &&
      (begins.dtype != kI32 || begins.shape != Shape{q[0], q[1]} || begins.strides[1] != 1 ||
       begins.strides[0] <= 0 || begins.strides[0] % 4 != 0 ||
       reinterpret_cast<uintptr_t>(begins.data) % 16 != 0))
    return str("where documents begin must be i32[B, T], rows at multiples of 16 bytes: ",
               begins.shape, " of ", begins.dtype, " with strides ", begins.strides);
  return "";
}

std::string version_refusal(int64_t version, const Attention& a) {
  const std::string name =
      str("cuDNN ", version / 10000, '.', version / 100 % 100, '.', version % 100);
  if (version < 90500) return name + " was never tried, only 9.5 and later";
  // NVIDIA's own frontend refuses these, forward and backward.
  if (version == 91000 || version == 91001)
    return name + " has bugs in attention of bf16 and f16, as NVIDIA says; 9.10.2 has not";
  if (version < 90600 && a.window != 0 && a.k.shape[1] != a.q.shape[1])
    return name + ": windows over as many keys as queries only; 9.6 and later take others";
  return "";
}

Attention with_packed_lse(const Attention& a) {
  Attention out = a;
  if (a.dout.rank() != 0 && !a.lse.contiguous()) out.lse = View::dense(nullptr, kF32, a.lse.shape);
  return out;
}

float masked_score(int64_t version, const Attention& a) {
  // If a query sees nothing of a block of keys, -inf minus the largest score is NaN, unless a kernel checks. That happens if
  // documents or windows hide the first blocks; this score has no weight next to any other, either, and its products with log2(e) are
  // finite.
  if (a.begins.rank() > 0 || a.window) return -1e30f;
  // NVIDIA's own frontend uses the lowest number for kernels before 9.10 and -inf for later ones.
  return version < 91000 ? std::numeric_limits<float>::lowest()
                         : -std::numeric_limits<float>::infinity();
}

Shape lse_strides(const Attention& a) {
  return a.lse.contiguous() ? a.lse.shape.contiguous_strides() : a.lse.strides;
}

std::vector<int64_t> plan_key(const Attention& a) {
  std::vector<int64_t> key{static_cast<int64_t>(a.q.dtype), a.k.shape[1],    a.k.shape[2], a.v.shape[3],
                           a.dout.rank() != 0,              a.deterministic, a.window != 0};
  const Shape lse = lse_strides(a);
  key.insert(key.end(), lse.begin(), lse.end());
  key.insert(key.end(), a.q.shape.begin(), a.q.shape.end());
  for (const View* v : {&a.q, &a.k, &a.v, &a.out, &a.dout, &a.dq, &a.dk, &a.dv, &a.begins})
    key.insert(key.end(), v->strides.begin(), v->strides.end());
  return key;
}

void check_can_be_planned(const Attention& a) {
  const auto& gpu = RankContext::current().gpu;
  if (gpu && gpu->capturing())
    fail_for(a,
             "there is no plan for these yet, and none is compiled while a graph is captured; "
             "compute it once before");
}

void fail_for(const Attention& a, std::string_view why) {
  fail<CudaError>("[attention] cuDNN, ", a.dout.rank() != 0 ? "backward" : "forward", ", queries ",
                  a.q.shape, ", keys ", a.k.shape, ", values ", a.v.shape, " of ", a.q.dtype, ": ",
                  why);
}

}  // namespace sheaf::kernels::cuda::cudnn
