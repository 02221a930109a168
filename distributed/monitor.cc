#include "sheaf/distributed/monitor.h"

#include <algorithm>
#include <cerrno>

#include <poll.h>

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

enum : uint8_t { kGreeting = 'h', kWelcome = 'w', kFailed = 'f', kStuck = 's', kAlive = 'a', kFarewell = 'b' };
constexpr uint64_t kMagic = 0x726f74696e6f6d66ull;
constexpr size_t kMaxNotes = 65536;
constexpr size_t kMaxReasonBytes = 16384;
constexpr auto kSendTime = std::chrono::seconds(1);
// A connection holds at least twice as much by default (tcp_rmem), counting half a KiB of overhead for each frame.
constexpr size_t kMostUnread = 48 << 10, kFrameOverhead = 512;

}  // namespace

Monitor::Monitor(int rank, int world, std::shared_ptr<FailureBoard> board, const std::string& host, std::string token,
                 std::chrono::milliseconds timeout)
    : rank_(rank), world_(world), board_(std::move(board)), token_(std::move(token)),
      longest_silence_(std::max<int64_t>(timeout / kTick, 20)),  // even a process that is alive may have to wait for its turn
      listener_(listen_on(host, 0)), peers_(static_cast<size_t>(world)), wake_(open_alarm()) {}

Monitor::~Monitor() {
  if (thread_.joinable()) {
    board_->unsubscribe(subscription_);
    tell_all(FrameWriter().u8(kFarewell).bytes());
    ring(wake_);
    thread_.join();
  }
}

void Monitor::connect(int peer, const std::string& host, int port, Deadline deadline, const Check& check) {
  Socket s = connect_to(host, port, deadline, str("rank ", peer), check);
  send_frame(s, FrameWriter().u8(kGreeting).u64(kMagic).u64(static_cast<uint64_t>(rank_)).text(token_).bytes(),
             deadline);
  const auto reply = receive_frame(s, deadline, check);
  if (!reply || FrameReader(*reply).u8() != kWelcome)
    throw CommError(str("[rendezvous] rank ", rank_, " of ", world_, ": rank ", peer, " at ", host, ':', port,
                        " does not answer"), Clock::now() >= deadline ? ExitCode::kTimeout : ExitCode::kPeerLost);
  peers_[peer].socket = std::move(s);
}

std::optional<int> Monitor::greeted_rank(const Socket& socket, Deadline deadline) const {
  const auto frame = receive_frame(socket, std::min(deadline, Clock::now() + std::chrono::seconds(5)));
  if (!frame) return std::nullopt;
  FrameReader in(*frame);
  const bool known = in.u8() == kGreeting && in.u64() == kMagic;
  const uint64_t rank = in.u64();
  const std::string token = in.text();
  if (!known || !in.ok() || token != token_ || rank <= static_cast<uint64_t>(rank_) ||
      rank >= static_cast<uint64_t>(world_))
    return std::nullopt;
  return static_cast<int>(rank);
}

void Monitor::start(Deadline deadline, const Check& check) {
  const auto complete = [&] {
    return std::all_of(peers_.begin() + rank_ + 1, peers_.end(), [](const Peer& p) { return bool(p.socket); });
  };
  while (!complete()) {
    std::optional<Socket> s = accept_from(listener_, deadline, check);
    if (!s) {
      std::string missing;
      for (int r = rank_ + 1; r < world_; ++r)
        if (!peers_[r].socket) missing += str(missing.empty() ? "" : ", ", r);
      throw CommError(str("[rendezvous] rank ", rank_, " of ", world_, ": time-out, missing ranks: ", missing),
                      ExitCode::kTimeout);
    }
    const auto peer = greeted_rank(*s, deadline);
    if (peer && !peers_[*peer].socket && send_frame(*s, FrameWriter().u8(kWelcome).bytes(), deadline))
      peers_[*peer].socket = std::move(*s);
  }
  listener_.close();
  thread_ = std::thread([this] { loop(); });
  subscription_ = board_->subscribe([this](const JobFailure& f) {
    tell_all(FrameWriter().u8(kFailed).u64(static_cast<uint64_t>(f.rank)).u64(static_cast<uint64_t>(f.code))
                 .text(std::string_view(f.reason).substr(0, kMaxReasonBytes)).bytes());
  });
}

// Notes say what holds now, and are repeated. A peer that does not read them, because its process is stopped, is sent only as many as
// its connection holds: when the process goes on, it speaks first. If the connection were full, the kernel would end it (socket.cc).
void Monitor::note_to_all(const std::string& frame) {
  for (Peer& p : peers_) {
    std::lock_guard lock(p.send_mutex);
    if (!p.socket || !p.outgoing.flush(p.socket, Clock::now()) || p.unread >= kMostUnread) continue;
    p.unread += frame.size() + kFrameOverhead;
    p.outgoing.push(frame);
    p.outgoing.flush(p.socket, Clock::now());
  }
}

