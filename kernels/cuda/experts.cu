#include "sheaf/kernels/cuda/rows.h"
#include "sheaf/kernels/experts.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

/// One warp per item.
LaunchShape warps_for(int64_t items) {
  return {.blocks = blocks_for(items, kWarps), .threads = kThreads};
}
__device__ int64_t item_of_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
}
__device__ int lane_of_thread() { return static_cast<int>(threadIdx.x) % kWarp; }

/// A value and its index; -1: none.
template <class C>
struct Candidate {
  C value;
  int64_t at;
  /// NaN before numbers, larger before smaller, the first of equals.
  __device__ bool before(const Candidate& o) const {
    if (at < 0 || o.at < 0) return at >= 0;
    const bool nan = value != value, other_nan = o.value != o.value;
    if (nan != other_nan) return nan;
    return nan || value == o.value ? at < o.at : value > o.value;
  }
};

template <class T>
__global__ void top_k_rows(const T* x, int64_t rows, int64_t n, int64_t k, int64_t* out) {
  using C = Compute<T>;
  const int64_t row = item_of_warp();
  if (row >= rows) return;
  const int lane = lane_of_thread();
  Candidate<C> last{C(0), -1};
  for (int64_t c = 0; c < k; ++c) {
    Candidate<C> best{C(0), -1};
    for (int64_t i = lane; i < n; i += kWarp) {
      const Candidate<C> here{convert_to<C>(x[row * n + i]), i};
      if ((c == 0 || last.before(here)) && here.before(best)) best = here;
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const Candidate<C> other{__shfl_xor_sync(kFullWarp, best.value, step),
                               __shfl_xor_sync(kFullWarp, best.at, step)};
      if (other.before(best)) best = other;
    }
    last = best;
    if (lane == 0) out[row * k + c] = best.at;
  }
}

constexpr int kMostSearching = 32;  // warps of a block

/// The choices of one expert among those of a group: a block searches for them, each of its warps in a stretch.
struct ChoicesOfExpert {
  int64_t expert, sequence, group, first, begin, end;  ///< `first` of the group; [begin, end) of the warp

  __device__ explicit ChoicesOfExpert(const Routing& r)
      : expert(blockIdx.x / r.groups / r.sequences),
        sequence(blockIdx.x / r.groups % r.sequences),
        group(blockIdx.x % r.groups),
        first((sequence * r.tokens + r.first_of(group)) * r.choices) {
    const int64_t last = (sequence * r.tokens + r.first_of(group + 1)) * r.choices;
    const int64_t stretch = (last - first + blockDim.x - 1) / blockDim.x * kWarp;
    begin = first + stretch * (threadIdx.x / kWarp);
    begin = begin < last ? begin : last;
    end = begin + stretch < last ? begin + stretch : last;
  }
  /// f(place in `choices`, choice, whether it is the expert's, number of the expert's before it in the stretch), in all lanes; returns
  /// the number of the expert's in the stretch.
  template <class F>
  __device__ int64_t each(const int64_t* choices, F f) const {
    constexpr int kAtOnce = 4;  // loads in flight: a warp has many rounds, and little else to do
    const int lane = lane_of_thread();
    int64_t count = 0;
    for (int64_t base = begin; base < end; base += kAtOnce * kWarp) {
      int64_t choice[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t at = base + k * kWarp + lane;
        choice[k] = choices[at < end ? at : end - 1];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int64_t at = base + k * kWarp + lane;
        const bool mine = at < end && choice[k] == expert;
        const unsigned all = __ballot_sync(kFullWarp, mine);
        if (at < end) f(at, choice[k], mine, count + __popc(all & ((1u << lane) - 1u)));
        count += __popc(all);
      }
    }
    return count;
  }
  /// The number of the expert's in the stretches before this warp's, and in the group. For all threads of the block at once.
  struct Counts { int64_t before, all; };
  __device__ Counts count(const int64_t* choices) const {
    __shared__ int64_t of_warps[kMostSearching];
    const int64_t own = each(choices, [](int64_t, int64_t, bool, int64_t) {});
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane_of_thread() == 0) of_warps[warp] = own;
    __syncthreads();
    Counts counts{0, 0};
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
      if (w < warp) counts.before += of_warps[w];
      counts.all += of_warps[w];
    }
    return counts;
  }
};

