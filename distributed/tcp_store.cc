#include "sheaf/distributed/tcp_store.h"

#include <algorithm>
#include <cerrno>
#include <list>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include <poll.h>
#include <sys/socket.h>

#include "sheaf/core/error.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

// Requests: type, then text. Answers: status, then text.
enum : uint8_t { kHello = 'H', kSet = 'S', kGet = 'G', kMissing = 'M', kGiveUp = 'U', kBye = 'B' };
enum : uint8_t { kOk = 'o', kRefused = 'r', kLost = 'l', kTimedOut = 't', kMissingRanks = 'm', kLater = 'w' };

constexpr uint64_t kMagic = 0x6d6f6f7266616873ull;  // identifies our clients
constexpr size_t kMaxClients = 65536;
constexpr size_t kMaxStoredBytes = size_t{64} << 20;
// In addition for each pair of ranks: for each communicator of both, two along each axis of a mesh, 136 bytes of Gloo's addresses.
constexpr size_t kMaxBytesOfPair = 2048;
constexpr auto kGreetingTime = std::chrono::seconds(10);
// Rank 0 ends when it learns that another has failed; clients that see its end wait this long for the reason first.
constexpr auto kExplanationTime = std::chrono::seconds(1);
constexpr const char* kServingRank = "rank 0, which serves the store,";

/// In constant time, so that it does not reveal how much of a guess was right.
bool equal_tokens(const std::string& a, const std::string& b) {
  unsigned difference = a.size() != b.size();
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i]) ^ (i < b.size() ? b[i] : 0);
  return difference == 0;
}

std::string get_request(const std::string& key, uint64_t part, uint64_t parts) {
  return FrameWriter().u8(kGet).text(key).u64(part).u64(parts).bytes();
}

std::string answer(uint8_t status, std::string_view text) { return FrameWriter().u8(status).text(text).bytes(); }

}  // namespace

class StoreServer::Impl {
 public:
  Impl(Socket listener, int world, std::string token)
      : listener_(std::move(listener)), world_(world), token_(std::move(token)),
        most_stored_(kMaxStoredBytes + kMaxBytesOfPair * static_cast<size_t>(world) * static_cast<size_t>(world)),
        wake_(open_alarm()) {
    thread_ = std::thread([this] { loop(); });
  }
  ~Impl() {
    ring(wake_);
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
    bool waiting = false, close = false;
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
      case kGiveUp: {
        const bool timed_out = in.u8();
        lose(c, timed_out ? kTimedOut : kLost, str("failed: ", in.text()));
        return reply(c, kOk, "");
      }
      case kBye: return void(left_.insert(c.rank));
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
    if (rank < static_cast<uint64_t>(world_) && left_.contains(static_cast<int>(rank))) return turn_away(c, kLater, "");
    if (rank >= static_cast<uint64_t>(world_) || !ranks_.insert(static_cast<int>(rank)).second)
      return refuse(c, "this rank is there already");
    c.rank = static_cast<int>(rank);
    reply(c, kOk, "");
  }

  void refuse(Client& c, const std::string& reason) { turn_away(c, kRefused, reason); }

  void turn_away(Client& c, uint8_t status, const std::string& reason) {
    reply(c, status, reason);
    c.close = true;
  }

  void serve(Client& c) {
    if (auto it = values_.find(c.awaited); it != values_.end()) reply_part(c, it->second);
    else if (!lost_.empty()) reply(c, lost_status_, lost_);
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
    if (c.rank >= 0 && !left_.contains(c.rank)) lose(c, kLost, "died before the job was connected");
  }

