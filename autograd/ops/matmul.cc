// Matrix products: matmul, and linear with its weight's and bias's gradients.
#include "sheaf/kernels/matmul.h"

#include "sheaf/autograd/ops/linear.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/linear.h"

namespace sheaf {
namespace {

using namespace ops;

Tensor swap_last(const Tensor& x) { return transpose(x, -1, -2); }

struct LinearWeightGradient : SavesTheOther {  // dy[.., O], x[.., I] -> dyᵀ x [O, I] over all rows
  static constexpr const char* kName = "linear_weight_gradient";
  static constexpr uint64_t kStoresWide = 0b1;
  using Attrs = Rounds;
  static constexpr auto describe = describe_rounds;
  static constexpr bool kMarked = true;
  static void infer(const Attrs& a, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_fp8(kName, a.fp8, d);
    if (c.shape(0).rank() < 1 || c.shape(0).rank() != c.shape(1).rank() ||
        !(leading(c.shape(0)) == leading(c.shape(1))))
      fail<ShapeError>("[", kName, "] rows of ", c.input(0), " and ", c.input(1), " differ");
    c.output(d, {c.shape(0).back(), c.shape(1).back()});
  }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    row_rules(p, {.inputs = 0b11});
    for (int i = 0; i < 2; ++i) {
      if (!p.in(i).is_shard(last)) continue;
      const Placement out = Placement::shard(p.in(i).map().moved_to(i));
      i == 0 ? p.rule({p.in(i), kR}, {out}) : p.rule({kR, p.in(i)}, {out});
    }
    p.rule({kR, kR}, {kR});
    if (a.fp8) return;
    p.rule({kP, kR}, {kP});
    p.rule({kR, kP}, {kP});
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_weight_gradient, c.input(0), c.input(1), c.output(0), a.fp8);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_weight_gradient, c.input(0), c.input(1), c.output(0),
                    c.workspace, a.fp8);
  }
  static void work(const Attrs& a, WorkOf& w) {
    w.multiplies(w.input(0), w.input(1).back());
    if (a.fp8) rounds(w, 0, w.input(0).numel() + w.input(1).numel());
  }
  static void vjp(const Attrs&, Vjp& c) {  // g[O, I]: dy gets x gᵀ, x gets dy g
    if (c.needs(0)) c.set(0, linear(c.input(1), c.grad()));
    if (c.needs(1)) c.set(1, times(c.input(0), c.grad()));
  }
};

struct LinearBiasGradient {  // dy[.., O] -> its rows added up, [O]
  static constexpr const char* kName = "linear_bias_gradient";
  static constexpr uint64_t kStoresWide = 0b1;
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), {c.shape(0).back()}); }
  static void place(const Attrs&, Place& p) {
    row_rules(p, {.inputs = 0b1});
    if (p.in(0).is_shard(p.shape(0).rank() - 1))
      p.rule({p.in(0)}, {Placement::shard(p.in(0).map().moved_to(0))});
    p.rule({kR}, {kR});
    p.rule({kP}, {kP});
  }
  static int64_t workspace(const Attrs&, const Execute& c) {
    return SHEAF_GPU_WORKSPACE(c.device(), linear_bias_gradient, c.input(0), c.output(0));
  }
  static void execute(const Attrs&, Execute& c) {
    SHEAF_ON_DEVICE_SCRATCH(c.stream(), c.workspace, linear_bias_gradient, c.input(0), c.output(0));
  }
  static void vjp(const Attrs&, Vjp& c) {
    c.set(0, sliced_to_dual(expand(c.grad(), c.input_type(0).shape), c.input_type(0)));
  }
};

