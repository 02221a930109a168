#include "sheaf/distributed/socket.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sheaf/core/error.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;
using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve(const std::string& host, int port, bool passive, Deadline deadline = {}, const Check& check = {}) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  int rc;
  while ((rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list)) == EAI_AGAIN && Clock::now() < deadline) {
    if (check) check();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  if (rc != 0)
    fail<ConfigError>("[rendezvous] cannot resolve host '", host, "': ",
                      rc == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(rc));
  return {list, &freeaddrinfo};
}

void set_option(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

// A host that loses power sends nothing: the kernel probes after 5 s of silence and gives up 3 s later. It does not probe while sent
// data is unacknowledged: then these 8 s are the time-out for that. They are also the time-out for data that a peer has no room for,
// so nobody may send much to one that does not read (Monitor::note_to_all).
void configure(int fd) {
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 8000);
}

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000'000));
}

/// Sleeps until `events` are possible on `fd`; false at the deadline.
bool ready(int fd, short events, Deadline deadline, const Check& check = {}) {
  while (true) {
    const Deadline until = check ? std::min(deadline, Clock::now() + std::chrono::milliseconds(100)) : deadline;
    pollfd p{fd, events, 0};
    const int rc = poll(&p, 1, milliseconds_until(until));
    if (rc > 0) return true;
    if (rc < 0 && errno != EINTR) return false;
    if (rc == 0 && until == deadline) return false;
    if (check) check();
  }
}

/// While nobody listens on a port, Linux may pick it for the caller's end as well, and connects the socket to itself.
bool is_connected_to_itself(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 && std::memcmp(&own, &peer, sizeof own) == 0;
}

bool receive_exactly(int fd, char* to, size_t bytes, Deadline deadline, const Check& check) {
  while (bytes > 0) {
    if (!ready(fd, POLLIN, deadline, check)) return false;
    const ssize_t n = recv(fd, to, bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) to += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

uint32_t decode_length(const char* bytes) {
  uint32_t length;
  std::memcpy(&length, bytes, sizeof length);
  return length;
}

// A port may be taken by the near end of a connection to somewhere else, for which the system has picked it. When that ends, the port
// stays taken for another minute.
constexpr auto kPortPatience = std::chrono::seconds(75);

/// Takes a moment if nobody does.
bool anyone_listens(const std::string& host, int port) {
  try {
    connect_to(host, port, Clock::now() + std::chrono::milliseconds(200));
    return true;
  } catch (const CommError&) {
    return false;
  }
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = other.release();
  }
  return *this;
}

int Socket::release() { return std::exchange(fd_, -1); }

void Socket::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Socket listen_on(const std::string& host, int port, Deadline deadline) {
  const AddressList list = resolve(host, port, true, deadline);
  const Deadline patience = std::min(deadline, Clock::now() + kPortPatience);
  int error = 0;
  do {
    for (addrinfo* a = list.get(); a; a = a->ai_next) {
      Socket s(socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
      if (!s) { error = errno; continue; }
      set_option(s.fd(), SOL_SOCKET, SO_REUSEADDR, 1);
      if (bind(s.fd(), a->ai_addr, a->ai_addrlen) == 0 && listen(s.fd(), 1024) == 0) return s;
      error = errno;
    }
  } while (error == EADDRINUSE && Clock::now() < patience && !anyone_listens(host, port));
  const std::string what = str("[rendezvous] cannot listen on ", host, ':', port, ": ", std::strerror(error));
  if (error == EADDRINUSE) fail<ConfigError>(what, "; MASTER_PORT or SHEAF_PORT chooses another port");
  if (error == EADDRNOTAVAIL) fail<ConfigError>(what, "; MASTER_ADDR must be an address of rank 0's host");
  fail<IoError>(what);
}

Socket connect_to(const std::string& host, int port, Deadline deadline, const std::string& who, const Check& check) {
  auto pause = std::chrono::milliseconds(5);
  std::string reason;
  while (true) {
    const AddressList list = resolve(host, port, false, deadline, check);
    for (addrinfo* a = list.get(); a; a = a->ai_next) {
      Socket s(socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
      if (!s && errno != EAFNOSUPPORT) fail<IoError>("[rendezvous] cannot open a socket: ", std::strerror(errno));
      if (!s) {
        reason = std::strerror(errno);
        continue;
      }
      int error = connect(s.fd(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        socklen_t size = sizeof error;
        if (ready(s.fd(), POLLOUT, std::min(deadline, Clock::now() + std::chrono::seconds(10)), check))
          getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error == 0 && is_connected_to_itself(s.fd())) {
        const linger none{1, 0};  // an orderly end would hold the port for a minute
        setsockopt(s.fd(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
        error = ECONNREFUSED;
      }
      if (error == 0) {
        configure(s.fd());
        return s;
      }
      reason = std::strerror(error);
    }
    if (check) check();
    if (Clock::now() + pause >= deadline)
      throw CommError(str("[rendezvous] no answer from ", who, who.empty() ? "" : " at ", host, ':', port, ": ", reason), ExitCode::kTimeout);
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::milliseconds(200));
  }
}

std::optional<Socket> accept_from(const Socket& listener, Deadline deadline, const Check& check) {
  while (ready(listener.fd(), POLLIN, deadline, check)) {
    Socket s(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!s) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) continue;
      fail<IoError>("[rendezvous] cannot accept a connection: ", std::strerror(errno));
    }
    configure(s.fd());
    return s;
  }
  return std::nullopt;
}

Socket open_alarm() {
  Socket s(eventfd(0, EFD_CLOEXEC));
  if (!s) fail<IoError>("[rendezvous] cannot open an eventfd: ", std::strerror(errno));
  return s;
}

void ring(const Socket& alarm) {
  const uint64_t one = 1;
  if (write(alarm.fd(), &one, sizeof one) < 0) { /* an eventfd takes a 1 */ }
}

int local_port(const Socket& socket) {
  sockaddr_storage a{};
  socklen_t size = sizeof a;
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&a), &size) != 0) return 0;
  return ntohs(a.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(a).sin6_port
                                       : reinterpret_cast<sockaddr_in&>(a).sin_port);
}

