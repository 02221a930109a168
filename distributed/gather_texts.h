// Collects a text from every rank, for one-time exchanges such as options and choices. Not for use in a step.
#pragma once

#include <string>
#include <vector>

#include "sheaf/core/communicator.h"

namespace sheaf {

/// Collective: every rank's `mine`, by rank. `path` names the call in messages.
std::vector<std::string> gather_texts(Communicator& lane, const std::string& mine, const std::string& path);
/// The same for large texts: on rank 0 they are laid end to end, and on other ranks there is nothing.
std::string join_texts_on_first(Communicator& lane, const std::string& mine, const std::string& path);

}  // namespace sheaf
