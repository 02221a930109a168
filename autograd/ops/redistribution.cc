#include "sheaf/autograd/ops/redistribution.h"

#include <algorithm>

#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using Kind = Placement::Kind;

// Calls under way. Whoever leaves by an exception waits for them: they read and write memory that is about to be freed.
struct InFlight {
  std::vector<Event> events;
  ~InFlight() {
    for (const Event& event : events) {
      try {
        event.sync();
      } catch (const std::exception&) {  // what goes on is the first
      }
    }
  }
};

Communicator& gather_lane(const Layout& l, int axis) {
  MeshRuntime* runtime = RankContext::current().runtime(l.mesh());
  if (!runtime) fail<PlacementError>("[redistribute] this rank has not joined mesh ", l.mesh()->to_string());
  return runtime->gather_lane(axis);
}

// A flat index runs over dense elements only.
bool is_flat(const Layout& from, const Layout& to, int axis) { return from[axis].map().is_flat() || to[axis].map().is_flat(); }

}  // namespace

Redistribution::Move Redistribution::move(const Layout& from, const Layout& to) {
  const Layout have = from.mesh() ? from : Layout(to.mesh());
  for (int axis = 0; axis < to.num_axes(); ++axis)
    if (!(have[axis] == to[axis])) return {axis, have[axis].kind(), to[axis].kind(), to.mesh()->size(axis)};
  return {-1, Kind::replicate, Kind::replicate, 1};
}

Redistribution::Redistribution(const Execute& c, const Type& from, const Type& to)
    : c_(c), from_(from), to_(to), m_(move(from.layout, to.layout)), stream_(c.stream()), meta_(c.device().is_meta()) {
  if (!m_.relabels()) me_ = RankContext::current().coordinate(to.layout.mesh(), m_.axis);
}

// --- in one op ---

int64_t Redistribution::workspace(const Layout& from, const Layout& to, const View& in, const View& out) {
  const Move m = move(from, to);
  if (m.relabels()) return 0;
  const int64_t bytes = in.bytes(), dense = in.contiguous() ? 0 : bytes;
  // A rank that gets nothing has an address, too: it tells the lane whose memory the ranks exchange.
  if (m.to == Kind::shard && m.from == Kind::shard)
    return bytes + std::max<int64_t>(out.bytes(), 1) + (is_flat(from, to, m.axis) ? dense : 0);
  if (m.from == Kind::shard) return m.to == Kind::partial ? 0 : out.bytes() + dense;
  return m.to == Kind::shard && (m.from == Kind::partial || to[m.axis].map().is_flat()) ? bytes : 0;
}

void Redistribution::run(View in, View out, void* scratch) const {
  if (m_.relabels()) return copy(in, View::dense(out.data, out.dtype, in.shape));
  if (Move::is_whole(m_.from)) return m_.to == Kind::shard ? slice(in, out, scratch) : keep_on_one(in, out);
  if (m_.to == Kind::partial) return zero_embed(in, out);
  char* const at = static_cast<char*>(scratch);
  void *sent = at, *received = out.data;
  if (m_.from == Kind::shard && m_.to == Kind::shard) {
    received = at + in.bytes();
    if (is_flat(from_.layout, to_.layout, m_.axis) && !in.contiguous()) in = dense_at(at + in.bytes() + out.bytes(), in);
  } else if (m_.from == Kind::shard) {
    if (unpacks()) received = at;
    if (!in.contiguous()) in = dense_at(at + out.bytes(), in);
  } else if (m_.to == Kind::shard && !packs() && !in.contiguous()) {
    in = dense_at(at, in);
  }
  c_.join(start(in, sent, received, /*waited_for=*/true));
  if (received != out.data) finish(received, out);
}

// --- in two ---

bool Redistribution::packs(const Type& from, const Type& to) {
  if (to.layout.is_elsewhere()) return false;
  const Move m = move(from.layout, to.layout);
  return m.to == Kind::shard && (m.from == Kind::shard || !cut_of(to, m.axis, to.layout[m.axis]).contiguous);
}
bool Redistribution::unpacks(const Type& from, const Type& to) {
  if (to.layout.is_elsewhere()) return false;
  const Move m = move(from.layout, to.layout);
  return m.from == Kind::shard && (m.to == Kind::shard || !cut_of(from, m.axis, from.layout[m.axis]).contiguous);
}