std::string local_address(const Socket& socket) {
  sockaddr_storage a{};
  socklen_t size = sizeof a;
  char host[NI_MAXHOST] = "";
  if (getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&a), &size) == 0)
    getnameinfo(reinterpret_cast<sockaddr*>(&a), size, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

bool is_loopback(const std::string& host, Deadline deadline) {
  const AddressList list = resolve(host, 0, false, deadline);
  for (addrinfo* a = list.get(); a; a = a->ai_next) {
    if (a->ai_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(a->ai_addr);
      if (ntohl(v4->sin_addr.s_addr) >> 24 != 127) return false;
    } else if (a->ai_family == AF_INET6) {
      if (!IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(a->ai_addr)->sin6_addr)) return false;
    }
  }
  return true;
}

bool send_frame(const Socket& socket, std::string_view payload, Deadline deadline) {
  if (payload.size() > kMaxFrameBytes) return false;
  FrameQueue queue;
  queue.push(payload);
  return queue.flush(socket, deadline);
}

void FrameQueue::push(std::string_view payload) {
  if (payload.size() > kMaxFrameBytes) return;
  const uint32_t length = static_cast<uint32_t>(payload.size());
  bytes_.append(reinterpret_cast<const char*>(&length), sizeof length);
  bytes_ += payload;
}

bool FrameQueue::flush(const Socket& socket, Deadline deadline) {
  size_t sent = 0;
  while (sent < bytes_.size()) {
    const ssize_t n = send(socket.fd(), bytes_.data() + sent, bytes_.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) sent += static_cast<size_t>(n);
    else if ((errno != EAGAIN && errno != EINTR) || !ready(socket.fd(), POLLOUT, deadline)) break;
  }
  bytes_.erase(0, sent);
  return bytes_.empty();
}

std::optional<std::string> receive_frame(const Socket& socket, Deadline deadline, const Check& check) {
  char header[4];
  if (!receive_exactly(socket.fd(), header, sizeof header, deadline, check)) return std::nullopt;
  const uint32_t length = decode_length(header);
  if (length > kMaxFrameBytes) return std::nullopt;
  std::string payload(length, '\0');
  if (!receive_exactly(socket.fd(), payload.data(), length, deadline, check)) return std::nullopt;
  return payload;
}

FrameBuffer::Status FrameBuffer::fill(const Socket& socket) {
  char chunk[4096];
  while (true) {
    const ssize_t n = recv(socket.fd(), chunk, sizeof chunk, MSG_DONTWAIT);
    if (n > 0) bytes_.append(chunk, static_cast<size_t>(n));
    else if (n < 0 && errno == EINTR) continue;
    else if (n < 0 && errno == EAGAIN) break;
    else return Status::closed;
    if (bytes_.size() >= 4 && decode_length(bytes_.data()) > kMaxFrameBytes) return Status::closed;
    if (bytes_.size() > 2 * kMaxFrameBytes) break;  // the rest waits until these frames are consumed
  }
  return Status::open;
}

std::optional<std::string> FrameBuffer::next() {
  if (bytes_.size() < 4) return std::nullopt;
  const size_t length = decode_length(bytes_.data());
  if (length > kMaxFrameBytes || bytes_.size() - 4 < length) return std::nullopt;
  std::string frame = bytes_.substr(4, length);
  bytes_.erase(0, 4 + length);
  return frame;
}

FrameWriter& FrameWriter::u64(uint64_t v) {
  char bytes[8];
  std::memcpy(bytes, &v, sizeof v);
  bytes_.append(bytes, sizeof bytes);
  return *this;
}

std::string_view FrameReader::take(size_t n) {
  if (n > bytes_.size()) {
    ok_ = false;
    bytes_ = {};
    return {};
  }
  const std::string_view out = bytes_.substr(0, n);
  bytes_.remove_prefix(n);
  return out;
}

uint8_t FrameReader::u8() {
  const std::string_view b = take(1);
  return b.empty() ? 0 : static_cast<uint8_t>(b[0]);
}

uint64_t FrameReader::u64() {
  const std::string_view b = take(8);
  uint64_t v = 0;
  if (b.size() == 8) std::memcpy(&v, b.data(), 8);
  return v;
}

std::string FrameReader::text() { return std::string(take(u64())); }

}  // namespace sheaf
