#include <algorithm>

#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/cross_entropy.h"
#include "sheaf/kernels/cuda/elements.h"
#include "sheaf/kernels/cuda/gemm.h"
#include "sheaf/kernels/cuda/logit_kernels.h"
#include "sheaf/kernels/cuda/workspace.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf::kernels::cuda {
namespace {

using namespace head;

bool given(const View& v) { return v.rank() != 0; }

/// Operands, and the loop over chunks. The given views determine which parts run.
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

  void run(const Stream& stream, const View& targets, HeadRules rules, const RowValues& v,
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
      if (rules.softcap != 0) cap(stream, count, cells, rules.softcap);
      const View chunk_targets = rows_of(places, first, count),
                 chunk_sums = rows_of(sums, first, count);
      if (v.target_logits) {
        find_part_values(
            stream, count, cells, v.part, chunk_targets, rules.ignore_index, chunk_sums,
            rows_of(View::dense(v.target_logits->data, row_dtype_, {rows_}), first, count));
        continue;
      }
      if (v.compute_lse && backward() && vocabulary_ <= kMostColumns &&
          (v.constant == 1 || x_.dtype == kF16)) {
        lose_and_differentiate(stream, count, cells, chunk_targets, rules, v.constant,
                               rows_of(losses, first, count), gradients);
      } else {
        if (v.compute_lse) {
          cross_entropy(stream, logits(cells, count, row_dtype_), chunk_targets, rules.ignore_index,
                        rows_of(losses, first, count), chunk_sums);
          if (rules.z_loss != 0) add_z(stream, rows_of(losses, first, count), chunk_sums, rules.z_loss);
        }
        if (!backward()) continue;
        differentiate(stream, first, count, cells, v, chunk_targets, rules, chunk_sums,
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

  template <class C>
  static C inverse_cap(const HeadRules& rules) {
    return rules.softcap != 0 ? static_cast<C>(1 / rules.softcap) : C(0);
  }
  void cap(const Stream& stream, int64_t count, void* cells, double softcap) const {
    const auto of = [&]<class C>(C) {
      launch(who_, stream, {.blocks = count, .threads = threads_for(vocabulary_, kGradientThreads)}, cap_logits<C>, static_cast<C*>(cells),
             pitch_, vocabulary_, static_cast<C>(softcap));
    };
    row_dtype_ == kF64 ? of(double()) : of(float());
  }

  /// Losses and their gradients for dloss, which is 1 except for f16.
  void lose_and_differentiate(const Stream& stream, int64_t count, void* cells, const View& targets,
                              HeadRules rules, double dloss, const View& losses,
                              void* gradients) const {
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
          targets.as<const int64_t>(), rules.ignore_index, static_cast<C>(dloss), inverse_cap<C>(rules),
          static_cast<C>(rules.z_loss), losses.as<C>(),
          static_cast<G*>(gradients));
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
                     const RowValues& v, const View& targets, HeadRules rules, const View& lse,
                     void* gradients) const {
    visit_floating(who_, x_.dtype, [&]<class G>() {
      using C = Compute<G>;
      const int64_t packs = blocks_for(vocabulary_, Pack<G>::kSize);
      const auto from = [&]<class From>(const From& rows) {
        launch(who_, stream, {.blocks = count, .threads = threads_for(packs, kGradientThreads)},
               logit_gradients<C, G, From>, static_cast<const C*>(cells), pitch_, vocabulary_,
               v.part, targets.as<const int64_t>(), rules.ignore_index, inverse_cap<C>(rules), lse.as<const C>(), rows,
               static_cast<G*>(gradients));
      };
      if (v.dlse)
        from(OfPart<C>{elements_of<const C>(who_, *v.dlse), elements_of<const C>(who_, *v.dtarget),
                       first});
      else
        from(OfLoss<C>{v.dloss ? v.dloss->as<const C>() : nullptr, static_cast<C>(v.constant), static_cast<C>(rules.z_loss)});
    });
  }
  void add_z(const Stream& stream, const View& losses, const View& lse, double z_loss) const {
    const auto of = [&]<class C>(C) {
      launch(who_, stream, {.blocks = blocks_for(losses.numel(), kLossThreads), .threads = kLossThreads}, add_z_losses<C>, losses.as<C>(),
             lse.as<const C>(), losses.numel(), static_cast<C>(z_loss));
    };
    row_dtype_ == kF64 ? of(double()) : of(float());
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
  bool narrow_;      // gradients of logits need separate memory
  bool sum_apart_;   // dweight is too narrow to accumulate chunks in
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
                          const View& targets, HeadRules rules, const View& loss,
                          const View& lse, Workspace workspace) {
  Head("linear_cross_entropy", x, weight, {}, {})
      .run(stream, targets, rules, {.loss = &loss, .lse = &lse, .part = whole_table(weight)},
           workspace);
}

size_t linear_cross_entropy_backward_workspace(const View& x, const View& weight, const View& dx,
                                               const View& dweight) {
  return Head("linear_cross_entropy_backward", x, weight, dx, dweight).workspace();
}
void linear_cross_entropy_backward(const Stream& stream, const View& x, const View& weight,
                                   const View& targets, HeadRules rules, const View& lse,
                                   const View& dloss, const View& dx, const View& dweight,
                                   Workspace workspace) {
  Head("linear_cross_entropy_backward", x, weight, dx, dweight)
      .run(stream, targets, rules,
           {.lse = &lse, .compute_lse = false, .dloss = &dloss, .part = whole_table(weight)},
           workspace);
}

size_t linear_cross_entropy_fused_workspace(const View& x, const View& weight, const View& dx,
                                            const View& dweight) {
  return Head("linear_cross_entropy_fused", x, weight, dx, dweight).workspace();
}
void linear_cross_entropy_fused(const Stream& stream, const View& x, const View& weight,
                                const View& targets, HeadRules rules, const View& loss,
                                const View& dx, const View& dweight, Workspace workspace,
                                double dloss) {
  Head("linear_cross_entropy_fused", x, weight, dx, dweight)
      .run(stream, targets, rules,
           {.loss = &loss, .constant = dloss, .part = whole_table(weight)}, workspace);
}

size_t linear_lse_workspace(const View& x, const View& weight) {
  return Head("linear_lse", x, weight, {}, {}).workspace();
}
void linear_lse(const Stream& stream, const View& x, const View& weight, TablePart part,
                const View& targets, HeadRules rules, const View& lse,
                const View& target_logits, Workspace workspace) {
  Head("linear_lse", x, weight, {}, {})
      .run(stream, targets, rules,
           {.target_logits = &target_logits, .lse = &lse, .part = part}, workspace);
}

size_t linear_lse_backward_workspace(const View& x, const View& weight, const View& dx,
                                     const View& dweight) {
  return Head("linear_lse_backward", x, weight, dx, dweight).workspace();
}
void linear_lse_backward(const Stream& stream, const View& x, const View& weight, TablePart part,
                         const View& targets, HeadRules rules, const View& lse,
                         const View& dlse, const View& dtarget, const View& dx, const View& dweight,
                         Workspace workspace) {
  Head("linear_lse_backward", x, weight, dx, dweight)
      .run(stream, targets, rules,
           {.lse = &lse, .compute_lse = false, .dlse = &dlse, .dtarget = &dtarget, .part = part},
           workspace);
}

}  // namespace sheaf::kernels::cuda
