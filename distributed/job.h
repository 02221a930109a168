// Job: connects the processes of one job, before there are communicators.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sheaf/distributed/failure_board.h"
#include "sheaf/distributed/monitor.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/distributed/tcp_store.h"

namespace sheaf {

/// Shared by the communicators of one process.
struct Job {
  Rendezvous rendezvous;
  std::shared_ptr<FailureBoard> board = std::make_shared<FailureBoard>();
  std::unique_ptr<StoreServer> server;  ///< on rank 0
  std::unique_ptr<StoreClient> store;
  std::unique_ptr<Monitor> monitor;
  int subscription = -1;  ///< to the board: when the job fails, waits for the store are ended

  Job() = default;
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Collective: every rank's answer to the question `key`, by rank. Each key is used once. When it returns on rank
  /// 0, which serves the store, all ranks have received it.
  std::vector<std::string> agree(const std::string& key, const std::string& answer);

  int rank() const { return rendezvous.rank; }
  int world() const { return rendezvous.world; }
};

/// Joins the job that `rendezvous` describes: store and monitor. Returns when all ranks are connected.
std::shared_ptr<Job> join_job(const Rendezvous& rendezvous);

}  // namespace sheaf
