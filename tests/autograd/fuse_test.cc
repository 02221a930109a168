// Elementwise ops fused by the pass: the bits equal those of the separate ops, for all ops, dtypes, shapes and strides, on the CPU and on a
// GPU; and nothing is fused that others need, or change, in between.
#include "sheaf/autograd/passes/fuse_elementwise.h"

#include <random>

#include <gmock/gmock.h>

#include "sheaf/autograd/fuse.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/transfer.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/tests/autograd/findings.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<NodeId> fused_nodes(const Tape& tape) {
  std::vector<NodeId> out;
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    if (tape.node(id).op == &fused_op()) out.push_back(id);
  return out;
}
// What the fused nodes compute, as printed in the tape's text.
std::vector<std::string> fused_text(const Tape& tape) {
  std::vector<std::string> out;
  for (const NodeId id : fused_nodes(tape)) fused_op().describe(tape.attrs(tape.node(id)), out.emplace_back());
  return out;
}

// A recorded step: its inputs and its outputs.
struct Step {
  Tape tape;
  std::unordered_map<ValueId, Tensor> leaves;
  std::vector<ValueId> wanted;
  Program program(Tape t) const {
    return Program(std::move(t), [this](ValueId v) { return leaves.at(v); }, wanted);
  }
};
Step record(const std::function<std::vector<Tensor>()>& code) {
  Recording recording;
  Step step;
  for (const Tensor& t : code()) step.wanted.push_back(recording.value_of(t));
  step.leaves = recording.leaves();
  step.tape = recording.take();
  return step;
}

// On the CPU. The compiler may choose the operand whose sign a NaN gets, so emulated kernels' signs of NaN are normalised.
Tensor here(const Tensor& t) {
  const Tensor out = t.to(Device::cpu());
  if (t.device().is_cpu() || !is_floating(t.dtype())) return out;
  return where(ne(out, out), full_like(out, std::numeric_limits<double>::quiet_NaN()), out);
}

// The fused step has the same bits. Returns what was fused.
Tape expect_same_bits(const Step& step) {
  SCOPED_TRACE(to_text(step.tape));
  Tape fused = step.tape;
  fuse_elementwise(fused, step.wanted);
  SCOPED_TRACE(to_text(fused));
  EXPECT_EQ(all(check_types(fused)), "");
  Program plain = step.program(step.tape);
  const std::vector<Tensor> want = plain.run();
  const auto expect_bits = [&](Program other) {
    const std::vector<Tensor> have = other.run();
    for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(identical(here(want[i]), here(have[i]))) << i;
  };
  expect_bits(step.program(fused));
  Tape tight = step.tape;
  const std::vector<int64_t> alive = plain.alive_bytes();
  fuse_elementwise(tight, step.wanted, alive, std::ranges::max(alive));
  EXPECT_LE(std::ranges::max(step.program(tight).alive_bytes()), std::ranges::max(alive)) << to_text(tight);
  expect_bits(step.program(tight));
  return fused;
}

// Draws a step of elementwise ops on operands of all kinds, some of which are kept.
class Drawn {
 public:
  explicit Drawn(unsigned seed) : random_(seed) {}

  std::vector<Tensor> step() {
    for (int i = 0; i < 3; ++i) values_.push_back(leaf(shape_));
    const int ops = draw(2, 45);
    for (int i = 0; i < ops; ++i) values_.push_back(op());
    std::vector<Tensor> kept;  // reductions, as outputs that nothing reads would be taken for the step's outputs
    for (const Tensor& t : values_)
      if (draw(0, 4) == 0 || &t == &values_.back()) kept.push_back(t.dtype() == kBool ? logical_not(logical_not(t)) : reshape(t, t.shape()));
    std::vector<Tensor> out;
    for (const Tensor& t : kept) out.push_back(stop(t));
    return out;
  }

 private:
  int draw(int low, int high) { return std::uniform_int_distribution(low, high)(random_); }
  // Not elementwise, so that its input is an output.
  static Tensor stop(const Tensor& t) { return t.dtype() == kBool ? concat({t, t}) : cumsum(t, 0); }

