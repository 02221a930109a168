#include "sheaf/autograd/ops/redistribute.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using Kind = Placement::Kind;

int changed_axis(const Layout& from, const Layout& to) {
  for (int a = 0; a < to.num_axes(); ++a)
    if (!(from[a] == to[a])) return a;
  return -1;
}

// [Note: axes in order] Axes that cut the same elements cut them in their order, and a step changes one axis. What a later
// axis cuts is therefore put together before an earlier one changes its cut of the same dimension, and cut again behind.
bool meet(const Placement& p, const Placement& q) {
  return p.is_shard() && q.is_shard() && (p.map().is_flat() || q.map().is_flat() || p.map().dim() == q.map().dim());
}

// Whether mesh axis `later` cuts what an axis before it has, or will have, cut by `p`.
bool is_inside(const Layout& l, int later, const Placement& p) {
  if (!meet(l[later], p)) return false;
  const OwnershipMap& map = l[later].map();
  return l.mesh()->size(later) > 1 || p.map().is_flat() || !(map == OwnershipMap::even(map.dim()));
}

// The value as one rank would hold it if `axis` did not cut it: [outer, along, inner] around the cut dimension.
struct Cut {
  int64_t outer = 1, inner = 1;
  std::vector<Interval> owned;  // rows of `along` per rank
  bool contiguous() const { return outer == 1; }
  int64_t elements(int rank) const { return owned[rank].size() * outer * inner; }
};

Cut cut_of(const Type& type, int axis, const Placement& p) {
  const Layout whole = type.layout.with(axis, Placement::replicate());
  const Shape shape = whole.local_shape(type.shape);
  Cut cut;
  const int n = type.layout.mesh()->size(axis);
  for (int r = 0; r < n; ++r) cut.owned.push_back(p.map().owned(r, n, shape));
  if (p.map().is_flat()) return cut;
  for (int d = 0; d < p.map().dim(); ++d) cut.outer *= shape[d];
  for (int d = p.map().dim() + 1; d < shape.rank(); ++d) cut.inner *= shape[d];
  return cut;
}

// Part r of a dense [outer, along, inner] block, as a view.
View part(const View& whole, const Cut& cut, int64_t along, int rank) {
  View v;
  v.dtype = whole.dtype;
  v.data = whole.as<char>() + cut.owned[rank].begin * cut.inner * static_cast<int64_t>(size_of(v.dtype));
  v.shape = {cut.outer, cut.owned[rank].size(), cut.inner};
  v.strides = {along * cut.inner, cut.inner, 1};
  return v;
}

struct Move {
  int axis;       // -1: only the mesh is named
  Kind from, to;
  int size;       // of the axis
};

Move move_of(const Layout& from, const Layout& to) {
  const Layout have = from.mesh() ? from : Layout(to.mesh());
  const int axis = changed_axis(have, to);
  if (axis < 0) return {-1, Kind::replicate, Kind::replicate, 1};
  return {axis, have[axis].kind(), to[axis].kind(), to.mesh()->size(axis)};
}

bool is_whole(Kind k) { return k == Kind::replicate || k == Kind::invariant; }

Communicator& gather_lane(const Layout& l, int axis) {
  MeshRuntime* runtime = RankContext::current().runtime(l.mesh());
  if (!runtime) fail<PlacementError>("[redistribute] this rank has not joined mesh ", l.mesh()->to_string());
  return runtime->gather_lane(axis);
}

struct RedistributeOp {
  static constexpr const char* kName = "redistribute";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;
  struct Attrs { Layout to; int32_t axis; };  // the one axis that changes; -1: only the mesh is named

  static bool relabels(const Move& m) {
    if (m.axis < 0 || m.size == 1) return true;
    return is_whole(m.from) && is_whole(m.to);
  }

  static int64_t workspace(const Attrs& a, const Execute& c) {
    const Type& from = c.input_type(0);
    const Move m = move_of(from.layout, a.to);
    if (relabels(m)) return 0;
    const auto bytes = [](const Shape& s, DType d) { return s.numel() * static_cast<int64_t>(size_of(d)); };
    const int64_t in = bytes(c.input(0).shape, from.dtype), out = bytes(c.output(0).shape, from.dtype);
    if (m.to == Kind::shard && m.from == Kind::shard) return in + out + (packs_flat(a, c) ? in : 0);
    if (m.from == Kind::shard) return out + (c.input(0).contiguous() ? 0 : in);
    if (m.to == Kind::shard) return in;
    return 0;
  }

