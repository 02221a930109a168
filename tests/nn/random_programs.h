// The grammar of random programs (random_programs_test.cc): what they consist of and how that is drawn.
//
//   model    = a tree of modules, each with some parameters: odd sizes, one element, frozen, tied to another module's
//   segment  = enter root, { enter module | leave | value = op(operands) }, loss, [gradients], [leave], backward
//   step     = a recording of one or two segments (micro-batches), then the optimizer
//   program  = a model and four steps over two segments, so that a step may or may not repeat the order of the last
//
// Operands are earlier values, inputs, and parameters of any module, in its scope or not. An op that refuses them in a trial on one rank is
// left out.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sheaf/autograd/custom_vjp.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/rowwise.h"
#include "sheaf/nn/module.h"
#include "sheaf/tests/core/draw.h"

namespace sheaf::testing {

constexpr int64_t kRows = 6, kWidth = 4, kLength = 3, kVocab = 7;
constexpr int kSegments = 2, kSteps = 4;

// ---- what programs are made of ---------------------------------------------------------------------------------------

using Args = const std::vector<Tensor>&;
struct Op {
  int operands;
  std::function<Tensor(Args)> f;
};

/// `to` on every axis.
inline Tensor everywhere(const Tensor& x, const Placement& to) {
  const MeshSpec* mesh = x.layout().mesh();
  return mesh ? redistribute(x, Layout(mesh, to)) : x;
}

/// Without a mesh a copy, so that there are as many values with a mesh as without.
inline Tensor moved(const Tensor& x, const Placement& to) {
  const Tensor y = everywhere(x, to);
  return y.id() == x.id() ? x * 1.0 : y;
}

/// The size of the last dimension; a scalar has none, and the op reports it.
inline int64_t last(const Tensor& x) { return x.rank() > 0 ? x.size(-1) : 0; }

inline const std::vector<Op>& ops() {
  static const auto* table = new std::vector<Op>{
      {1, [](Args a) { return tanh(a[0]); }}, {1, [](Args a) { return gelu(a[0]); }},
      {1, [](Args a) { return sin(a[0]); }}, {1, [](Args a) { return 0.5 * a[0]; }},
      {1, [](Args a) { return square(a[0]); }}, {1, [](Args a) { return stop_gradient(a[0]); }},
      {1, [](Args a) { return softmax(a[0]); }}, {1, [](Args a) { return log_softmax(a[0], 0); }},
      {1, [](Args a) { return sum(a[0], 0); }}, {1, [](Args a) { return mean(a[0], -1, true); }},
      {1, [](Args a) { return logsumexp(a[0], -1); }}, {1, [](Args a) { return cumsum(a[0], -1); }},
      {1, [](Args a) { return reshape(a[0], {a[0].numel()}); }}, {1, [](Args a) { return transpose(a[0], 0, -1); }},
      {1, [](Args a) { return slice(a[0], -1, 0, (last(a[0]) + 1) / 2); }},
      {1, [](Args a) { return split(a[0], {1, last(a[0]) - 1}, -1)[1]; }},
      {1, [](Args a) { return pad(a[0], 0, 1, 0, 0.5); }}, {1, [](Args a) { return dropout(a[0], 0.25); }},
      {1, [](Args a) { return expand(reshape(a[0], {1, a[0].numel()}), {2, a[0].numel()}); }},
      {1, [](Args a) { return rotary(reshape(a[0], {a[0].size(0), a[0].size(1), 1, a[0].size(2)})); }},
      {1, [](Args a) { return custom_vjp([](const Tensor& x) { return sin(x); }, [](Vjp& c) { c.set(0, c.grad() * cos(c.input(0))); }, a[0]); }},
      {1, [](Args a) {
         return custom_vjp([](const Tensor& x) { return exp(tanh(x)); },
                           [](Vjp& c) { c.set(0, c.grad() * (c.output(0) * (1.0 - square(log(c.output(0)))))); },
                           {.saved_inputs = 0}, a[0]);
       }},
      {2, [](Args a) { return a[0] + a[1]; }}, {2, [](Args a) { return a[0] - a[1]; }},
      {2, [](Args a) { return a[0] * a[1]; }}, {2, [](Args a) { return a[0] / (square(a[1]) + 1.0); }},
      {2, [](Args a) { return swiglu(a[0], a[1]); }}, {2, [](Args a) { return concat({a[0], a[1]}, -1); }},
      {2, [](Args a) { return stack({a[0], a[1], a[0]}, 0); }}, {2, [](Args a) { return matmul(a[0], a[1]); }},
      {2, [](Args a) { return matmul(a[0], transpose(a[1], 0, 1)); }}, {2, [](Args a) { return linear(a[0], a[1]); }},
      {2, [](Args a) { return embedding(a[0], a[1]); }}, {2, [](Args a) { return cross_entropy(a[0], a[1]); }},
      {2, [](Args a) { return rms_norm(a[0], a[1], 0.01); }},
      {2, [](Args a) {
         const auto f = [&](const Tensor& rows) { return dropout(tanh(linear(rows, a[1])), 0.25) * 1.0; };
         return rowwise(f, tanh(transpose(a[0], 1, -1)));
       }},
      {3, [](Args a) { return linear(a[0], a[1], a[2]); }}, {3, [](Args a) { return linear_gelu(a[0], a[1], a[2]).value; }},
      {3, [](Args a) { return linear_cross_entropy(a[0], a[1], a[2], {.divide_by = 5}); }},
      {3, [](Args a) { return layer_norm(a[0], a[1], a[2], 0.01); }},
      {3, [](Args a) { return add_rms_norm(a[0], a[1], a[2], 0.01).normed; }},
      {3, [](Args a) {
         const auto heads = [](const Tensor& x) { return reshape(x, {x.size(0), x.size(1), 2, x.size(2) / 2}); };
         return attention(heads(a[0]), heads(a[1]), heads(a[2]));
       }},
      {1, [](Args a) { return moved(a[0], Placement::replicate()); }},
      {1, [](Args a) { return moved(a[0], Placement::partial()); }},
      {1, [](Args a) { return moved(a[0], Placement::invariant()); }},
      {1, [](Args a) { return moved(a[0], Placement::shard(0)); }},
      {1, [](Args a) { return moved(a[0], Placement::shard(1)); }},
  };
  return *table;
}

/// Sums of the operands' elements, each with its own weight; Partial on every axis.
inline Tensor loss_of(Args values) {
  Tensor loss;
  for (size_t i = 0; i < values.size(); ++i) {
    Tensor term = sum(values[i]) * (0.5 + 0.3 * static_cast<double>(i));
    term = everywhere(term, Placement::partial());
    loss = loss ? loss + term : term;
  }
  return loss;
}

struct Instruction {
  enum Kind { enter, leave, op, gradients, backward } kind;
  int module = 0;                 // that is entered
  std::vector<int> operands = {}; // values in order of creation, inputs first; ~i is parameter i
  std::function<Tensor(Args)> f = {};
};
using Segment = std::vector<Instruction>;

struct Leaf { Shape shape; bool frozen; int tied; };
struct Node { int parent; std::vector<Leaf> leaves; };
struct Program {
  uint64_t seed = 0;
  std::vector<Node> tree = {};
  Segment segments[kSegments] = {};
  std::vector<int> steps[kSteps] = {};
};

inline void draw_tree(Program& p, Draw& draw) {
  const std::vector<Shape> shapes{{kWidth, kWidth}, {kWidth, kWidth}, {kWidth}, {kWidth}, {2 * kWidth, kWidth},
                                  {kVocab, kWidth}, {kLength, kWidth}, {1}, {}, {kVocab}, {17, 9}};
  std::vector<Leaf> all;
  for (int m = 0; m < 1 + draw.below(6); ++m) {
    Node node{m ? draw.below(static_cast<size_t>(m)) : -1, {}};
    for (int i = all.empty() ? 0 : draw.below(4) - 1; i < 3; ++i) {
      Leaf leaf{draw.of(shapes), !all.empty() && draw.one_in(8), -1};
      if (!all.empty() && draw.one_in(8)) {
        leaf.tied = draw.below(all.size());
        leaf.shape = all[static_cast<size_t>(leaf.tied)].shape;
      }
      all.push_back(leaf);
      node.leaves.push_back(leaf);
    }
    p.tree.push_back(node);
  }
  for (int step = 0; step < kSteps; ++step) {
    if (step && draw.one_in(2)) p.steps[step] = p.steps[step - 1];
    else p.steps[step] = {draw.below(kSegments)};
    if (p.steps[step].size() == 1 && draw.one_in(2)) p.steps[step].push_back(draw.below(kSegments));
  }
}

// ---- how they are run ------------------------------------------------------------------------------------------------

struct Tree : nn::Module {
  std::vector<nn::Parameter> leaves;
  std::vector<std::unique_ptr<Tree>> children;
  SHEAF_FIELDS(leaves, children);
};

struct Config {
  int world = 0;     // 0: no mesh
  int replicas = 0;  // 0: a mesh of one axis
  DType dtype = kF64;
  const char* strategy = "full_shard";
  int64_t prefetch = 0;
  uint64_t units = 0;      // bit i: module i
  bool secondary = false;  // replicas' masters are cut, too, if the strategy cuts them
  uint64_t recompute = 0;  // bit i: module i
  RecomputeOptions how = {};
  std::string to_string() const {
    return str(world, " ranks ", replicas ? str("in ", replicas, secondary ? " secondary copies " : " replicas ") : "", dtype, " ", strategy,
               " prefetch ", prefetch, " units ", units, " recompute ", recompute, how.selective ? " selectively" : how.results ? " results" : "");
  }
};

/// Inputs of a micro-batch: x[N, C], x[N, T, C], tokens[N, T], targets[N], all cut by rows, and a constant[C].
inline std::vector<Tensor> drawn_inputs(const MeshSpec* mesh, Device device, DType dtype, uint64_t key) {
  const auto make = [&](const Shape& shape, DType dtype, int64_t below = 0, bool cut = true) {
    const Type type{dtype, shape, mesh && cut ? Layout(mesh, Placement::shard(0)) : Layout()};
    if (device.is_meta()) return Tensor::empty(type, device);
    const int64_t row = shape.numel() / shape[0], first = type.layout.mesh() ? type.local_start()[0] * row : 0;
    std::vector<double> local;
    for (int64_t i = first; i < first + type.local_shape().numel(); ++i) {
      const double u = static_cast<double>(Draw(key * 1000 + static_cast<uint64_t>(i)).bits() >> 11) * 0x1p-53;
      local.push_back(below ? std::floor(u * static_cast<double>(below)) : 2 * u - 1);
    }
    return cast(Tensor::from_local(local, {kF64, shape, type.layout}), dtype);
  };
  return {make({kRows, kWidth}, dtype), make({kRows, kLength, kWidth}, dtype), make({kRows, kLength}, kI32, kVocab),
          make({kRows}, kI32, kVocab), make({kWidth}, dtype, 0, false)};
}

inline Config drawn_config(int world, int replicas, DType dtype, Draw& draw) {
  Config c{world, replicas, dtype, draw.of<const char*>({"full_shard", "full_shard", "shard_grad_op", "zero1", "replicate"}),
           draw.of<int64_t>({0, -1, 500, 1 << 30}), draw.one_in(4) ? 0 : draw.bits(), draw.one_in(2)};
  c.recompute = draw.one_in(4) ? 0 : draw.bits();
  c.how = draw.of<RecomputeOptions>({{}, {.selective = true}, {.results = true}});
  return c;
}

}  // namespace sheaf::testing
