// Detects ranks with different options, which would compute wrong results or deadlock.
#pragma once

#include <vector>

#include "sheaf/distributed/agreement.h"
#include "sheaf/models/train_config.h"

namespace sheaf::tools {

/// Throws ConfigError on all ranks if the options or the `further` facts differ. Threads may differ, and so may the paths of the data
/// on each host, which are compared by content.
void require_same_options(World& world, const models::TrainConfig& config, std::vector<Fact> further = {});

}  // namespace sheaf::tools
