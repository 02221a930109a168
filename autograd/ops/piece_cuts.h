// Shared code of redistributions in pieces, by rows, ranks or heads: the number of pieces of a value, and lane calls in flight.
#pragma once

#include <algorithm>
#include <exception>
#include <vector>

#include "sheaf/autograd/ops/pieces.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/event.h"
#include "sheaf/core/placement.h"

namespace sheaf::pieces {

inline constexpr int64_t kMostPieces = 4;  // each costs a call of the lane, and a product

// Calls in flight. If an exception leaves the scope, waits for them: they read and write memory that is about to be freed.
struct InFlight {
  std::vector<Event> events;
  ~InFlight() {
    for (const Event& event : events) {
      try {
        event.sync();
      } catch (const std::exception&) {  // the first exception is the one that propagates
      }
    }
  }
};

inline int64_t if_several(int64_t parts) { return parts > 1 ? std::min(kMostPieces, parts) : 0; }

inline Interval part(Interval i, int64_t p, int64_t parts) {
  return {i.begin + even_cut(i.size(), p, parts), i.begin + even_cut(i.size(), p + 1, parts)};
}

// Whether the ranks' parts before the redistribution are rows; those after an all_to_all are then columns.
inline bool from_rows(const Layout& from, const Layout& to, const Redistribution::Move& m) {
  return m.exchanges() ? from[m.axis].map().dim() < to[m.axis].map().dim() : m.from == Placement::Kind::shard;
}
inline const Layout& cut_by_rows(const Layout& from, const Layout& to, const Redistribution::Move& m) { return from_rows(from, to, m) ? from : to; }

}  // namespace sheaf::pieces

namespace sheaf {

// A value's dimensions as [sequences, rows of all ranks, width]; each rank has an interval of rows.
struct RedistributionInPieces::Rows {
  int64_t sequences = 1, all, width = 1;
  int64_t each = 1;  // how many rows of a product, of the last dimension, one such row is
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
  Rows(const Type& from, const Layout& to, const Move& m) : Rows(from, pieces::cut_by_rows(from.layout, to, m), m.axis) {}

  Interval of_rank(int r) const { return of[static_cast<size_t>(r)]; }
  int64_t fewest() const {
    int64_t n = all;
    for (const Interval& i : of) n = std::min(n, i.size());
    return n;
  }
  /// Number of parts of each rank's rows, each at least `least_rows` rows of a product.
  int64_t parts_of_ranks(int64_t least_rows) const { return std::min(fewest(), fewest() * each / least_rows); }
  Interval some_sequences(int64_t p, int64_t parts) const { return pieces::part({0, sequences}, p, parts); }
  /// If one_row_each(): whether each rank has enough columns.
  bool has_pieces_of_ranks(int64_t least_rows) const { return fewest() * each >= least_rows; }
  /// In that case, of v, rank `me`'s columns of all rows, which is dense: the columns of rank `r`'s row.
  View of_row(const View& v, int me, int r) const {
    const int64_t own = of_rank(me).size();
    return at(v, {r * own, (r + 1) * own});
  }
  View at(const View& v, Interval rows) const {
    const int64_t bytes = rows.begin * width * static_cast<int64_t>(size_of(v.dtype));
    return View::dense(v.data ? v.as<char>() + bytes : nullptr, v.dtype, {rows.size(), width});
  }
  // For an all_gather, in the order in which they arrive at rank `me`: by rank, or by sequence. On a GPU, where bits depend on it, a
  // rank multiplies as many of its own rows at once as others do of them.
  std::vector<Interval> gathered(int me, int64_t parts, bool gpu) const {
    std::vector<Interval> out;
    if (sequences > 1) {
      for (int64_t p = 0; p < parts; ++p) out.push_back({all * some_sequences(p, parts).begin, all * some_sequences(p, parts).end});
      return out;
    }
    const auto ranks = static_cast<int>(of.size());
    for (int step = 0; step < ranks; ++step) {
      const int64_t cuts = step == 0 && !gpu ? 1 : parts;
      for (int64_t p = 0; p < cuts; ++p) out.push_back(pieces::part(of_rank((me + step) % ranks), p, cuts));
    }
    return out;
  }
  // For an all_to_all: of the rows that rank `me` has.
  std::vector<Interval> exchanged(int me, int64_t parts) const {
    std::vector<Interval> out;
    const int64_t own = of_rank(me).size();
    for (int64_t p = 0; p < parts; ++p) {
      const Interval i = sequences > 1 ? some_sequences(p, parts) : pieces::part({0, own}, p, parts);
      out.push_back(sequences > 1 ? Interval{own * i.begin, own * i.end} : i);
    }
    return out;
  }
  /// For several sequences, where a product reads the rows of all ranks.
  int64_t parts_of_sequences(int64_t least_rows) const { return pieces::if_several(std::min(sequences, sequences * all * each / (4 * least_rows))); }
  int64_t parts_exchanged(int64_t least_rows) const {
    return pieces::if_several(sequences > 1 ? std::min(sequences, sequences * fewest() * each / least_rows) : parts_of_ranks(least_rows));
  }
  IncomingRows incoming(Interval i) const { return {.begin = i.begin * each, .end = i.end * each}; }
};

}  // namespace sheaf
