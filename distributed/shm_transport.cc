#include "sheaf/distributed/shm_transport.h"

#include <algorithm>
#include <functional>

#include <unistd.h>

#include "sheaf/distributed/local_communicator.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

// Address space of one rank's wire memory: what the host has, and never so much that the segments of many ranks, all
// mapped by each, could fill a process's 128 TiB.
size_t wire_bytes(int world) {
  constexpr size_t kPage = 4096, kAllRanks = size_t{32} << 40;
  const auto memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(memory, kAllRanks / static_cast<size_t>(world)) / kPage * kPage;
}

/// What all ranks say to step `key` of the agreement. A rank that fails says "!" and why, and then so does the result.
struct Answers {
  std::vector<std::string> texts;
  std::string why_not;
};

Answers ask_all(Job& job, const std::string& key, const std::function<std::string()>& answer) {
  std::string own;
  try {
    own = answer();
  } catch (const IoError& e) {
    own = str('!', e.what());
  }
  Answers all{job.agree(key, own), {}};
  for (int r = 0; r < job.world() && all.why_not.empty(); ++r)
    if (all.texts[r].starts_with('!')) all.why_not = str("rank ", r, ": ", all.texts[r].substr(1));
  return all;
}

}  // namespace

std::unique_ptr<Communicator> ShmTransport::connect(const CommunicatorGroup& group) {
  if (group.size() == 1)
    return std::make_unique<LocalCommunicator>(group, job_->board, std::make_shared<LocalGroup>(1), LocalOptions{});
  return std::make_unique<ShmCommunicator>(group, job_, segments_);
}

ShmOffer offer_shm(const std::shared_ptr<Job>& job) {
  const Deadline deadline = Clock::now() + job->rendezvous.init_timeout;

  const Answers hosts = ask_all(*job, "shm/host", host_identity);
  if (!hosts.why_not.empty()) return {nullptr, hosts.why_not};
  for (int r = 1; r < job->world(); ++r)
    if (hosts.texts[r] != hosts.texts[0])
      return {nullptr, str("rank ", r, " and rank 0 are on different hosts, in different network namespaces, or run as "
                           "different users")};

  std::shared_ptr<ShmSegment> own;
  std::unique_ptr<ShmExchange> exchange;
  const Answers sockets = ask_all(*job, "shm/socket", [&] {
    own = ShmSegment::create(job->rank(), wire_bytes(job->world()));
    own->take_control(sizeof(ShmRank));  // the first
    exchange = std::make_unique<ShmExchange>();
    return exchange->name();
  });
  if (!sockets.why_not.empty()) return {nullptr, sockets.why_not};

  ShmSegments segments;
  const Answers mapped = ask_all(*job, "shm/mapped", [&] {
    segments = exchange->swap(job->rank(), sockets.texts, own, *job->board, deadline);
    return "ok";
  });
  if (!mapped.why_not.empty()) return {nullptr, mapped.why_not};
  own->close_memory();
  RankContext::current().cpu->add_wire(ShmSegment::wire_range(own));
  return {std::make_shared<ShmTransport>(job, std::move(segments)), {}};
}

}  // namespace sheaf
