#include "sheaf/autograd/ops/redistribute.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/small_vector.h"
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

// [Note: axes in order] Axes that cut the same elements cut them in their order (cuts_after), and a step changes one axis.
// What a later axis cuts is therefore put together before an earlier one changes its cut of the same dimension, and cut again
// behind.
bool meet(const Placement& p, const Placement& q) {
  if (p.is_single() || q.is_single()) return false;
  return p.is_shard() && q.is_shard() && (p.map().is_flat() || q.map().is_flat() || p.map().dim() == q.map().dim());
}

// Whether mesh axis `other` cuts what `axis` has, or will have, cut by `p`.
bool is_inside(const Layout& l, int other, int axis, const Placement& p) {
  if (other == axis || !meet(l[other], p) || !cuts_after(l[other], other, p, axis)) return false;
  const OwnershipMap& map = l[other].map();
  return l.mesh()->size(other) > 1 || p.map().is_flat() || !(map == OwnershipMap::even(map.dim()));
}

// All axes, against the order in which they would cut the same dimension.
SmallVector<int, kMaxAxes> last_cut_first(const Layout& l) {
  SmallVector<int, kMaxAxes> out;
  for (const bool inner : {true, false})
    for (int axis = l.num_axes() - 1; axis >= 0; --axis)
      if ((l[axis].is_shard() && l[axis].map().is_inner()) == inner) out.emplace_back(axis);
  return out;
}

// Whether an axis is to cut before another that it cuts after, or what another has yet to give up: where cuts become inner
// ones, or no longer are. Then all are put together before they are cut anew.
bool reorders(const Layout& from, const Layout& to) {
  const auto gives_up = [&](int a, int b) {  // b, what a is to cut behind it; but a has its turn before
    return !(from[a] == to[a]) && !(from[b] == to[b]) && meet(from[b], to[a]) && cuts_after(to[a], a, from[b], b) &&
           cuts_after(to[b], b, to[a], a);
  };
  for (int a = 0; a < to.num_axes(); ++a)
    for (int b = 0; b < a; ++b) {
      if (from[a] == to[a] && from[b] == to[b]) continue;
      bool after = false, before = false;
      for (const Placement& p : {from[a], to[a]})
        for (const Placement& q : {from[b], to[b]})
          if (meet(p, q)) (cuts_after(p, a, q, b) ? after : before) = true;
      if ((after && before) || gives_up(a, b) || gives_up(b, a)) return true;
    }
  return false;
}

// The value as one rank would hold it if `axis` did not cut it, and what each rank has of it: rows of the cut dimension, or
// of the flat index, which is then the only dimension; several intervals where the dimension is several parts or
// whole intervals have owners.
struct Cut {
  int dim = 0;
  bool flat = false, contiguous = true;  // a rank's share is one run of the dense whole
  int64_t row = 1;                       // elements of one
  std::vector<std::vector<Interval>> owned;
  int64_t rows(int rank) const { return total(owned[rank]); }
  int64_t elements(int rank) const { return rows(rank) * row; }
  std::vector<int64_t> counts() const {
    std::vector<int64_t> out;
    for (size_t r = 0; r < owned.size(); ++r) out.push_back(elements(static_cast<int>(r)));
    return out;
  }
  static int64_t total(const std::vector<Interval>& rows) {
    int64_t n = 0;
    for (const Interval& i : rows) n += i.size();
    return n;
  }
};

Cut cut_of(const Type& type, int axis, const Placement& p) {
  const Layout whole = type.layout.with(axis, Placement::replicate());
  const Shape shape = whole.local_shape(type.shape);
  Cut cut;
  const int n = type.layout.mesh()->size(axis);
  for (int r = 0; r < n; ++r) cut.owned.push_back(p.map().owned_intervals(r, n, shape));
  cut.flat = p.map().is_flat() || p.map().is_single();
  if (cut.flat) return cut;
  cut.dim = p.map().dim();
  cut.contiguous = !p.map().is_scattered();
  for (int d = 0; d < shape.rank(); ++d) {
    if (d != cut.dim) cut.row *= shape[d];
    if (d < cut.dim && shape[d] != 1) cut.contiguous = false;
  }
  return cut;
}

View flattened(const View& dense) { return View::dense(dense.data, dense.dtype, {dense.numel()}); }

// A dense block like `v` but for the rows it has of `dim`.
View block(const View& v, int dim, int64_t rows, void* data) {
  Shape shape = v.shape;
  shape[dim] = rows;
  return View::dense(data, v.dtype, shape);
}

