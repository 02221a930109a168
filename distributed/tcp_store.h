// A small key-value store over TCP, served by rank 0, through which ranks exchange their addresses.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "sheaf/distributed/socket.h"

namespace sheaf {

/// Serves on its own thread until it is destroyed. A client must first send the job's token and its rank; a rank that connects twice,
/// is out of range or has another world size is refused with the reason, and when a rank's connection breaks, all clients that wait
/// for a key learn that it died.
class StoreServer {
 public:
  /// Takes a socket that listens already.
  StoreServer(Socket listener, int world, std::string token);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// One rank's connection; for one thread at a time, except interrupt().
class StoreClient {
 public:
  /// ConfigError if refused, CommError on time-out.
  StoreClient(const std::string& host, int port, int rank, int world, const std::string& token, Deadline deadline);
  ~StoreClient();

  void set(const std::string& key, std::string_view value, Deadline deadline);
  /// Sleeps until somebody sets `key`. CommError: kTimeout at the deadline, kPeerLost if a rank or the server is gone.
  std::string get(const std::string& key, Deadline deadline) { return get_part(key, 0, 1, deadline); }
  /// The same of the `part`-th of `parts` equal parts of the value. ConfigError if it has no such parts.
  std::string get_part(const std::string& key, uint64_t part, uint64_t parts, Deadline deadline);

  /// The ranks that have not connected to the server: "2, 3".
  std::string missing_ranks();

  /// From any thread: current and later calls throw CommError(kPeerLost) with this reason.
  void interrupt(const std::string& reason);

  /// This machine's address as the server's machine sees it: where peers can reach us.
  std::string local_address() const { return sheaf::local_address(socket_); }

 private:
  std::string ask(const std::string& request, const std::string& what, Deadline deadline);
  bool answered(Deadline deadline) const;  ///< false at the deadline, or when interrupted

  const int rank_, world_;
  Socket socket_;
  const Socket wake_;  // an eventfd: the connection stays intact, so that the server does not consider us dead
  std::mutex mutex_;
  std::string interrupted_;  // why; empty: it was not
};

}  // namespace sheaf
