// Small models for the tests of nn/.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sheaf/autograd/ops.h"
#include "sheaf/nn/layers/dropout.h"
#include "sheaf/nn/layers/embedding.h"
#include "sheaf/nn/layers/linear.h"
#include "sheaf/nn/layers/norm.h"
#include "sheaf/nn/shard.h"

namespace sheaf::testing {

struct TinyBlock : nn::Module {
  nn::LayerNorm norm;
  nn::Linear up, down;
  explicit TinyBlock(int64_t width) : norm(width), up(width, 3 * width), down(3 * width, width) {}
  Tensor forward(const Tensor& x) { return x + down(tanh(up(norm(x)))); }
  SHEAF_FIELDS(norm, up, down);
};

/// Successive blocks.
template <class Block, int kCount>
struct Chain : nn::Module {
  std::vector<Block> blocks = std::vector<Block>(kCount);
  Tensor forward(Tensor x) {
    for (Block& block : blocks) x = block(x);
    return x;
  }
  SHEAF_FIELDS(blocks);
};

/// Odd sizes everywhere, a table tied to the head, blocks in a vector.
struct TinyModel : nn::Module {
  nn::Embedding table;
  std::vector<TinyBlock> blocks;
  nn::LayerNorm norm;

  explicit TinyModel(int64_t layers = 2, int64_t vocab = 11, int64_t width = 7)
      : table(vocab, width, nn::Init::normal(0.5)), norm(width, {.bias = false}) {
    for (int64_t i = 0; i < layers; ++i) blocks.emplace_back(width);
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = table(tokens);
    for (TinyBlock& block : blocks) x = block(x);
    return linear(norm(x), table.weight);
  }
  SHEAF_FIELDS(table, blocks, norm);
  Tensor loss(const Tensor& tokens, const Tensor& targets, const CrossEntropyOptions& options = {}) {
    return cross_entropy((*this)(tokens), targets, options);
  }
};

/// Rows of tokens that depend only on the global row index: [rows, length] below `vocab`, cut along rows over `mesh` if it is given.
inline Tensor token_rows(const Mesh& mesh, int64_t rows, int64_t length, int64_t vocab, int64_t shift = 0) {
  const Type type{kI32, {rows, length}, mesh.spec ? Layout(mesh.spec, Placement::shard(0)) : Layout()};
  const int64_t begin = mesh.spec ? type.local_start()[0] : 0;
  std::vector<int32_t> local;
  for (int64_t i = 0; i < type.local_shape().numel(); ++i) {
    const int64_t global = begin * length + i + shift;
    local.push_back(static_cast<int32_t>((global * global + 3 * global + global / 5) % vocab));
  }
  return Tensor::from_local(local, type);
}

/// Rows of micro-batch `part` that depend only on the global row index: [rows, width], cut along rows over `mesh`; `alone`: this rank's
/// rows, on no mesh.
inline Tensor dense_rows(const Mesh& mesh, int64_t rows, int64_t width, int part, bool alone = false) {
  const Type type{kF32, {rows, width}, Layout(mesh.spec, Placement::shard(0))};
  const int64_t first = type.local_start()[0] + part * rows;
  std::vector<float> local;
  for (int64_t i = 0; i < type.local_shape().numel(); ++i)
    local.push_back(0.1f * static_cast<float>((first * width + i) * 7 % 23) - 0.9f);
  return Tensor::from_local(local, alone ? Type{kF32, type.local_shape(), {}} : type);
}

/// Calls check(strategy, units, prefetch_bytes, name) for all ways to shard a TinyModel on `world` ranks that have the same bits.
template <class F>
void for_each_sharding(int world, F&& check) {
  check(Strategy::full_shard, nn::units_of<TinyBlock>(), -1, "full_shard");
  check(Strategy::full_shard, nn::units_of<TinyBlock>(), 0, "full_shard without prefetch");
  check(Strategy::full_shard, {}, -1, "one unit");
  check(Strategy::full_shard, nn::units_of_at_least(100), -1, "many units");
  check(Strategy::shard_grad_op, nn::units_of<TinyBlock>(), -1, "shard_grad_op");
  check(Strategy::zero1, nn::units_of<TinyBlock>(), -1, "zero1");
  check(Strategy::replicate, nn::units_of<TinyBlock>(), -1, "replicate");
  if (world == 1) check(Strategy::none, nn::units_of<TinyBlock>(), -1, "unsharded");
}

}  // namespace sheaf::testing
