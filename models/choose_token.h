// How the next token is drawn from a model's logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// Draws from softmax(logits / config.temperature), restricted to the config.top_k likeliest, and of these to as few as make up
/// config.top_p of their probability (Holtzman et al., https://arxiv.org/abs/1904.09751), without those less likely than config.min_p
/// times the likeliest (Nguyen et al., https://arxiv.org/abs/2407.01082), by draw `index` of sample number `sample`: the same token on
/// any rank and in any batch. Throws ConfigError for a negative number or a share above 1, NonFiniteError naming the position, after a prompt of `prompt` tokens, if
/// logits are NaN or +inf, or all -inf.
int32_t choose_token(std::span<const double> logits, const GenerateConfig& config, int64_t sample, int64_t index, size_t prompt);

}  // namespace sheaf::models