  static void execute(const Attrs& a, Execute& c) {
    const Type& from = c.input_type(0);
    const Type& to = c.output_type(0);
    const Move m = move_of(from.layout, a.to);
    const bool meta = c.device().is_meta();
    const Stream stream = c.stream();
    View in = c.input(0), out = c.output(0);
    const std::string& path = PathScope::current();
    const auto copy = [&](const View& x, const View& y) { SHEAF_ON_DEVICE(stream, copy, x, y); };
    const auto fill = [&](const View& y, double v) { SHEAF_ON_DEVICE(stream, fill, y, v); };
    if (relabels(m)) {
      if (!meta) copy(in, View::dense(out.data, out.dtype, in.shape));
      return;
    }
    const int me = RankContext::current().coordinate(a.to.mesh(), m.axis);
    char* scratch = static_cast<char*>(c.workspace.data);
    const auto size = static_cast<int64_t>(size_of(from.dtype));

    if (is_whole(m.from) && m.to == Kind::shard) {  // slice: alias() refused because the input is not dense
      if (meta) return;
      const Cut cut = cut_of(to, m.axis, a.to[m.axis]);
      const int64_t along = in.numel() / std::max<int64_t>(cut.outer * cut.inner, 1);
      View dense = View::dense(scratch, in.dtype, in.shape);
      copy(in, dense);
      const View mine = part(dense, cut, along, me);
      return copy(mine, View::dense(out.data, out.dtype, mine.shape));
    }
    if (is_whole(m.from) && m.to == Kind::partial) {
      if (meta) return;
      return me == 0 ? copy(in, out) : fill(out, 0);
    }
    if (m.from == Kind::shard && m.to == Kind::partial) {
      if (meta) return;
      const Cut cut = cut_of(from, m.axis, from.layout[m.axis]);
      fill(out, 0);
      const View mine = part(out, cut, out.numel() / std::max<int64_t>(cut.outer * cut.inner, 1), me);
      View src = View::dense(scratch, in.dtype, in.shape);
      copy(in, src);
      src.shape = mine.shape;
      src.strides = mine.shape.contiguous_strides();
      return copy(src, mine);
    }
    Communicator& lane = gather_lane(a.to, m.axis);
    const bool run = !meta || lane.kind() == "simulated";
    if (m.from == Kind::partial && is_whole(m.to)) {
      if (!meta) copy(in, out);
      if (run) c.join(lane.all_reduce(out.data, out.numel(), out.dtype, Reduction::sum, path));
      return;
    }
    if (m.from == Kind::shard && is_whole(m.to)) {
      const Cut cut = cut_of(from, m.axis, from.layout[m.axis]);
      std::vector<int64_t> counts;
      for (int r = 0; r < m.size; ++r) counts.push_back(cut.elements(r));
      char* gathered = cut.contiguous() ? static_cast<char*>(out.data) : scratch;
      View src = in;
      if (!in.contiguous()) {
        src = View::dense(scratch + out.numel() * size, in.dtype, in.shape);
        if (!meta) copy(in, src);
      }
      if (run) c.join(lane.all_gather(src.data, gathered, counts, in.dtype, path));
      if (meta || cut.contiguous()) return;
      const int64_t along = out.numel() / std::max<int64_t>(cut.outer * cut.inner, 1);
      for (int r = 0; r < m.size; ++r) {
        const View target = part(out, cut, along, r);
        copy(View::dense(gathered, in.dtype, target.shape), target);
        gathered += counts[r] * size;
      }
      return;
    }
    if (m.from == Kind::partial && m.to == Kind::shard) {
      const Cut cut = cut_of(to, m.axis, a.to[m.axis]);
      std::vector<int64_t> counts;
      for (int r = 0; r < m.size; ++r) counts.push_back(cut.elements(r));
      void* send = in.data;
      if (!cut.contiguous() || !in.contiguous()) {
        send = scratch;
        if (!meta) pack(copy, in, a.to[m.axis].map(), cut, m.size, scratch);
      }
      if (run) c.join(lane.reduce_scatter(send, out.data, counts, in.dtype, path));
      return;
    }
    // Shard to another Shard: what each pair of ranks shares is a block (two dimensions) or an interval (flat).
    const Placement &p = from.layout[m.axis], &q = a.to[m.axis];
    const Shape whole = from.layout.with(m.axis, Placement::replicate()).local_shape(from.shape);
    std::vector<int64_t> send_counts, recv_counts;
    char* send = scratch;
    char* recv = scratch + in.numel() * size;
    if (packs_flat(a, c)) {
      const View dense = View::dense(recv + out.numel() * size, in.dtype, in.shape);
      if (!meta) copy(in, dense);
      in = dense;
    }
    std::vector<View> targets;
    for (int r = 0; r < m.size; ++r) {
      const View mine = overlap(in, whole, p, q, me, r, m.size, /*of_source=*/true);
      const View theirs = overlap(out, whole, p, q, r, me, m.size, /*of_source=*/false);
      send_counts.push_back(mine.numel());
      recv_counts.push_back(theirs.numel());
      targets.push_back(theirs);
      if (!meta) copy(mine, View::dense(send, in.dtype, mine.shape));
      send += mine.numel() * size;
    }
    if (run) c.join(lane.all_to_all(scratch, send_counts, recv, recv_counts, in.dtype, path));
    if (meta) return;
    for (const View& t : targets) {
      copy(View::dense(recv, in.dtype, t.shape), t);
      recv += t.numel() * size;
    }
  }

