#include "sheaf/distributed/tcp_store.h"

#include <algorithm>
#include <cerrno>
#include <list>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sheaf/core/error.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

// Requests: type, then text. Answers: status, then text.
enum : uint8_t { kHello = 'H', kSet = 'S', kGet = 'G', kMissing = 'M', kBye = 'B' };
enum : uint8_t { kOk = 'o', kRefused = 'r', kLost = 'l', kMissingRanks = 'm' };

constexpr uint64_t kMagic = 0x6d6f6f7266616873ull;  // identifies our clients
constexpr size_t kMaxClients = 65536;
constexpr size_t kMaxStoredBytes = size_t{64} << 20;
// In addition for each pair of ranks: for each communicator of both, two along each axis of a mesh, 136 bytes of Gloo's addresses.
constexpr size_t kMaxBytesOfPair = 2048;
constexpr auto kGreetingTime = std::chrono::seconds(10);
// Rank 0 ends when it learns that another has failed; clients that see its end wait this long for the reason first.
constexpr auto kExplanationTime = std::chrono::seconds(1);

/// In constant time, so that it does not reveal how much of a guess was right.
bool equal_tokens(const std::string& a, const std::string& b) {
  unsigned difference = a.size() != b.size();
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i]) ^ (i < b.size() ? b[i] : 0);
  return difference == 0;
}

std::string answer(uint8_t status, std::string_view text) { return FrameWriter().u8(status).text(text).bytes(); }

}  // namespace

class StoreServer::Impl {
 public:
  Impl(Socket listener, int world, std::string token)
      : listener_(std::move(listener)), world_(world), token_(std::move(token)),
        most_stored_(kMaxStoredBytes + kMaxBytesOfPair * static_cast<size_t>(world) * static_cast<size_t>(world)),
        wake_(eventfd(0, EFD_CLOEXEC)) {
    thread_ = std::thread([this] { loop(); });
  }
  ~Impl() {
    const uint64_t one = 1;
    if (write(wake_.fd(), &one, sizeof one) < 0) { /* an eventfd takes a 1 */ }
    thread_.join();
  }

 private:
  struct Client {
    Socket socket;
    FrameBuffer frames = {};
    int rank = -1;                 // none until it has greeted
    std::string awaited = {};      // key that its pending get asks for,
    uint64_t part = 0, parts = 1;  // and which part of its value
    Deadline greet_by = {};
    bool waiting = false, said_bye = false, close = false;
  };