// Of an all_to_all: what each pair of ranks shares are rows of what either has.
struct Redistribution::Exchange {
  bool flat;
  int dim_in, dim_out;
  std::vector<std::vector<Interval>> mine, theirs;  // of what this rank has, by whom it goes to, and gets, by whom it is from
  View seen(const View& v) const { return flat ? flattened(v) : v; }
};

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
  char* at = static_cast<char*>(sent);
  std::vector<int64_t> send_counts, recv_counts;
  if (m_.from == Kind::partial && m_.to == Kind::shard) {
    const Cut cut = cut_out();
    recv_counts = cut.counts();
    for (int r = 0; r < m_.size && packs(); ++r) {
      const View packed = block_of_rows(in, cut.dim, cut.rows(r), at);
      pack(in, cut.dim, cut.owned[static_cast<size_t>(r)], packed);
      at += packed.bytes();
    }
  } else if (m_.from == Kind::partial) {
    copy(in, View::dense(received, in.dtype, in.shape));
  } else if (m_.to == Kind::shard) {
    const Exchange e = exchange();
    const View from = e.seen(in), to = e.seen(View::dense(received, in.dtype, to_.local_shape()));
    for (size_t r = 0; r < e.mine.size(); ++r) {
      const View packed = block_of_rows(from, e.dim_in, Cut::total(e.mine[r]), at);
      pack(from, e.dim_in, e.mine[r], packed);
      at += packed.bytes();
      send_counts.push_back(packed.numel());
      recv_counts.push_back(block_of_rows(to, e.dim_out, Cut::total(e.theirs[r]), received).numel());
    }
  } else {
    recv_counts = cut_in().counts();
  }
  Communicator& lane = gather_lane(to_.layout, m_.axis);
  if (!talks(lane)) return {};
  if (waited_for) lane.is_waited_for();
  const std::string& path = PathScope::current();
  const void* const out = packs() ? sent : in.data;
  if (m_.from == Kind::partial)
    return m_.to == Kind::shard ? lane.reduce_scatter(out, received, recv_counts, in.dtype, path)
                                : lane.all_reduce(received, in.numel(), in.dtype, Reduction::sum, path);
  return m_.to == Kind::shard ? lane.all_to_all(out, send_counts, received, recv_counts, in.dtype, path)
                              : lane.all_gather(out, received, recv_counts, in.dtype, path);
}

void Redistribution::finish(void* received, View out) const {
  if (!unpacks()) return copy(View::dense(received, out.dtype, out.shape), out);
  const Exchange e = m_.to == Kind::shard ? exchange() : Exchange{false, 0, cut_in().dim, {}, cut_in().owned};
  out = e.seen(out);
  char* at = static_cast<char*>(received);
  for (const std::vector<Interval>& rows : e.theirs) {
    const View packed = block_of_rows(out, e.dim_out, Cut::total(rows), at);
    unpack(packed, out, e.dim_out, rows);
    at += packed.bytes();
  }
}

// --- in pieces ---

// A value's dimensions as [sequences, rows of all ranks, width], of which each rank has an interval of rows.
struct Redistribution::Rows {
  int64_t sequences = 1, all = 1, width;
  std::vector<Interval> of;
  int64_t fewest() const {
    int64_t n = all;
    for (const Interval& i : of) n = std::min(n, i.size());
    return n;
  }

