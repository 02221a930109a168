// ShmTransport: shared memory between the ranks of one host.
#pragma once

#include <memory>
#include <string>

#include "sheaf/distributed/hosts.h"
#include "sheaf/distributed/shm_communicator.h"
#include "sheaf/distributed/transport.h"

namespace sheaf {

/// For groups of ranks that `segments` contains.
class ShmTransport final : public Transport {
 public:
  ShmTransport(std::shared_ptr<Job> job, ShmSegments segments)
      : job_(std::move(job)), segments_(std::make_shared<const ShmSegments>(std::move(segments))) {}
  std::string_view kind() const override { return "shm"; }
  std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) override;
  FailureBoard& board() override { return *job_->board; }

 private:
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<const ShmSegments> segments_;
};

struct ShmOffer {
  Hosts hosts;                           ///< the ranks that have mapped each other's memory
  std::shared_ptr<Transport> transport;  ///< between the ranks of this host; null if this rank is alone there
  std::string why_not;                   ///< why not all ranks share memory, the same on all of them; empty: they do
};

/// Collective over the job: sets up shared memory between ranks that can share it, which is tried, not guessed. If one rank of a host
/// cannot, none of that host do. Gives the current rank's allocator its wire memory.
ShmOffer offer_shm(const std::shared_ptr<Job>& job);

}  // namespace sheaf
