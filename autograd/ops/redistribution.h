// Redistribution: how a rank converts its part of a value from one placement to another, on one mesh axis. The data it sends are
// packed and passed to the axis' lane, and the data it receives are unpacked: in one op (redistribute.cc), in two with others between
// them (pending_redistribute.cc), or in pieces between products (pieces.h).
#pragma once

#include <vector>

#include "sheaf/autograd/op.h"
#include "sheaf/autograd/ops/cut.h"
#include "sheaf/core/event.h"

namespace sheaf {

class Communicator;

/// What packing or unpacking a rank's part reads and writes.
inline double bytes_to_copy(const Shape& local, DType dtype) {
  return 2.0 * static_cast<double>(local.numel()) * static_cast<double>(size_of(dtype));
}

class Redistribution {
 public:
  struct Move {
    int axis;  ///< -1: only a mesh is added
    Placement::Kind from, to;
    int size;  ///< of the axis

    /// No element moves.
    bool relabels() const { return axis < 0 || size == 1 || (is_whole(from) && is_whole(to)); }
    /// Ranks communicate.
    bool communicates() const { return !relabels() && !is_whole(from) && !(from == Placement::Kind::shard && to == Placement::Kind::partial); }
    /// Between each two ranks: an all_to_all.
    bool exchanges() const { return from == Placement::Kind::shard && to == Placement::Kind::shard; }
    static bool is_whole(Placement::Kind k) { return k == Placement::Kind::replicate || k == Placement::Kind::invariant; }
  };
  /// From a layout to one that differs on one axis.
  static Move move(const Layout& from, const Layout& to);

  /// Between the local parts of values of these types, on c's device.
  Redistribution(const Execute& c, const Type& from, const Type& to);

  /// The whole redistribution, with workspace() bytes at `scratch`.
  void run(View in, View out, void* scratch) const;
  static int64_t workspace(const Type& from, const Type& to, const View& in, const View& out);

  /// For one that communicates, the first half: `in` is dense if it is not packed; `received` has room for what is received, as many
  /// bytes as the result; `sent`, used only if it packs(), has room for as many as `in`. Until the event all three belong to the
  /// lane. With `waited_for` this rank does nothing else before finish().
  Event start(View in, void* sent, void* received, bool waited_for) const;
  /// The second half, after the event. Nothing to do if it does not unpack() and `received` is the result's memory.
  void finish(void* received, View out) const;
  /// The transfer is copied by this rank's own cores.
  bool takes_own_cores() const;

  /// False for nodes of other ranks, and if each rank's share is contiguous in memory: the rows of experts, one part of them per
  /// rank, are sent and received in place.
  static bool packs(const Type& from, const Type& to);
  static bool unpacks(const Type& from, const Type& to);

 protected:
  // Of the input, and of the output.
  Cut cut_in() const { return cut_of(from_, m_.axis, from_.layout[m_.axis]); }
  Cut cut_out() const { return cut_of(to_, m_.axis, to_.layout[m_.axis]); }
  Communicator& lane() const;
  bool talks(Communicator& lane) const;
  void copy(const View& x, const View& y) const;

  using RowsOfRanks = std::vector<std::vector<Interval>>;
  static std::vector<int64_t> elements_of(const View& v, int dim, const RowsOfRanks& rows);
  /// Packs each rank's share, one after another, and returns their sizes.
  std::vector<int64_t> pack_for_ranks(const View& from, int dim, const RowsOfRanks& rows, void* to) const;
  static void unpack_of_ranks(const Stream& stream, void* from, const View& to, int dim, const RowsOfRanks& rows);
  /// The rows that each pair of ranks exchanges.
  struct Exchange {
    bool flat;
    int dim_in, dim_out;
    RowsOfRanks mine, theirs;  // this rank's input rows by destination, and its output rows by source
    View seen(const View& v) const { return flat ? flattened(v) : v; }
  };
  Exchange exchange() const;

  const Execute& c_;
  const Type &from_, &to_;
  const Move m_;
  const Stream stream_;
  const bool meta_;
  const bool packs_, unpacks_;  // of one that communicates
  int me_ = 0;

 private:
  void fill(const View& y, double value) const;
  void pack(const View& from, int dim, const std::vector<Interval>& rows, const View& packed) const;
  void unpack(const View& packed, const View& to, int dim, const std::vector<Interval>& rows) const;
  View dense_at(void* to, const View& in) const;
  void slice(View in, const View& out, void* scratch) const;
  void keep_on_one(const View& in, const View& out) const;
  void zero_embed(const View& in, const View& out) const;
};

}  // namespace sheaf
