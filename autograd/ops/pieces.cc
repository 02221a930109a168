#include "sheaf/autograd/ops/pieces.h"

#include <algorithm>
#include <optional>

#include "sheaf/autograd/ops/piece_cuts.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace pieces;
using Kind = Placement::Kind;
using Move = Redistribution::Move;

}  // namespace

// A piece of an all_to_all: some rows.
struct RedistributionInPieces::Share {
  View in, out;    // their rows; whole if the ranks' rows are interleaved
  Exchange ranks;  // the rows that each pair of ranks exchanges
  int64_t in_bytes() const { return bytes(in, ranks.dim_in, ranks.mine); }
  int64_t out_bytes() const { return bytes(out, ranks.dim_out, ranks.theirs); }
  static int64_t bytes(const View& v, int dim, const RowsOfRanks& rows) {
    int64_t elements = 0;
    for (const int64_t n : elements_of(v, dim, rows)) elements += n;
    return elements * static_cast<int64_t>(size_of(v.dtype));
  }
};

namespace {

// Whether a value of these types can be redistributed by rows: each rank has an interval of rows and, for an all_to_all, an interval
// of columns in a later dimension.
bool moves_rows(const Type& from, const Layout& to) {
  const Layout& have = from.layout;
  if (!is_floating(from.dtype) || !have.mesh() || have.mesh() != to.mesh() || have.is_elsewhere() || to.is_elsewhere()) return false;
  if (route(have, to).size() != 1) return false;
  const Move m = Redistribution::move(have, to);
  if (m.relabels() || (m.from != Kind::shard && m.to != Kind::shard)) return false;
  const auto cut = [&](const Layout& l) { return cut_of({from.dtype, from.shape, l}, m.axis, l[m.axis]); };
  const auto some = [](const auto& owned) { return Cut::total(owned) > 0; };
  const Layout& rows_cut = cut_by_rows(have, to, m);
  const Cut rows = cut(rows_cut);
  if (rows.flat || rows.dim >= from.shape.rank() - 1 || !from.shape.numel()) return false;
  if (!std::ranges::all_of(rows.owned, [&](const auto& owned) { return owned.size() == 1 && some(owned); })) return false;
  if (!m.exchanges()) return true;
  const Cut columns = cut(&rows_cut == &to ? have : to);
  return rows.dim <= 1 && !columns.flat && columns.dim > rows.dim && std::ranges::all_of(columns.owned, some);
}

}  // namespace

// --- receiving ---

RedistributionInPieces::Coming RedistributionInPieces::coming(const Type& from, const Layout& to, int64_t least_rows) {
  if (least_rows == 0 || !moves_rows(from, to)) return {};
  const Move m = move(from.layout, to);
  const Rows rows(from, to, m);
  if (rows.sequences == 0) return {};  // another axis has left this rank nothing
  if (m.exchanges()) {
    if (from_rows(from.layout, to, m)) return {};
    if (const auto columns = one_row_each(from, to, m))
      return columns->has_pieces_of_ranks(least_rows) ? Coming{.parts = 1, .own = m.size} : Coming();
    return {rows.parts_exchanged(least_rows), true, true};
  }
  if (m.from != Kind::shard || !Move::is_whole(m.to)) return {};
  if (rows.sequences > 1) return {rows.parts_of_sequences(least_rows), true, false};
  if (rows.parts_of_ranks(least_rows) == 0) return {};
  return {std::clamp<int64_t>(kMostPieces / (m.size - 1), 1, rows.parts_of_ranks(least_rows)), false, false};
}

std::vector<IncomingRows> RedistributionInPieces::incoming_rows(const Type& from, const Type& to, int64_t parts, Device device) {
  const Move m = move(from.layout, to.layout);
  const auto columns = one_row_each(from, to.layout, m);
  const Rows rows = columns ? *columns : Rows(from, to.layout, m);
  const int me = RankContext::current().coordinate(to.layout.mesh(), m.axis);
  std::vector<IncomingRows> out;
  for (const Interval& i : m.exchanges() && !columns ? rows.exchanged(me, parts) : rows.gathered(me, parts, device.is_cuda()))
    out.push_back(rows.incoming(i));
  return out;
}

std::vector<IncomingRows> RedistributionInPieces::start(const View& in, const View& out, void* received, void* sent, int64_t parts) const {
  if (takes_own_cores()) {  // nothing would be sent during their computation
    void* const at = received ? received : out.data;
    c_.join(Redistribution::start(in, sent, at, /*waited_for=*/true));
    if (received) finish(received, out);
    return incoming_rows(from_, to_, parts, stream_.device);
  }
  if (const auto columns = one_row_each(from_, to_.layout, m_)) return start_by_ranks(*columns, in, out, 1);
  const Rows rows(from_, to_.layout, m_);
  char* const come = static_cast<char*>(received);
  if (m_.exchanges()) return start_exchange(rows, in, out, come, static_cast<char*>(sent), parts);
  return rows.sequences > 1 ? start_by_sequences(rows, in, out, come, parts) : start_by_ranks(rows, in, out, parts);
}

