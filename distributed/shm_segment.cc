#include "sheaf/distributed/shm_segment.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "sheaf/core/error.h"
#include "sheaf/distributed/block_signal.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifndef MFD_NOEXEC_SEAL  // of Linux 6.3
#define MFD_NOEXEC_SEAL 8u
#endif
constexpr size_t kControlAlign = 128;

[[noreturn]] void fail_system(const char* what) { fail<IoError>("[shm] ", what, ": ", std::strerror(errno)); }

void require(bool done, const char* what) {
  if (!done) fail_system(what);
}

sockaddr_un abstract_address(const std::string& name, socklen_t& size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  check<IoError>(name.size() + 1 <= sizeof address.sun_path, "[shm] bad socket name");
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // byte 0 stays 0: no file
  size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

bool same_user(const Socket& s) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return getsockopt(s.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

/// Sleeps until `s` is readable; IoError if that takes until `deadline`, or if the job fails before.
void wait_readable(const Socket& s, const FailureBoard& board, Deadline deadline, const std::string& late) {
  while (Clock::now() < deadline) {
    if (const auto failure = board.failure()) fail<IoError>("[shm] rank ", failure->rank, " failed: ", failure->reason);
    pollfd p{s.fd(), POLLIN, 0};
    if (poll(&p, 1, 20) > 0) return;
  }
  fail<IoError>("[shm] time-out: ", late);
}

/// Nobody executes it: systems with vm.memfd_noexec=2 refuse memfds that could be, others log them. Kernels before 6.3 do not know that.
Socket open_memfd(const char* name) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Socket memory(memfd_create(name, kFlags | MFD_NOEXEC_SEAL));
  return !memory && errno == EINVAL ? Socket(memfd_create(name, kFlags)) : std::move(memory);
}

/// One byte, with room for a descriptor.
struct DescriptorMessage {
  char payload = 'm';
  iovec data{&payload, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};

  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
  DescriptorMessage(const DescriptorMessage&) = delete;  // it points into itself
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;
};

void send_descriptor(const Socket& to, int descriptor) {
  DescriptorMessage out;
  cmsghdr* header = CMSG_FIRSTHDR(&out.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  require(sendmsg(to.fd(), &out.message, MSG_NOSIGNAL) == 1, "cannot pass memory to a peer");
}

Socket receive_descriptor(const Socket& from) {
  DescriptorMessage in;
  require(recvmsg(from.fd(), &in.message, MSG_CMSG_CLOEXEC) == 1, "cannot receive a peer's memory");
  const cmsghdr* header = CMSG_FIRSTHDR(&in.message);
  check<IoError>(header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)),
                 "[shm] a peer sent no memory");
  int descriptor;
  std::memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
  return Socket(descriptor);
}

}  // namespace

std::shared_ptr<ShmSegment> ShmSegment::create(int rank, size_t wire_bytes) {
  // The name is visible in /proc/PID/maps and cannot be opened.
  Socket memory = open_memfd(str("sheaf-rank-", rank).c_str());
  require(bool(memory), "memfd_create");
  {
    const BlockSignal block(SIGXFSZ);  // of a limit to the size of files (ulimit -f)
    require(ftruncate(memory.fd(), static_cast<off_t>(kControlBytes + wire_bytes)) == 0, "cannot size a memfd");
  }
  // Reading beyond the end would kill a peer: the size is sealed.
  require(fcntl(memory.fd(), F_ADD_SEALS, kSeals) == 0, "cannot seal a memfd");
  return std::shared_ptr<ShmSegment>(new ShmSegment(std::move(memory), true));
}

std::shared_ptr<ShmSegment> ShmSegment::map(Socket memory) {
  const int seals = fcntl(memory.fd(), F_GET_SEALS);
  check<IoError>(seals >= 0 && (seals & kSeals) == kSeals, "[shm] a peer sent something that is no segment");
  auto segment = std::shared_ptr<ShmSegment>(new ShmSegment(std::move(memory), false));
  segment->close_memory();
  return segment;
}

ShmSegment::ShmSegment(Socket memory, bool own) : memory_(std::move(memory)) {
  struct stat status;
  require(fstat(memory_.fd(), &status) == 0, "fstat");
  check<IoError>(status.st_size > static_cast<off_t>(kControlBytes), "[shm] a segment is too small");
  wire_bytes_ = static_cast<size_t>(status.st_size) - kControlBytes;
  void* p = mmap(nullptr, kControlBytes + wire_bytes_, own ? PROT_READ | PROT_WRITE : PROT_READ,
                 MAP_SHARED | MAP_NORESERVE, memory_.fd(), 0);
  require(p != MAP_FAILED, "cannot map a segment");
  control_ = static_cast<char*>(p);
  wire_ = control_ + kControlBytes;
  require(own || mprotect(control_, kControlBytes, PROT_READ | PROT_WRITE) == 0, "cannot write to control words");
}

