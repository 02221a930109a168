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

// Whether what a rank has before the move are rows; of an all_to_all, then columns behind it.
bool from_rows(const Layout& from, const Layout& to, const Move& m) {
  return m.exchanges() ? from[m.axis].map().dim() < to[m.axis].map().dim() : m.from == Kind::shard;
}
const Layout& cut_by_rows(const Layout& from, const Layout& to, const Move& m) { return from_rows(from, to, m) ? from : to; }

}  // namespace

// A value's dimensions as [sequences, rows of all ranks, width], of which each rank has an interval of rows.
struct RedistributionInPieces::Rows {
  int64_t sequences = 1, all, width = 1;
  int64_t each = 1;  // rows of products, of the last dimension, that one of them is
  std::vector<Interval> of;

  Rows(const Type& type, const Layout& cut_by, int axis) {
    const Shape shape = cut_by.with(axis, Placement::replicate()).local_shape(type.shape);
    const Cut cut = cut_of({type.dtype, type.shape, cut_by}, axis, cut_by[axis]);
    for (int d = 0; d < cut.dim; ++d) sequences *= shape[d];
    for (int d = cut.dim + 1; d < shape.rank(); ++d) width *= shape[d];
    for (int d = cut.dim + 1; d < shape.rank() - 1; ++d) each *= shape[d];
    all = shape[cut.dim];
    for (const auto& owned : cut.owned) of.push_back(owned[0]);
  }
  Rows(const Type& from, const Layout& to, const Move& m) : Rows(from, cut_by_rows(from.layout, to, m), m.axis) {}

  Interval of_rank(int r) const { return of[static_cast<size_t>(r)]; }
  int64_t fewest() const {
    int64_t n = all;
    for (const Interval& i : of) n = std::min(n, i.size());
    return n;
  }
  /// Parts of each rank's rows that are at least so many for a product.
  int64_t parts_of_ranks(int64_t least_rows) const { return std::min(fewest(), fewest() * each / least_rows); }
  Interval some_sequences(int64_t p, int64_t parts) const { return part({0, sequences}, p, parts); }
  View at(const View& v, Interval rows) const {
    const int64_t bytes = rows.begin * width * static_cast<int64_t>(size_of(v.dtype));
    return View::dense(v.data ? v.as<char>() + bytes : nullptr, v.dtype, {rows.size(), width});
  }
  // Of an all_gather, in the order in which rank `me` gets them: of ranks, or of sequences. On a GPU, whose bits depend on it, a rank
  // multiplies so many of its own rows at once as others of them.
  std::vector<Interval> gathered(int me, int64_t parts, bool gpu) const {
    std::vector<Interval> out;
    if (sequences > 1) {
      for (int64_t p = 0; p < parts; ++p) out.push_back({all * some_sequences(p, parts).begin, all * some_sequences(p, parts).end});
      return out;
    }
    const auto ranks = static_cast<int>(of.size());
    for (int step = 0; step < ranks; ++step) {
      const int64_t cuts = step == 0 && !gpu ? 1 : parts;
      for (int64_t p = 0; p < cuts; ++p) out.push_back(part(of_rank((me + step) % ranks), p, cuts));
    }
    return out;
  }
  // Of an all_to_all: of the rows that rank `me` has.
  std::vector<Interval> exchanged(int me, int64_t parts) const {
    std::vector<Interval> out;
    const int64_t own = of_rank(me).size();
    for (int64_t p = 0; p < parts; ++p) {
      const Interval i = sequences > 1 ? some_sequences(p, parts) : part({0, own}, p, parts);
      out.push_back(sequences > 1 ? Interval{own * i.begin, own * i.end} : i);
    }
    return out;
  }
  /// Of several sequences, where a product has the rows of all ranks.
  int64_t parts_of_sequences(int64_t least_rows) const { return if_several(std::min(sequences, sequences * all * each / (4 * least_rows))); }
  int64_t parts_exchanged(int64_t least_rows) const {
    return if_several(sequences > 1 ? std::min(sequences, sequences * fewest() * each / least_rows) : parts_of_ranks(least_rows));
  }
  RowsToCome to_come(Interval i) const { return {.begin = i.begin * each, .end = i.end * each}; }
};

// Of an all_to_all of some rows.
struct RedistributionInPieces::Share {
  View in, out;    // their rows, whole where the ranks' rows lie between those of others
  Exchange ranks;  // what each pair of ranks shares of them
  int64_t in_bytes() const { return bytes(in, ranks.dim_in, ranks.mine); }
  int64_t out_bytes() const { return bytes(out, ranks.dim_out, ranks.theirs); }
  static int64_t bytes(const View& v, int dim, const RowsOfRanks& rows) {
    int64_t elements = 0;
    for (const int64_t n : elements_of(v, dim, rows)) elements += n;
    return elements * static_cast<int64_t>(size_of(v.dtype));
  }
};