std::vector<IncomingRows> RedistributionInPieces::start_by_sequences(const Rows& rows, const View& in, const View& out, char* received,
                                                                   int64_t parts) const {
  Communicator& lane = this->lane();
  const int64_t own = rows.of_rank(me_).size();
  RowsOfRanks of_ranks;
  for (const Interval& i : rows.of) of_ranks.push_back({i});
  std::vector<IncomingRows> come;
  InFlight calls;
  for (const Interval& piece : rows.gathered(me_, parts, stream_.device.is_cuda())) {
    IncomingRows& next = come.emplace_back(rows.incoming(piece));
    const int64_t first = piece.begin / rows.all, count = piece.size() / rows.all;
    const View from = rows.at(in, {first * own, (first + count) * own});
    const View at = rows.at(View::dense(received, in.dtype, out.shape), piece);
    const View to = View::dense(rows.at(out, piece).data, in.dtype, {count, rows.all, rows.width});
    if (!talks(lane)) continue;
    next.event = lane.all_gather(from.data, at.data, elements_of(to, 1, of_ranks), in.dtype, PathScope::current());
    calls.events.push_back(next.event);
    if (!meta_) next.unpack = [stream = stream_, at, to, of_ranks] { unpack_of_ranks(stream, at.data, to, 1, of_ranks); };
  }
  calls.events.clear();
  return come;
}

std::vector<IncomingRows> RedistributionInPieces::start_exchange(const Rows& rows, const View& in, const View& out, char* received, char* sent,
                                                               int64_t parts) const {
  const std::vector<Interval> pieces = rows.exchanged(me_, parts);
  const Exchange all = exchange();
  std::vector<IncomingRows> come;
  InFlight calls;
  for (int64_t p = 0; p < parts; ++p) {
    IncomingRows& next = come.emplace_back(rows.incoming(pieces[static_cast<size_t>(p)]));
    const Share piece = share(rows, all, in, out, p, parts);
    next.event = send(piece, sent, received);
    calls.events.push_back(next.event);
    if (meta_) continue;
    next.unpack = [stream = stream_, piece, received] { unpack_of_ranks(stream, received, piece.out, piece.ranks.dim_out, piece.ranks.theirs); };
    sent += piece.in_bytes(), received += piece.out_bytes();
  }
  calls.events.clear();
  return come;
}

// --- sending ---

RedistributionInPieces::Going RedistributionInPieces::going(const Type& from, const Layout& to, int64_t least_rows) {
  if (least_rows == 0 || !moves_rows(from, to)) return {};
  const Move m = move(from.layout, to);
  const Rows rows(from, to, m);
  if (rows.sequences == 0) return {};
  if (m.exchanges()) {
    if (!from_rows(from.layout, to, m)) return {};
    if (const auto columns = one_row_each(from, to, m))
      return columns->has_pieces_of_ranks(least_rows) ? Going{.parts = m.size, .dim = to[m.axis].map().dim()} : Going();
    return {rows.parts_exchanged(least_rows), true, from.layout[m.axis].map().dim()};
  }
  if (m.from != Kind::partial || m.to != Kind::shard) return {};
  return {rows.sequences > 1 ? rows.parts_of_sequences(least_rows) : if_several(rows.parts_of_ranks(least_rows)), false, to[m.axis].map().dim()};
}

// If all ranks have equally many rows of one sequence, one product computes them all.
static void join_even(std::vector<RowBlock>& blocks) {
  const RowBlock first = blocks[0];
  const int64_t stride = blocks.size() > 1 ? blocks[1].begin - first.begin : 0;
  if (stride < first.rows) return;
  for (size_t r = 0; r < blocks.size(); ++r) {
    const int64_t begin = first.begin + static_cast<int64_t>(r) * stride;
    if (blocks[r].groups > 1 || blocks[r].rows != first.rows || blocks[r].begin != begin) return;
  }
  blocks = {{first.begin, first.rows, static_cast<int64_t>(blocks.size()), stride}};
}

std::vector<RedistributionInPieces::RowsToGo> RedistributionInPieces::rows_to_go(const Type& from, const Type& to, int64_t parts) {
  const Move m = move(from.layout, to.layout);
  const int me = RankContext::current().coordinate(to.layout.mesh(), m.axis);
  if (const auto columns = one_row_each(from, to.layout, m)) return rows_to_go_by_ranks(*columns, me);
  const Rows rows(from, to.layout, m);
  std::vector<RowsToGo> out;
  if (m.exchanges()) {
    for (const Interval& i : rows.exchanged(me, parts)) out.push_back({.blocks = {{i.begin * rows.each, i.size() * rows.each}}, .rows = {}});
    return out;
  }
  const int64_t own = rows.of_rank(me).size();
  for (int64_t p = 0; p < parts; ++p) {
    RowsToGo& piece = out.emplace_back();
    const Interval some = rows.some_sequences(p, parts);
    for (const Interval& i : rows.of) {
      const Interval of_rank = part(i, p, parts);
      RowBlock block{of_rank.begin * rows.each, of_rank.size() * rows.each};
      if (rows.sequences > 1) block = {(some.begin * rows.all + i.begin) * rows.each, i.size() * rows.each, some.size(), rows.all * rows.each};
      piece.blocks.push_back(block);
      piece.rows.push_back(block.all());
    }
    piece.first = (rows.sequences > 1 ? some.begin * own : part({0, own}, p, parts).begin) * rows.each;
    join_even(piece.blocks);
  }
  return out;
}