  Tensor leaf(const Shape& shape) {
    const DType wide = double_ ? kF64 : kF32;
    Tensor t = randn({wide, shape, {}}, Key{static_cast<uint64_t>(draw(1, 1 << 30))});
    // Values of all magnitudes, including NaN and infinities.
    Tensor out = Tensor::empty(t.type(), Device::cpu());
    const Tensor drawn = t.to(Device::cpu());
    visit_dtype("leaf", wide, [&]<class T>() {
      if constexpr (std::is_floating_point_v<T>)
        for (int64_t i = 0; i < shape.numel(); ++i) {
          const int kind = draw(0, 60);
          out.view().as<T>()[i] = kind == 0   ? std::numeric_limits<T>::infinity()
                                  : kind == 1 ? std::numeric_limits<T>::quiet_NaN()
                                  : kind == 2 ? T(0)
                                  : kind == 3 ? T(1e30) * drawn.view().as<T>()[i]
                                              : drawn.view().as<T>()[i];
        }
    });
    Tensor there = out.to(RankContext::current().device);
    Recording::current()->watch(there);
    if (!double_ && draw(0, 1)) there = contiguous(cast(there, draw(0, 1) ? kBF16 : kF16));
    return there;
  }

  const Tensor& any() { return values_[draw(0, static_cast<int>(values_.size()) - 1)]; }
  // Of floating type, of the given dtype or any.
  Tensor number(DType dtype) {
    for (int tries = 0; tries < 20; ++tries)
      if (const Tensor& t = any(); t.dtype() == dtype) return t;
    for (int tries = 0; tries < 20; ++tries)
      if (const Tensor& t = any(); is_floating(t.dtype())) return cast(t, dtype);
    return cast(values_[0], dtype);
  }
  DType dtype() { return double_ ? kF64 : std::array{kF32, kF32, kBF16, kF16}[draw(0, 3)]; }
  Tensor truth(const Tensor& x) {
    switch (draw(0, 4)) {
      case 0: return isfinite(x);
      case 1: return lt(x, draw(-1, 1) * 0.5);
      case 2: return ge(x, number(x.dtype()));
      case 3: return logical_and(le(x, 0.3), ne(x, 0.0));
      default: return logical_not(logical_or(gt(x, 0.1), eq(x, 0.0)));
    }
  }
  // An operand that is broadcast along some dimensions, or strided.
  Tensor operand(DType d) {
    switch (draw(0, 7)) {
      case 0: return cast(leaf({shape_[2]}), d);
      case 1: return cast(leaf({shape_[1], 1}), d);
      case 2: return cast(leaf({shape_[0], 1, shape_[2]}), d);
      case 3: return cast(leaf({}), d);
      case 4: return transpose(cast(leaf({shape_[0], shape_[2], shape_[1]}), d), 1, 2);
      case 5: return slice(cast(leaf({shape_[0], shape_[1], shape_[2] + 3}), d), 2, 1, shape_[2] + 1);
      default: return number(d);
    }
  }
  Tensor op() {
    const DType d = dtype();
    const Tensor x = number(d);
    switch (draw(0, 40)) {
      case 0: return neg(x);
      case 1: return exp(x);
      case 2: return log(x);
      case 3: return sqrt(x);
      case 4: return rsqrt(x);
      case 5: return square(x);
      case 6: return abs(x);
      case 7: return sign(x);
      case 8: return sin(x);
      case 9: return cos(x);
      case 10: return truth(x);
      case 11: return clamp(x, -0.7, 0.9);
      case 12: return where(truth(x), operand(d), operand(d));
      case 13: return draw(0, 1) ? where(truth(x), x, 0.25) : where(truth(x), -2.0, operand(d));
      case 14: return add(x, operand(d));
      case 15: return sub(operand(d), x);
      case 16: return mul(x, operand(d));
      case 17: return div(x, operand(d));
      case 18: return pow(abs(x), operand(d));
      case 19: return minimum(x, operand(d));
      case 20: return maximum(operand(d), x);
      case 21: return add(x, 0.3);
      case 22: return sub(1.0, x);
      case 23: return mul(x, -1.7);
      case 24: return draw(0, 1) ? div(x, 3.0) : div(2.0, x);
      case 25: return draw(0, 1) ? pow(x, 2.0) : pow(abs(x), 1.5);
      case 26: return maximum(x, 0.1);
      case 27: return relu(x);
      case 28: return tanh(x);
      case 29: return sigmoid(x);
      case 30: return silu(x);
      case 31: return gelu(x, draw(0, 1) ? GeluKind::tanh : GeluKind::exact);
      case 32: return swiglu(x, number(d));
      case 33: return clamped_swiglu(x, number(d), {.alpha = 1.3, .limit = draw(0, 1) ? 0.6 : std::numeric_limits<double>::infinity()});
      case 34: return softplus(x);
      case 35: return floor(x * 3.0);
      case 36: return round(x * 3.0);
      case 37: return log1p(abs(x));
      case 38: return expm1(x);
      case 39: return erf(x);
      default: return cast(truth(x), d);
    }
  }