/// counts[E, B, N]: at most `places` of each.
__global__ void __launch_bounds__(kMostSearching * kWarp)
count_choices(Routing r, int64_t places, const int64_t* choices, int32_t* counts) {
  const int64_t count = ChoicesOfExpert(r).count(choices).all;
  if (threadIdx.x == 0) counts[blockIdx.x] = static_cast<int32_t>(count < places ? count : places);
}

/// Limits the counts to the rows that parts have: one thread for each group of a part.
__global__ void fit_counts(Routing r, ExpertParts p, int32_t* counts) {
  const int64_t groups = r.sequences * r.groups, item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= r.parts * groups) return;
  const int64_t end = p.first_of(item / groups + 1);
  int32_t* const of_group = counts + item % groups;
  int64_t left = r.room;
  constexpr int kAtOnce = 8;  // loads in flight: after a store each would be waited for
  for (int64_t first = p.first_of(item / groups); first < end; first += kAtOnce) {
    int64_t count[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) count[k] = of_group[(first + k < end ? first + k : end - 1) * groups];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k >= end) break;
      if (count[k] > left) of_group[(first + k) * groups] = static_cast<int32_t>(left);
      left -= count[k] < left ? count[k] : left;
    }
  }
}

__global__ void __launch_bounds__(kMostSearching * kWarp)
fill_rows(Routing r, ExpertParts p, const int64_t* choices, int32_t* slots, int32_t* sources, const int32_t* counts) {
  const ChoicesOfExpert own(r);
  const int64_t groups = r.sequences * r.groups, item = blockIdx.x, part = p.part_of(own.expert), count = counts[item];
  const int64_t before_stretch = own.count(choices).before;
  int64_t begin = 0;  // of the expert's rows
  for (int64_t e = p.first_of(part); e < own.expert; ++e) begin += counts[e * groups + item % groups];
  own.each(choices, [&](int64_t at, int64_t choice, bool mine, int64_t before) {
    if (own.expert == 0 && (choice < 0 || choice >= p.experts)) slots[at] = -1;
    if (!mine) return;
    const int64_t place = before_stretch + before;
    slots[at] = place < count ? static_cast<int32_t>(part * r.room + begin + place) : -1;
    if (place < count) sources[r.row(part, own.sequence, own.group, begin + place)] = static_cast<int32_t>(at - own.first);
  });
  if (own.expert + 1 < p.first_of(part + 1)) return;
  for (int64_t row = begin + count + threadIdx.x; row < r.room; row += blockDim.x)
    sources[r.row(part, own.sequence, own.group, row)] = -1;
}

/// An array of integers or weights.
template <class T>
using Each = Rows<const T>;
template <class T>
Each<T> each_of(const char* who, const View& v) {
  return elements_of<const T>(who, v);
}

template <class T>
__global__ void send_rows(Routing r, Rows<const T> x, bool weighted, Each<Compute<T>> weights,
                          Each<int32_t> sources, Rows<T> rows) {
  using C = Compute<T>;
  const int64_t row = item_of_warp(), cols = x.cols;
  if (row >= r.rows()) return;
  const int64_t source = *sources[row];
  const int64_t choice = source < 0 ? 0 : r.choice_at(row, source);
  const T* from = source < 0 ? nullptr : x[choice / r.choices];
  const C weight = weighted && source >= 0 ? *weights[choice] : C(1);
  for (int64_t at = lane_of_thread() * Pack<T>::kSize; at < cols; at += kWarp * Pack<T>::kSize) {
    Pack<T> pack;
    if (source >= 0) pack = load_chunk(from, at, cols);
#pragma unroll
    for (int i = 0; i < Pack<T>::kSize; ++i)
      if (source < 0) pack.v[i] = element<T>(C(0));
      else if (weighted) pack.v[i] = element<T>(weight * convert_to<C>(pack.v[i]));
    store_chunk(rows[row], at, cols, pack);
  }
}

