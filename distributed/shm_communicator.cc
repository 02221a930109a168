#include "sheaf/distributed/shm_communicator.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "sheaf/distributed/reduce.h"
#include "sheaf/distributed/staging.h"
#include "sheaf/distributed/stream_copy.h"

namespace sheaf {
namespace {

using Clock = std::chrono::steady_clock;

bool is_small_all_reduce(const Collective& call) {
  return call.op == CollectiveOp::all_reduce && call.counts[0] * call.element_size() <= kSmallAllReduceBytes;
}

/// Whether any rank reads `call.in` of member `index`.
bool gives(const Collective& call, int index) {
  switch (call.op) {
    case CollectiveOp::all_gather: return call.counts[index] > 0;
    case CollectiveOp::broadcast: return call.root == index && call.counts[0] > 0;
    case CollectiveOp::barrier: return false;
    default: return std::any_of(call.counts.begin(), call.counts.end(), [](int64_t c) { return c > 0; });
  }
}

}  // namespace

ShmCommunicator::ShmCommunicator(CommunicatorGroup group, std::shared_ptr<Job> job,
                                 std::shared_ptr<const ShmSegments> segments)
    : CommunicatorBase(std::move(group), job->board), job_(std::move(job)), segments_(std::move(segments)),
      allocator_(RankContext::current().cpu), spans_hosts_(std::ranges::count(*segments_, nullptr) > 0),
      staging_bytes_(shm_staging_bytes(size())), notes_(group_, *job_->monitor) {
  staging_ = static_cast<std::byte*>(allocator_->allocate(static_cast<size_t>(staging_bytes_), MemoryKind::wire));
  try {
    meeting_ = connect(group_, *job_, *segments_, staging_, [this] { tell_other_hosts(); });
  } catch (...) {
    allocator_->free(staging_, static_cast<size_t>(staging_bytes_));
    throw;
  }
  subscription_ = board_->subscribe([this](const JobFailure&) { meeting_->wake(); });
}

ShmCommunicator::~ShmCommunicator() {
  finish_lane();
  board_->unsubscribe(subscription_);
  meeting_->leave();
  allocator_->free(staging_, static_cast<size_t>(staging_bytes_));
}

std::unique_ptr<ShmMeeting> ShmCommunicator::connect(const CommunicatorGroup& group, Job& job,
                                                     const ShmSegments& segments, const void* staging,
                                                     std::function<void()> on_nap) {
  const Deadline deadline = Clock::now() + job.rendezvous.init_timeout;
  ShmSegment& own = *segments[group.world_rank()];
  const int64_t staging_at = own.wire_offset(staging);
  check<OutOfMemory>(staging_at >= 0, "[mesh] no wire memory is left for the staging of ", group.name);
  const size_t at = own.take_control(ShmControl::bytes(group.size()));
  reinterpret_cast<ShmControl*>(own.control(at))->staging = staging_at;
  const auto key = [&](int member) { return str(group.name, '/', member); };
  job.store->set(key(group.index), std::to_string(at), deadline);
  std::vector<ShmControl*> controls;
  std::vector<ShmRank*> ranks;
  for (int m = 0; m < group.size(); ++m) {
    const ShmSegment& segment = *segments[group.members[m]];
    const size_t offset = m == group.index ? at : std::stoull(job.store->get(key(m), deadline, waits_for(group, m)));
    controls.push_back(reinterpret_cast<ShmControl*>(segment.control(offset)));
    ranks.push_back(reinterpret_cast<ShmRank*>(segment.control(0)));
  }
  return std::make_unique<ShmMeeting>(std::move(controls), std::move(ranks), group.index, std::move(on_nap));
}

void ShmCommunicator::run(const Collective& call) {
  running_ = &call;
  const Monitor::OpenEnded open(*job_->monitor, !call.has_deadline);
  timer_ = AwakeTimer();
  next_note_ = Clock::now() + Monitor::kTick;
  announced_ = false;
  windows_ = 0;
  exchange(call);
  meet(call);  // all have read: the inputs are returned to their owners
}

void ShmCommunicator::announce(const Collective& call) {
  ShmControl& own = meeting_->own();
  own.sequence = call.sequence;
  own.fingerprint = call.fingerprint;
  // A small all_reduce is overwritten by its owner while peers may still read: they read a copy.
  own.source = !gives(call, rank()) ? 0 : is_small_all_reduce(call) ? -1 : segment(rank()).wire_offset(call.in);
  const std::string what = call.to_string();
  const size_t length = std::min(what.size(), ShmControl::kWhatBytes - 1);
  std::memcpy(own.what, what.data(), length);
  own.what[length] = 0;
  if (call.op == CollectiveOp::all_to_all) {
    std::copy(call.counts.begin(), call.counts.end(), own.counts);
    std::copy(call.recv_counts.begin(), call.recv_counts.end(), own.counts + size());
  }
  announced_ = true;
}

void ShmCommunicator::meet(const Collective& call) {
  std::vector<int> absent;
  switch (meeting_->meet(timer_, time_for(call, job_->rendezvous.timeout), *board_, absent)) {
    case ShmMeeting::Outcome::all_here: return;
    case ShmMeeting::Outcome::failed: throw_failure(call, *board_->failure());
    case ShmMeeting::Outcome::left:
      await_explanation(call, [&] { return job_->monitor->has_left(group_.members[absent[0]]); });
      raise_lost(call, absent[0], "it has left the job");
    case ShmMeeting::Outcome::timed_out:
      raise_timeout(call, std::chrono::duration<double>(job_->rendezvous.timeout).count(), missing(absent));
  }
}

// Ranks that wait over the network, directly or indirectly, for this rank cannot see that it waits.
void ShmCommunicator::tell_other_hosts() {
  if (!spans_hosts_ || Clock::now() < next_note_) return;
  notes_.post(*running_);
  next_note_ = Clock::now() + Monitor::kNotePeriod;
}

// A member that waits in another group's collective, on this host or across hosts, is blocked itself: it is named only if there is no
// other candidate.
std::vector<int> ShmCommunicator::missing(const std::vector<int>& absent) const {
  const bool knows_elsewhere = Monitor::knows_who_waits(job_->rendezvous.timeout);
  std::vector<int> silent;
  for (int m : absent)
    if (!meeting_->is_waiting(m) && !(knows_elsewhere && job_->monitor->is_waiting(group_.members[m])))
      silent.push_back(m);
  return silent.empty() ? absent : silent;
}

void ShmCommunicator::check_agreement(const Collective& call) const {
  const auto of = [&](int m) -> const ShmControl& { return meeting_->control(m); };
  const auto& ranks = group_.members;
  for (int m = 1; m < size(); ++m)
    if (of(m).fingerprint != of(0).fingerprint)
      raise(call, ExitCode::kDesync, str("ranks disagree: rank ", ranks[0], " calls ", of(0).what, ", rank ", ranks[m],
                                         " calls ", of(m).what));
  if (call.op != CollectiveOp::all_to_all) return;
  for (int from = 0; from < size(); ++from)
    for (int to = 0; to < size(); ++to)
      if (of(from).counts[to] != of(to).counts[size() + from])
        raise(call, ExitCode::kDesync, str("ranks disagree: rank ", ranks[from], " sends ", of(from).counts[to],
                                           " elements to rank ", ranks[to], ", which expects ",
                                           of(to).counts[size() + from]));
}

/// Bytes [begin, begin + length) of every piece can be read; sources[m] points at member m's.
struct ShmCommunicator::Window {
  int64_t begin, length;
  std::vector<const std::byte*> sources;

