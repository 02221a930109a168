// Values stored in quantized blocks.
#include "sheaf/autograd/ops/rows.h"
#include "sheaf/autograd/work.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/linear_of_blocks.h"
#include "sheaf/kernels/quantize.h"

namespace sheaf {
namespace {

using namespace ops;

/// Blocks are stored and communicated; they are dequantized where the values are used, and again in the backward, like a cast.
struct Dequantize {
  static constexpr const char* kName = "dequantize";
  static constexpr bool kRecipe = true, kStopsGradient = true;
  struct Attrs {
    BlockFormat format;
    DType to;
  };
  static void infer(const Attrs& a, Infer& c) {
    check<DTypeError>(c.dtype(0) == kU8, "[dequantize] blocks are u8, not ", c.input(0));
    require_floating(kName, a.to);
    c.output(a.to, values_shape(c.shape(0), a.format));
  }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    for (int d = 0; d < last; ++d) {
      const Placement cut = p.in(0).is_shard(d) ? p.in(0) : Placement::shard(d);
      p.rule({cut}, {cut});
    }
    const int64_t bytes = block_bytes(a.format);
    const OwnershipMap whole_blocks = p.in(0).is_shard(last) ? p.in(0).map() : OwnershipMap::even(last, bytes);
    if (whole_blocks.can_move(1, bytes))
      p.rule({Placement::shard(whole_blocks)}, {Placement::shard(whole_blocks.moved_to(last, kBlockSize, bytes))});
    p.rule({kR}, {kR});
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), dequantize, c.input(0), a.format, c.output(0));
  }
  static void describe(const Attrs& a, std::string& out) { out += str(name(a.format), " to ", a.to); }
};

struct LinearOfBlocks {  // x[.., I], blocks[O, bytes of I] [, bias[O]]
  static constexpr const char* kName = "linear_of_blocks";
  struct Attrs {
    BlockFormat format;
  };
  static void infer(const Attrs& a, Infer& c) {
    const DType d = c.dtype(0);
    require_floating(kName, d);
    check<DTypeError>(c.dtype(1) == kU8, "[linear_of_blocks] blocks are u8, not ", c.input(1));
    check<ShapeError>(c.shape(1).rank() == 2 && c.shape(0).rank() > 0, "[linear_of_blocks] input ", c.input(0), " and blocks ",
                      c.input(1), ": wants [.., I] and a matrix");
    const Shape weight = values_shape(c.shape(1), a.format);
    check<ShapeError>(c.shape(0).back() == weight[1], "[linear_of_blocks] input ", c.input(0),
                      " does not fit the blocks of a weight ", weight);
    if (c.num_inputs() == 3)
      check<ShapeError>(c.shape(2) == Shape{weight[0]} && c.dtype(2) == d, "[linear_of_blocks] bias ", c.input(2),
                        " does not fit input ", c.input(0), " and a weight ", weight);
    Shape y = c.shape(0);
    y[y.rank() - 1] = weight[0];
    c.output(d, y);
  }
  static void place(const Attrs& a, Place& p) {
    const int last = p.shape(0).rank() - 1;
    const int64_t bytes = block_bytes(a.format);
    const auto rule = [&](const Placement& x, const Placement& w, const Placement& b, const Placement& y) {
      const Placement in[] = {x, w, b};
      p.rule(std::span(in, static_cast<size_t>(p.num_inputs())), std::span(&y, 1));
    };
    const Placement& x = p.in(0);
    if (x.is_shard() && !x.map().is_flat() && x.map().dim() != last) rule(x, kR, kR, x);
    const Placement& w = p.in(1);
    if (w.is_shard(0)) rule(kR, w, w, Placement::shard(w.map().moved_to(last)));
    if (w.is_shard(1) && w.map().can_move(1, bytes))
      rule(Placement::shard(w.map().moved_to(last, kBlockSize, bytes)), w, kP, kP);
    rule(kR, kR, kR, kR);
    rule(kP, kR, kP, kP);
  }
  static View bias(const Execute& c) { return c.num_inputs() == 3 ? c.input(2) : View{}; }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), linear_of_blocks, c.input(0), c.input(1), a.format, bias(c), c.output(0));
  }
  static void execute(const Attrs& a, Execute& c) {
    SHEAF_ON_DEVICE(c.stream(), linear_of_blocks, c.input(0), c.input(1), a.format, bias(c), c.output(0), c.workspace);
  }
  static void work(const Attrs&, WorkOf& w) { w.multiplies(w.input(0), w.input(1)[0]); }
  static void describe(const Attrs& a, std::string& out) { out += name(a.format); }
};

}  // namespace

Tensor linear_of_blocks(const Tensor& x, const Tensor& blocks, BlockFormat format, const Tensor& bias) {
  std::vector<Tensor> inputs{x, contiguous(blocks)};
  if (bias) inputs.push_back(dense_rows(bias));
  const LinearOfBlocks::Attrs attrs{format};
  return std::move(apply(op_def<LinearOfBlocks>(), &attrs, inputs)[0]);
}

Tensor dequantize(const Tensor& blocks, BlockFormat format, DType dtype) {
  return apply<Dequantize>({format, dtype}, contiguous(blocks));
}

}  // namespace sheaf
