#include "sheaf/kernels/linear_cross_entropy.h"

#include "sheaf/kernels/cpu/cross_entropy_row.h"
#include "sheaf/kernels/cpu/gemm.h"
#include "sheaf/kernels/cpu/rows.h"
#include "sheaf/kernels/cpu/softcap.h"
#include "sheaf/kernels/embedding.h"
#include "sheaf/kernels/given.h"

namespace sheaf::kernels::cpu {
namespace {

/// Operands, and the loop over chunks. The given views determine which parts run.
struct Head {
  const char* who;
  View x, weight, dx, dweight;
  int64_t rows, width, vocabulary, chunk;
  DType row_dtype;  ///< of lse, losses, and a chunk's logits
  View uneven;      ///< x whose rows are not evenly spaced: a chunk of them is copied at a time
  bool narrow;      ///< gradients of logits need a rounded copy
  bool sum_apart;   ///< dweight is too narrow to accumulate chunks in

  Head(const char* who_in, const View& x_in, const View& weight_in, const View& dx_in,
       const View& dweight_in)
      : who(who_in),
        x(as_matrix(x_in)),
        weight(weight_in),
        dx(given(dx_in) ? as_matrix(dx_in) : View{}),
        dweight(dweight_in) {
    check<ShapeError>(!given(dx_in) || dx.rank() == 2, "[", who, "] rows of dx ", dx_in.shape,
                      " must be evenly spaced");
    if (x.rank() == 0) {
      uneven = x_in;
      x = View::dense(nullptr, x_in.dtype, {x_in.numel() / x_in.shape.back(), x_in.shape.back()});
    }
    check<ShapeError>(weight.rank() == 2 && weight.shape[1] == x.shape[1], "[", who, "] weight ",
                      weight.shape, " for input ", x_in.shape);
    check<ShapeError>(
        (!given(dx) || dx.shape == x.shape) && (!given(dweight) || dweight.shape == weight.shape),
        "[", who, "] gradients ", dx.shape, " and ", dweight.shape);
    rows = x.shape[0], width = x.shape[1], vocabulary = weight.shape[0];
    chunk = std::min(linear_cross_entropy_chunk(vocabulary), std::max<int64_t>(rows, 1));
    row_dtype = x.dtype == kF64 ? kF64 : kF32;
    narrow = x.dtype != row_dtype && (given(dx) || given(dweight));
    sum_apart = given(dweight) && dweight.dtype != row_dtype && rows > chunk;
  }

  /// The chunk of x that begins at `first`: in place, or the copy of it.
  View input(int64_t first, int64_t count, void* copy) const {
    return given(uneven) ? View::dense(copy, x.dtype, {count, width}) : rows_of(x, first, count);
  }
  View rows_of(const View& v, int64_t first, int64_t count) const {
    View out = v;
    out.shape[0] = count;
    if (out.data)
      out.data = v.as<char>() + static_cast<size_t>(first * v.strides[0]) * size_of(v.dtype);
    return out;
  }
  View logits(void* data, int64_t count, DType dtype) const {
    return View::dense(data, dtype, {count, vocabulary});
  }
  View weight_sum(void* data) const {
    return sum_apart ? View::dense(data, row_dtype, dweight.shape) : dweight;
  }

  Gemm forward(const View& chunk_x, int64_t count, void* chunk_logits) const {
    return {who, chunk_x, transposed(weight), logits(chunk_logits, count, row_dtype), {}};
  }
  Gemm input_gradient(int64_t first, int64_t count, void* gradients) const {
    return {who, logits(gradients, count, x.dtype), weight, rows_of(dx, first, count), {}};
  }
  Gemm weight_gradient(const View& chunk_x, int64_t first, int64_t count, void* gradients,
                       void* sum) const {
    return {who,      transposed(logits(gradients, count, x.dtype)), chunk_x, weight_sum(sum), {},
            first > 0};
  }

  size_t product_bytes() const {
    size_t most = 0;
    for (int64_t first :
         {int64_t{0}, rows / chunk * chunk, chunk}) {  // whole, last and accumulating chunks
      const int64_t count = std::min(chunk, rows - first);
      if (count <= 0) continue;
      most = std::max(most, gemm_workspace(forward(input(first, count, nullptr), count, nullptr)));
      if (given(dx)) most = std::max(most, gemm_workspace(input_gradient(first, count, nullptr)));
      if (given(dweight))
        most = std::max(most, gemm_workspace(weight_gradient(input(first, count, nullptr), first,
                                                             count, nullptr, nullptr)));
    }
    return line_align(most);
  }
  size_t copy_bytes() const {
    return given(uneven) ? line_align(static_cast<size_t>(chunk * width) * size_of(x.dtype)) : 0;
  }
  size_t workspace() const {
    const size_t cells = static_cast<size_t>(chunk * vocabulary);
    return line_align(cells * size_of(row_dtype)) +
           (narrow ? line_align(cells * size_of(x.dtype)) : 0) +
           (sum_apart ? line_align(static_cast<size_t>(weight.numel()) * size_of(row_dtype)) : 0) +
           line_align(static_cast<size_t>(chunk) * size_of(row_dtype)) + copy_bytes() +
           product_bytes();
  }

