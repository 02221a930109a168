// Ranks that were given different options would compute something wrong, or wait for each other in vain.
#pragma once

#include <vector>

#include "sheaf/distributed/agreement.h"
#include "sheaf/models/train_config.h"

namespace sheaf::tools {

/// Throws ConfigError on all ranks if the options differ, or the `further` facts. Threads may differ, and so may the places where
/// hosts keep the data, which are compared by content.
void require_same_options(World& world, const models::TrainConfig& config, std::vector<Fact> further = {});

}  // namespace sheaf::tools
