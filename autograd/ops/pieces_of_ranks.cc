// Redistributions in pieces, each from a single rank: a gather of rows, and an all_to_all in which each rank has one row, as of
// experts. See [Note: in pieces] (execute.h).
#include "sheaf/autograd/ops/piece_cuts.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"

namespace sheaf {

using namespace pieces;

// In the latter case, the columns: the next dimension with several indices, of which each rank has an interval, in rank order.
std::optional<RedistributionInPieces::Rows> RedistributionInPieces::one_row_each(const Type& from, const Layout& to, const Move& m) {
  if (!m.exchanges() || packs(from, {from.dtype, from.shape, to}) || unpacks(from, {from.dtype, from.shape, to})) return {};
  const Layout& by_rows = cut_by_rows(from.layout, to, m);
  const Layout& by_columns = &by_rows == &to ? from.layout : to;
  const auto cut = [&](const Layout& l) { return cut_of({from.dtype, from.shape, l}, m.axis, l[m.axis]); };
  const Cut rows = cut(by_rows), columns = cut(by_columns);
  if (columns.dim <= rows.dim || columns.dim >= from.shape.rank() - 1) return {};
  for (const auto& owned : rows.owned)
    if (Cut::total(owned) != 1) return {};
  for (const auto& owned : columns.owned)
    if (owned.size() != 1) return {};
  Rows out({from.dtype, from.shape, by_columns}, by_columns, m.axis);
  if (out.sequences == 0) return {};  // another axis has left this rank nothing
  out.sequences = 1;
  return out;
}

// In each call a rank sends to one, and gets from another.
std::vector<IncomingRows> RedistributionInPieces::start_by_ranks(const Rows& rows, const View& in, const View& out, int64_t parts) const {
  Communicator& lane = this->lane();
  const Interval own = rows.of_rank(me_);
  const std::vector<Interval> pieces = rows.gathered(me_, parts, stream_.device.is_cuda());
  const size_t others = static_cast<size_t>(parts * (m_.size - 1)), owns = pieces.size() - others;
  // The part of `in` that is sent to a rank.
  const auto for_rank = [&](int r, int64_t p) {
    return m_.exchanges() ? rows.of_row(in, me_, r) : rows.at(in, part({0, own.size()}, p, parts));
  };
  copy(m_.exchanges() ? rows.of_row(in, me_, me_) : rows.at(in, {0, own.size()}), rows.at(out, own));
  std::vector<IncomingRows> come;
  InFlight calls;
  for (size_t i = 0; i < pieces.size(); ++i) {
    IncomingRows& next = come.emplace_back(rows.incoming(pieces[i]));
    if (i < owns || !talks(lane)) continue;
    const auto call = static_cast<int64_t>(i - owns);
    const auto step = static_cast<int>(1 + call / parts);
    const int there = (me_ + m_.size - step) % m_.size;
    next.event = exchange_with(lane, for_rank(there, call % parts), there, rows.at(out, pieces[i]), (me_ + step) % m_.size);
    calls.events.push_back(next.event);
  }
  calls.events.clear();  // the owner of the pieces waits for them
  return come;
}

std::vector<RedistributionInPieces::RowsToGo> RedistributionInPieces::rows_to_go_by_ranks(const Rows& rows, int me) {
  const auto ranks = static_cast<int>(rows.of.size());
  std::vector<RowsToGo> out;
  for (int step = 1; step <= ranks; ++step) {
    const Interval i = rows.of_rank((me + step) % ranks);
    out.push_back({.blocks = {{i.begin * rows.each, i.size() * rows.each}}, .rows = {}});
  }
  return out;
}

// Computes first what other ranks wait for. Nothing is packed.
void RedistributionInPieces::run_by_ranks(const Rows& rows, const View& y, const View& out,
                                          const std::function<void(const RowBlock&, void*)>& compute) const {
  Communicator& lane = this->lane();
  InFlight calls;
  int step = 0;
  for (const RowsToGo& piece : rows_to_go_by_ranks(rows, me_)) {
    const int there = (me_ + ++step) % m_.size;
    const View made = rows.at(y, rows.of_rank(there));
    compute(piece.blocks[0], made.data);
    if (there == me_) copy(made, rows.of_row(out, me_, me_));
    else if (const int from = (me_ + m_.size - step) % m_.size; talks(lane))
      calls.events.push_back(exchange_with(lane, made, there, rows.of_row(out, me_, from), from));
  }
  for (const Event& event : calls.events) c_.join(event);
  calls.events.clear();
}

// `sent` to rank `to`, `received` from rank `from`.
Event RedistributionInPieces::exchange_with(Communicator& lane, const View& sent, int to, const View& received, int from) const {
  std::vector<int64_t> send_counts(static_cast<size_t>(m_.size)), recv_counts(send_counts);
  send_counts[static_cast<size_t>(to)] = sent.numel(), recv_counts[static_cast<size_t>(from)] = received.numel();
  return lane.all_to_all(sent.data, send_counts, received.data, recv_counts, sent.dtype, PathScope::current());
}

}  // namespace sheaf