template <class T>
__global__ void return_rows(Routing r, Rows<const T> rows, bool weighted, Each<Compute<T>> weights,
                            Each<int32_t> slots, Rows<T> y) {
  using C = Compute<T>;
  constexpr int kSize = Pack<T>::kSize, kAtOnce = 4;  // loads in flight
  const int64_t token = item_of_warp(), cols = y.cols;
  if (token >= r.sequences * r.tokens) return;
  const int lane = lane_of_thread();
  // To find a choice's row takes divisions: each lane finds one, for all columns.
  constexpr int64_t kNone = INT64_MIN;
  int64_t place_of_lane = kNone;
  C weight_of_lane = C(1);
  const auto find = [&](int64_t first) {
    const int64_t choice = token * r.choices + first + lane, slot = first + lane < r.choices ? *slots[choice] : -1;
    const bool there = r.has(slot);
    place_of_lane = there ? rows.at.offset(0, r.row_at(choice, slot)) : kNone;
    weight_of_lane = there && weighted ? *weights[choice] : C(1);
  };
  find(0);
  for (int64_t begin = 0; begin < cols; begin += kWarp * kSize) {
    const int64_t at = begin + lane * kSize;
    C total[kSize] = {};
    for (int64_t c = 0; c < r.choices; c += kAtOnce) {
      if (r.choices > kWarp && c % kWarp == 0) find(c);
      const int first = static_cast<int>(c % kWarp);
      int64_t place[kAtOnce];
      uint4 raw[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {  // lanes past the last choice have no row
        place[k] = __shfl_sync(kFullWarp, place_of_lane, first + k);
        if (place[k] != kNone) raw[k] = load_raw(rows.data + place[k], at, cols);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const C weight = __shfl_sync(kFullWarp, weight_of_lane, first + k);
        if (place[k] == kNone) continue;
        const Pack<T> pack = unpressed<T>(raw[k]);
#pragma unroll
        for (int i = 0; i < kSize; ++i) total[i] += weight * convert_to<C>(pack.v[i]);
      }
    }
    Pack<T> out;
#pragma unroll
    for (int i = 0; i < kSize; ++i) out.v[i] = element<T>(total[i]);
    store_chunk(y[token], at, cols, out);
  }
}

template <class T>
__global__ void dot_choices(Routing r, Rows<const T> rows, Rows<const T> y, Each<int32_t> slots,
                            Compute<T>* out) {
  using C = Compute<T>;
  const int64_t choice = item_of_warp(), cols = y.cols;
  if (choice >= r.sequences * r.tokens * r.choices) return;
  const int64_t slot = *slots[choice];
  C total = 0;
  if (r.has(slot)) {
    const T *a = rows[r.row_at(choice, slot)], *b = y[choice / r.choices];
    for (int64_t at = lane_of_thread() * Pack<T>::kSize; at < cols; at += kWarp * Pack<T>::kSize) {
      const Pack<T> p = load_chunk(a, at, cols), q = load_chunk(b, at, cols);
#pragma unroll
      for (int i = 0; i < Pack<T>::kSize; ++i)
        total += convert_to<C>(p.v[i]) * convert_to<C>(q.v[i]);
    }
  }
  total = warp_sum(total);
  if (lane_of_thread() == 0) out[choice] = total;
}

/// f(storage type of rows and y); weights have its compute type.
template <class F>
void visit_rows(const char* who, const View& rows, const View& y, const View& weights, F&& f) {
  check<DTypeError>(rows.dtype == y.dtype, '[', who, "] dtypes ", rows.dtype, " and ", y.dtype);
  visit_floating(who, rows.dtype, [&]<class T>() {
    check<DTypeError>(weights.rank() == 0 || weights.dtype == dtype_of<Compute<T>>, '[', who,
                      "] weights of ", weights.dtype, " for rows of ", rows.dtype);
    f.template operator()<T>();
  });
}

}  // namespace