struct LinearGradients : SavesTheOther {  // both: dy[.., O], x[.., I] -> [O, I], [O]
  static constexpr const char* kName = "linear_gradients";
  static constexpr uint64_t kStoresWide = 0b11;
  using Attrs = Rounds;
  static constexpr auto describe = describe_rounds;
  static constexpr bool kMarked = true;
  static void infer(const Attrs& a, Infer& c) {
    LinearWeightGradient::infer(a, c);
    LinearBiasGradient::infer({}, c);
  }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    row_rules(p, {.inputs = 0b11, .num_outputs = 2});
    for (int i = 0; i < 2; ++i) {
      if (!p.in(i).is_shard(last)) continue;
      const Placement out = Placement::shard(p.in(i).map().moved_to(i));
      i == 0 ? p.rule({p.in(i), kR}, {out, out}) : p.rule({kR, p.in(i)}, {out, kR});
    }
    p.rule({kR, kR}, {kR, kR});
    if (a.fp8) return;
    p.rule({kP, kR}, {kP, kP});
    p.rule({kR, kP}, {kP, kR});
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_gradients, c.input(0), c.input(1), c.output(0),
                           c.output(1), a.fp8);
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_gradients, c.input(0), c.input(1), c.output(0), c.output(1),
                    c.workspace, a.fp8);
  }
  static void work(const Attrs& a, WorkOf& w) { LinearWeightGradient::work(a, w); }
  static void vjp(const Attrs&, Vjp& c) {  // g[O, I], h[O]: dy gets x gᵀ + h, x gets dy g
    if (c.needs(0)) {
      if (!c.has_grad(0))
        c.set(0, sliced_to_dual(expand(c.grad(1), c.input_type(0).shape), c.input_type(0)));
      else
        c.set(0, linear(c.input(1), c.grad(0), c.has_grad(1) ? c.grad(1) : Tensor()));
    }
    if (c.needs(1) && c.has_grad(0)) c.set(1, times(c.input(0), c.grad(0)));
  }
};

struct Matmul : SavesTheOther {
  static constexpr const char* kName = "matmul";
  struct Attrs { bool each_alone, fp8; };
  static void infer(const Attrs& attrs, Infer& c) {
    const DType d = common_dtype(kName, c);
    require_floating(kName, d);
    require_fp8(kName, attrs.fp8, d);
    const Shape &a = c.shape(0), &b = c.shape(1);
    if (a.rank() < 2 || b.rank() < 2 || a.dim(-1) != b.dim(-2))
      fail<ShapeError>("[", kName, "] ", c.input(0), " and ", c.input(1),
                       " do not multiply: wants [.., M, K] and [.., K, N]",
                       a.rank() == 1 || b.rank() == 1 ? "; unsqueeze() makes a matrix of a vector" : "");
    Shape out = broadcast_shapes(kName, leading(leading(a)), leading(leading(b)));
    out.push_back(a.dim(-2));
    out.push_back(b.dim(-1));
    c.output(d, out);
  }
  static void place(const Attrs& a, Place& p) {
    const int rank[2] = {p.shape(0).rank(), p.shape(1).rank()}, out = std::max(rank[0], rank[1]);
    for (int i = 0; i < 2; ++i) {
      if (!p.in(i).is_shard() || p.in(i).map().is_flat()) continue;
      const OwnershipMap& map = p.in(i).map();
      const int d = map.dim() - rank[i] + out;  // numbered as in the output
      const int contracted = i == 0 ? out - 1 : out - 2;
      const auto at = [&](int operand) {
        return Placement::shard(map.moved_to(d - out + rank[operand]));
      };
      if (d == contracted) {
        const Placement other = Placement::shard(map.moved_to(i == 0 ? rank[1] - 2 : rank[0] - 1));
        i == 0 ? p.rule({p.in(0), other}, {kP}) : p.rule({other, p.in(1)}, {kP});
      } else if (d >= out - 2) {
        const Placement result = Placement::shard(map.moved_to(d));
        i == 0 ? p.rule({p.in(0), kR}, {result}) : p.rule({kR, p.in(1)}, {result});
      } else {
        // A batch dimension: present in both operands, or absent from (or of size 1 in) the operand that is broadcast.
        const auto size = [&](int operand) {
          const int j = d - out + rank[operand];
          return j < 0 ? 1 : p.shape(operand)[j];
        };
        if (size(i) < size(1 - i)) continue;
        const bool shared = size(1 - i) == size(i) && d - out + rank[1 - i] >= 0;
        const Placement other = shared ? at(1 - i) : kR, result = Placement::shard(map.moved_to(d));
        i == 0 ? p.rule({p.in(0), other}, {result}) : p.rule({other, p.in(1)}, {result});
      }
      break;
    }
    p.rule({kR, kR}, {kR});
    if (a.fp8) return;
    p.rule({kP, kR}, {kP});
    p.rule({kR, kP}, {kP});
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), matmul, c.input(0), c.input(1), c.output(0), a.fp8);
  }
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View x = c.input(0), y = c.input(1), out = c.output(0);
    const bool one_by_one = a.each_alone && out.rank() == 3 && stream.device.is_cuda();
    const int64_t n = one_by_one ? out.shape[0] : 0;
    if (n == 0) SHEAF_ON_DEVICE(stream, matmul, x, y, out, c.workspace, a.fp8);
    for (int64_t i = 0; i < n; ++i)
      SHEAF_ON_DEVICE(stream, matmul, nth(x, i), nth(y, i), nth(out, i), c.workspace, a.fp8);
  }
  static uint64_t row_inputs(const Attrs& a, InputTypes in) { return in[1]->shape.rank() == 2 && !a.fp8 && !a.each_alone ? 0b1 : 0; }
  static void work(const Attrs& a, WorkOf& w) {
    const Shape& out = w.output(0);
    const int64_t matrix = out.dim(-2) * out.back(), matrices = matrix ? out.numel() / matrix : 0;
    const bool shared = w.input(1).rank() == 2;  // one matrix for all of a batch: rows of one product
    w.multiplies(matrices * out.dim(-2), w.input(0).back(), out.back(), shared ? 1 : matrices);
    if (a.fp8) rounds(w, w.input(0).numel(), w.input(1).numel());
  }
  // Matrix i of a batch that may be broadcast.
  static View nth(const View& batch, int64_t i) {
    View v = batch;
    if (batch.rank() < 3) return v;
    const int64_t step = batch.shape[0] > 1 ? batch.strides[0] : 0;
    v.data = batch.as<char>() + i * step * static_cast<int64_t>(size_of(batch.dtype));
    v.shape.erase(0), v.strides.erase(0);
    return v;
  }
  static constexpr bool kMarked = true;
  static void describe(const Attrs& a, std::string& out) {
    out += a.each_alone ? a.fp8 ? "each alone, fp8" : "each alone" : a.fp8 ? "fp8" : "";
  }
  static void vjp(const Attrs& a, Vjp& c) {
    if (c.needs(0))
      c.set(0, sum_to(matmul(c.grad(), swap_last(c.input(1)), {a.each_alone, a.fp8}), c.input_type(0)));
    if (!c.needs(1)) return;
    // A matrix that the whole batch shares gets one product over all rows instead of a sum of products.
    if (c.input_type(1).shape.rank() == 2)
      c.set(1, apply<LinearWeightGradient>({.fp8 = false}, {c.input(0), c.grad()}, c.into(1)));
    else
      c.set(1,
            sum_to(matmul(swap_last(c.input(0)), c.grad(), {a.each_alone}), c.input_type(1)));
  }
};