  Rows(const Type& from, const Cut& cut, int axis) {
    const Shape shape = from.layout.with(axis, Placement::replicate()).local_shape(from.shape);
    int64_t each = 1;
    for (int d = 0; d < shape.rank() - 1; ++d) (d < cut.dim ? sequences : all) *= shape[d];
    for (int d = cut.dim + 1; d < shape.rank() - 1; ++d) each *= shape[d];
    width = shape.back();
    for (const auto& owned : cut.owned) of.push_back({owned[0].begin * each, owned[0].end * each});
  }
  // In the order in which rank `me` gets them: of ranks, or of sequences.
  // On a GPU, whose bits depend on it, a rank multiplies so many of its own rows at once as others of them.
  std::vector<Interval> pieces(int me, int64_t parts, bool gpu) const {
    std::vector<Interval> out;
    const auto ranks = static_cast<int>(of.size());
    if (sequences > 1) {
      for (int64_t p = 0; p < parts; ++p) out.push_back({all * even_cut(sequences, p, parts), all * even_cut(sequences, p + 1, parts)});
      return out;
    }
    for (int step = 0; step < ranks; ++step) {
      const int64_t cuts = step == 0 && !gpu ? 1 : parts;
      for (int64_t p = 0; p < cuts; ++p) out.push_back(part(of[static_cast<size_t>((me + step) % ranks)], p, cuts));
    }
    return out;
  }
  static Interval part(Interval i, int64_t p, int64_t parts) {
    return {i.begin + even_cut(i.size(), p, parts), i.begin + even_cut(i.size(), p + 1, parts)};
  }
  View at(const View& v, Interval rows) const {
    const int64_t bytes = rows.begin * width * static_cast<int64_t>(size_of(v.dtype));
    return View::dense(v.data ? v.as<char>() + bytes : nullptr, v.dtype, {rows.size(), width});
  }
};

// Each has a call of the lane, and a product.
constexpr int64_t kMostPieces = 4;

static bool is_one_move_here(const Type& from, const Layout& to) {
  return is_floating(from.dtype) && from.layout.mesh() && from.layout.mesh() == to.mesh() && !from.layout.is_elsewhere() &&
         !to.is_elsewhere() && route(from.layout, to).size() == 1;
}
// An interval of them for each rank.
static bool are_rows(const Cut& cut, const Shape& shape) {
  return !cut.flat && cut.dim < shape.rank() - 1 && std::ranges::all_of(cut.owned, [](const auto& owned) { return owned.size() == 1; });
}

Redistribution::Pieces Redistribution::pieces_of(const Type& from, const Layout& to, int64_t least_rows) {
  if (!is_one_move_here(from, to) || least_rows == 0) return {};
  const Move m = move(from.layout, to);
  if (m.relabels() || m.from != Kind::shard || !Move::is_whole(m.to)) return {};
  const Cut cut = cut_of(from, m.axis, from.layout[m.axis]);
  if (!are_rows(cut, from.shape)) return {};
  const Rows rows(from, cut, m.axis);
  if (rows.fewest() == 0 || rows.sequences == 0) return {};
  if (rows.sequences > 1) {
    const int64_t parts = std::min({kMostPieces, rows.sequences, rows.sequences * rows.all / (4 * least_rows)});
    return {parts > 1 ? parts : 0, true};
  }
  if (rows.fewest() < least_rows) return {};
  return {std::clamp<int64_t>(kMostPieces / (m.size - 1), 1, rows.fewest() / least_rows), false};
}

std::vector<RowsToCome> Redistribution::pieces(const Type& from, const Type& to, int64_t parts, Device device) {
  const Move m = move(from.layout, to.layout);
  const Rows rows(from, cut_of(from, m.axis, from.layout[m.axis]), m.axis);
  std::vector<RowsToCome> out;
  for (const Interval& piece : rows.pieces(RankContext::current().coordinate(to.layout.mesh(), m.axis), parts, device.is_cuda()))
    out.push_back({.begin = piece.begin, .end = piece.end});
  return out;
}

std::vector<RowsToCome> Redistribution::start_in_pieces(const View& in, const View& out, void* packed, int64_t parts) const {
  const Rows rows(from_, cut_in(), m_.axis);
  if (takes_own_cores()) {  // nothing would travel beside what they compute
    run(in, out, packed);
    std::vector<RowsToCome> come;
    for (const Interval& piece : rows.pieces(me_, parts, false)) come.push_back({.begin = piece.begin, .end = piece.end});
    return come;
  }
  return rows.sequences > 1 ? start_of_sequences(rows, in, out, static_cast<char*>(packed), parts) : start_of_ranks(rows, in, out, parts);
}

