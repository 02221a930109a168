// A small key-value store over TCP, served by rank 0, through which ranks exchange their addresses.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "sheaf/core/error.h"
#include "sheaf/distributed/socket.h"

namespace sheaf {

/// Serves on its own thread until it is destroyed. A client must first send the job's token and its rank; a rank that connects twice,
/// is out of range or has another world size is refused with the reason, and when a rank gives up or its connection breaks, all clients
/// that wait for a key learn why. A rank that has left and connects again belongs to the next job of these ranks: it is asked to come
/// later, when this server is gone.
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
  /// Waits for a server of the ranks' previous job to end. ConfigError if refused, CommError on time-out.
  StoreClient(const std::string& host, int port, int rank, int world, const std::string& token, Deadline deadline);
  /// Ranks that wait for a key learn that this one died, unless it may leave or has told them why it gives up.
  ~StoreClient();
  /// Tells the others: those that wait for a key, now or later, throw a CommError with this reason, kTimeout if it is one, else
  /// kPeerLost. The first to give up is believed: the others' reasons follow from its own.
  void give_up(const std::string& reason, ExitCode code);
  /// All ranks are connected, so that they learn of each other's failures in other ways: from now on the end of this is none.
  void may_leave() { may_leave_ = true; }

  void set(const std::string& key, std::string_view value, Deadline deadline);
  /// Sleeps until somebody sets `key`. CommError: kTimeout at the deadline, kPeerLost if a rank or the server is gone. Messages say that
  /// this rank waited for `what`, by default for the key.
  std::string get(const std::string& key, Deadline deadline, const std::string& what = {}) { return get_part(key, 0, 1, deadline, what); }
  /// The same, but nothing at the deadline. Another rank's time-out is its error here, too.
  std::optional<std::string> get_unless_late(const std::string& key, Deadline deadline);
  /// The same of the `part`-th of `parts` equal parts of the value. ConfigError if it has no such parts.
  std::string get_part(const std::string& key, uint64_t part, uint64_t parts, Deadline deadline, const std::string& what = {});

  /// After a time-out, the ranks that have not connected to the server: "2, 3". If another rank gave up before, throws what it said;
  /// CommError(kPeerLost) if the server is gone.
  std::string missing_ranks();

  /// From now until unwatch(), throw_if_any_lost() throws as get() would if a rank were gone; nothing else may be called meanwhile.
  void watch();
  void throw_if_any_lost();
  void unwatch(Deadline deadline);

  /// From any thread: current and later calls throw CommError(kPeerLost) with this reason.
  void interrupt(const std::string& reason);

  /// This machine's address as the server's machine sees it: where peers can reach us.
  std::string local_address() const { return sheaf::local_address(socket_); }

 private:
  /// False if the server says that it is of the previous job, or ends before it answers.
  bool is_greeted(const std::string& hello, Deadline deadline);
  std::string ask(const std::string& request, const std::string& what, Deadline deadline);
  std::optional<std::string> ask_unless_late(const std::string& request, Deadline deadline);
  std::string text_of(const std::string& reply) const;
  bool answered(Deadline deadline) const;  ///< false at the deadline, or when interrupted
  void throw_if_lost(uint8_t status, const std::string& text) const;
  [[noreturn]] void throw_server_gone() const;
  std::optional<std::string> ask_missing_ranks(Deadline deadline);
  std::string me() const;  ///< what messages begin with

  const int rank_, world_;
  Socket socket_;
  bool may_leave_ = false;
  const Socket wake_;  // an eventfd: the connection stays intact, so that the server does not consider us dead
  std::mutex mutex_;
  std::string interrupted_;  // why; empty: it was not
};

}  // namespace sheaf