  void run(const View& targets, HeadRules rules, const RowValues& v, Workspace memory) const {
    check<ShapeError>(targets.numel() == rows, "[", who, "] targets ", targets.shape, " for ", rows,
                      " rows");
    for (const View* row_values : {v.lse, v.target_logits, v.dlse, v.dtarget})
      check<ShapeError>(!row_values || row_values->numel() == rows, "[", who, "] row values ",
                        row_values ? row_values->shape : Shape{}, " for ", rows, " rows");
    check_targets(who, targets, v.part.all, rules.ignore_index);
    if (row_dtype == kF64) return chunks<double, double>(targets, rules, v, memory);
    if (x.dtype == kF32) return chunks<float, float>(targets, rules, v, memory);
    if (x.dtype == kBF16) return chunks<float, bf16>(targets, rules, v, memory);
    if (x.dtype == kF16) return chunks<float, f16>(targets, rules, v, memory);
    fail<DTypeError>("[", who, "] input of ", x.dtype);
  }

  template <class C, class G>
  void chunks(const View& targets, HeadRules rules, const RowValues& v,
              Workspace memory) const {
    Carver carver(who, memory);
    C* cells = carver.take<C>(chunk * vocabulary);
    G* gradients = narrow ? carver.take<G>(chunk * vocabulary) : reinterpret_cast<G*>(cells);
    C* sum = sum_apart ? carver.take<C>(weight.numel()) : nullptr;
    C* losses = carver.take<C>(chunk);
    G* copy = given(uneven) ? carver.take<G>(chunk * width) : nullptr;
    const Indices target_of(who, targets);
    const View none{nullptr, row_dtype, {}, {}};
    const Elements<C> lse_of(who, v.lse && !v.compute_lse ? *v.lse : none),
        dlse_of(who, v.dlse ? *v.dlse : none), dtarget_of(who, v.dtarget ? *v.dtarget : none);
    // For an ignored row: over all parts of the vocabulary it combines to 0.
    const C nothing =
        v.part.first == 0 && vocabulary > 0 ? C(0) : -std::numeric_limits<C>::infinity();
    const size_t product = product_bytes();
    const Workspace scratch{carver.take<char>(static_cast<int64_t>(product)), product};
    const bool backward = given(dx) || given(dweight);
    const C scale = v.dloss ? *v.dloss->as<C>() : static_cast<C>(v.constant);
    const C cap = static_cast<C>(rules.softcap), inverse_cap = cap != 0 ? C(1) / cap : C(0), z = static_cast<C>(rules.z_loss);
    double total = 0;
    for (int64_t first = 0; first < rows; first += chunk) {
      const int64_t count = std::min(chunk, rows - first);
      if (copy) copy_rows(first, count, copy);
      const View chunk_x = input(first, count, copy);
      gemm(forward(chunk_x, count, cells), scratch);
      parallel_for(count, row_grain(2 * vocabulary), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          C* row = cells + r * vocabulary;
          if (cap != 0) softcap(row, vocabulary, C(1), cap);
          const int64_t token = target_of[first + r], target = token - v.part.first;
          const bool ignored = token == rules.ignore_index;
          const bool counts = !ignored && target >= 0 && target < vocabulary;
          const C log_sum = ignored         ? nothing
                            : v.compute_lse ? log_sum_exp(row, vocabulary)
                                            : lse_of[first + r];
          if (v.compute_lse && v.lse) v.lse->as<C>()[first + r] = log_sum;
          if (v.target_logits) v.target_logits->as<C>()[first + r] = counts ? row[target] : C(0);
          losses[r] = counts ? log_sum - row[target] : C(0);
          if (z != 0 && counts) losses[r] += z * log_sum * log_sum;
          if (!backward) continue;
          G* out = gradients + r * vocabulary;
          if (ignored) {
            std::fill_n(out, vocabulary, G(C(0)));
          } else if (v.dlse || z != 0) {
            const C dlse = v.dlse ? dlse_of[first + r] : scale * (C(1) + C(2) * z * log_sum);
            const C dtarget = v.dlse ? dtarget_of[first + r] : -scale;
            logit_row_backward(
                row, vocabulary, target, log_sum, dlse, [&](C p) { return p * dlse + dtarget; },
                out, inverse_cap);
          } else {
            cross_entropy_row_backward(row, vocabulary, target, log_sum, scale, out, inverse_cap);
          }
        }
      });
      for (int64_t r = 0; r < count; ++r) total += static_cast<double>(losses[r]);
      if (given(dx)) gemm(input_gradient(first, count, gradients), scratch);
      if (given(dweight)) gemm(weight_gradient(chunk_x, first, count, gradients, sum), scratch);
    }
    if (v.loss) *v.loss->as<C>() = static_cast<C>(total);
    if (given(dweight) && (rows == 0 || sum_apart)) finish_weight(sum);
  }

