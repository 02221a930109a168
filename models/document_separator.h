// The token that separates documents in a sequence.
#pragma once

#include <cstdint>

#include "sheaf/models/corpus.h"
#include "sheaf/models/train_config.h"

namespace sheaf::models {

/// That token; -1 if they are not separated (data.separate_documents). Examples always are, since they are unrelated to their
/// neighbours: by one token, which then ends documents, too. Throws ConfigError if it is not known, or not in model.vocab.
int64_t separator_of(const TrainConfig& config, const Corpus& corpus);

}  // namespace sheaf::models