  // A flat index runs over dense elements only.
  static bool packs_flat(const Attrs& a, const Execute& c) {
    const int axis = move_of(c.input_type(0).layout, a.to).axis;
    return (c.input_type(0).layout[axis].map().is_flat() || a.to[axis].map().is_flat()) && !c.input(0).contiguous();
  }

  // The parts of all ranks one after another, dense.
  template <class Copy>
  static void pack(Copy& copy, const View& in, const OwnershipMap& map, const Cut& cut, int ranks, char* to) {
    if (map.is_flat()) return copy(in, View::dense(to, in.dtype, in.shape));
    for (int r = 0; r < ranks; ++r) {
      View slice = in;
      slice.data = in.as<char>() + cut.owned[r].begin * in.strides[map.dim()] * static_cast<int64_t>(size_of(in.dtype));
      slice.shape[map.dim()] = cut.owned[r].size();
      copy(slice, View::dense(to, in.dtype, slice.shape));
      to += slice.bytes();
    }
  }

  // The elements that source rank s (placement p) and target rank t (placement q) share, inside the local block of one
  // of them.
  static View overlap(const View& local, const Shape& whole, const Placement& p, const Placement& q, int s, int t,
                      int ranks, bool of_source) {
    const auto size = static_cast<int64_t>(size_of(local.dtype));
    const Interval a = p.map().owned(s, ranks, whole), b = q.map().owned(t, ranks, whole);
    View v = local;
    const bool by_flat_index = p.map().is_flat() || q.map().is_flat() || p.map().dim() == q.map().dim();
    if (by_flat_index) {  // both are intervals of one index: the flat one, or the rows of one dimension
      int64_t unit = 1;
      Interval x = a, y = b;
      int dim = 0;
      if (p.map().is_flat() || q.map().is_flat()) {
        for (int d = 1; d < whole.rank(); ++d) unit *= whole[d];
        if (!p.map().is_flat()) x = {a.begin * unit, a.end * unit};
        if (!q.map().is_flat()) y = {b.begin * unit, b.end * unit};
        v = View::dense(local.data, local.dtype, {local.numel()});
      } else {
        dim = p.map().dim();
      }
      const Interval both{std::max(x.begin, y.begin), std::max(std::max(x.begin, y.begin), std::min(x.end, y.end))};
      const int64_t start = of_source ? x.begin : y.begin;
      v.data = v.as<char>() + (both.size() ? (both.begin - start) * v.strides[dim] * size : 0);
      v.shape[dim] = both.size();
      return v;
    }
    const int dim = of_source ? q.map().dim() : p.map().dim();
    const Interval other = of_source ? b : a;
    v.data = v.as<char>() + other.begin * v.strides[dim] * size;
    v.shape[dim] = other.size();
    return v;
  }

  static void vjp(const Attrs&, Vjp& c) {  // Law A
    const Type& from = c.input_type(0);
    if (!from.layout.mesh()) {  // a constant of no mesh is Replicate: its gradient is Partial
      return c.set(0, redistribute(c.grad(), Layout(c.output_type(0).layout.mesh(), Placement::partial())));
    }
    c.set(0, redistribute(c.grad(), from.layout.dual()));
  }
  static void describe(const Attrs& a, std::string& out) { out += a.to.to_string(); }
};

