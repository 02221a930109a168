#include <algorithm>
#include <limits>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cross_entropy.h"
#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/gemm.h"
#include "sheaf/kernels/cuda/log_sum_exp.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf::kernels::cuda {
namespace {

constexpr int64_t kMostColumns = 1 << 30;  // of losses_and_gradients
constexpr int kGradientThreads = 256, kLossThreads = 1024;
constexpr int64_t kPadding = 8;  // elements: rows of logits begin at 16 bytes in any type

// What of a row waits in shared memory for its log-sum-exp: two blocks share a multiprocessor where
// that holds the better part of a row, else one has it alone.
constexpr int64_t kShare = 108 << 10, kAlone = 2 * kShare;

template <class C>
__device__ C probability(C logit, C lse) {
  const C x = logit - lse;
  return std::is_same_v<C, float> ? C(expf(static_cast<float>(x))) : C(::exp(x));
}

/// cross_entropy and logit_gradients in one, bit for bit: a row to a block, from the last one,
/// which the cache still has, to the first. The first `held_batches` rounds of the block are read
/// once; what lies behind, and did not fit, is read again, from the cache if it has it. Rows are
/// padded as there.
template <class C, class G>
__global__ void __launch_bounds__(kLogSumExpThreads, 2)
    losses_and_gradients(const C* logits, int64_t pitch, int n, int held_batches,
                         const int64_t* targets, int64_t ignore_index, C* losses, G* out) {
  constexpr int kSize = Pack<C>::kSize, kBatch = kLogSumExpBatch;
  __shared__ C scratch[2][kWarp];
  const int64_t row = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x, target = targets[row];
  const C* const x = logits + row * pitch;
  G* const to = out + row * pitch;
  const int threads = static_cast<int>(blockDim.x), begin = static_cast<int>(threadIdx.x) * kSize,
            step = threads * kSize;
  if (target == ignore_index) {
    for (int at = begin; at < n; at += step) *reinterpret_cast<Group<G, kSize>*>(to + at) = {};
    if (threadIdx.x == 0) losses[row] = C(0);
    return;
  }
  const bool inside = target >= 0 && target < n;
  const int hit = inside ? static_cast<int>(target) : -kSize;
  const auto load = [&](int first, Pack<C>(&packs)[kBatch]) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (first + u * step < n) packs[u] = load_pack(x + first + u * step);
  };
  LogSumExp<C> seen;
  Pack<C>* held = dynamic_shared<Pack<C>>() + threadIdx.x;
  for (int first = begin, batch = 0; first < n; first += kBatch * step, ++batch) {
    Pack<C> packs[kBatch];
    load(first, packs);
    if (batch < held_batches) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) held[u * threads] = packs[u];
      held += kBatch * threads;
    }
    seen.add(packs, step, n - first);
  }
  C lse = seen.over_block(scratch);
  if (!inside) {
    lse = std::numeric_limits<C>::quiet_NaN();
    if (threadIdx.x == 0) losses[row] = lse;
  }
  // A thread takes what it has read itself: out may be the memory of logits.
  held = dynamic_shared<Pack<C>>() + threadIdx.x;
  for (int first = begin, batch = 0; first < n; first += kBatch * step, ++batch) {
    Pack<C> packs[kBatch];
    if (batch < held_batches) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) packs[u] = held[u * threads];
      held += kBatch * threads;
    } else {
      load(first, packs);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int at = first + u * step;
      if (at >= n) break;
      Group<G, kSize> gradient;
#pragma unroll
      for (int k = 0; k < kSize; ++k) gradient.v[k] = element<G>(probability(packs[u].v[k], lse));
      if (const int place = hit - at; place >= 0 && place < kSize) {
#pragma unroll
        for (int k = 0; k < kSize; ++k)
          if (k == place) {
            losses[row] = lse - packs[u].v[k];
            gradient.v[k] = element<G>(rounded_sum(probability(packs[u].v[k], lse), C(-1)));
          }
      }
      *reinterpret_cast<Group<G, kSize>*>(to + at) = gradient;
    }
  }
}

