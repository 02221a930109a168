#include "sheaf/autograd/ops/redistribution.h"

#include <algorithm>
#include <utility>

#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using Kind = Placement::Kind;

// A flat index requires dense elements.
bool is_flat(const Type& from, const Type& to, int axis) { return from.layout[axis].map().is_flat() || to.layout[axis].map().is_flat(); }

// Whether in the part of a value that any rank `has`, the rows of another dimension that other ranks want are contiguous and in rank
// order.
bool lie_in_order(const Cut& has, const Cut& wanted, const Shape& whole) {
  if (has.flat || wanted.flat || has.dim == wanted.dim) return false;
  for (int d = 0; d < wanted.dim; ++d) {
    int64_t most = whole[d];
    if (d == has.dim) {
      most = 0;
      for (const auto& owned : has.owned) most = std::max(most, Cut::total(owned));
    }
    if (most > 1) return false;
  }
  int64_t end = 0;
  for (const auto& owned : wanted.owned)
    for (const Interval& i : owned)
      if (i.begin != std::exchange(end, i.end)) return false;
  return true;
}

// The same for an all_to_all: of what is received (`comes`), or sent.
bool lies_in_order(const Type& from, const Type& to, int axis, bool comes) {
  const Cut in = cut_of(from, axis, from.layout[axis]), out = cut_of(to, axis, to.layout[axis]);
  const Shape whole = to.layout.with(axis, Placement::replicate()).local_shape(to.shape);
  return comes ? lie_in_order(out, in, whole) : lie_in_order(in, out, whole);
}

}  // namespace

Redistribution::Move Redistribution::move(const Layout& from, const Layout& to) {
  const Layout have = from.mesh() ? from : Layout(to.mesh());
  for (int axis = 0; axis < to.num_axes(); ++axis)
    if (!(have[axis] == to[axis])) return {axis, have[axis].kind(), to[axis].kind(), to.mesh()->size(axis)};
  return {-1, Kind::replicate, Kind::replicate, 1};
}

Redistribution::Redistribution(const Execute& c, const Type& from, const Type& to)
    : c_(c), from_(from), to_(to), m_(move(from.layout, to.layout)), stream_(c.stream()),
      meta_(c.device().is_meta()), packs_(m_.communicates() && packs(from, to)), unpacks_(m_.communicates() && unpacks(from, to)) {
  if (!m_.relabels()) me_ = RankContext::current().coordinate(to.layout.mesh(), m_.axis);
}

// --- in one op ---

int64_t Redistribution::workspace(const Type& from, const Type& to, const View& in, const View& out) {
  const Move m = move(from.layout, to.layout);
  if (m.relabels()) return 0;
  const int64_t bytes = in.bytes(), dense = in.contiguous() ? 0 : bytes;
  if (m.exchanges()) {
    const bool packs = Redistribution::packs(from, to);
    // A rank that gets nothing has an address, too: it tells the lane whose memory the ranks exchange.
    return (packs ? bytes : 0) + (unpacks(from, to) ? out.bytes() : 0) + (out.bytes() ? 0 : 1) + (!packs || is_flat(from, to, m.axis) ? dense : 0);
  }
  if (m.from == Kind::shard) return m.to == Kind::partial ? 0 : out.bytes() + dense;
  return m.to == Kind::shard && (m.from == Kind::partial || to.layout[m.axis].map().is_flat()) ? bytes : 0;
}

void Redistribution::run(View in, View out, void* scratch) const {
  if (m_.relabels()) return copy(in, View::dense(out.data, out.dtype, in.shape));
  if (Move::is_whole(m_.from)) return m_.to == Kind::shard ? slice(in, out, scratch) : keep_on_one(in, out);
  if (m_.to == Kind::partial) return zero_embed(in, out);
  char* at = static_cast<char*>(scratch);
  void *sent = at, *received = out.data;
  if (m_.exchanges()) {
    if (!in.contiguous() && (!packs_ || is_flat(from_, to_, m_.axis))) in = dense_at(at, in), at += in.bytes();
    sent = at;
    if (packs_) at += in.bytes();
    if (unpacks_ || out.bytes() == 0) received = at;
  } else if (m_.from == Kind::shard) {
    if (unpacks_) received = at;
    if (!in.contiguous()) in = dense_at(at + out.bytes(), in);
  } else if (m_.to == Kind::shard && !packs_ && !in.contiguous()) {
    in = dense_at(at, in);
  }
  c_.join(start(in, sent, received, /*waited_for=*/true));
  if (received != out.data) finish(received, out);
}