// In each call a rank sends to one, and gets from another.
std::vector<RowsToCome> Redistribution::start_of_ranks(const Rows& rows, const View& in, const View& out, int64_t parts) const {
  Communicator& lane = gather_lane(to_.layout, m_.axis);
  const Interval own = rows.of[static_cast<size_t>(me_)];
  const std::vector<Interval> pieces = rows.pieces(me_, parts, stream_.device.is_cuda());
  const size_t others = static_cast<size_t>(parts * (m_.size - 1)), owns = pieces.size() - others;
  copy(View::dense(in.data, in.dtype, {own.size(), rows.width}), rows.at(out, own));
  std::vector<RowsToCome> come;
  InFlight calls;
  for (size_t i = 0; i < pieces.size(); ++i) {
    RowsToCome& next = come.emplace_back(RowsToCome{.begin = pieces[i].begin, .end = pieces[i].end});
    if (i < owns || !talks(lane)) continue;
    const auto call = static_cast<int64_t>(i - owns);
    const auto step = static_cast<int>(1 + call / parts);
    const View from = rows.at(in, Rows::part({0, own.size()}, call % parts, parts)), to = rows.at(out, pieces[i]);
    std::vector<int64_t> sent(rows.of.size()), received(sent);
    sent[static_cast<size_t>((me_ + m_.size - step) % m_.size)] = from.numel();
    received[static_cast<size_t>((me_ + step) % m_.size)] = to.numel();
    next.event = lane.all_to_all(from.data, sent, to.data, received, in.dtype, PathScope::current());
    calls.events.push_back(next.event);
  }
  calls.events.clear();  // whoever has the pieces waits for them
  return come;
}

std::vector<RowsToCome> Redistribution::start_of_sequences(const Rows& rows, const View& in, const View& out, char* packed,
                                                           int64_t parts) const {
  Communicator& lane = gather_lane(to_.layout, m_.axis);
  const int64_t own = rows.of[static_cast<size_t>(me_)].size(), element = static_cast<int64_t>(size_of(in.dtype));
  std::vector<RowsToCome> come;
  InFlight calls;
  for (const Interval& piece : rows.pieces(me_, parts, stream_.device.is_cuda())) {
    RowsToCome& next = come.emplace_back(RowsToCome{.begin = piece.begin, .end = piece.end});
    const int64_t first = piece.begin / rows.all, count = piece.size() / rows.all;
    const View from = rows.at(in, {first * own, (first + count) * own}), to = rows.at(out, piece);
    char* const at = packed ? packed + piece.begin * rows.width * element : nullptr;
    std::vector<int64_t> counts;
    for (const Interval& i : rows.of) counts.push_back(count * i.size() * rows.width);
    if (!talks(lane)) continue;
    next.event = lane.all_gather(from.data, at, counts, in.dtype, PathScope::current());
    calls.events.push_back(next.event);
    if (meta_) continue;
    next.unpack = [stream = stream_, of = rows.of, all = rows.all, width = rows.width, to, count, at] {
      const View whole = View::dense(to.data, to.dtype, {count, all, width});
      View part = View::dense(at, to.dtype, whole.shape);
      for (const Interval& i : of) {
        part = block_of_rows(part, 1, i.size(), part.data);
        SHEAF_ON_DEVICE(stream, copy, part, rows_of(whole, 1, i));
        part.data = part.as<char>() + part.bytes();
      }
    };
  }
  calls.events.clear();
  return come;
}

int64_t Redistribution::sent_parts(const Type& from, const Layout& to, int64_t least_rows) {
  if (!is_one_move_here(from, to) || least_rows == 0) return 0;
  const Move m = move(from.layout, to);
  if (m.relabels() || m.from != Kind::partial || m.to != Kind::shard) return 0;
  const Type result{from.dtype, from.shape, to};
  const Cut cut = cut_of(result, m.axis, to[m.axis]);
  if (!are_rows(cut, from.shape)) return 0;
  const Rows rows(from, cut, m.axis);
  if (rows.fewest() == 0 || rows.sequences == 0) return 0;
  const int64_t parts = rows.sequences > 1 ? std::min(rows.sequences, rows.sequences * rows.all / (4 * least_rows))
                                           : rows.fewest() / least_rows;
  return parts > 1 ? std::min(kMostPieces, parts) : 0;
}