/// lse and the target's logit of a row of part of the vocabulary: a row to a block. Rows are padded
/// as below.
template <class C>
__global__ void __launch_bounds__(kLogSumExpThreads, 2)
    part_values(const C* logits, int64_t pitch, int64_t n, TablePart part, const int64_t* targets,
                int64_t ignore_index, C* lse, C* target_logits) {
  constexpr int kSize = Pack<C>::kSize, kBatch = kLogSumExpBatch;
  __shared__ C scratch[2][kWarp];
  const int64_t row = blockIdx.x, token = targets[row], target = token - part.first;
  if (token == ignore_index) {
    if (threadIdx.x != 0) return;
    lse[row] = part.first == 0 && n > 0 ? C(0) : -std::numeric_limits<C>::infinity();
    target_logits[row] = C(0);
    return;
  }
  const C* const x = logits + row * pitch;
  LogSumExp<C> seen;
  const int step = static_cast<int>(blockDim.x) * kSize;
  for (int64_t first = threadIdx.x * kSize; first < n; first += kBatch * step) {
    Pack<C> packs[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (first + u * step < n) packs[u] = load_pack(x + first + u * step);
    seen.add(packs, step, static_cast<int>(std::min<int64_t>(n - first, INT32_MAX)));
  }
  const C total = seen.over_block(scratch);
  if (threadIdx.x != 0) return;
  lse[row] = total;
  target_logits[row] = target >= 0 && target < n        ? x[target]
                       : token >= 0 && token < part.all ? C(0)
                                                        : std::numeric_limits<C>::quiet_NaN();
}

/// What a logit's gradient takes from its row: of a loss, (p - onehot(target)) * dloss for a
/// probability p.
template <class C>
struct OfLoss {
  const C* dloss;
  struct Row {
    C scale;
    __device__ C operator()(C p, bool is_target) const {
      return rounded_sum(p, -C(is_target)) * scale;
    }
  };
  __device__ Row row(int64_t, bool bad) const {
    return {bad ? std::numeric_limits<C>::quiet_NaN() : dloss ? *dloss : C(1)};
  }
};
/// Of values of part of the vocabulary: p * dlse + onehot(target) * dtarget.
template <class C>
struct OfPart {
  Rows<const C> dlse, dtarget;
  int64_t first_row;
  struct Row {
    C dlse, dtarget;
    __device__ C operator()(C p, bool is_target) const {
      return rounded_sum(rounded_product(p, dlse), is_target ? dtarget : C(0));
    }
  };
  __device__ Row row(int64_t r, bool bad) const {
    const C dlse_of_row = *dlse[first_row + r];
    return {bad ? std::numeric_limits<C>::quiet_NaN() : dlse_of_row, *dtarget[first_row + r]};
  }
};

/// Gradients of logits, as `From` says, in the products' type G: a row to a block, from the last
/// one, which the cache still has, to the first. out may be the memory of logits. Rows are padded
/// to whole packs, which may be read and written beyond n.
template <class C, class G, class From>
__global__ void __launch_bounds__(kGradientThreads)
    logit_gradients(const C* logits, int64_t pitch, int64_t n, TablePart part,
                    const int64_t* targets, int64_t ignore_index, const C* lse, From from, G* out) {
  constexpr int kSize = Pack<G>::kSize, kParts = kSize / Pack<C>::kSize;
  const int64_t row = static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x, token = targets[row],
                target = token - part.first;
  const bool ignored = token == ignore_index;
  const C log_sum = lse[row];
  const auto gradient = from.row(row, token < 0 || token >= part.all);
  for (int64_t at = static_cast<int64_t>(threadIdx.x) * kSize; at < n;
       at += static_cast<int64_t>(blockDim.x) * kSize) {
    Pack<C> in[kParts];
    Pack<G> pack{};
    if (!ignored) {
#pragma unroll
      for (int p = 0; p < kParts; ++p)
        in[p] = load_pack(logits + row * pitch + at + p * Pack<C>::kSize);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const C logit = in[k / Pack<C>::kSize].v[k % Pack<C>::kSize];
        pack.v[k] = element<G>(gradient(probability(logit, log_sum), at + k == target));
      }
    }
    store_pack(out + row * pitch + at, pack);
  }
}