struct Linear : SavesTheOther {  // x[.., I], weight[O, I] [, bias[O]]
  static constexpr const char* kName = "linear";
  static constexpr bool kDefersWeights = true;
  using Attrs = LayerRounds;
  static constexpr auto describe = describe_layer_rounds;
  static constexpr bool kMarked = true;
  static void infer(const Attrs& a, Infer& c) { infer_linear(kName, c, 1, a.forward()); }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    const auto rule = [&](const Placement& x, const Placement& w, const Placement& b,
                          const Placement& y) {
      const Placement in[] = {x, w, b};
      p.rule(std::span(in, static_cast<size_t>(p.num_inputs())), std::span(&y, 1));
    };
    if (p.in(0).is_shard() && !p.in(0).map().is_flat()) {
      const OwnershipMap& map = p.in(0).map();
      if (map.dim() == last)
        rule(p.in(0), Placement::shard(map.moved_to(1)), kP, kP);
      else
        rule(p.in(0), kR, kR, p.in(0));
    }
    if (p.in(1).is_shard(0)) {
      const OwnershipMap& map = p.in(1).map();
      rule(kR, p.in(1), p.in(1), Placement::shard(map.moved_to(last)));
    }
    if (p.in(1).is_shard(1)) rule(Placement::shard(p.in(1).map().moved_to(last)), p.in(1), kP, kP);
    rule(kR, kR, kR, kR);
    if (a.forward()) return;
    rule(kP, kR, kP, kP);
    rule(kR, kP, kP, kP);
  }
  static View bias(const Execute& c) { return c.num_inputs() == 3 ? c.input(2) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear, c.input(0), c.input(1), bias(c), c.output(0), a.forward());
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear, c.input(0), c.input(1), bias(c), c.output(0), c.workspace, a.forward());
  }
  static uint64_t row_inputs(const Attrs& a, InputTypes) { return a.forward() ? 0 : 0b1; }  // else weights would be rounded for each piece
  static void work(const Attrs& a, WorkOf& w) { work_of_linear(w, 1, a.forward()); }
  static void vjp(const Attrs& a, Vjp& c) {
    const Tensor dy = dense_rows(c.grad());
    will_read_input(c, 1);
    if (c.needs(0)) c.set(0, times(dy, c.input(1), a.forward()));
    set_parameter_gradients(c, dy, 1, a.fp8);
  }
};

}  // namespace

