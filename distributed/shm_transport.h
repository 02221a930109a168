// ShmTransport: shared memory between all ranks of a job, where they share a host.
#pragma once

#include <memory>
#include <string>

#include "sheaf/distributed/shm_communicator.h"
#include "sheaf/distributed/transport.h"

namespace sheaf {

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
  std::shared_ptr<Transport> transport;  ///< null if there is none
  std::string why_not;                   ///< then: the first rank's reason, the same on all ranks
};

/// Collective over the job: shared memory for all ranks or for none. Gives the current rank's allocator its wire memory.
ShmOffer offer_shm(const std::shared_ptr<Job>& job);

}  // namespace sheaf
