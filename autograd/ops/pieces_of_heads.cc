// Keys and values that arrive a few heads at a time: see [Note: in pieces] (execute.h).
#include <algorithm>

#include "sheaf/autograd/ops/piece_cuts.h"
#include "sheaf/autograd/ops/pieces.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {

using namespace pieces;

int64_t RedistributionInPieces::coming_by_heads(const Type& from, const Layout& to, Device device, int64_t readers, int64_t least_rows) {
  const Layout& have = from.layout;
  if (least_rows == 0 || !is_floating(from.dtype) || from.shape.rank() != 4 || !from.shape.numel() || have.mesh() != to.mesh() ||
      have.is_elsewhere() || to.is_elsewhere() || route(have, to).size() != 1)
    return 0;
  const Move m = move(have, to);
  if (m.relabels() || m.from != Placement::Kind::shard || !Move::is_whole(m.to)) return 0;
  const Cut cut = cut_of(from, m.axis, have[m.axis]);
  const Shape local = to.local_shape(from.shape);
  if (cut.flat || cut.dim != 1 || local[0] == 0 || local[2] % 2 != 0) return 0;
  int64_t rows = INT64_MAX;  // the fewest that a rank has
  for (const auto& owned : cut.owned) rows = std::min(rows, local[0] * Cut::total(owned));
  if (rows < least_rows) return 0;
  const int64_t heads = local[2] / 2;
  return if_several(kernels::is_for_gpu(device) ? std::min(heads, rows * heads * readers / (least_rows * least_rows)) : heads);
}

std::vector<IncomingRows> RedistributionInPieces::incoming_heads(const Type& to, int64_t parts) {
  std::vector<IncomingRows> out;
  for (int64_t p = 0; p < parts; ++p) {
    const Interval heads = part({0, to.local_shape()[2] / 2}, p, parts);
    out.push_back({.begin = heads.begin, .end = heads.end, .of_heads = true});
  }
  return out;
}

// Such heads of keys, and of values.
static View heads_of_both(const View& x, const IncomingRows& heads) {
  const int64_t all = x.shape[2] / 2;
  View v{x.data, x.dtype, {x.shape[0], x.shape[1], 2, all, x.shape[3]}, {x.strides[0], x.strides[1], all * x.strides[2], x.strides[2], x.strides[3]}};
  return rows_of(v, 3, {heads.begin, heads.end});
}

std::vector<IncomingRows> RedistributionInPieces::start_by_heads(const View& in, const View& out, void* received, void* sent, int64_t parts) const {
  std::vector<IncomingRows> come = incoming_heads(to_, parts);
  if (takes_own_cores()) {  // nothing would be sent during their computation
    const View dense = View::dense(sent, in.dtype, in.shape);
    copy(in, dense);
    c_.join(Redistribution::start(dense, nullptr, received, /*waited_for=*/true));
    finish(received, out);
    return come;
  }
  Communicator& lane = this->lane();
  const Cut cut = cut_in();
  char *go = static_cast<char*>(sent), *to = static_cast<char*>(received);
  InFlight calls;
  for (IncomingRows& heads : come) {
    const View from = heads_of_both(in, heads), at = heads_of_both(out, heads);
    const View packed = View::dense(go, in.dtype, from.shape);
    copy(from, packed);
    if (!talks(lane)) continue;
    heads.event = lane.all_gather(go, to, elements_of(at, 1, cut.owned), in.dtype, PathScope::current());
    calls.events.push_back(heads.event);
    if (meta_) continue;
    heads.unpack = [stream = stream_, to, at, owned = cut.owned] { unpack_of_ranks(stream, to, at, 1, owned); };
    go += packed.bytes(), to += at.numel() * static_cast<int64_t>(size_of(at.dtype));
  }
  calls.events.clear();
  return come;
}

}  // namespace sheaf