  std::mt19937 random_;
  const bool double_ = random_() % 5 == 0;
  // Sizes that are multiples of blocks, others, and 0.
  const Shape shape_{std::array{1, 3, 5, 40}[random_() % 4], std::array{1, 2, 7, 16}[random_() % 4],
                     std::array{1, 5, 8, 64, 0}[random_() % 17 ? random_() % 4 : 4]};
  std::vector<Tensor> values_;
};

void expect_drawn_steps(int seeds) {
  int nodes = 0;
  for (int seed = 0; seed < seeds && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    nodes += static_cast<int>(fused_nodes(expect_same_bits(record([&] { return Drawn(seed).step(); }))).size());
  }
  EXPECT_GT(nodes, seeds);
}

TEST(Fuse, DrawnStepsHaveTheBitsOfOneOpAfterTheOther) { expect_drawn_steps(400); }

TEST(Fuse, DrawnStepsOnAGpuToo) {
  SHEAF_NEEDS_GPU();
  if constexpr (kernels::kHasCuda) {
    RankContext context;
    context.gpu = kernels::cuda::make_gpu(0);
    context.device = context.gpu->device();
    RankScope scope(context);
    expect_drawn_steps(kernels::emulated_cuda() ? 60 : 400);
  }
}

// Derivatives of activations.
TEST(Fuse, BackwardsHaveTheBitsOfOneOpAfterTheOther) {
  for (const DType d : {kF32, kBF16, kF64})
    for (int kind = 0; kind < 6; ++kind) {
      const Step step = record([&] {
        const Tensor x = cast(randn({kF64, {5, 300}, {}}, Key{3}, 0, 3), d);
        Recording::current()->watch(x);
        const Tensor twice = mul(x, 2.0);
        const Tensor y = kind == 0   ? relu(twice)
                         : kind == 1 ? tanh(twice)
                         : kind == 2 ? sigmoid(twice)
                         : kind == 3 ? silu(twice)
                                     : gelu(twice, kind == 4 ? GeluKind::tanh : GeluKind::exact);
        const Tensor loss = sum(cast(mul(square(y), y), kF64));
        return std::vector<Tensor>{cumsum(Recording::current()->gradient(loss, std::vector{x})[0], 0)};
      });
      EXPECT_THAT(fused_text(expect_same_bits(step)), ::testing::Contains(HasSubstr("_backward"))) << kind;
    }
}

