#include "sheaf/distributed/job.h"

#include <fcntl.h>
#include <sys/resource.h>

namespace sheaf {

namespace {

// Rank 0 has two connections to each rank, and Gloo one for each peer and lane: more than what shells allow by default.
void allow_many_descriptors() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Connects the monitors of all ranks, which tell each other their addresses through the store.
void connect_monitors(Job& job, Deadline deadline) {
  const Rendezvous& r = job.rendezvous;
  const std::string address = job.store->local_address();
  job.monitor = std::make_unique<Monitor>(r.rank, r.world, job.board, address, r.token, r.timeout);
  job.store->set(str("monitor/", r.rank), str(address, ' ', job.monitor->port()), deadline);

  std::vector<std::string> addresses(r.world);
  for (int peer = 0; peer < r.world; ++peer) {
    const auto address_of_peer = job.store->get_unless_late(str("monitor/", peer), deadline);
    if (!address_of_peer)
      throw CommError(str("[rendezvous] rank ", r.rank, " of ", r.world, ": time-out after ",
                          r.init_timeout.count() / 1000, " s, missing ranks: ", job.store->missing_ranks()),
                      ExitCode::kTimeout);
    addresses[peer] = *address_of_peer;
  }
  job.store->watch();
  const Check check_others = [&] { job.store->throw_if_any_lost(); };
  for (int peer = 0; peer < r.rank; ++peer) {
    const size_t space = addresses[peer].find(' ');
    check<CommError>(space != std::string::npos, "[rendezvous] rank ", peer, " left no address");
    job.monitor->connect(peer, addresses[peer].substr(0, space), std::stoi(addresses[peer].substr(space + 1)),
                         deadline, check_others);
  }
  job.monitor->start(deadline, check_others);
  job.store->unwatch(deadline);
}

}  // namespace

std::shared_ptr<Job> join_job(const Rendezvous& r) {
  allow_many_descriptors();
  const Deadline deadline = std::chrono::steady_clock::now() + r.init_timeout;
  auto job = std::make_shared<Job>();
  job->rendezvous = r;
  if (r.rank == 0) {
    Socket listener(r.listen_fd);
    // The launcher's socket, unless another process closed it or its port is not the agreed one.
    if (!listener || local_port(listener) != r.port) {
      listener.release();
      listener = listen_on(r.host, r.port, deadline);
    }
    fcntl(listener.fd(), F_SETFD, FD_CLOEXEC);
    job->server = std::make_unique<StoreServer>(std::move(listener), r.world, r.token);
  }
  job->store = std::make_unique<StoreClient>(r.host, r.port, r.rank, r.world, r.token, deadline);
  try {
    connect_monitors(*job, deadline);
  } catch (const Error& e) {
    job->store->give_up(e.what(), static_cast<ExitCode>(e.exit_code()));
    throw;
  }
  job->store->may_leave();
  job->subscription = job->board->subscribe([store = job->store.get()](const JobFailure& failure) {
    store->interrupt(str("rank ", failure.rank, " failed: ", failure.reason));
  });
  return job;
}

Job::~Job() { board->unsubscribe(subscription); }

std::vector<std::string> Job::agree(const std::string& key, const std::string& answer) {
  const Deadline deadline = std::chrono::steady_clock::now() + rendezvous.init_timeout;
  const auto of = [&](const char* what, int r) { return str(key, '/', what, '/', r); };
  std::vector<std::string> answers(world());
  if (rank() == 0) {  // collects for all: the store serves each rank three times, not each pair of ranks
    FrameWriter all;
    answers[0] = answer;
    for (int r = 1; r < world(); ++r) answers[r] = store->get(of("answer", r), deadline, str("rank ", r, " to answer '", key, "'"));
    for (const std::string& a : answers) all.text(a);
    store->set(key, all.bytes(), deadline);
    for (int r = 1; r < world(); ++r) store->get(of("heard", r), deadline, str("rank ", r, " to hear the answers to '", key, "'"));
    return answers;
  }
  store->set(of("answer", rank()), answer, deadline);
  const std::string all = store->get(key, deadline, str("rank 0 to tell the answers to '", key, "'"));
  FrameReader in(all);
  for (std::string& a : answers) a = in.text();
  check<CommError>(in.ok(), "[rendezvous] the answers to '", key, "' are not whole");
  store->set(of("heard", rank()), "", deadline);
  return answers;
}

}  // namespace sheaf
