// Redistribution: how a rank moves its part of a value from one placement to another, on one mesh axis. What it sends is packed and
// given to the lane of the axis, and what has come is unpacked: in one op (redistribute.cc), or in two with others between them
// (travel.cc).
#pragma once

#include <functional>

#include "sheaf/autograd/op.h"
#include "sheaf/autograd/ops/cut.h"
#include "sheaf/core/event.h"
#include "sheaf/core/storage.h"

namespace sheaf {

class Communicator;

class Redistribution {
 public:
  struct Move {
    int axis;  ///< -1: only the mesh is named
    Placement::Kind from, to;
    int size;  ///< of the axis

    /// No element goes anywhere.
    bool relabels() const { return axis < 0 || size == 1 || (is_whole(from) && is_whole(to)); }
    /// Ranks talk.
    bool communicates() const { return !relabels() && !is_whole(from) && !(from == Placement::Kind::shard && to == Placement::Kind::partial); }
    static bool is_whole(Placement::Kind k) { return k == Placement::Kind::replicate || k == Placement::Kind::invariant; }
  };
  /// From a layout to one that differs on one axis.
  static Move move(const Layout& from, const Layout& to);

  /// Between local parts of values of these types, where c executes.
  Redistribution(const Execute& c, const Type& from, const Type& to);

  /// All of it, with workspace() bytes at `scratch`.
  void run(View in, View out, void* scratch) const;
  static int64_t workspace(const Layout& from, const Layout& to, const View& in, const View& out);

  /// Of one that communicates, the first half: `in` is dense where it is not packed, `received` has room for what comes, as many bytes as the result, and
  /// `sent`, which matters where it packs(), for as many as `in`. Until the event both belong to the lane, and so does `in`. With
  /// `waited_for` this rank does nothing before finish().
  Event start(View in, void* sent, void* received, bool waited_for) const;
  /// The second, behind the event. Nothing to do where it does not unpack() and `received` is where the result is to lie.
  void finish(void* received, View out) const;
  /// An all_gather in pieces, of `in`, which is dense. Of one sequence the ranks' rows go straight to where they belong in `out`: this
  /// rank's own first, then those of the next one, and so on, each rank's in so many parts. Of several sequences so many parts are
  /// gathered one after another, to `packed`, as large as `out`. See [Note: in pieces].
  std::vector<RowsToCome> start_in_pieces(const View& in, const View& out, void* packed, int64_t parts) const;
  /// Which rows these are.
  static std::vector<RowsToCome> pieces(const Type& from, const Type& to, int64_t parts, Device device);
  struct Pieces {
    int64_t parts = 0;  ///< 0: it is not done so
    bool packed = false;
  };
  /// With pieces of at least so many rows.
  static Pieces pieces_of(const Type& from, const Layout& to, int64_t least_rows);

  /// A reduce_scatter in pieces: of one sequence a part of each rank's rows, of several some of them. compute(block, to) is to put
  /// such rows of what is sent densely to `to`, which is in `y`; each piece travels while the next is computed.
  void run_in_pieces(const View& y, const View& out, int64_t parts, const std::function<void(const RowBlock&, void*)>& compute) const;
  /// In how many parts; 0: it is not done so.
  static int64_t sent_parts(const Type& from, const Layout& to, int64_t least_rows);
  struct Sent {
    std::vector<RowBlock> blocks;  // of the whole, rank by rank
    std::vector<int64_t> rows;     // for each rank
    int64_t first;                 // of those that this rank gets
  };
  static std::vector<Sent> sent_pieces(const Type& from, const Type& to, int64_t parts);
  /// What travels is copied by this rank's own cores.
  bool takes_own_cores() const;

  static bool packs(const Type& from, const Type& to);  ///< not where they are elsewhere
  static bool unpacks(const Type& from, const Type& to);

 private:
  bool packs() const { return packs(from_, to_); }
  bool unpacks() const { return unpacks(from_, to_); }
  // Of what comes in, and of what goes out.
  Cut cut_in() const { return cut_of(from_, m_.axis, from_.layout[m_.axis]); }
  Cut cut_out() const { return cut_of(to_, m_.axis, to_.layout[m_.axis]); }
  struct Rows;
  std::vector<RowsToCome> start_of_ranks(const Rows& rows, const View& in, const View& out, int64_t parts) const;
  std::vector<RowsToCome> start_of_sequences(const Rows& rows, const View& in, const View& out, char* packed, int64_t parts) const;
  struct Exchange;
  Exchange exchange() const;
  static void join_even(std::vector<RowBlock>& blocks);
  bool talks(Communicator& lane) const;
  void copy(const View& x, const View& y) const;
  void fill(const View& y, double value) const;
  void pack(const View& from, int dim, const std::vector<Interval>& rows, const View& packed) const;
  void unpack(const View& packed, const View& to, int dim, const std::vector<Interval>& rows) const;
  View dense_at(void* to, const View& in) const;
  void slice(View in, const View& out, void* scratch) const;
  void keep_on_one(const View& in, const View& out) const;
  void zero_embed(const View& in, const View& out) const;

  const Execute& c_;
  const Type &from_, &to_;
  const Move m_;
  const Stream stream_;
  const bool meta_;
  int me_ = 0;
};

}  // namespace sheaf