int64_t RedistributionInPieces::workspace(const Type& from, const Type& to, const View& y, const View& out) {
  const Move m = move(from.layout, to.layout);
  return m.exchanges() && !one_row_each(from, to.layout, m) ? y.bytes() + out.bytes() : 0;
}

void RedistributionInPieces::run(const View& y, const View& out, int64_t parts, void* scratch,
                                 const std::function<void(const RowBlock&, void*)>& compute) const {
  if (const auto columns = one_row_each(from_, to_.layout, m_)) run_by_ranks(*columns, y, out, compute);
  else if (m_.exchanges()) run_exchange(y, out, parts, static_cast<char*>(scratch), compute);
  else run_scatter(y, out, parts, compute);
}

// Values to be reduced are computed in the order in which they are sent: nothing is packed.
void RedistributionInPieces::run_scatter(const View& y, const View& out, int64_t parts,
                                         const std::function<void(const RowBlock&, void*)>& compute) const {
  Communicator& lane = this->lane();
  const int64_t width = y.shape.back(), row = width * static_cast<int64_t>(size_of(y.dtype));
  char* at = y.as<char>();
  InFlight sent;
  for (const RowsToGo& piece : rows_to_go(from_, to_, parts)) {
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

// Rows are computed in place, and packed: each has columns for all ranks. A received piece is unpacked while the next is in flight.
void RedistributionInPieces::run_exchange(const View& y, const View& out, int64_t parts, char* sent,
                                          const std::function<void(const RowBlock&, void*)>& compute) const {
  const Rows rows(from_, to_.layout, m_);
  const std::vector<RowsToGo> pieces = rows_to_go(from_, to_, parts);
  const Exchange all = exchange();
  const int64_t row = y.shape.back() * static_cast<int64_t>(size_of(y.dtype));
  char* received = sent ? sent + y.bytes() : nullptr;
  InFlight calls;
  const auto unpack = [&](const Share& piece, const Event& come) {
    c_.join(come);
    if (meta_) return;
    unpack_of_ranks(stream_, received, piece.out, piece.ranks.dim_out, piece.ranks.theirs);
    received += piece.out_bytes();
  };
  char* next = received;
  std::optional<Share> last;
  for (int64_t p = 0; p < parts; ++p) {
    const RowBlock& block = pieces[static_cast<size_t>(p)].blocks[0];
    compute(block, y.data ? y.as<char>() + block.begin * row : nullptr);
    const Share piece = share(rows, all, y, out, p, parts);
    calls.events.push_back(send(piece, sent, next));
    if (sent) sent += piece.in_bytes(), next += piece.out_bytes();
    if (last) unpack(*last, calls.events[calls.events.size() - 2]);
    last = piece;
  }
  unpack(*last, calls.events.back());
  calls.events.clear();
}

// --- an all_to_all of some rows ---

RedistributionInPieces::Share RedistributionInPieces::share(const Rows& rows, const Exchange& all, const View& in, const View& out, int64_t p,
                                                            int64_t parts) const {
  Share s{in, out, all};
  if (rows.sequences > 1) {
    s.in = rows_of(in, 0, rows.some_sequences(p, parts)), s.out = rows_of(out, 0, rows.some_sequences(p, parts));
    return s;
  }
  const bool goes = s.ranks.dim_in > s.ranks.dim_out;  // rows are sharded in `in`
  const int dim = std::min(s.ranks.dim_in, s.ranks.dim_out);
  for (auto& owned : goes ? s.ranks.theirs : s.ranks.mine) owned = {part(owned[0], p, parts)};
  View& own = goes ? s.in : s.out;
  own = rows_of(own, dim, part({0, rows.of_rank(me_).size()}, p, parts));
  return s;
}

Event RedistributionInPieces::send(const Share& share, char* sent, char* received) const {
  const std::vector<int64_t> go = pack_for_ranks(share.in, share.ranks.dim_in, share.ranks.mine, sent);
  Communicator& lane = this->lane();
  if (!talks(lane)) return {};
  return lane.all_to_all(sent, go, received, elements_of(share.out, share.ranks.dim_out, share.ranks.theirs), share.in.dtype, PathScope::current());
}

}  // namespace sheaf