void ops::require_fp8(const char* op, bool fp8, DType dtype) {
  if (fp8 && (!is_floating(dtype) || dtype == kF64))
    fail<DTypeError>("[", op, "] rounds f32, bf16 and f16 to FP8, not ", dtype);
}

void ops::rounds(WorkOf& w, int64_t along_rows, int64_t along_columns) {
  const auto elements = static_cast<double>(along_rows + along_columns);
  const auto size = static_cast<double>(size_of(w.work.dtype));
  w.work.fp8 = true;
  w.work.bytes -= elements * (size - 1);  // products read FP8 codes
  w.work.passes += elements * (size + 1) + static_cast<double>(along_columns) * size;  // rounding reads twice
}

Tensor ops::times(const Tensor& x, const Tensor& weight, bool fp8) {
  const MatmulOptions options{.fp8 = fp8};
  if (x.rank() > 1) return matmul(x, weight, options);
  return squeeze(matmul(unsqueeze(x, {0}), weight, options), {0});
}

Tensor ops::weight_gradient(const Tensor& dy, const Tensor& x) {
  return apply<LinearWeightGradient>({.fp8 = false}, {dy, x});
}

void ops::work_of_linear(WorkOf& w, int weight, bool fp8) {
  w.multiplies(w.input(0), w.input(weight)[0]);
  if (fp8) rounds(w, w.input(0).numel() + w.input(weight).numel(), 0);
}

void ops::infer_linear(const char* op, Infer& c, int weight, bool fp8) {
  const DType d = common_dtype(op, c);
  require_floating(op, d);
  require_fp8(op, fp8, d);
  const Shape &x = c.shape(0), &w = c.shape(weight);
  if (x.rank() < 1 || w.rank() != 2 || x.back() != w[1])
    fail<ShapeError>("[", op, "] input ", c.input(0), " does not fit weight ", c.input(weight),
                     ": wants [.., I] and [O, I]");
  if (c.num_inputs() > weight + 1 && !(c.shape(weight + 1) == Shape{w[0]}))
    fail<ShapeError>("[", op, "] bias ", c.input(weight + 1), " does not fit weight ",
                     c.input(weight));
  Shape out = x;
  out[out.rank() - 1] = w[0];
  c.output(d, out);
}

void ops::set_parameter_gradients(Vjp& c, const Tensor& dy, int weight, Fp8 fp8) {
  const int bias = weight + 1;
  const bool of_weight = c.needs(weight), of_bias = c.num_inputs() > bias && c.needs(bias);
  if (!of_weight && !of_bias) return;
  const Tensor x = of_weight ? c.input(0) : Tensor();
  const Rounds rounds{of_weight && rounds_of(fp8 == Fp8::all, dy, x).fp8};
  c.weight_gradients(weight, [=](Vjp& c) {
    if (of_weight && of_bias) {
      const auto d = apply_all<LinearGradients>(rounds, {dy, x}, {c.into(weight), c.into(bias)});
      c.set(weight, d[0]), c.set(bias, d[1]);
    } else if (of_weight) {
      c.set(weight, apply<LinearWeightGradient>(rounds, {dy, x}, c.into(weight)));
    } else {
      c.set(bias, apply<LinearBiasGradient>({}, dy, c.into(bias)));
    }
  });
}

Tensor matmul(const Tensor& a, const Tensor& b, const MatmulOptions& options) {
  return apply<Matmul>({options.each_alone, rounds_of(options.fp8, a, b).fp8}, {a, b});
}

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, Fp8 fp8, const OutputLayout& output_layout) {
  std::vector<Tensor> inputs{x, weight};
  if (bias) inputs.push_back(dense_rows(bias));
  const LayerRounds attrs = rounds_of(fp8, x, weight);
  return apply_and_redistribute(op_def<Linear>(), &attrs, inputs, output_layout);
}

}  // namespace sheaf