// The slice R → S as a view; its own op only in that it can alias (the table's communicating moves cannot).
struct Slice : RedistributeOp {
  static constexpr bool kRecipe = true;
  static constexpr Lane kLane = Lane::compute;
  static bool alias(const Attrs& a, const View& in, View& out) {
    out.strides = in.strides;
    out.data = in.data;
    if (in.shape == out.shape && in.rank() == out.rank()) return true;
    const Placement& p = a.to[a.axis];
    const int me = RankContext::current().coordinate(a.to.mesh(), a.axis), n = a.to.mesh()->size(a.axis);
    if (n == 1) {  // one rank: only a flat cut changes the local shape
      out.strides = out.shape.contiguous_strides();
      return in.contiguous();
    }
    const Interval own = p.map().owned(me, n, in.shape);
    if (p.map().is_flat()) {
      if (!in.contiguous()) return false;
      out.strides = Shape{1};
    }
    const int64_t row = p.map().is_flat() ? 1 : in.strides[p.map().dim()];
    out.data = in.as<char>() + own.begin * row * static_cast<int64_t>(size_of(in.dtype));
    return true;
  }
};

}  // namespace

bool is_redistribute(const OpDef* op) { return op == &op_def<RedistributeOp>() || op == &op_def<Slice>(); }

std::string redistribution_name(const Layout& from, const Layout& to) {
  const Move m = move_of(from, to);
  if (RedistributeOp::relabels(m)) return "nothing";
  if (is_whole(m.from)) return m.to == Kind::shard ? "slice" : "keep_on_one";
  if (m.from == Kind::partial) return m.to == Kind::shard ? "reduce_scatter" : "all_reduce";
  return m.to == Kind::partial ? "zero_embed" : m.to == Kind::shard ? "all_to_all" : "all_gather";
}

bool can_slice(const Layout& l, int axis, const Placement& p) {
  for (int a = 0; a < l.num_axes(); ++a)
    if (a != axis && (a > axis ? is_inside(l, a, p) : meet(l[a], p) && (p.map().is_flat() || l[a].map().is_flat()))) return false;
  return true;
}

Tensor redistribute(const Tensor& x, const Layout& to) {
  if (x.layout() == to || !to.mesh()) return x;
  if (x.layout().mesh() && x.layout().mesh() != to.mesh())
    fail<PlacementError>("[redistribute] ", x.type(), " is on mesh ", x.layout().mesh()->to_string(), ", not ",
                         to.mesh()->to_string());
  for (int axis = 0; axis < to.num_axes(); ++axis)  // of one rank, too, where nothing is cut
    if (const int dim = to[axis].map().dim(); to[axis].is_shard() && !to[axis].map().is_flat() && (dim < 0 || dim >= x.rank()))
      fail<PlacementError>("[redistribute] ", x.type(), " has no dimension ", dim, " to cut over mesh axis ",
                           to.mesh()->name(axis), ", rank ", RankContext::current().rank);
  to.local_shape(x.shape());  // throws, before anything is sent, if a cut does not fit
  Tensor y = x;
  Layout have = x.layout().mesh() ? x.layout() : Layout(to.mesh());
  const auto step = [&](const Layout& next) {
    const Move m = move_of(y.layout(), next);
    const RedistributeOp::Attrs attrs{next, m.axis};
    const bool views = RedistributeOp::relabels(m) || (is_whole(m.from) && m.to == Kind::shard);
    const OutputSpec spec{{y.dtype(), y.shape(), next}, {}, -1, 0};
    y = apply_typed(views ? op_def<Slice>() : op_def<RedistributeOp>(), &attrs, std::span(&y, 1), std::span(&spec, 1))[0];
    have = next;
  };
  const auto change = [&](int axis, const Placement& p) {
    const Placement& from = have[axis];
    const bool flat_and_inner = from.is_shard() && p.is_shard() &&
                                (from.map().is_flat() ? p.map().dim() > 0 : p.map().is_flat() && from.map().dim() > 0);
    if (flat_and_inner) step(have.with(axis, Placement::replicate()));  // no rank slice is one run: by way of R
    step(have.with(axis, p));
  };
  if (have == to) step(to);
  for (int axis = 0; axis < to.num_axes(); ++axis) {
    if (have[axis] == to[axis]) continue;
    for (int later = to.num_axes() - 1; later > axis; --later) {
      if (!is_inside(have, later, have[axis]) && !is_inside(have, later, to[axis])) continue;
      bool at_once = !meet(to[later], to[axis]);  // else it is cut anew once the axes before it are in place
      for (int other = 0; other < to.num_axes(); ++other) at_once &= other == later || !meet(to[later], have[other]);
      change(later, at_once ? to[later] : Placement::replicate());
    }
    change(axis, to[axis]);
  }
  return y;
}

Tensor redistribute(const Tensor& x, const std::string& axis, const Placement& to) {
  if (!x.layout().mesh()) fail<PlacementError>("[redistribute] ", x.type(), " has no mesh; give a whole layout");
  return redistribute(x, x.layout().with(x.layout().mesh()->axis(axis), to));
}

}  // namespace sheaf
