// Agreement: all ranks of a job were given the same values, or they report at once which differ.
#pragma once

#include <string>
#include <vector>

#include "sheaf/distributed/world.h"

namespace sheaf {

/// Something that must be the same on every rank.
struct Fact {
  std::string name;        ///< such as "train.batch"
  std::string value;       ///< what is compared
  std::string shown = {};  ///< how messages show it; empty: `value`
};

/// Collective. Every rank passes the same names in the same order. ConfigError on every rank if a value differs: it names the first
/// such fact, and its values on rank 0 and on the first rank that differs. `what` begins the message. A rank that fails before this
/// call ends the others' wait, as in any collective.
void require_agreement(World& world, const std::string& what, const std::vector<Fact>& facts);
/// The same among the ranks of one communicator; messages use ranks within it.
void require_agreement(Communicator& lane, const std::string& what, const std::vector<Fact>& facts);

}  // namespace sheaf
