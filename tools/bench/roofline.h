// The roofline of a training step (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785): the seconds that
// its operations and the bytes that it cannot avoid take at rates that the machine has reached.
#pragma once

#include <cstdint>

#include "sheaf/models/train_config.h"

namespace sheaf::bench {

/// Rates that this machine reached, each by itself.
struct Rates {
  double products = 0;            ///< FLOP/s of the best large product
  double attention_forward = 0;   ///< FLOP/s, two products of B H T² D operations
  double attention_backward = 0;  ///< FLOP/s, five of them: scores are computed again
  double copy = 0;                ///< bytes read or written per second
};

/// Seconds of one step by `rates`, one after the other: products, attention, all other bytes of
/// activations (each read and written once, residual additions with their norm, an activation
/// function with its product), and 32 bytes a parameter for the norm of the gradient and AdamW.
/// `parameters`: elements of the model. Nothing for communication.
double roofline_seconds(const models::TrainConfig& config, int64_t parameters, const Rates& rates);

}  // namespace sheaf::bench