/// The sum in f64: each thread's terms in order, then the threads' sums in pairs. One block.
template <class C>
__global__ void __launch_bounds__(kLossThreads) sum_losses(const C* losses, int64_t rows, C* loss) {
  __shared__ double sums[kLossThreads];
  double sum = 0;
  for (int64_t r = threadIdx.x; r < rows; r += kLossThreads) sum += static_cast<double>(losses[r]);
  sums[threadIdx.x] = sum;
  for (int half = kLossThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *loss = static_cast<C>(sums[0]);
}

bool given(const View& v) { return v.rank() != 0; }

/// What a row gives and takes; null: not wanted, or not there.
struct RowValues {
  const View *loss = nullptr, *target_logits = nullptr;  ///< of all rows added up; of each
  const View* lse = nullptr;                             ///< each row's: made, or given
  bool compute_lse = true;
  const View* dloss = nullptr;                     ///< gradients of the loss; null: 1
  const View *dlse = nullptr, *dtarget = nullptr;  ///< of each row's, where the weight is a part
  TablePart part;
};

/// Operands and the walk over chunks. Which parts run depends on which views are given.
class Head {
 public:
  Head(const char* who, const View& x_in, const View& weight, const View& dx_in,
       const View& dweight)
      : who_(who),
        x_in_(x_in),
        x_(as_matrix(x_in)),
        weight_(weight),
        dx_(given(dx_in) ? as_matrix(dx_in) : View{}),
        dweight_(dweight) {
    check<ShapeError>(!given(dx_in) || given(dx_), "[", who, "] rows of dx ", dx_in.shape,
                      " must be evenly spaced");
    copy_x_ = !given(x_);
    if (copy_x_) x_ = dense_matrix(nullptr, x_in);
    check<ShapeError>(weight.rank() == 2 && weight.shape[1] == x_.shape[1], "[", who, "] weight ",
                      weight.shape, " for input ", x_in.shape);
    check<ShapeError>((!given(dx_) || dx_.shape == x_.shape) &&
                          (!given(dweight) || dweight.shape == weight.shape),
                      "[", who, "] gradients ", dx_.shape, " and ", dweight.shape);
    check<DTypeError>(is_floating(x_.dtype), "[", who, "] input of ", x_.dtype);
    rows_ = x_.shape[0], vocabulary_ = weight.shape[0];
    chunk_ = std::min(linear_cross_entropy_chunk(vocabulary_), std::max<int64_t>(rows_, 1));
    pitch_ = blocks_for(vocabulary_, kPadding) * kPadding;
    row_dtype_ = x_.dtype == kF64 ? kF64 : kF32;
    narrow_ = x_.dtype != row_dtype_ && backward();
    sum_apart_ = given(dweight) && dweight.dtype != row_dtype_ && rows_ > chunk_;
  }

  size_t workspace() const {
    const size_t cells = static_cast<size_t>(chunk_ * pitch_), size = size_of(row_dtype_),
                 rows = static_cast<size_t>(rows_);
    return line_align(product_bytes()) + line_align(cells * size) +
           (narrow_ ? line_align(cells * size_of(x_.dtype)) : 0) +
           (sum_apart_ ? line_align(static_cast<size_t>(weight_.numel()) * size) : 0) +
           2 * line_align(rows * size) + line_align(rows * sizeof(int64_t)) +
           (copy_x_ ? line_align(static_cast<size_t>(x_.bytes())) : 0);
  }

  void run(const Stream& stream, const View& targets, int64_t ignore_index, const RowValues& v,
           Workspace memory) {
    check<ShapeError>(targets.numel() == rows_, "[", who_, "] targets ", targets.shape, " for ",
                      rows_, " rows");
    for (const View* values : {v.lse, v.target_logits, v.dlse, v.dtarget})
      check<ShapeError>(!values || values->numel() == rows_, "[", who_, "] row values ",
                        values ? values->shape : Shape{}, " for ", rows_, " rows");
    for (const View* values : {v.loss, v.lse, v.target_logits, v.dloss})
      check<DTypeError>(!values || (values->dtype == row_dtype_ && values->contiguous()), "[", who_,
                        "] loss and row values must be dense ", row_dtype_);
    (void)visit_index(who_, targets.dtype, [&]<class I>() { return sizeof(I); });  // else an error
    Carver carver(who_, memory);
    const auto take = [&](int64_t count, DType dtype) -> void* {
      return carver.take<char>(count * static_cast<int64_t>(size_of(dtype)));
    };
    const size_t product = product_bytes();
    const Workspace scratch{carver.take<char>(static_cast<int64_t>(product)), product};
    void* const cells = take(chunk_ * pitch_, row_dtype_);
    void* const gradients = narrow_ ? take(chunk_ * pitch_, x_.dtype) : cells;
    void* const sum = sum_apart_ ? take(weight_.numel(), row_dtype_) : nullptr;
    const View losses = View::dense(take(rows_, row_dtype_), row_dtype_, {rows_});
    const View sums =
        View::dense(v.lse ? v.lse->data : take(rows_, row_dtype_), row_dtype_, {rows_});
    View places = View::dense(take(rows_, kI64), kI64, targets.shape);
    copy(stream, targets, places);
    places = View::dense(places.data, kI64, {rows_});
    if (copy_x_) {
      x_.data = take(x_.numel(), x_.dtype);
      copy(stream, x_in_, View::dense(x_.data, x_.dtype, x_in_.shape));
    }
    for (int64_t first = 0; first < rows_; first += chunk_) {
      const int64_t count = std::min(chunk_, rows_ - first);
      gemm(stream, forward(first, count, cells), scratch);
      const View chunk_targets = rows_of(places, first, count),
                 chunk_sums = rows_of(sums, first, count);
      if (v.target_logits) {
        find_part_values(
            stream, count, cells, v.part, chunk_targets, ignore_index, chunk_sums,
            rows_of(View::dense(v.target_logits->data, row_dtype_, {rows_}), first, count));
        continue;
      }
      if (v.compute_lse && backward() && vocabulary_ <= kMostColumns) {
        lose_and_differentiate(stream, count, cells, chunk_targets, ignore_index,
                               rows_of(losses, first, count), gradients);
      } else {
        if (v.compute_lse)
          cross_entropy(stream, logits(cells, count, row_dtype_), chunk_targets, ignore_index,
                        rows_of(losses, first, count), chunk_sums);
        if (!backward()) continue;
        differentiate(stream, first, count, cells, v, chunk_targets, ignore_index, chunk_sums,
                      gradients);
      }
      if (given(dx_)) gemm(stream, input_gradient(first, count, gradients), scratch);
      if (given(dweight_)) gemm(stream, weight_gradient(first, count, gradients, sum), scratch);
    }
    if (v.loss) add_up(stream, losses, *v.loss);
    if (given(dweight_) && rows_ == 0) fill(stream, dweight_, 0);
    if (sum_apart_) copy(stream, weight_sum(sum), dweight_);
  }

 private:
  bool backward() const { return given(dx_) || given(dweight_); }

  View rows_of(const View& v, int64_t first, int64_t count) const {
    View out = v;
    out.shape[0] = count;
    if (out.data)
      out.data = v.as<char>() + first * v.strides[0] * static_cast<int64_t>(size_of(v.dtype));
    return out;
  }
  View logits(void* data, int64_t count, DType dtype) const {
    return {data, dtype, {count, vocabulary_}, {pitch_, 1}};
  }
  View weight_sum(void* data) const {
    return sum_apart_ ? View::dense(data, row_dtype_, dweight_.shape) : dweight_;
  }
  Gemm forward(int64_t first, int64_t count, void* cells) const {
    return {
        who_, rows_of(x_, first, count), transposed(weight_), logits(cells, count, row_dtype_), {}};
  }
  Gemm input_gradient(int64_t first, int64_t count, void* gradients) const {
    return {who_, logits(gradients, count, x_.dtype), weight_, rows_of(dx_, first, count), {}};
  }
  Gemm weight_gradient(int64_t first, int64_t count, void* gradients, void* sum) const {
    return {who_,
            transposed(logits(gradients, count, x_.dtype)),
            rows_of(x_, first, count),
            weight_sum(sum),
            {},
            first > 0};
  }
  size_t product_bytes() const {
    size_t most = 0;
    for (int64_t first : {int64_t{0}, rows_ / chunk_ * chunk_, chunk_}) {  // first, last, adding
      const int64_t count = std::min(chunk_, rows_ - first);
      if (count <= 0) continue;
      most = std::max(most, gemm_workspace(forward(first, count, nullptr)));
      if (given(dx_)) most = std::max(most, gemm_workspace(input_gradient(first, count, nullptr)));
      if (given(dweight_))
        most = std::max(most, gemm_workspace(weight_gradient(first, count, nullptr, nullptr)));
    }
    return most;
  }

  /// Of losses whose gradient is 1.
  void lose_and_differentiate(const Stream& stream, int64_t count, void* cells, const View& targets,
                              int64_t ignore_index, const View& losses, void* gradients) const {
    visit_floating(who_, x_.dtype, [&]<class G>() {
      using C = Compute<G>;
      const int64_t bytes = pitch_ * static_cast<int64_t>(sizeof(C));
      const int threads = log_sum_exp_threads<C>(vocabulary_);
      const int64_t batch = int64_t{16} * kLogSumExpBatch * threads,  // bytes
          held = std::min(blocks_for(bytes, batch), (bytes <= kAlone ? kShare : kAlone) / batch);
      launch(
          who_, stream,
          {.blocks = count, .threads = threads, .shared_bytes = static_cast<size_t>(held * batch)},
          losses_and_gradients<C, G>, static_cast<const C*>(cells), pitch_, vocabulary_, held,
          targets.as<const int64_t>(), ignore_index, losses.as<C>(), static_cast<G*>(gradients));
    });
  }
  void find_part_values(const Stream& stream, int64_t count, void* cells, TablePart part,
                        const View& targets, int64_t ignore_index, const View& lse,
                        const View& target_logits) const {
    const auto of = [&]<class C>(C) {
      launch(who_, stream, {.blocks = count, .threads = log_sum_exp_threads<C>(vocabulary_)},
             part_values<C>, static_cast<const C*>(cells), pitch_, vocabulary_, part,
             targets.as<const int64_t>(), ignore_index, lse.as<C>(), target_logits.as<C>());
    };
    row_dtype_ == kF64 ? of(double()) : of(float());
  }
  void differentiate(const Stream& stream, int64_t first, int64_t count, void* cells,
                     const RowValues& v, const View& targets, int64_t ignore_index, const View& lse,
                     void* gradients) const {
    visit_floating(who_, x_.dtype, [&]<class G>() {
      using C = Compute<G>;
      const int64_t packs = blocks_for(vocabulary_, Pack<G>::kSize);
      const auto from = [&]<class From>(const From& rows) {
        launch(who_, stream, {.blocks = count, .threads = threads_for(packs, kGradientThreads)},
               logit_gradients<C, G, From>, static_cast<const C*>(cells), pitch_, vocabulary_,
               v.part, targets.as<const int64_t>(), ignore_index, lse.as<const C>(), rows,
               static_cast<G*>(gradients));
      };
      if (v.dlse)
        from(OfPart<C>{elements_of<const C>(who_, *v.dlse), elements_of<const C>(who_, *v.dtarget),
                       first});
      else
        from(OfLoss<C>{v.dloss ? v.dloss->as<const C>() : nullptr});
    });
  }
  void add_up(const Stream& stream, const View& losses, const View& loss) const {
    const LaunchShape one{.threads = kLossThreads};
    if (row_dtype_ == kF64)
      launch(who_, stream, one, sum_losses<double>, losses.as<const double>(), rows_,
             loss.as<double>());
    else
      launch(who_, stream, one, sum_losses<float>, losses.as<const float>(), rows_,
             loss.as<float>());
  }

  const char* who_;
  View x_in_, x_, weight_, dx_, dweight_;
  int64_t rows_, vocabulary_, chunk_, pitch_;
  DType row_dtype_;  // of lse, losses, and a chunk's logits
  bool copy_x_;      // its rows are not evenly spaced
  bool narrow_;      // gradients of logits need a place of their own
  bool sum_apart_;   // dweight is too narrow to sum chunks in
};

}  // namespace

