#include "sheaf/distributed/shm_transport.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <unistd.h>

#include "sheaf/distributed/local_communicator.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

// Address space of one rank's wire memory: as much as the host has memory, but not so much that the segments of many ranks, all
// mapped by each, could fill a process's 128 TiB.
size_t wire_bytes(int64_t ranks) {
  constexpr size_t kPage = 4096, kAllRanks = size_t{32} << 40;
  const auto memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(memory, kAllRanks / static_cast<size_t>(ranks)) / kPage * kPage;
}

/// All ranks' answers to step `key` of the agreement. A rank that fails answers "!" and why, and `offer` then records that its host
/// has no shared memory.
std::vector<std::string> ask_all(Job& job, const std::string& key, ShmOffer& offer,
                                 const std::function<std::string()>& answer) {
  std::string own;
  try {
    own = answer();
  } catch (const IoError& e) {
    own = str('!', e.what());
  }
  std::vector<std::string> all = job.agree(key, own);
  for (int r = 0; r < job.world(); ++r) {
    if (!all[r].starts_with('!')) continue;
    if (offer.why_not.empty()) offer.why_not = str("rank ", r, ": ", all[r].substr(1));
    const int host = offer.hosts[r];
    for (int other = 0; other < job.world(); ++other)
      if (offer.hosts[other] == host) offer.hosts[other] = other;
  }
  return all;
}

}  // namespace

std::unique_ptr<Communicator> ShmTransport::connect(const CommunicatorGroup& group) {
  if (group.size() == 1)
    return std::make_unique<LocalCommunicator>(group, job_->board, std::make_shared<LocalGroup>(1), LocalOptions{});
  return std::make_unique<ShmCommunicator>(group, job_, segments_);
}

ShmOffer offer_shm(const std::shared_ptr<Job>& job) {
  // A rank that waits in vain for a peer's memory still has time to report it.
  const Deadline deadline = Clock::now() + job->rendezvous.init_timeout / 2;
  const int me = job->rank(), world = job->world();
  ShmOffer offer;
  offer.hosts.resize(static_cast<size_t>(world));
  std::iota(offer.hosts.begin(), offer.hosts.end(), 0);
  const auto ranks_here = [&] { return std::ranges::count(offer.hosts, offer.hosts[me]); };

  const std::vector<std::string> names = ask_all(*job, "shm/host", offer, [&] {
    return str(host_identity(), ' ', job->rendezvous.host_id);
  });
  for (int r = 0; r < world; ++r)
    if (!names[r].starts_with('!'))
      offer.hosts[r] = static_cast<int>(std::ranges::find(names, names[r]) - names.begin());
  for (int r = 1; r < world && offer.why_not.empty(); ++r)
    if (offer.hosts[r] != 0)
      offer.why_not = str("rank ", r, " and rank 0 are on different hosts, in different network namespaces, run as "
                          "different users, or have different SHEAF_HOST_ID");

  std::shared_ptr<ShmSegment> own;
  std::unique_ptr<ShmExchange> exchange;
  std::vector<std::string> sockets = ask_all(*job, "shm/socket", offer, [&]() -> std::string {
    if (ranks_here() == 1) return "";
    own = ShmSegment::create(me, wire_bytes(ranks_here()));
    own->take_control(sizeof(ShmRank));  // the first
    exchange = std::make_unique<ShmExchange>();
    return exchange->name();
  });
  for (int r = 0; r < world; ++r)
    if (offer.hosts[r] != offer.hosts[me]) sockets[r].clear();

  ShmSegments segments;
  ask_all(*job, "shm/mapped", offer, [&] {
    if (ranks_here() > 1) segments = exchange->swap(me, sockets, own, *job->board, deadline);
    return "ok";
  });
  if (ranks_here() == 1) return offer;
  own->close_memory();
  RankContext::current().cpu->add_wire(ShmSegment::wire_range(own));
  offer.transport = std::make_shared<ShmTransport>(job, std::move(segments));
  return offer;
}

}  // namespace sheaf