// News are sent once, and a process may end after it: they are waited for, but not by peers that read.
void Monitor::tell_all(const std::string& news) {
  const Deadline deadline = Clock::now() + kSendTime;
  for (const bool again : {false, true})
    for (Peer& p : peers_) {
      std::lock_guard lock(p.send_mutex);
      if (!p.socket) continue;
      if (!again) p.outgoing.push(news);
      p.outgoing.flush(p.socket, again ? deadline : Clock::now());
    }
}

void Monitor::post(const StuckNote& note) {
  FrameWriter out;
  out.u8(kStuck).u64(note.group).u64(note.sequence).u64(note.fingerprint).text(note.what);
  out.u64(note.send_counts.size());
  for (int64_t c : note.send_counts) out.u64(static_cast<uint64_t>(c));
  note_to_all(out.bytes());
}

std::optional<StuckNote> Monitor::note(uint64_t group, int peer) const {
  std::lock_guard lock(notes_mutex_);
  const auto it = notes_.find({group, peer});
  return it == notes_.end() ? std::nullopt : std::optional(it->second);
}

bool Monitor::is_waiting(int peer) const {
  std::lock_guard lock(notes_mutex_);
  return std::any_of(notes_.begin(), notes_.end(), [&](const auto& item) {
    return item.first.second == peer && Clock::now() - item.second.received < kNoteLife;
  });
}

int Monitor::watch(std::function<void()> tick) {
  std::lock_guard lock(watchers_mutex_);
  watchers_.emplace(next_watcher_, std::move(tick));
  return next_watcher_++;
}

void Monitor::unwatch(int id) {
  std::lock_guard lock(watchers_mutex_);
  watchers_.erase(id);
}

void Monitor::loop() {
  Deadline next_tick = Clock::now() + kTick;
  while (true) {
    std::vector<pollfd> polled = {{wake_.fd(), POLLIN, 0}};
    for (Peer& p : peers_) polled.push_back({p.closed ? -1 : p.socket.fd(), POLLIN, 0});  // poll skips -1
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick - Clock::now()).count();
    if (poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(left, 0))) < 0 && errno != EINTR) return;
    if (polled[0].revents) return;
    for (int r = 0; r < world_; ++r)
      if (polled[r + 1].revents) read(r);
    if (Clock::now() >= next_tick) {
      std::lock_guard lock(watchers_mutex_);
      for (auto& [id, tick] : watchers_) tick();
      show_and_check_life();
      next_tick = Clock::now() + kTick;
    }
  }
}

// Four signs of life within the time that others wait for one, but no more than one a second.
void Monitor::show_and_check_life() {
  if (ticks_++ % std::clamp<int64_t>(longest_silence_ / 4, 1, 10) == 0) note_to_all(FrameWriter().u8(kAlive).bytes());
  for (int r = 0; r < world_; ++r) {
    Peer& p = peers_[r];
    if (++p.silent_ticks <= longest_silence_ || !open_ended_ || !p.socket || p.closed || p.left) continue;
    board_->raise({r, ExitCode::kTimeout, str("it has given no sign of life for ", std::chrono::duration<double>(longest_silence_ * kTick).count(),
                                              " s; is its process stopped?")});
  }
}

void Monitor::read(int peer) {
  Peer& p = peers_[peer];
  p.silent_ticks = 0;
  p.unread = 0;
  const bool closed = p.frames.fill(p.socket) == FrameBuffer::Status::closed;
  while (auto frame = p.frames.next()) handle(peer, *frame);
  if (!closed) return;
  p.closed = true;
  if (!p.left) board_->raise({peer, ExitCode::kPeerLost, "it died (its connection closed)"});
}

void Monitor::handle(int peer, const std::string& frame) {
  FrameReader in(frame);
  switch (in.u8()) {
    case kFailed: {
      const int rank = static_cast<int>(std::min<uint64_t>(in.u64(), static_cast<uint64_t>(world_)));
      const auto code = static_cast<ExitCode>(in.u64());
      std::string reason = in.text();
      if (in.ok()) board_->raise({rank, code, std::move(reason)});
      return;
    }
    case kStuck: {
      StuckNote note{.group = in.u64(), .sequence = in.u64(), .fingerprint = in.u64(), .what = in.text(),
                     .send_counts = {}, .received = Clock::now()};
      const uint64_t n = in.u64();
      for (uint64_t i = 0; i < n && in.ok(); ++i) note.send_counts.push_back(static_cast<int64_t>(in.u64()));
      if (!in.ok()) return;
      std::lock_guard lock(notes_mutex_);
      if (notes_.size() < kMaxNotes) notes_[{note.group, peer}] = std::move(note);
      return;
    }
    case kAlive: return;
    case kFarewell: peers_[peer].left = true; return;
    default: return;
  }
}

}  // namespace sheaf
