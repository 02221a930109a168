#include "sheaf/tools/bench/memory_theory.h"

#include <algorithm>

#include "sheaf/kernels/linear.h"
#include "sheaf/kernels/linear_cross_entropy.h"

namespace sheaf::bench {

double theoretical_peak(const models::TrainConfig& config, int ranks) {
  const auto of = [](int64_t n) { return static_cast<double>(n); };
  const auto& m = config.model;
  const double L = of(m.layers), C = of(m.width), V = of(m.vocab), T = of(m.context),
               H = of(m.heads), N = ranks;
  const double rows = T * of(config.train.batch) / of(config.train.micro_batches) / N;
  const double f32 = 4;

  // Elements: a block (12 C² in products, norms and biases 13 C at most), and the root unit with
  // token embedding, positions and the last norm.
  const double block = 12 * C * C + (m.bias ? 13 : 2) * C;
  const double root = V * C + T * C + (m.bias ? 2 : 1) * C;
  const double all = L * block + root;

  // Persistent state: parameters and the two moments, the rank's shard of them.
  const bool sharded = config.sharding.strategy != "replicate";
  const bool kept = config.sharding.strategy == "shard_grad_op";
  const double part = sharded ? 1 / N : 1;
  const double rest = 3 * all * part;

  // Gathered during computation: everything if it is kept for backward; otherwise the root unit, the current block and the one being
  // prefetched.
  const double gathered = !sharded || ranks == 1 ? 0 : kept ? all : root + 2 * block;

  // Saved per token and block for backward, in units of C: its input, the first norm's output, queries, keys and values (3),
  // attention's output, the sum, the second norm's output, the MLP before and after GELU (4 + 4); in addition a log-sum-exp per head
  // and two norms' statistics.
  const double of_block = rows * (16 * C + H + 4);
  // The last norm's input, output and statistics; the loss's gradient in its input.
  const double of_head = rows * (3 * C + 2);

  // At the loss: all activations, the head's weight gradient in the root's slots, one chunk of logits.
  const double chunk = std::min(rows, of(kernels::cpu::linear_cross_entropy_chunk(m.vocab)));
  const double at_loss = L * of_block + of_head + root + chunk * V;
  // At the start of the backward of the last block's MLP: all blocks' activations, the gradients of its output and of its widest
  // activation, the block's slots.
  const double at_mlp = L * of_block + rows * 5 * C + root + block;
  // In the first block's backward, the last one to run: one block's activations and about half as much in gradients of them, this
  // block's slots, those of the second block, whose reduction is in flight, and the gradients reduced so far.
  const double slots = ranks == 1 ? 0 : 2 * block;
  const double reduced = ranks == 1 ? L * block : (L - 1) * block * part;
  const double at_end = 1.5 * of_block + root + slots + reduced;
  // The current product packs blocks of its operands; the largest are those of the MLP's weight gradient.
  const auto view = [](int64_t i, int64_t j) { return View::dense(nullptr, kF32, {i, j}); };
  const int64_t tokens = static_cast<int64_t>(rows);
  const double packed = of(static_cast<int64_t>(kernels::cpu::linear_weight_gradient_workspace(
      view(tokens, 4 * m.width), view(tokens, m.width), view(4 * m.width, m.width))));
  return f32 * (rest + gathered + std::max({at_loss, at_mlp, at_end})) + packed;
}

}  // namespace sheaf::bench
