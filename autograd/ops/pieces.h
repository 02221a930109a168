// Redistributions in pieces, between products of rows: see [Note: in pieces] (execute.h). A product's input arrives in pieces, each
// with rows that are multiplied on arrival; its result is sent in pieces, each while the next rows are multiplied. Keys and values
// arrive a few heads at a time, for attention (pieces_of_heads.cc).
#pragma once

#include <functional>
#include <optional>

#include "sheaf/autograd/ops/redistribution.h"
#include "sheaf/core/storage.h"

namespace sheaf {

/// - An all_gather of rows is received in pieces. If there is one sequence, the ranks' rows are received directly in place: this
///   rank's own first, then those of the next rank, and so on, each rank's in several parts. If there are several sequences, groups
///   of sequences are gathered one after another.
/// - A reduce_scatter of rows is sent in pieces: of one sequence a part of each rank's rows at a time, of several a group of
///   sequences.
/// - An all_to_all between shards of rows and of columns is received in pieces if it ends in rows, and sent in pieces if it starts
///   from rows: of one sequence a part of each rank's rows at a time, of several a group of sequences.
/// - If each rank has one row, such as one part of the experts in experts' rows [Q, B, ..], it is received and sent without packing,
///   as an all_gather's rows are: a rank's columns are contiguous, and are the rows of products. This rank's own come first and are
///   sent last.
class RedistributionInPieces : public Redistribution {
 public:
  using Redistribution::Redistribution;

  /// How a value is received, in pieces of at least `least_rows` rows. parts 0: whole.
  struct Coming {
    int64_t parts = 0;
    bool unpacks = false;  ///< the received pieces need a buffer, as large as the result
    bool packs = false;    ///< so do the sent ones
    int32_t own = 1;       ///< if neither, the fraction 1 / own of `from` is copied locally
  };
  static Coming coming(const Type& from, const Layout& to, int64_t least_rows);
  /// The order in which rows are received.
  static std::vector<IncomingRows> incoming_rows(const Type& from, const Type& to, int64_t parts, Device device);
  /// Starts receiving all of them. `in` is dense; unless it is packed, it is read until they have arrived. `received` and `sent` are
  /// null where not needed.
  std::vector<IncomingRows> start(const View& in, const View& out, void* received, void* sent, int64_t parts) const;

  /// For keys and values [B, T, 2 G, D], of whose tokens each rank has a shard with all heads: the number of parts in which all
  /// tokens are received, a few of the G heads at a time; 0: whole. `readers` query heads read each. It packs and unpacks. See
  /// redistribute_in_heads().
  static int64_t coming_by_heads(const Type& from, const Layout& to, Device device, int64_t readers, int64_t least_rows);
  static std::vector<IncomingRows> incoming_heads(const Type& to, int64_t parts);
  std::vector<IncomingRows> start_by_heads(const View& in, const View& out, void* received, void* sent, int64_t parts) const;

  /// How a product's result is sent. parts 0: whole.
  struct Going {
    int64_t parts = 0;
    bool packs = false;  ///< packs what is sent, and unpacks what is received
    int dim = 0;         ///< pieces are ranges of this dimension, across all later ones, or groups of sequences
  };
  static Going going(const Type& from, const Layout& to, int64_t least_rows);
  struct RowsToGo {
    std::vector<RowBlock> blocks;  ///< of the whole, in memory order
    std::vector<int64_t> rows;     ///< for a reduce_scatter: rows per rank,
    int64_t first = 0;             ///< and where in the result this rank's begin
  };
  static std::vector<RowsToGo> rows_to_go(const Type& from, const Type& to, int64_t parts);
  /// Bytes that run() needs for all pieces.
  static int64_t workspace(const Type& from, const Type& to, const View& y, const View& out);
  /// compute(block, at) must store these rows of y densely at `at`, which is in y.
  void run(const View& y, const View& out, int64_t parts, void* scratch, const std::function<void(const RowBlock&, void*)>& compute) const;

 private:
  struct Rows;
  static std::optional<Rows> one_row_each(const Type& from, const Layout& to, const Move& m);
  static std::vector<RowsToGo> rows_to_go_by_ranks(const Rows& rows, int me);
  std::vector<IncomingRows> start_by_ranks(const Rows& rows, const View& in, const View& out, int64_t parts) const;
  std::vector<IncomingRows> start_by_sequences(const Rows& rows, const View& in, const View& out, char* received, int64_t parts) const;
  std::vector<IncomingRows> start_exchange(const Rows& rows, const View& in, const View& out, char* received, char* sent, int64_t parts) const;
  void run_scatter(const View& y, const View& out, int64_t parts, const std::function<void(const RowBlock&, void*)>& compute) const;
  void run_exchange(const View& y, const View& out, int64_t parts, char* sent, const std::function<void(const RowBlock&, void*)>& compute) const;
  Event exchange_with(Communicator& lane, const View& sent, int to, const View& received, int from) const;
  void run_by_ranks(const Rows& rows, const View& y, const View& out, const std::function<void(const RowBlock&, void*)>& compute) const;
  struct Share;
  Share share(const Rows& rows, const Exchange& all, const View& in, const View& out, int64_t p, int64_t parts) const;
  Event send(const Share& share, char* sent, char* received) const;
};

}  // namespace sheaf
