// The token that keeps documents in a sequence apart.
#pragma once

#include <cstdint>

#include "sheaf/models/corpus.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// That token; -1 if they are not kept apart (data.separate_documents). Examples always are, for they have nothing to do with their
/// neighbours: by one token, which then ends documents, too. Throws ConfigError where it is not known, or not in model.vocab.
int64_t separator_of(const TrainConfig& config, const Corpus& corpus);

}  // namespace sheaf::models