int64_t linear_cross_entropy_chunk(int64_t vocabulary) {
  constexpr int64_t kCells = (int64_t{512} << 20) / static_cast<int64_t>(sizeof(float));
  constexpr int64_t kTile = 128, kMost = 8192;  // rows; whole tiles of the products
  const int64_t pitch = blocks_for(std::max<int64_t>(vocabulary, 1), kPadding) * kPadding;
  const int64_t rows = std::max<int64_t>(kCells / pitch, 1);
  return std::min(rows >= kTile ? rows / kTile * kTile : rows, kMost);
}

size_t linear_cross_entropy_workspace(const View& x, const View& weight) {
  return Head("linear_cross_entropy", x, weight, {}, {}).workspace();
}
void linear_cross_entropy(const Stream& stream, const View& x, const View& weight,
                          const View& targets, int64_t ignore_index, const View& loss,
                          const View& lse, Workspace workspace) {
  Head("linear_cross_entropy", x, weight, {}, {})
      .run(stream, targets, ignore_index, {.loss = &loss, .lse = &lse, .part = whole_table(weight)},
           workspace);
}

size_t linear_cross_entropy_backward_workspace(const View& x, const View& weight, const View& dx,
                                               const View& dweight) {
  return Head("linear_cross_entropy_backward", x, weight, dx, dweight).workspace();
}
void linear_cross_entropy_backward(const Stream& stream, const View& x, const View& weight,
                                   const View& targets, int64_t ignore_index, const View& lse,
                                   const View& dloss, const View& dx, const View& dweight,
                                   Workspace workspace) {
  Head("linear_cross_entropy_backward", x, weight, dx, dweight)
      .run(stream, targets, ignore_index,
           {.lse = &lse, .compute_lse = false, .dloss = &dloss, .part = whole_table(weight)},
           workspace);
}