ShmSegment::~ShmSegment() {
  if (control_) munmap(control_, kControlBytes + wire_bytes_);
}

size_t ShmSegment::take_control(size_t bytes) {
  const size_t offset = control_used_;
  bytes = (bytes + kControlAlign - 1) / kControlAlign * kControlAlign;
  if (bytes > kControlBytes - offset)
    fail<CommError>("[shm] too many communicators: their control words take more than ", kControlBytes >> 20, " MiB");
  control_used_ += bytes;
  return offset;
}

int64_t ShmSegment::wire_offset(const void* block) const {
  const auto* p = static_cast<const char*>(block);
  return p >= wire_ && p < wire_ + wire_bytes_ ? p - wire_ : -1;
}

SharedRange ShmSegment::wire_range(const std::shared_ptr<ShmSegment>& own) {
  return {own->wire_, own->wire_bytes_, own};
}

ShmExchange::ShmExchange() {
  unsigned char bytes[16];
  require(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "getrandom");
  name_ = "sheaf-";
  for (unsigned char b : bytes) name_ += "0123456789abcdef"[b >> 4], name_ += "0123456789abcdef"[b & 15];
  listener_ = Socket(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  socklen_t size;
  const sockaddr_un address = abstract_address(name_, size);
  require(listener_ && bind(listener_.fd(), reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
              listen(listener_.fd(), 1024) == 0, "cannot listen on a Unix socket");
}

// Everybody connects, then all receive. A connection waits in its peer's queue, which may be shorter than there are ranks (the kernel
// cuts it at net.core.somaxconn): who finds one full serves those in its own, so that nobody waits in a circle.
std::vector<std::shared_ptr<ShmSegment>> ShmExchange::swap(int rank, const std::vector<std::string>& names,
                                                           const std::shared_ptr<ShmSegment>& own,
                                                           const FailureBoard& board, Deadline deadline) {
  const int world = static_cast<int>(names.size());
  const auto is_peer = [&](int r) { return r != rank && !names[r].empty(); };
  int left = 0;
  for (int r = 0; r < world; ++r) left += is_peer(r);
  std::vector<bool> served(world, false);
  const auto serve_one = [&] {
    const Socket peer(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer || !same_user(peer)) return;  // strangers get nothing
    wait_readable(peer, board, deadline, "a peer does not say who it is");
    int who = -1;
    if (recv(peer.fd(), &who, sizeof who, MSG_DONTWAIT) != sizeof who || who < 0 || who >= world || !is_peer(who) ||
        served[who])
      return;
    send_descriptor(peer, own->memory().fd());
    served[who] = true;
    --left;
  };
  std::vector<Socket> sources(world);
  for (int r = 0; r < world; ++r) {
    if (!is_peer(r)) continue;
    sources[r] = Socket(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    require(bool(sources[r]), "cannot make a Unix socket");
    socklen_t size;
    const sockaddr_un address = abstract_address(names[r], size);
    while (connect(sources[r].fd(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
      require(errno == EAGAIN || errno == EINTR, "cannot connect to a peer's Unix socket");
      if (const auto failure = board.failure()) fail<IoError>("[shm] rank ", failure->rank, " failed: ", failure->reason);
      check<IoError>(Clock::now() < deadline, "[shm] time-out: rank ", r, " does not accept connections");
      pollfd p{listener_.fd(), POLLIN, 0};
      if (poll(&p, 1, 2) > 0) serve_one();
    }
    check<IoError>(same_user(sources[r]), "[shm] rank ", r, " runs as another user");
    require(send(sources[r].fd(), &rank, sizeof rank, MSG_NOSIGNAL) == sizeof rank, "cannot greet a peer");
  }
  while (left > 0) {
    wait_readable(listener_, board, deadline, str(left, " peers did not ask for memory"));
    serve_one();
  }
  std::vector<std::shared_ptr<ShmSegment>> segments(world);
  segments[rank] = own;
  for (int r = 0; r < world; ++r) {
    if (!is_peer(r)) continue;
    wait_readable(sources[r], board, deadline, str("rank ", r, " sent no memory"));
    segments[r] = ShmSegment::map(receive_descriptor(sources[r]));
  }
  return segments;
}

std::string host_identity() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  const auto network = std::filesystem::read_symlink("/proc/self/ns/net", error);
  check<IoError>(!boot.empty() && !error, "[shm] /proc does not tell the host");
  return str(boot, ' ', network.string(), ' ', geteuid());
}

}  // namespace sheaf