void top_k(const Stream& stream, const View& x, const View& out) {
  const int64_t k = out.shape.back(), n = x.shape.back();
  check<ShapeError>(k <= n && x.contiguous() && out.contiguous() && out.dtype == kI64,
                    "[top_k] the ", k, " largest of ", x.shape);
  if (out.numel() == 0) return;
  visit_floating("top_k", x.dtype, [&]<class T>() {
    launch("top_k", stream, warps_for(out.numel() / k), top_k_rows<T>,
           static_cast<const T*>(x.as<T>()), out.numel() / k, n, k, out.as<int64_t>());
  });
}

void route(const Stream& stream, const View& choices, int64_t places, const View& slots, const View& sources,
           const View& counts) {
  const char* who = "route";
  const Routing r = Routing::of(slots, sources, 0);
  const ExpertParts p{counts.shape[0], r.parts};
  const auto* const choice = choices.as<const int64_t>();
  constexpr int64_t kLeast = 128;  // choices of a warp
  const int64_t searching = std::clamp<int64_t>(blocks_for(r.tokens * r.choices, r.groups * kLeast), 1, kMostSearching);
  const LaunchShape each{.blocks = counts.numel(), .threads = static_cast<int>(searching) * kWarp};
  launch(who, stream, each, count_choices, r, std::min(places, r.room), choice, counts.as<int32_t>());
  if (p.parts != p.experts)
    launch(who, stream, {.blocks = blocks_for(r.parts * r.sequences * r.groups, kThreads), .threads = kThreads}, fit_counts, r, p,
           counts.as<int32_t>());
  launch(who, stream, each, fill_rows, r, p, choice, slots.as<int32_t>(), sources.as<int32_t>(), counts.as<const int32_t>());
}

void to_experts(const Stream& stream, const View& x, const View& weights, const View& slots,
                const View& sources, const View& rows) {
  constexpr const char* kName = "to_experts";
  const Routing r = Routing::of(slots, rows, 1);
  if (rows.numel() == 0) return;
  visit_rows(kName, rows, x, weights, [&]<class T>() {
    launch(kName, stream, warps_for(r.rows()), send_rows<T>, r, rows_of<const T>(kName, x),
           weights.rank() != 0, each_of<Compute<T>>(kName, weights), each_of<int32_t>(kName, sources),
           rows_of<T>(kName, rows));
  });
}

void from_experts(const Stream& stream, const View& rows, const View& weights, const View& slots, const View& y,
                  int64_t first_part) {
  constexpr const char* kName = "from_experts";
  const Routing r = Routing::of(slots, rows, 1, first_part);
  if (y.numel() == 0) return;
  visit_rows(kName, rows, y, weights, [&]<class T>() {
    launch(kName, stream, warps_for(r.sequences * r.tokens), return_rows<T>, r,
           rows_of<const T>(kName, rows), weights.rank() != 0,
           each_of<Compute<T>>(kName, weights), each_of<int32_t>(kName, slots), rows_of<T>(kName, y));
  });
}

void choice_dots(const Stream& stream, const View& rows, const View& y, const View& slots, const View& out, int64_t first_part) {
  constexpr const char* kName = "choice_dots";
  const Routing r = Routing::of(slots, rows, 1, first_part);
  if (out.numel() == 0) return;
  visit_rows(kName, rows, y, out, [&]<class T>() {
    launch(kName, stream, warps_for(out.numel()), dot_choices<T>, r, rows_of<const T>(kName, rows),
           rows_of<const T>(kName, y), each_of<int32_t>(kName, slots), out.as<Compute<T>>());
  });
}

}  // namespace sheaf::kernels::cuda