std::vector<Redistribution::Sent> Redistribution::sent_pieces(const Type& from, const Type& to, int64_t parts) {
  const Move m = move(from.layout, to.layout);
  const Rows rows(from, cut_of(to, m.axis, to.layout[m.axis]), m.axis);
  const Interval own = rows.of[static_cast<size_t>(RankContext::current().coordinate(to.layout.mesh(), m.axis))];
  std::vector<Sent> out;
  for (int64_t p = 0; p < parts; ++p) {
    Sent& piece = out.emplace_back();
    if (rows.sequences > 1) {
      const int64_t first = even_cut(rows.sequences, p, parts), count = even_cut(rows.sequences, p + 1, parts) - first;
      for (const Interval& i : rows.of) piece.blocks.push_back({first * rows.all + i.begin, i.size(), count, rows.all});
      piece.first = first * own.size();
    } else {
      for (const Interval& i : rows.of) {
        const Interval part = Rows::part(i, p, parts);
        piece.blocks.push_back({part.begin, part.size()});
      }
      piece.first = Rows::part({0, own.size()}, p, parts).begin;
    }
    for (const RowBlock& block : piece.blocks) piece.rows.push_back(block.all());
    join_even(piece.blocks);
  }
  return out;
}

// Where ranks have as many rows each, of one sequence, those of all are one product.
void Redistribution::join_even(std::vector<RowBlock>& blocks) {
  const RowBlock first = blocks[0];
  const int64_t stride = blocks.size() > 1 ? blocks[1].begin - first.begin : 0;
  if (stride < first.rows) return;
  for (size_t r = 0; r < blocks.size(); ++r) {
    const int64_t begin = first.begin + static_cast<int64_t>(r) * stride;
    if (blocks[r].groups > 1 || blocks[r].rows != first.rows || blocks[r].begin != begin) return;
  }
  blocks = {{first.begin, first.rows, static_cast<int64_t>(blocks.size()), stride}};
}

bool Redistribution::takes_own_cores() const { return !stream_.device.is_cuda() && gather_lane(to_.layout, m_.axis).takes_own_cores(); }

void Redistribution::run_in_pieces(const View& y, const View& out, int64_t parts,
                                   const std::function<void(const RowBlock&, void*)>& compute) const {
  Communicator& lane = gather_lane(to_.layout, m_.axis);
  const int64_t width = y.shape.back(), row = width * static_cast<int64_t>(size_of(y.dtype));
  char* at = y.as<char>();
  InFlight sent;
  for (const Sent& piece : sent_pieces(from_, to_, parts)) {
    char* const begin = at;
    for (const RowBlock& block : piece.blocks) {
      if (block.all() > 0) compute(block, at);
      if (at) at += block.all() * row;
    }
    std::vector<int64_t> counts;
    for (const int64_t rows : piece.rows) counts.push_back(rows * width);
    if (!talks(lane)) continue;
    char* const to = out.data ? out.as<char>() + piece.first * row : nullptr;
    sent.events.push_back(lane.reduce_scatter(begin, to, counts, y.dtype, PathScope::current()));
  }
  for (const Event& event : sent.events) c_.join(event);
  sent.events.clear();
}

// Where ranks are simulated, their lanes count what tensors without memory would send.
bool Redistribution::talks(Communicator& lane) const {
  if (meta_ && lane.kind() != "simulated") return false;
  if (lane.takes_own_cores()) lane.is_waited_for();
  return true;
}

// --- without talking ---

// Where no view shows it (Slice::alias).
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

// Nothing is copied of tensors without memory.
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

// What comes in, without gaps.
View Redistribution::dense_at(void* to, const View& in) const {
  const View out = View::dense(to, in.dtype, in.shape);
  copy(in, out);
  return out;
}

}  // namespace sheaf