  template <class G>
  void copy_rows(int64_t first, int64_t count, G* to) const {
    const Rows<const G> from(who, uneven);
    for (int64_t r = 0; r < count; ++r) std::copy_n(from[first + r], width, to + r * width);
  }

  /// Rounds the sum over chunks into dweight; without rows there is nothing to sum.
  template <class C>
  void finish_weight(const C* sum) const {
    visit_floating(who, dweight.dtype, [&]<class T>() {
      if constexpr (std::is_same_v<ComputeType<T>, C>) {
        const Rows<T> to(who, dweight);
        parallel_for(vocabulary, row_grain(width), [&](int64_t begin, int64_t end) {
          for (int64_t v = begin; v < end; ++v)
            for_lanes(width, [&](int64_t i, auto n) {
              store_lanes(to[v] + i,
                          rows == 0 ? Lanes<C>(C(0)) : load_lanes(sum + v * width + i, n), n);
            });
        });
      }
    });
  }
};

}  // namespace

int64_t linear_cross_entropy_chunk(int64_t vocabulary) {
  const int64_t rows = (int64_t{1} << 24) / std::max<int64_t>(vocabulary, 1) / 64 * 64;
  return std::clamp<int64_t>(rows, 64, 2048);
}

size_t linear_cross_entropy_workspace(const View& x, const View& weight) {
  return Head("linear_cross_entropy", x, weight, {}, {}).workspace();
}
void linear_cross_entropy(const View& x, const View& weight, const View& targets,
                          HeadRules rules, const View& loss, const View& lse,
                          Workspace workspace) {
  Head("linear_cross_entropy", x, weight, {}, {})
      .run(targets, rules, {.loss = &loss, .lse = &lse, .part = whole_table(weight)},
           workspace);
}

size_t linear_cross_entropy_backward_workspace(const View& x, const View& weight, const View& dx,
                                               const View& dweight) {
  return Head("linear_cross_entropy_backward", x, weight, dx, dweight).workspace();
}
void linear_cross_entropy_backward(const View& x, const View& weight, const View& targets,
                                   HeadRules rules, const View& lse, const View& dloss,
                                   const View& dx, const View& dweight, Workspace workspace) {
  Head("linear_cross_entropy_backward", x, weight, dx, dweight)
      .run(targets, rules,
           {.lse = &lse, .compute_lse = false, .dloss = &dloss, .part = whole_table(weight)},
           workspace);
}

size_t linear_cross_entropy_fused_workspace(const View& x, const View& weight, const View& dx,
                                            const View& dweight) {
  return Head("linear_cross_entropy_fused", x, weight, dx, dweight).workspace();
}
void linear_cross_entropy_fused(const View& x, const View& weight, const View& targets,
                                HeadRules rules, const View& loss, const View& dx,
                                const View& dweight, Workspace workspace, double dloss) {
  Head("linear_cross_entropy_fused", x, weight, dx, dweight)
      .run(targets, rules, {.loss = &loss, .constant = dloss, .part = whole_table(weight)},
           workspace);
}

size_t linear_lse_workspace(const View& x, const View& weight) {
  return Head("linear_lse", x, weight, {}, {}).workspace();
}
void linear_lse(const View& x, const View& weight, TablePart part, const View& targets,
                HeadRules rules, const View& lse, const View& target_logits,
                Workspace workspace) {
  Head("linear_lse", x, weight, {}, {})
      .run(targets, rules, {.target_logits = &target_logits, .lse = &lse, .part = part},
           workspace);
}

size_t linear_lse_backward_workspace(const View& x, const View& weight, const View& dx,
                                     const View& dweight) {
  return Head("linear_lse_backward", x, weight, dx, dweight).workspace();
}
void linear_lse_backward(const View& x, const View& weight, TablePart part, const View& targets,
                         HeadRules rules, const View& lse, const View& dlse,
                         const View& dtarget, const View& dx, const View& dweight,
                         Workspace workspace) {
  Head("linear_lse_backward", x, weight, dx, dweight)
      .run(targets, rules,
           {.lse = &lse, .compute_lse = false, .dlse = &dlse, .dtarget = &dtarget, .part = part},
           workspace);
}

}  // namespace sheaf::kernels::cpu