namespace {

// Whether a value of these types can move so: each rank has some rows, an interval, and of an all_to_all some columns behind them.
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

// --- what comes ---

RedistributionInPieces::Coming RedistributionInPieces::coming(const Type& from, const Layout& to, int64_t least_rows) {
  if (least_rows == 0 || !moves_rows(from, to)) return {};
  const Move m = move(from.layout, to);
  const Rows rows(from, to, m);
  if (rows.sequences == 0) return {};  // another axis has left this rank none
  if (m.exchanges()) return from_rows(from.layout, to, m) ? Coming() : Coming{rows.parts_exchanged(least_rows), true, true};
  if (m.from != Kind::shard || !Move::is_whole(m.to)) return {};
  if (rows.sequences > 1) return {rows.parts_of_sequences(least_rows), true, false};
  if (rows.parts_of_ranks(least_rows) == 0) return {};
  return {std::clamp<int64_t>(kMostPieces / (m.size - 1), 1, rows.parts_of_ranks(least_rows)), false, false};
}

std::vector<RowsToCome> RedistributionInPieces::rows_to_come(const Type& from, const Type& to, int64_t parts, Device device) {
  const Move m = move(from.layout, to.layout);
  const Rows rows(from, to.layout, m);
  const int me = RankContext::current().coordinate(to.layout.mesh(), m.axis);
  std::vector<RowsToCome> out;
  for (const Interval& i : m.exchanges() ? rows.exchanged(me, parts) : rows.gathered(me, parts, device.is_cuda())) out.push_back(rows.to_come(i));
  return out;
}

std::vector<RowsToCome> RedistributionInPieces::start(const View& in, const View& out, void* received, void* sent, int64_t parts) const {
  if (takes_own_cores()) {  // nothing would travel beside what they compute
    void* const at = received ? received : out.data;
    c_.join(Redistribution::start(in, sent, at, /*waited_for=*/true));
    if (received) finish(received, out);
    return rows_to_come(from_, to_, parts, stream_.device);
  }
  const Rows rows(from_, to_.layout, m_);
  char* const come = static_cast<char*>(received);
  if (m_.exchanges()) return start_exchange(rows, in, out, come, static_cast<char*>(sent), parts);
  return rows.sequences > 1 ? start_by_sequences(rows, in, out, come, parts) : start_by_ranks(rows, in, out, parts);
}

// In each call a rank sends to one, and gets from another.
std::vector<RowsToCome> RedistributionInPieces::start_by_ranks(const Rows& rows, const View& in, const View& out, int64_t parts) const {
  Communicator& lane = this->lane();
  const Interval own = rows.of_rank(me_);
  const std::vector<Interval> pieces = rows.gathered(me_, parts, stream_.device.is_cuda());
  const size_t others = static_cast<size_t>(parts * (m_.size - 1)), owns = pieces.size() - others;
  copy(View::dense(in.data, in.dtype, {own.size(), rows.width}), rows.at(out, own));
  std::vector<RowsToCome> come;
  InFlight calls;
  for (size_t i = 0; i < pieces.size(); ++i) {
    RowsToCome& next = come.emplace_back(rows.to_come(pieces[i]));
    if (i < owns || !talks(lane)) continue;
    const auto call = static_cast<int64_t>(i - owns);
    const auto step = static_cast<int>(1 + call / parts);
    const View from = rows.at(in, part({0, own.size()}, call % parts, parts)), to = rows.at(out, pieces[i]);
    std::vector<int64_t> sent(rows.of.size()), received(sent);
    sent[static_cast<size_t>((me_ + m_.size - step) % m_.size)] = from.numel();
    received[static_cast<size_t>((me_ + step) % m_.size)] = to.numel();
    next.event = lane.all_to_all(from.data, sent, to.data, received, in.dtype, PathScope::current());
    calls.events.push_back(next.event);
  }
  calls.events.clear();  // whoever has the pieces waits for them
  return come;
}

std::vector<RowsToCome> RedistributionInPieces::start_by_sequences(const Rows& rows, const View& in, const View& out, char* received,
                                                                   int64_t parts) const {
  Communicator& lane = this->lane();
  const int64_t own = rows.of_rank(me_).size();
  RowsOfRanks of_ranks;
  for (const Interval& i : rows.of) of_ranks.push_back({i});
  std::vector<RowsToCome> come;
  InFlight calls;
  for (const Interval& piece : rows.gathered(me_, parts, stream_.device.is_cuda())) {
    RowsToCome& next = come.emplace_back(rows.to_come(piece));
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

std::vector<RowsToCome> RedistributionInPieces::start_exchange(const Rows& rows, const View& in, const View& out, char* received, char* sent,
                                                               int64_t parts) const {
  const std::vector<Interval> pieces = rows.exchanged(me_, parts);
  const Exchange all = exchange();
  std::vector<RowsToCome> come;
  InFlight calls;
  for (int64_t p = 0; p < parts; ++p) {
    RowsToCome& next = come.emplace_back(rows.to_come(pieces[static_cast<size_t>(p)]));
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

// --- what goes ---

int64_t RedistributionInPieces::going(const Type& from, const Layout& to, int64_t least_rows) {
  if (least_rows == 0 || !moves_rows(from, to)) return 0;
  const Move m = move(from.layout, to);
  const Rows rows(from, to, m);
  if (rows.sequences == 0) return 0;
  if (m.exchanges()) return from_rows(from.layout, to, m) ? rows.parts_exchanged(least_rows) : 0;
  if (m.from != Kind::partial || m.to != Kind::shard) return 0;
  return rows.sequences > 1 ? rows.parts_of_sequences(least_rows) : if_several(rows.parts_of_ranks(least_rows));
}

// Where ranks have as many rows each, of one sequence, those of all are one product.
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
  const Rows rows(from, to.layout, m);
  const int me = RankContext::current().coordinate(to.layout.mesh(), m.axis);
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
  return move(from.layout, to.layout).exchanges() ? y.bytes() + out.bytes() : 0;
}

void RedistributionInPieces::run(const View& y, const View& out, int64_t parts, void* scratch,
                                 const std::function<void(const RowBlock&, void*)>& compute) const {
  if (m_.exchanges()) run_exchange(y, out, parts, static_cast<char*>(scratch), compute);
  else run_scatter(y, out, parts, compute);
}

// What ranks add up is computed in the order of the wire: nothing is packed.
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

// Rows lie where they belong, and are packed: each has columns for all ranks. What has come is unpacked while the next travels.
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
  const bool goes = s.ranks.dim_in > s.ranks.dim_out;  // rows are cut in `in`
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
