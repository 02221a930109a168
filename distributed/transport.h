// Transport: how one rank reaches the others. Creates communicators; knows the job's first failure.
#pragma once

#include <memory>
#include <string_view>

#include "sheaf/distributed/communicator_base.h"

namespace sheaf {

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view kind() const = 0;
  /// This rank's communicator in `group`. Every member calls it, all in the same order of groups.
  virtual std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) = 0;
  virtual FailureBoard& board() = 0;
};

}  // namespace sheaf