  void lose(Client& c, uint8_t status, const std::string& how) {
    if (!lost_.empty()) return;
    lost_ = str("rank ", c.rank, ' ', how);
    lost_status_ = status;
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
  std::set<int> ranks_, left_;  // that have greeted; of these, that have said bye
  std::map<std::string, std::string> values_;
  size_t stored_ = 0;
  std::string lost_;  // what is said of the first rank that was lost; empty: none was
  uint8_t lost_status_ = kLost;
  std::thread thread_;
};

StoreServer::StoreServer(Socket listener, int world, std::string token)
    : impl_(std::make_unique<Impl>(std::move(listener), world, std::move(token))) {}
StoreServer::~StoreServer() = default;

StoreClient::StoreClient(const std::string& host, int port, int rank, int world, const std::string& token,
                         Deadline deadline)
    : rank_(rank), world_(world), wake_(open_alarm()) {
  const std::string hello = FrameWriter().u8(kHello).u64(kMagic).u64(static_cast<uint64_t>(rank))
                                .u64(static_cast<uint64_t>(world)).text(token).bytes();
  socket_ = connect_to(host, port, deadline, kServingRank);
  while (!is_greeted(hello, deadline)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    socket_ = connect_to(host, port, deadline, kServingRank);
  }
}

bool StoreClient::is_greeted(const std::string& hello, Deadline deadline) {
  std::optional<std::string> reply;
  if (send_frame(socket_, hello, deadline) && answered(deadline)) reply = receive_frame(socket_, deadline);
  if (!reply && Clock::now() >= deadline)
    throw CommError(str(me(), "time-out, waiting for ", kServingRank, " to answer"), ExitCode::kTimeout);
  if (!reply || FrameReader(*reply).u8() == kLater) return false;
  text_of(*reply);
  return true;
}

StoreClient::~StoreClient() {
  if (may_leave_) send_frame(socket_, FrameWriter().u8(kBye).bytes(), Clock::now());
}

void StoreClient::give_up(const std::string& reason, ExitCode code) {
  const Deadline deadline = Clock::now() + kExplanationTime;
  send_frame(socket_, FrameWriter().u8(kGiveUp).u8(code == ExitCode::kTimeout).text(reason).bytes(), deadline);
  receive_frame(socket_, deadline);  // rank 0 may end, with its server, once it has told the others
}

void StoreClient::set(const std::string& key, std::string_view value, Deadline deadline) {
  ask(FrameWriter().u8(kSet).text(key).text(value).bytes(), str(kServingRank, " to take '", key, "'"), deadline);
}

std::optional<std::string> StoreClient::get_unless_late(const std::string& key, Deadline deadline) {
  return ask_unless_late(get_request(key, 0, 1), deadline);
}

std::string StoreClient::get_part(const std::string& key, uint64_t part, uint64_t parts, Deadline deadline, const std::string& what) {
  return ask(get_request(key, part, parts), what.empty() ? str('\'', key, '\'') : what, deadline);
}

std::optional<std::string> StoreClient::ask_missing_ranks(Deadline deadline) {
  send_frame(socket_, FrameWriter().u8(kMissing).bytes(), deadline);
  while (auto reply = receive_frame(socket_, deadline)) {  // a late answer to an earlier request may come first
    FrameReader in(*reply);
    const uint8_t status = in.u8();
    if (status == kMissingRanks) return in.text();
    throw_if_lost(status, in.text());
  }
  return std::nullopt;
}

std::string StoreClient::missing_ranks() {
  const Deadline deadline = Clock::now() + std::chrono::seconds(2);
  if (const auto ranks = ask_missing_ranks(deadline)) return *ranks;
  if (Clock::now() < deadline) throw_server_gone();
  return "0";  // it hangs: its server always answers at once
}

void StoreClient::watch() {  // for a key that nobody sets
  send_frame(socket_, get_request("", 0, 1), Clock::now() + kExplanationTime);
}

void StoreClient::throw_if_any_lost() {
  pollfd polled{socket_.fd(), POLLIN, 0};
  if (poll(&polled, 1, 0) <= 0) return;
  const auto reply = receive_frame(socket_, Clock::now() + kExplanationTime);
  if (!reply) throw_server_gone();
  FrameReader in(*reply);
  const uint8_t status = in.u8();
  throw_if_lost(status, in.text());
}

void StoreClient::unwatch(Deadline deadline) {
  if (ask_missing_ranks(deadline)) return;
  if (Clock::now() >= deadline) throw CommError(str(me(), "time-out, waiting for ", kServingRank, " to answer"), ExitCode::kTimeout);
  throw_server_gone();
}

void StoreClient::interrupt(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (!interrupted_.empty()) return;
  interrupted_ = reason;
  ring(wake_);
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

void StoreClient::throw_if_lost(uint8_t status, const std::string& text) const {
  if (status == kLost || status == kTimedOut)
    throw CommError(me() + text, status == kTimedOut ? ExitCode::kTimeout : ExitCode::kPeerLost);
}

void StoreClient::throw_server_gone() const {
  throw CommError(str(me(), kServingRank, " is gone"), ExitCode::kPeerLost);
}

std::string StoreClient::me() const { return str("[rendezvous] rank ", rank_, " of ", world_, ": "); }

std::string StoreClient::ask(const std::string& request, const std::string& what, Deadline deadline) {
  if (const auto reply = ask_unless_late(request, deadline)) return *reply;
  throw CommError(str(me(), "time-out, waiting for ", what), ExitCode::kTimeout);
}

std::optional<std::string> StoreClient::ask_unless_late(const std::string& request, Deadline deadline) {
  std::optional<std::string> reply;
  if (send_frame(socket_, request, deadline) && answered(deadline)) reply = receive_frame(socket_, deadline);
  if (!reply) {
    const bool late = Clock::now() >= deadline;
    pollfd news{wake_.fd(), POLLIN, 0};
    if (!late) poll(&news, 1, static_cast<int>(std::chrono::milliseconds(kExplanationTime).count()));
    std::lock_guard lock(mutex_);
    if (!interrupted_.empty()) throw CommError(me() + interrupted_, ExitCode::kPeerLost);
    if (late) return std::nullopt;
    throw_server_gone();
  }
  return text_of(*reply);
}

std::string StoreClient::text_of(const std::string& reply) const {
  FrameReader in(reply);
  const uint8_t status = in.u8();
  std::string text = in.text();
  if (status == kRefused) fail<ConfigError>(me(), "refused: ", text);
  throw_if_lost(status, text);
  if (status != kOk || !in.ok()) fail<CommError>(me(), "what answers is not a Sheaf job");
  return text;
}

}  // namespace sheaf