// A gate with limits is several steps, with its kernel's bits also for operands beyond the limits and NaN of either sign.
TEST(Fuse, AGateWithLimitsHasItsBits) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  std::vector<double> gates, ups;
  for (const double gate : {0.5, -3.0, 0.7, 0.8, inf, -inf, nan, -nan})
    for (const double up : {0.5, -0.3, 0.7, -0.7, 0.8, -3.0, inf, -inf, nan, -nan}) gates.push_back(gate), ups.push_back(up);
  for (const DType d : {kF32, kBF16, kF16, kF64}) {
    const Step step = record([&] {
      const Tensor gate = cast(Tensor::from(gates, {8, 10}), d), up = cast(Tensor::from(ups, {8, 10}), d);
      for (const Tensor& t : {gate, up}) Recording::current()->watch(t);
      const Tensor held = mul(clamped_swiglu(gate, up, {.alpha = 1.3, .limit = 0.7}), 2.0);
      const Tensor open = mul(clamped_swiglu(up, gate, {.limit = inf}), 2.0);
      return std::vector<Tensor>{concat({held, held}), concat({open, open})};
    });
    EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre("clamp, clamp, shifted swiglu, mul, clamp, clamp, shifted swiglu, mul"));
  }
}

Tensor given(const Shape& shape, uint64_t key = 1) {
  const Tensor t = randn({kF32, shape, {}}, Key{key});
  Recording::current()->watch(t);
  return t;
}

TEST(Fuse, AChainIsOneNodeAndWhatLiesBetweenTakesNoMemory) {
  const Step step = record([] {
    const Tensor x = given({64, 64}), y = given({64}, 2);
    return std::vector<Tensor>{sum(mul(add(exp(mul(x, 0.5)), y), 2.0)), sum(x)};
  });
  const Tape fused = expect_same_bits(step);
  EXPECT_THAT(fused_text(fused), ElementsAre("mul, exp, add, mul"));
  EXPECT_LT(step.program(fused).least_bytes(), step.program(step.tape).least_bytes()) << to_text(step.tape) << to_text(fused);
  EXPECT_THAT(to_text(fused), HasSubstr("fused %"));
}

TEST(Fuse, WhatOthersReadMeanwhileIsThere) {
  const Step step = record([] {
    const Tensor x = given({8, 8});
    const Tensor a = exp(x), b = mul(a, 2.0), product = matmul(b, x), c = add(product, b);
    return std::vector<Tensor>{matmul(c, a)};
  });
  EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre("exp, mul"));  // the addition comes after their product
}

TEST(Fuse, SeveralGroupsThatMeetBecomeOne) {
  const Step step = record([] {
    const Tensor x = given({8, 8}), y = given({8, 8}, 2);
    return std::vector<Tensor>{matmul(add(mul(exp(x), 2.0), mul(exp(y), 3.0)), x)};
  });
  EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre("exp, mul, exp, mul, add"));
}

TEST(Fuse, WhatAPassMustKeepIsKept) {
  const Step step = record([] { return std::vector<Tensor>{square(mul(exp(given({8, 8})), 2.0))}; });
  EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre("exp, mul"));  // the last one is wanted
  const Step first = record([] {
    const Tensor a = exp(given({8, 8}));
    return std::vector<Tensor>{a, cumsum(mul(mul(a, 2.0), 3.0), 0)};
  });
  EXPECT_THAT(fused_text(expect_same_bits(first)), ElementsAre("mul, mul"));
}

TEST(Fuse, ShapesAndPhasesDoNotMix) {
  const Step step = record([] {
    const Tensor x = given({4, 8}), y = given({8}, 2);
    return std::vector<Tensor>{cumsum(mul(x, exp(y)), 0)};
  });
  EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre());
}

TEST(Fuse, MoreOpsThanACodeHoldsAreSeveralNodes) {
  const Step step = record([] {
    Tensor x = given({4, 8});
    for (int i = 0; i < 100; ++i) x = i % 2 ? sub(x, 0.25) : mul(x, 1.125);
    return std::vector<Tensor>{cumsum(x, 0)};
  });
  const Tape fused = expect_same_bits(step);
  int ops = 0;
  for (const std::string& text : fused_text(fused)) ops += static_cast<int>(std::ranges::count(text, ',')) + 1;
  EXPECT_EQ(ops, 100);
  EXPECT_EQ(fused_nodes(fused).size(), 4u);
}