// --- in two ---

bool Redistribution::packs(const Type& from, const Type& to) {
  if (to.layout.is_elsewhere()) return false;
  const Move m = move(from.layout, to.layout);
  if (m.exchanges()) return !lies_in_order(from, to, m.axis, /*comes=*/false);
  return m.to == Kind::shard && !cut_of(to, m.axis, to.layout[m.axis]).contiguous;
}
bool Redistribution::unpacks(const Type& from, const Type& to) {
  if (to.layout.is_elsewhere()) return false;
  const Move m = move(from.layout, to.layout);
  if (m.exchanges()) return !lies_in_order(from, to, m.axis, /*comes=*/true);
  return m.from == Kind::shard && !cut_of(from, m.axis, from.layout[m.axis]).contiguous;
}

Redistribution::Exchange Redistribution::exchange() const {
  Cut p = cut_in(), q = cut_out();
  Exchange e{p.flat || q.flat, 0, 0, {}, {}};
  if (e.flat) p.count_elements(), q.count_elements();
  const bool one_index = e.flat || p.dim == q.dim;
  e.dim_in = one_index ? p.dim : q.dim, e.dim_out = p.dim;
  const auto me = static_cast<size_t>(me_);
  for (size_t r = 0; r < static_cast<size_t>(m_.size); ++r) {
    e.mine.push_back(one_index ? shared_rows(p.owned[me], q.owned[r]) : q.owned[r]);
    e.theirs.push_back(one_index ? shared_rows(q.owned[me], p.owned[r]) : p.owned[r]);
  }
  return e;
}

Event Redistribution::start(View in, void* sent, void* received, bool waited_for) const {
  std::vector<int64_t> send_counts, recv_counts;
  if (m_.from == Kind::partial && m_.to == Kind::shard) {
    const Cut cut = cut_out();
    recv_counts = cut.counts();
    if (packs_) pack_for_ranks(in, cut.dim, cut.owned, sent);
  } else if (m_.from == Kind::partial) {
    copy(in, View::dense(received, in.dtype, in.shape));
  } else if (m_.to == Kind::shard) {
    const Exchange e = exchange();
    send_counts = packs_ ? pack_for_ranks(e.seen(in), e.dim_in, e.mine, sent) : elements_of(e.seen(in), e.dim_in, e.mine);
    recv_counts = elements_of(e.seen(View::dense(received, in.dtype, to_.local_shape())), e.dim_out, e.theirs);
  } else {
    recv_counts = cut_in().counts();
  }
  Communicator& lane = this->lane();
  if (!talks(lane)) return {};
  if (waited_for) lane.next_call_is_awaited();
  lane.label_next_call(str(from_, " to ", to_.layout));
  const std::string& path = PathScope::current();
  const void* const out = packs_ ? sent : in.data;
  if (m_.from == Kind::partial)
    return m_.to == Kind::shard ? lane.reduce_scatter(out, received, recv_counts, in.dtype, path)
                                : lane.all_reduce(received, in.numel(), in.dtype, Reduction::sum, path);
  return m_.to == Kind::shard ? lane.all_to_all(out, send_counts, received, recv_counts, in.dtype, path)
                              : lane.all_gather(out, received, recv_counts, in.dtype, path);
}

void Redistribution::finish(void* received, View out) const {
  if (!unpacks_) return copy(View::dense(received, out.dtype, out.shape), out);
  if (meta_) return;
  const Exchange e = m_.to == Kind::shard ? exchange() : Exchange{false, 0, cut_in().dim, {}, cut_in().owned};
  unpack_of_ranks(stream_, received, e.seen(out), e.dim_out, e.theirs);
}