View rows_of(View v, int dim, Interval rows) {
  v.data = v.as<char>() + rows.begin * v.strides[dim] * static_cast<int64_t>(size_of(v.dtype));
  v.shape[dim] = rows.size();
  return v;
}

// `rows` of `from`, one interval after another, to the view `packed`; and back to the rows of `to`.
template <class Copy>
void pack(const Copy& copy, const View& from, int dim, const std::vector<Interval>& rows, const View& packed) {
  int64_t at = 0;
  for (const Interval& i : rows) {
    if (i.size() > 0) copy(rows_of(from, dim, i), rows_of(packed, dim, {at, at + i.size()}));
    at += i.size();
  }
}
template <class Copy>
void unpack(const Copy& copy, const View& packed, const View& to, int dim, const std::vector<Interval>& rows) {
  pack([&](const View& x, const View& y) { copy(y, x); }, to, dim, rows, packed);
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
  struct Attrs {
    Layout to;
    int32_t axis;  // the one that changes; -1: only the mesh is named
    bool operator==(const Attrs&) const = default;
  };

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
    // A rank that gets nothing has an address, too: it tells the lane whose memory the ranks exchange.
    if (m.to == Kind::shard && m.from == Kind::shard) return in + std::max<int64_t>(out, 1) + (packs_flat(a, c) ? in : 0);
    if (m.from == Kind::shard) return m.to == Kind::partial ? 0 : out + (c.input(0).contiguous() ? 0 : in);
    return m.to == Kind::shard && (m.from == Kind::partial || a.to[m.axis].map().is_flat()) ? in : 0;
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

    if (is_whole(m.from) && m.to == Kind::shard) {  // slice: alias() refused because no view shows it
      if (meta) return;
      const Cut cut = cut_of(to, m.axis, a.to[m.axis]);
      if (cut.flat) {
        const View dense = View::dense(scratch, in.dtype, in.shape);
        copy(in, dense);
        in = flattened(dense);
      }
      return pack(copy, in, cut.dim, cut.owned[me], out);
    }
    if (is_whole(m.from) && m.to == Kind::partial) {
      if (meta) return;
      return me == 0 ? copy(in, out) : fill(out, 0);
    }
    if (m.from == Kind::shard && m.to == Kind::partial) {
      if (meta) return;
      const Cut cut = cut_of(from, m.axis, from.layout[m.axis]);
      if (from.layout[m.axis].is_single()) return cut.elements(me) > 0 ? copy(in, out) : fill(out, 0);
      fill(out, 0);
      return unpack(copy, in, cut.flat ? flattened(out) : out, cut.dim, cut.owned[me]);
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
      char* gathered = cut.contiguous ? static_cast<char*>(out.data) : scratch;
      View src = in;
      if (!in.contiguous()) {
        src = View::dense(scratch + out.numel() * size, in.dtype, in.shape);
        if (!meta) copy(in, src);
      }
      if (run) c.join(lane.all_gather(src.data, gathered, cut.counts(), in.dtype, path));
      if (meta || cut.contiguous) return;
      for (int r = 0; r < m.size; ++r) {
        unpack(copy, block(out, cut.dim, cut.rows(r), gathered), out, cut.dim, cut.owned[r]);
        gathered += cut.elements(r) * size;
      }
      return;
    }
    if (m.from == Kind::partial && m.to == Kind::shard) {
      const Cut cut = cut_of(to, m.axis, a.to[m.axis]);
      void* send = in.data;
      if (!cut.contiguous || !in.contiguous()) {
        send = scratch;
        if (!meta && cut.flat) copy(in, View::dense(scratch, in.dtype, in.shape));
        for (int r = 0; r < m.size && !meta && !cut.flat; ++r) {
          pack(copy, in, cut.dim, cut.owned[r], block(in, cut.dim, cut.rows(r), scratch));
          scratch += cut.elements(r) * size;
        }
      }
      if (run) c.join(lane.reduce_scatter(send, out.data, cut.counts(), in.dtype, path));
      return;
    }
    // Shard to another Shard: what each pair of ranks shares are rows of what either has.
    Cut p = cut_of(from, m.axis, from.layout[m.axis]), q = cut_of(to, m.axis, a.to[m.axis]);
    std::vector<int64_t> send_counts, recv_counts;
    char* send = scratch;
    char* recv = scratch + in.numel() * size;
    if (packs_flat(a, c)) {
      const View dense = View::dense(recv + out.numel() * size, in.dtype, in.shape);
      if (!meta) copy(in, dense);
      in = dense;
    }
    const bool one_index = p.flat || q.flat || p.dim == q.dim;
    if (p.flat || q.flat) {
      in = flattened(in), out = flattened(out);
      for (Cut* cut : {&p, &q}) count_elements(*cut);
    }
    const int dim_in = one_index ? p.dim : q.dim, dim_out = p.dim;
    const auto part = [&](const View& of, int dim, const std::vector<Interval>& rows, void* data) {
      return block(of, dim, Cut::total(rows), data);
    };
    std::vector<std::vector<Interval>> theirs;
    for (int r = 0; r < m.size; ++r) {
      const std::vector<Interval> mine = one_index ? shared(p.owned[me], q.owned[r]) : q.owned[r];
      theirs.push_back(one_index ? shared(q.owned[me], p.owned[r]) : p.owned[r]);
      const View packed = part(in, dim_in, mine, send);
      send_counts.push_back(packed.numel());
      recv_counts.push_back(part(out, dim_out, theirs.back(), recv).numel());
      if (!meta) pack(copy, in, dim_in, mine, packed);
      send += packed.bytes();
    }
    if (run) c.join(lane.all_to_all(scratch, send_counts, recv, recv_counts, in.dtype, path));
    if (meta) return;
    for (const auto& rows : theirs) {
      const View packed = part(out, dim_out, rows, recv);
      unpack(copy, packed, out, dim_out, rows);
      recv += packed.bytes();
    }
  }

  // A flat index runs over dense elements only.
  static bool packs_flat(const Attrs& a, const Execute& c) {
    const int axis = move_of(c.input_type(0).layout, a.to).axis;
    return (c.input_type(0).layout[axis].map().is_flat() || a.to[axis].map().is_flat()) && !c.input(0).contiguous();
  }

  // Which rows of `own`, counted in it, are `others`, too. Both are in order.
  static std::vector<Interval> shared(const std::vector<Interval>& own, const std::vector<Interval>& others) {
    std::vector<Interval> out;
    int64_t at = 0;
    for (const Interval& a : own) {
      for (const Interval& b : others) {
        const Interval both{std::max(a.begin, b.begin), std::min(a.end, b.end)};
        if (both.size() > 0) out.push_back({at + both.begin - a.begin, at + both.end - a.begin});
      }
      at += a.size();
    }
    return out;
  }

  // Rows of dimension 0 as elements of the flat index.
  static void count_elements(Cut& cut) {
    for (auto& intervals : cut.owned)
      for (Interval& i : intervals) i = {i.begin * cut.row, i.end * cut.row};
    cut.row = 1;
  }

  static void vjp(const Attrs&, Vjp& c) { detail::adjoint_of_redistribution(c); }
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
    if (p.map().is_scattered()) return false;
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

