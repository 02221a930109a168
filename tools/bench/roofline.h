// The roofline of a training step (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785): the seconds that its operations
// and its unavoidable memory traffic take at rates that the machine has reached.
#pragma once

#include <cstdint>

#include "sheaf/models/train_config.h"

namespace sheaf::bench {

/// Rates that this machine reached, each measured in isolation.
struct Rates {
  double products = 0;            ///< FLOP/s of the best large product
  double attention_forward = 0;   ///< FLOP/s, two products of B H T² D operations
  double attention_backward = 0;  ///< FLOP/s, five of them: scores are recomputed
  double copy = 0;                ///< bytes read or written per second
};

/// Seconds of one step by `rates`, without overlap: products, attention, all other bytes of activations (each read and written once,
/// residual additions fused with their norm, an activation function with its product), and 32 bytes per parameter for the gradient
/// norm and AdamW. `parameters`: elements of the model. Communication is not counted.
double roofline_seconds(const models::TrainConfig& config, int64_t parameters, const Rates& rates);

}  // namespace sheaf::bench
