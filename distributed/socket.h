// TCP sockets and length-prefixed frames, for the store and the monitor.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace sheaf {

using Deadline = std::chrono::steady_clock::time_point;
/// Called several times a second during a wait; what it throws ends that.
using Check = std::function<void()>;
inline constexpr size_t kMaxFrameBytes = size_t{1} << 20;

/// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  ~Socket() { close(); }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();
  void close();

 private:
  int fd_ = -1;
};

/// A socket that listens on `host` (a name or address) and `port` (0: any free one). ConfigError for a name that does not
/// resolve (a name server that is busy is asked until `deadline`, here and below), an address that is not this host's and a port that is
/// taken, IoError for the rest. If nobody listens on that port, it belongs to a connection: then it is tried again, until `deadline` and
/// for 75 s at most.
Socket listen_on(const std::string& host, int port, Deadline deadline = {});
/// Tries until `deadline`. ConfigError for a name that does not resolve, CommError(kTimeout), which names `who` is there, if nobody
/// answers, IoError if this process may open no more files.
Socket connect_to(const std::string& host, int port, Deadline deadline, const std::string& who = {}, const Check& check = {});
/// The next connection, or none when `deadline` passes.
std::optional<Socket> accept_from(const Socket& listener, Deadline deadline, const Check& check = {});

/// A descriptor that another thread can make readable, for poll(). IoError.
Socket open_alarm();
void ring(const Socket& alarm);

int local_port(const Socket& socket);
std::string local_address(const Socket& socket);  ///< numeric
/// True if every address that `host` resolves to is this machine's loopback. ConfigError if it does not resolve.
bool is_loopback(const std::string& host, Deadline deadline = {});

/// Frame: 32-bit little-endian length, payload. False if the peer is gone or `deadline` passes first.
bool send_frame(const Socket& socket, std::string_view payload, Deadline deadline);
/// The next frame; none if the peer is gone, sends more than kMaxFrameBytes, or `deadline` passes first.
std::optional<std::string> receive_frame(const Socket& socket, Deadline deadline, const Check& check = {});

/// Frames on their way to a peer that may not read them now. What its connection does not take stays here, so that no frame is cut short.
class FrameQueue {
 public:
  /// Ignores a frame that is too long.
  void push(std::string_view payload);
  /// False if something is left, because the peer is gone or `deadline` has passed.
  bool flush(const Socket& socket, Deadline deadline);

 private:
  std::string bytes_;
};

/// Collects the bytes of a non-blocking reader and splits them into frames.
class FrameBuffer {
 public:
  enum class Status { open, closed };
  /// Reads available bytes without blocking. `closed` at the end of the stream, on errors and on oversized frames.
  Status fill(const Socket& socket);
  std::optional<std::string> next();

 private:
  std::string bytes_;
};

/// Integers and strings in a frame's payload.
class FrameWriter {
 public:
  FrameWriter& u8(uint8_t v) { bytes_ += static_cast<char>(v); return *this; }
  FrameWriter& u64(uint64_t v);
  FrameWriter& text(std::string_view v) { u64(v.size()); bytes_ += v; return *this; }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

/// Reads them back; if the payload is too short, ok() turns false and values are zero or empty.
class FrameReader {
 public:
  explicit FrameReader(std::string_view bytes) : bytes_(bytes) {}
  uint8_t u8();
  uint64_t u64();
  std::string text();
  bool ok() const { return ok_; }

 private:
  std::string_view take(size_t n);
  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace sheaf