bool is_redistribute(const OpDef* op) {
  return op == &op_def<RedistributeOp>() || op == &op_def<Slice>() || op == &send_op();
}

void detail::adjoint_of_redistribution(Vjp& c) {
  const Type& from = c.input_type(0);
  if (!from.layout.mesh()) {  // a constant of no mesh is Replicate: its gradient is Partial
    return c.set(0, redistribute(c.grad(), Layout(c.output_type(0).layout.mesh(), Placement::partial())));
  }
  // What one rank adds to a parameter's gradient goes to its slot at once (store_into).
  const bool to_slot = adds_up_to(c.grad().layout(), from.layout.dual()) && c.into(0, /*may_add=*/true).to;
  c.set(0, to_slot ? c.grad() : redistribute(c.grad(), from.layout.dual()));
}

bool adds_up_to(const Layout& g, const Layout& want) {
  for (int a = 0; a < g.num_axes(); ++a)
    if (!(g[a] == want[a]) && !(want[a].is_partial() && g[a].is_single())) return false;
  return g.mesh() == want.mesh();
}

std::string redistribution_name(const Layout& from, const Layout& to) {
  const Move m = move_of(from, to);
  if (RedistributeOp::relabels(m)) return "nothing";
  if (is_whole(m.from)) return m.to == Kind::shard ? "slice" : "keep_on_one";
  if (m.from == Kind::partial) return m.to == Kind::shard ? "reduce_scatter" : "all_reduce";
  if (is_send(*to.mesh(), m.axis, from[m.axis], to[m.axis])) return "send";
  return m.to == Kind::partial ? "zero_embed" : m.to == Kind::shard ? "all_to_all" : "all_gather";
}

