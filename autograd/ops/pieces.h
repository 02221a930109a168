// Redistributions in pieces, between products of rows: see [Note: in pieces] (execute.h). What a product reads comes in some, each for
// rows that are multiplied as soon as they are there; what it gives goes in some, each while the next rows are multiplied. Keys and values
// come some heads after others, for attention (pieces_of_heads.cc).
#pragma once

#include <functional>
#include <optional>

#include "sheaf/autograd/ops/redistribution.h"
#include "sheaf/core/storage.h"

namespace sheaf {

/// - An all_gather of rows comes. Of one sequence the ranks' rows go straight to where they belong: this rank's own first, then those of
///   the next one, and so on, each rank's in so many parts. Of several sequences so many parts are gathered one after another.
/// - A reduce_scatter of rows goes: of one sequence a part of each rank's rows at a time, of several some of them.
/// - An all_to_all between a cut of rows and one of columns comes where ranks have rows behind it, and goes where they have rows before
///   it: of one sequence a part of each rank's rows at a time, of several some of them.
/// - Where each rank has one row, as of experts' rows [Q, B, ..] one part of the experts, it comes, and goes, straight from where it is to
///   where it belongs, as an all_gather's rows do: what ranks have of the columns lies together, and is what products have rows of. This
///   rank's own comes first and goes last.
class RedistributionInPieces : public Redistribution {
 public:
  using Redistribution::Redistribution;

  /// How a value comes, with pieces of at least so many rows. parts 0: whole.
  struct Coming {
    int64_t parts = 0;
    bool unpacks = false;  ///< what is received needs memory of its own, as large as the result
    bool packs = false;    ///< so does what is sent
    int32_t own = 1;       ///< where neither is so, what is copied of `from` is the part 1 / own
  };
  static Coming coming(const Type& from, const Layout& to, int64_t least_rows);
  /// Which rows come when.
  static std::vector<IncomingRows> incoming_rows(const Type& from, const Type& to, int64_t parts, Device device);
  /// Starts all of them. `in` is dense; it is read until they have come, unless it packs. `received` and `sent` are null where not needed.
  std::vector<IncomingRows> start(const View& in, const View& out, void* received, void* sent, int64_t parts) const;

  /// Keys and values [B, T, 2 G, D] of which each rank has all heads of its tokens, to be all tokens, some of the G heads after others:
  /// in so many parts; 0: whole. So many query heads read each. It packs and unpacks. See redistribute_in_heads().
  static int64_t coming_by_heads(const Type& from, const Layout& to, Device device, int64_t readers, int64_t least_rows);
  static std::vector<IncomingRows> incoming_heads(const Type& to, int64_t parts);
  std::vector<IncomingRows> start_by_heads(const View& in, const View& out, void* received, void* sent, int64_t parts) const;

  /// How a product's result goes. parts 0: whole.
  struct Going {
    int64_t parts = 0;
    bool packs = false;  ///< what is sent, and unpacks what comes
    int dim = 0;         ///< pieces are some indices of this dimension each, of all that lie behind it, or several sequences
  };
  static Going going(const Type& from, const Layout& to, int64_t least_rows);
  struct RowsToGo {
    std::vector<RowBlock> blocks;  ///< of the whole, in the order in which they lie
    std::vector<int64_t> rows;     ///< of a reduce_scatter: for each rank,
    int64_t first = 0;             ///< and where in the result those of this one begin
  };
  static std::vector<RowsToGo> rows_to_go(const Type& from, const Type& to, int64_t parts);
  /// Bytes that run() needs, of all pieces.
  static int64_t workspace(const Type& from, const Type& to, const View& y, const View& out);
  /// compute(block, at) is to put such rows of y densely to `at`, which is in y.
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