  void loop() {
    while (true) {
      std::vector<pollfd> polled = {{wake_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
      bool strangers = false;
      for (Client& c : clients_) polled.push_back({c.socket.fd(), POLLIN, 0}), strangers |= c.rank < 0;
      if (poll(polled.data(), polled.size(), strangers ? 200 : -1) < 0 && errno != EINTR) return;
      if (polled[0].revents) return;
      size_t i = 2;
      for (Client& c : clients_)  // new clients are appended, so indices match `polled`
        if (polled[i++].revents) read(c);
      for (auto it = clients_.begin(); it != clients_.end();) {
        if (it->rank < 0 && Clock::now() > it->greet_by) it->close = true;
        if (it->close) drop(*it);
        it = it->close ? clients_.erase(it) : std::next(it);
      }
      if (polled[1].revents) {
        try {
          if (auto s = accept_from(listener_, Clock::now()); s && clients_.size() < kMaxClients)
            clients_.push_back({.socket = std::move(*s), .greet_by = Clock::now() + kGreetingTime});
        } catch (const IoError&) {  // out of descriptors: pending connections are retried, after a pause
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
      }
    }
  }

  void read(Client& c) {
    if (c.frames.fill(c.socket) == FrameBuffer::Status::closed) c.close = true;
    while (auto frame = c.frames.next()) handle(c, *frame);
  }

  void handle(Client& c, const std::string& frame) {
    FrameReader in(frame);
    const uint8_t type = in.u8();
    if (c.rank < 0 && type != kHello) return void(c.close = true);
    switch (type) {
      case kHello: return greet(c, in);
      case kSet: {
        std::string key = in.text(), value = in.text();
        if (!in.ok() || stored_ + key.size() + value.size() > most_stored_)
          return reply(c, kRefused, "bad request or store full");
        stored_ += key.size() + value.size();
        values_[key] = std::move(value);
        reply(c, kOk, "");
        for (Client& other : clients_)
          if (other.waiting && other.awaited == key) serve(other);
        return;
      }
      case kGet:
        c.awaited = in.text(), c.part = in.u64(), c.parts = in.u64();
        c.waiting = true;
        return serve(c);
      case kMissing: {
        std::string ranks;
        for (int r = 0; r < world_; ++r)
          if (!ranks_.contains(r)) ranks += str(ranks.empty() ? "" : ", ", r);
        c.waiting = false;
        return reply(c, kMissingRanks, ranks.empty() ? "none" : ranks);
      }
      case kBye: return void(c.said_bye = true);
      default: c.close = true;
    }
  }

  void greet(Client& c, FrameReader& in) {
    const uint64_t magic = in.u64(), rank = in.u64(), world = in.u64();
    const std::string token = in.text();
    if (!in.ok() || magic != kMagic) return void(c.close = true);
    if (!equal_tokens(token_, token)) return refuse(c, "it is of another job: its SHEAF_TOKEN or its launcher's job id is not rank 0's");
    if (world != static_cast<uint64_t>(world_))
      return refuse(c, str("its world size ", world, " is not rank 0's, ", world_));
    if (rank >= static_cast<uint64_t>(world_) || !ranks_.insert(static_cast<int>(rank)).second)
      return refuse(c, "this rank is there already");
    c.rank = static_cast<int>(rank);
    reply(c, kOk, "");
  }

  void refuse(Client& c, const std::string& reason) {
    reply(c, kRefused, reason);
    c.close = true;
  }

  void serve(Client& c) {
    if (auto it = values_.find(c.awaited); it != values_.end()) reply_part(c, it->second);
    else if (!lost_.empty()) reply(c, kLost, lost_);
    else return;
    c.waiting = false;
  }

  void reply_part(Client& c, std::string_view value) {
    if (c.part >= c.parts || value.size() % c.parts != 0)
      return reply(c, kRefused, str("'", c.awaited, "' has no part ", c.part, " of ", c.parts));
    const size_t bytes = value.size() / c.parts;
    reply(c, kOk, value.substr(c.part * bytes, bytes));
  }

  void drop(Client& c) {
    if (c.rank < 0 || c.said_bye || !lost_.empty()) return;
    lost_ = str("rank ", c.rank, " died");
    for (Client& other : clients_)
      if (other.waiting && &other != &c) serve(other);
  }

  void reply(Client& c, uint8_t status, std::string_view text) {
    if (!send_frame(c.socket, answer(status, text), Clock::now() + std::chrono::seconds(5))) c.close = true;
  }

  const Socket listener_;
  const int world_;
  const std::string token_;
  const size_t most_stored_;
  const Socket wake_;
  std::list<Client> clients_;
  std::set<int> ranks_;
  std::map<std::string, std::string> values_;
  size_t stored_ = 0;
  std::string lost_;
  std::thread thread_;
};

StoreServer::StoreServer(Socket listener, int world, std::string token)
    : impl_(std::make_unique<Impl>(std::move(listener), world, std::move(token))) {}
StoreServer::~StoreServer() = default;

StoreClient::StoreClient(const std::string& host, int port, int rank, int world, const std::string& token,
                         Deadline deadline)
    : rank_(rank), world_(world), socket_(connect_to(host, port, deadline)), wake_(eventfd(0, EFD_CLOEXEC)) {
  const std::string hello = FrameWriter().u8(kHello).u64(kMagic).u64(static_cast<uint64_t>(rank))
                                .u64(static_cast<uint64_t>(world)).text(token).bytes();
  ask(hello, "greeting", deadline);
}

StoreClient::~StoreClient() { send_frame(socket_, FrameWriter().u8(kBye).bytes(), Clock::now()); }

void StoreClient::set(const std::string& key, std::string_view value, Deadline deadline) {
  ask(FrameWriter().u8(kSet).text(key).text(value).bytes(), "setting '" + key + "'", deadline);
}

std::string StoreClient::get_part(const std::string& key, uint64_t part, uint64_t parts, Deadline deadline) {
  return ask(FrameWriter().u8(kGet).text(key).u64(part).u64(parts).bytes(), "'" + key + "'", deadline);
}

std::string StoreClient::missing_ranks() {
  const Deadline deadline = Clock::now() + std::chrono::seconds(2);
  send_frame(socket_, FrameWriter().u8(kMissing).bytes(), deadline);
  while (auto reply = receive_frame(socket_, deadline)) {  // a late answer to an earlier request may come first
    FrameReader in(*reply);
    if (in.u8() == kMissingRanks) return in.text();
  }
  return "unknown";
}

void StoreClient::interrupt(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!interrupted_.empty()) return;
  interrupted_ = reason;
  const uint64_t one = 1;
  if (write(wake_.fd(), &one, sizeof one) < 0) { /* an eventfd takes a 1 */ }
}

bool StoreClient::answered(Deadline deadline) const {
  while (Clock::now() < deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd polled[] = {{wake_.fd(), POLLIN, 0}, {socket_.fd(), POLLIN, 0}};
    poll(polled, 2, static_cast<int>(std::clamp<int64_t>(left, 0, 1'000'000'000)));
    if (polled[0].revents) return false;
    if (polled[1].revents) return true;
  }
  return false;
}

std::string StoreClient::ask(const std::string& request, const std::string& what, Deadline deadline) {
  std::optional<std::string> reply;
  if (send_frame(socket_, request, deadline) && answered(deadline)) reply = receive_frame(socket_, deadline);
  const std::string me = str("[rendezvous] rank ", rank_, " of ", world_, ": ");
  if (!reply) {
    pollfd news{wake_.fd(), POLLIN, 0};
    if (Clock::now() < deadline) poll(&news, 1, static_cast<int>(std::chrono::milliseconds(kExplanationTime).count()));
    std::lock_guard lock(mutex_);
    if (!interrupted_.empty()) throw CommError(me + interrupted_, ExitCode::kPeerLost);
    if (Clock::now() >= deadline) throw CommError(str(me, "time-out, waiting for ", what), ExitCode::kTimeout);
    throw CommError(str(me, "rank 0, which serves the store, is gone"), ExitCode::kPeerLost);
  }
  FrameReader in(*reply);
  const uint8_t status = in.u8();
  std::string text = in.text();
  if (status == kRefused) fail<ConfigError>(me, "refused: ", text);
  if (status == kLost) throw CommError(str(me, text, " before the job was connected"), ExitCode::kPeerLost);
  if (status != kOk || !in.ok()) fail<CommError>(me, "what answers is not a Sheaf job");
  return text;
}

}  // namespace sheaf