bool can_slice(const Layout& l, int axis, const Placement& p) {
  for (int a = 0; a < l.num_axes(); ++a)
    if (a != axis && (is_inside(l, a, axis, p) || (meet(l[a], p) && (p.map().is_flat() || l[a].map().is_flat())))) return false;
  return true;
}

Tensor redistribute(const Tensor& x, const Layout& to) {
  if (x.layout() == to || !to.mesh()) return x;
  if (x.layout().mesh() && x.layout().mesh() != to.mesh())
    fail<PlacementError>("[redistribute] ", x.type(), " is on mesh ", x.layout().mesh()->to_string(), ", not ",
                         to.mesh()->to_string());
  for (int axis = 0; axis < to.num_axes(); ++axis)  // of one rank, too, where nothing is cut
    if (const int dim = to[axis].map().dim(); to[axis].is_shard() && !to[axis].map().is_flat() && !to[axis].is_single() && (dim < 0 || dim >= x.rank()))
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
    if (!views && is_send(*next.mesh(), m.axis, have[m.axis], next[m.axis])) {
      if (const Recording* r = Recording::current(); r && r->in_recompute_scope())
        fail<PlacementError>("[send] ", path_label(PathScope::current()), ": ", y.type(), " goes to ", next.to_string(),
                             " inside of a RecomputeScope: the backward would send it again, when the other stage is elsewhere. ",
                             "Recompute the modules of a stage, not what holds several");
      const SendAttrs way{next, m.axis};
      const Tensor x = contiguous(y);
      y = apply_typed(send_op(), &way, std::span(&x, 1), std::span(&spec, 1))[0];
      if (next.is_elsewhere() && !have.is_elsewhere()) lend_until_sent(x, y, m.axis);
      have = next;
      return;
    }
    y = apply_typed(views ? op_def<Slice>() : op_def<RedistributeOp>(), &attrs, std::span(&y, 1), std::span(&spec, 1))[0];
    have = next;
  };
  const auto change = [&](int axis, const Placement& p) {
    const Placement from = have[axis];
    if (from.is_single() && p.is_single() && to.mesh()->is_chain(axis)) {
      // From neighbour to neighbour: ranks that have no part in it need not come, as they would have to by way of R.
      for (int at = from.map().owner(), end = p.map().owner(); at != end;)
        step(have.with(axis, Placement::on(at += at < end ? 1 : -1)));
      return;
    }
    const bool flat_and_inner = from.is_shard() && p.is_shard() &&
                                (from.map().is_flat() ? p.map().dim() > 0 : p.map().is_flat() && from.map().dim() > 0);
    const bool to_or_from_one = from.is_shard() && p.is_shard() && !(from == p) && (from.is_single() || p.is_single());
    if (flat_and_inner || to_or_from_one) step(have.with(axis, Placement::replicate()));  // no rank slice is one run: by way of R
    step(have.with(axis, p));
  };
  const auto arrange = [&](int axis) {
    if (have[axis] == to[axis]) return;
    for (const int later : last_cut_first(have)) {
      if (!is_inside(have, later, axis, have[axis]) && !is_inside(have, later, axis, to[axis])) continue;
      bool at_once = !meet(to[later], to[axis]);  // else it is cut anew once the axes before it are in place
      for (int other = 0; other < to.num_axes(); ++other)
        at_once &= other == later || !(meet(to[later], have[other]) ||
                                       (cuts_after(to[later], later, to[other], other) && meet(to[later], to[other])));
      change(later, at_once ? to[later] : Placement::replicate());
    }
    change(axis, to[axis]);
  };
  if (have == to) step(to);
  if (reorders(have, to))
    for (const int axis : last_cut_first(have))
      if (have[axis].is_shard()) change(axis, Placement::replicate());
  while (!(have == to)) {  // twice at most: an outer cut that moves leaves inner ones to be made again
    const SmallVector<int, kMaxAxes> axes = last_cut_first(to);
    for (size_t i = axes.size(); i-- > 0;) arrange(axes[i]);
  }
  return y;
}

Tensor redistribute(const Tensor& x, const std::string& axis, const Placement& to) {
  if (!x.layout().mesh()) fail<PlacementError>("[redistribute] ", x.type(), " has no mesh; give a whole layout");
  return redistribute(x, x.layout().with(x.layout().mesh()->axis(axis), to));
}

}  // namespace sheaf