// A user-defined op that declares its formula: 1.7 x + by, rounded once.
struct Shifted {
  static constexpr const char* kName = "shifted";
  struct Attrs {
    double by;
  };
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs& a, Execute& c) {
    visit_floating(kName, c.input(0).dtype, [&]<class T>() {
      for (int64_t i = 0; i < c.input(0).numel(); ++i)
        c.output(0).as<T>()[i] = T(static_cast<float>(c.input(0).as<T>()[i]) * 1.7f + static_cast<float>(a.by));
    });
  }
  static void fuse(const Attrs& a, Fuse& f) {
    using enum kernels::BinaryOp;
    f.yields(f.binary(add, f.binary(mul, f.input(0), f.constant(1.7)), f.constant(a.by)));
  }
};
// An op that has nothing to compute.
struct Marked {
  static constexpr const char* kName = "marked";
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::pointwise_nonlinear(p); }
  static void execute(const Attrs&, Execute& c) {
    std::copy_n(c.input(0).as<float>(), c.input(0).numel(), c.output(0).as<float>());
  }
  static void fuse(const Attrs&, Fuse& f) { f.yields(f.input(0)); }
};

TEST(Fuse, OpsOfOnesOwnTakePartIfTheySayWhatTheyAreMadeOf) {
  for (const DType d : {kF32, kBF16, kF16}) {
    const Step step = record([&] {
      const Tensor x = contiguous(cast(given({8, 8}), d));
      return std::vector<Tensor>{cumsum(mul(apply<Shifted>({0.25}, mul(x, 2.0)), 3.0), 0)};
    });
    EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre(HasSubstr("mul, mul, add, mul")));
  }
  const Step step = record([] {
    const Tensor x = given({8, 8}), a = mul(exp(x), 2.0), b = apply<Marked>({}, a), c = mul(apply<Marked>({}, x), 3.0);
    return std::vector<Tensor>{cumsum(a, 0), cumsum(b, 0), cumsum(c, 0)};
  });
  EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre("exp, mul"));
}

// Two leaves that share memory.
TEST(Fuse, AnOverwrittenLeafIsReadBeforeByWhateverName) {
  const Tensor state = Tensor::from(std::vector<float>(64, 2), {8, 8}), other_name = Tensor::view_into(state, state.type(), 0);
  Step step = record([&] {
    const Tensor a = mul(other_name, 2.0), changed = cumsum(state, 0);
    return std::vector<Tensor>{cumsum(add(a, changed), 0)};
  });
  ValueId leaf = -1, sum = -1;
  for (const auto& [v, t] : step.leaves)
    if (t.id() == state.id()) leaf = v;
  for (NodeId id = 0; id < step.tape.num_nodes() && sum < 0; ++id)
    if (step.tape.op_name(step.tape.node(id)) == "cumsum") sum = step.tape.output(step.tape.node(id));
  ASSERT_GE(leaf, 0);
  EXPECT_EQ(fused_nodes(fuse_elementwise(step.program(step.tape)).tape()).size(), 1u);
  step.tape.mutable_value(sum).base = leaf;
  EXPECT_EQ(fused_nodes(fuse_elementwise(step.program(step.tape)).tape()).size(), 0u);
}

// A tape in which an operand is overwritten between two nodes that could be fused.
TEST(Fuse, AnOperandThatIsOverwrittenMeanwhileIsReadBefore) {
  Step step = record([] {
    const Tensor x = given({4, 8}), state = cumsum(x, 0), a = mul(state, 2.0), other = cumsum(x, 1);
    return std::vector<Tensor>{cumsum(add(a, other), 0)};
  });
  std::vector<ValueId> sums;
  for (NodeId id = 0; id < step.tape.num_nodes(); ++id)
    if (step.tape.op_name(step.tape.node(id)) == "cumsum") sums.push_back(step.tape.output(step.tape.node(id)));
  EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre("mul, add"));
  step.tape.mutable_value(sums[1]).base = sums[0];
  EXPECT_THAT(fused_text(expect_same_bits(step)), ElementsAre());
}

}  // namespace
}  // namespace sheaf::testing
