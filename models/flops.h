// The number of operations of a training step: for computing utilisation from tokens per second.
#pragma once

#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Two conventions of counting attention: only what a causal mask leaves, 6 L T H D per token (llm.c, Megatron), or all of it, 12 L T
/// H D (PaLM: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B); L layers, T tokens of a sequence, H heads of D. A
/// window of W keys leaves a block 12 W (1 - W / 2T) H D instead of 6 T H D.
enum class CountAttention { causal, full };
/// Floating-point operations of one step: for each parameter in a product and each token 6 (2 forward, 4 backward; 4 in all if it is
/// frozen, as with model.lora_rank; the head counts, but not the lookup of the embedding, nor experts that a token is not routed to),
/// plus attention. Recomputation does not count. The vocabulary is model.vocab.
double flops_per_step(const TrainConfig& config, CountAttention attention = CountAttention::causal);

/// A step's operations in one block (the mean of all if their windows differ), in the head, and in all MTP layers, each of which has the
/// head after it.
struct FlopsOfParts {
  double block, head, mtp;
};
FlopsOfParts flops_of_parts(const TrainConfig& config, CountAttention attention = CountAttention::causal);

}  // namespace sheaf::models