std::vector<int64_t> Redistribution::elements_of(const View& v, int dim, const RowsOfRanks& rows) {
  std::vector<int64_t> out;
  for (const auto& of_rank : rows) out.push_back(block_of_rows(v, dim, Cut::total(of_rank), nullptr).numel());
  return out;
}

std::vector<int64_t> Redistribution::pack_for_ranks(const View& from, int dim, const RowsOfRanks& rows, void* to) const {
  char* at = static_cast<char*>(to);
  for (const auto& of_rank : rows) {
    const View packed = block_of_rows(from, dim, Cut::total(of_rank), at);
    pack(from, dim, of_rank, packed);
    if (at) at += packed.bytes();
  }
  return elements_of(from, dim, rows);
}

void Redistribution::unpack_of_ranks(const Stream& stream, void* from, const View& to, int dim, const RowsOfRanks& rows) {
  char* at = static_cast<char*>(from);
  for (const auto& of_rank : rows) {
    const View packed = block_of_rows(to, dim, Cut::total(of_rank), at);
    unpack_rows([&](const View& x, const View& y) { SHEAF_ON_DEVICE(stream, copy, x, y); }, packed, to, dim, of_rank);
    at += packed.bytes();
  }
}

Communicator& Redistribution::lane() const {
  MeshRuntime* runtime = RankContext::current().runtime(to_.layout.mesh());
  if (!runtime) fail<PlacementError>("[redistribute] this rank has not joined mesh ", to_.layout.mesh()->to_string());
  return runtime->gather_lane(m_.axis);
}

bool Redistribution::takes_own_cores() const { return !stream_.device.is_cuda() && lane().takes_own_cores(); }

// In simulations, the lanes of simulated ranks count what tensors without memory would send.
bool Redistribution::talks(Communicator& lane) const {
  if (meta_ && lane.kind() != "simulated") return false;
  if (lane.takes_own_cores()) lane.next_call_is_awaited();
  return true;
}

// --- without communication ---

// Where no view can express it (Slice::alias).
void Redistribution::slice(View in, const View& out, void* scratch) const {
  const Cut cut = cut_out();
  if (cut.flat) in = flattened(dense_at(scratch, in));
  pack(in, cut.dim, cut.owned[static_cast<size_t>(me_)], out);
}

void Redistribution::keep_on_one(const View& in, const View& out) const {
  if (me_ == 0) copy(in, out);
  else fill(out, 0);
}

void Redistribution::zero_embed(const View& in, const View& out) const {
  const Cut cut = cut_in();
  if (!from_.layout[m_.axis].is_single()) {
    fill(out, 0);
    unpack(in, cut.flat ? flattened(out) : out, cut.dim, cut.owned[static_cast<size_t>(me_)]);
  } else if (cut.elements(me_) > 0) {
    copy(in, out);
  } else {
    fill(out, 0);
  }
}

// Tensors without memory are not copied.
void Redistribution::copy(const View& x, const View& y) const {
  if (!meta_) SHEAF_ON_DEVICE(stream_, copy, x, y);
}
void Redistribution::fill(const View& y, double value) const {
  if (!meta_) SHEAF_ON_DEVICE(stream_, fill, y, value);
}
void Redistribution::pack(const View& from, int dim, const std::vector<Interval>& rows, const View& packed) const {
  if (!meta_) pack_rows([this](const View& x, const View& y) { copy(x, y); }, from, dim, rows, packed);
}
void Redistribution::unpack(const View& packed, const View& to, int dim, const std::vector<Interval>& rows) const {
  if (!meta_) unpack_rows([this](const View& x, const View& y) { copy(x, y); }, packed, to, dim, rows);
}

// The input, made dense.
View Redistribution::dense_at(void* to, const View& in) const {
  const View out = View::dense(to, in.dtype, in.shape);
  copy(in, out);
  return out;
}

}  // namespace sheaf