size_t linear_cross_entropy_fused_workspace(const View& x, const View& weight, const View& dx,
                                            const View& dweight) {
  return Head("linear_cross_entropy_fused", x, weight, dx, dweight).workspace();
}
void linear_cross_entropy_fused(const Stream& stream, const View& x, const View& weight,
                                const View& targets, int64_t ignore_index, const View& loss,
                                const View& dx, const View& dweight, Workspace workspace) {
  Head("linear_cross_entropy_fused", x, weight, dx, dweight)
      .run(stream, targets, ignore_index, {.loss = &loss, .part = whole_table(weight)}, workspace);
}

size_t linear_lse_workspace(const View& x, const View& weight) {
  return Head("linear_lse", x, weight, {}, {}).workspace();
}
void linear_lse(const Stream& stream, const View& x, const View& weight, TablePart part,
                const View& targets, int64_t ignore_index, const View& lse,
                const View& target_logits, Workspace workspace) {
  Head("linear_lse", x, weight, {}, {})
      .run(stream, targets, ignore_index,
           {.target_logits = &target_logits, .lse = &lse, .part = part}, workspace);
}

size_t linear_lse_backward_workspace(const View& x, const View& weight, const View& dx,
                                     const View& dweight) {
  return Head("linear_lse_backward", x, weight, dx, dweight).workspace();
}
void linear_lse_backward(const Stream& stream, const View& x, const View& weight, TablePart part,
                         const View& targets, int64_t ignore_index, const View& lse,
                         const View& dlse, const View& dtarget, const View& dx, const View& dweight,
                         Workspace workspace) {
  Head("linear_lse_backward", x, weight, dx, dweight)
      .run(stream, targets, ignore_index,
           {.lse = &lse, .compute_lse = false, .dlse = &dlse, .dtarget = &dtarget, .part = part},
           workspace);
}

}  // namespace sheaf::kernels::cuda