  int64_t part(int64_t bytes) const { return std::clamp(bytes - begin, int64_t{0}, length); }
};

// piece(from, to) is what member `to` reads of member `from`'s call.in; `same_for_all`: it is the same for every `to`. read(window)
// is called until all windows have been read.
template <class PieceOf, class Read>
void ShmCommunicator::stream(const Collective& call, bool same_for_all, PieceOf&& piece, Read&& read) {
  const int n = size(), me = rank();
  const auto* in = static_cast<const std::byte*>(call.in);
  // Bytes of one piece that fit into a half.
  const int64_t half = shm_half_bytes(n), room = same_for_all ? half : half / n / 128 * 128;
  const auto place = [&](int to) { return windows_ % 2 * half + (same_for_all ? 0 : to * room); };
  if (!announced_) announce(call);
  const bool announcing = windows_ == 0;

  Window window{0, room, std::vector<const std::byte*>(static_cast<size_t>(n))};
  int64_t end = 0;  // of the longest piece, if anything is staged
  do {
    if (meeting_->own().source < 0) {
      for (int to = 0; to < (same_for_all ? 1 : n); ++to) {
        if (!same_for_all && to == me) continue;
        const Piece p = piece(me, to);
        std::memcpy(staging_ + place(to), in + p.begin + window.begin, static_cast<size_t>(window.part(p.bytes)));
      }
    }
    meet(call);
    if (window.begin == 0) {
      if (announcing) check_agreement(call);
      bool staged = false;
      for (int m = 0; m < n; ++m) staged |= meeting_->control(m).source < 0;
      if (!staged) window.length = std::numeric_limits<int64_t>::max();  // all of it at once
      for (int from = 0; staged && from < n; ++from)
        for (int to = 0; to < (same_for_all ? 1 : n); ++to) end = std::max(end, piece(from, to).bytes);
    }
    for (int m = 0; m < n; ++m) {
      const ShmControl& peer = meeting_->control(m);
      const int64_t at = piece(m, me).begin + window.begin;
      if (m == me) window.sources[m] = in ? in + at : nullptr;
      else if (peer.source >= 0) window.sources[m] = reinterpret_cast<const std::byte*>(segment(m).wire(peer.source + at));
      else window.sources[m] = reinterpret_cast<const std::byte*>(segment(m).wire(peer.staging + place(me)));
    }
    read(window);
    ++windows_;
    window.begin += room;
  } while (window.begin < end);
}

// Outputs up to this size, about half a second-level cache, are still mostly cached when they are used.
constexpr int64_t kCachedBytes = int64_t{1} << 20;

/// Copies every member's piece for this one to its place in call.out; places.back() is the end of the last.
template <class PieceOf>
void ShmCommunicator::copy_pieces(const Collective& call, bool same_for_all, const std::vector<int64_t>& places,
                                  PieceOf&& piece) {
  auto* out = static_cast<std::byte*>(call.out);
  const bool cached = places.back() <= kCachedBytes;
  stream(call, same_for_all, piece, [&](const Window& w) {
    for (int i = 1; i <= size(); ++i) {  // each rank starts with a different peer
      const int from = (rank() + i) % size();
      const int64_t bytes = w.part(piece(from, rank()).bytes);
      std::byte* to = out + places[from] + w.begin;
      if (bytes == 0 || to == w.sources[from]) continue;
      if (cached) std::memcpy(to, w.sources[from], static_cast<size_t>(bytes));
      else stream_copy(to, w.sources[from], static_cast<size_t>(bytes));
    }
  });
}

/// Sums, in rank order, all members' bytes [cuts[me], cuts[me + 1]) into `out`.
void ShmCommunicator::reduce_slices(const Collective& call, const std::vector<int64_t>& cuts, std::byte* out) {
  const auto piece = [&](int, int to) { return Piece{cuts[to], cuts[to + 1] - cuts[to]}; };
  const int64_t own = piece(0, rank()).bytes;
  std::vector<const void*> sources;
  stream(call, /*same_for_all=*/false, piece, [&](const Window& w) {
    sources.assign(w.sources.begin(), w.sources.end());
    if (const int64_t bytes = w.part(own); bytes > 0)
      reduce_in_order(out + w.begin, sources, bytes / call.element_size(), call.dtype, call.reduction);
  });
}

void ShmCommunicator::exchange(const Collective& call) {
  const int n = size(), me = rank();
  const int64_t element = call.element_size();
  auto* out = static_cast<std::byte*>(call.out);
  switch (call.op) {
    case CollectiveOp::all_gather:
      return copy_pieces(call, true, cuts_of(call.counts, element),
                         [&](int from, int) { return Piece{0, call.counts[from] * element}; });

    case CollectiveOp::reduce_scatter: return reduce_slices(call, cuts_of(call.counts, element), out);

    case CollectiveOp::all_reduce: {
      const int64_t bytes = call.counts[0] * element;
      if (is_small_all_reduce(call)) {
        std::vector<const void*> sources;
        return stream(call, true, [&](int, int) { return Piece{0, bytes}; }, [&](const Window& w) {
          sources.assign(w.sources.begin(), w.sources.end());
          if (bytes > 0) reduce_in_order(out, sources, call.counts[0], call.dtype, call.reduction);
        });
      }
      std::vector<int64_t> cuts;
      for (int r = 0; r <= n; ++r) cuts.push_back(even_cut(call.counts[0], r, n) * element);
      reduce_slices(call, cuts, out + cuts[me]);
      return copy_pieces(call, true, cuts, [&](int from, int) { return Piece{cuts[from], cuts[from + 1] - cuts[from]}; });
    }

    case CollectiveOp::all_to_all:
      return copy_pieces(call, false, cuts_of(call.recv_counts, element), [&](int from, int to) {
        const int64_t* counts = meeting_->control(from).counts;
        return Piece{std::accumulate(counts, counts + to, int64_t{0}) * element, counts[to] * element};
      });

    case CollectiveOp::broadcast: {
      std::vector<int64_t> places(static_cast<size_t>(n) + 1, 0);
      places[n] = call.counts[0];
      return copy_pieces(call, true, places, [&](int from, int) {
        return Piece{0, from == call.root ? call.counts[0] : 0};
      });
    }

    case CollectiveOp::barrier:
      return stream(call, true, [](int, int) { return Piece{0, 0}; }, [](const Window&) {});
  }
}

}  // namespace sheaf
