// HostsTransport: a job over several hosts. Groups on one host communicate through its memory, the others over the
// network.
#pragma once

#include <memory>

#include "sheaf/distributed/hosts.h"
#include "sheaf/distributed/transport.h"

namespace sheaf {

/// All members of a group make the same choice, as `hosts` is the same on all ranks.
class HostsTransport final : public Transport {
 public:
  /// `within` connects this rank with those of its host, null if it is alone there; `across` connects all.
  HostsTransport(Hosts hosts, std::shared_ptr<Transport> within, std::shared_ptr<Transport> across)
      : hosts_(std::move(hosts)), within_(std::move(within)), across_(std::move(across)) {}
  std::string_view kind() const override { return kind_on(hosts_); }
  std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) override {
    return (within_ && on_one_host(hosts_, group.members) ? within_ : across_)->connect(group);
  }
  FailureBoard& board() override { return across_->board(); }

 private:
  const Hosts hosts_;
  const std::shared_ptr<Transport> within_, across_;
};

}  // namespace sheaf
