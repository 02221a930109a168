#include "sheaf/autograd/ops/redistribute.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/cut.h"
#include "sheaf/autograd/ops/route.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using Kind = Placement::Kind;

struct Move {
  int axis;       // -1: only the mesh is named
  Kind from, to;
  int size;       // of the axis
};

Move move_of(const Layout& from, const Layout& to) {
  const Layout have = from.mesh() ? from : Layout(to.mesh());
  for (int axis = 0; axis < to.num_axes(); ++axis)
    if (!(have[axis] == to[axis])) return {axis, have[axis].kind(), to[axis].kind(), to.mesh()->size(axis)};
  return {-1, Kind::replicate, Kind::replicate, 1};
}

bool is_whole(Kind k) { return k == Kind::replicate || k == Kind::invariant; }

// No element goes anywhere.
bool relabels(const Move& m) { return m.axis < 0 || m.size == 1 || (is_whole(m.from) && is_whole(m.to)); }

Communicator& gather_lane(const Layout& l, int axis) {
  MeshRuntime* runtime = RankContext::current().runtime(l.mesh());
  if (!runtime) fail<PlacementError>("[redistribute] this rank has not joined mesh ", l.mesh()->to_string());
  return runtime->gather_lane(axis);
}

// A flat index runs over dense elements only.
bool packs_flat(const Move& m, const Execute& c) {
  const bool flat = c.input_type(0).layout[m.axis].map().is_flat() || c.output_type(0).layout[m.axis].map().is_flat();
  return flat && !c.input(0).contiguous();
}

// One redistribution: what comes in, what goes out, and scratch memory between them and the lane of the axis.
class Redistribution {
 public:
  explicit Redistribution(Execute& c)
      : c_(c), from_(c.input_type(0)), to_(c.output_type(0)), m_(move_of(from_.layout, to_.layout)), stream_(c.stream()),
        meta_(c.device().is_meta()), in_(c.input(0)), out_(c.output(0)), scratch_(static_cast<char*>(c.workspace.data)) {}

  void run() {
    if (relabels(m_)) return copy(in_, View::dense(out_.data, out_.dtype, in_.shape));
    me_ = RankContext::current().coordinate(to_.layout.mesh(), m_.axis);
    if (is_whole(m_.from)) return m_.to == Kind::shard ? slice() : keep_on_one();
    if (m_.from == Kind::partial) return m_.to == Kind::shard ? reduce_scatter() : all_reduce();
    if (m_.to == Kind::partial) return zero_embed();
    return m_.to == Kind::shard ? all_to_all() : all_gather();
  }

 private:
  // Of what comes in, and of what goes out.
  Cut cut_in() const { return cut_of(from_, m_.axis, from_.layout[m_.axis]); }
  Cut cut_out() const { return cut_of(to_, m_.axis, to_.layout[m_.axis]); }

  // Nothing is copied of tensors without memory.
  void copy(const View& x, const View& y) const {
    if (!meta_) SHEAF_ON_DEVICE(stream_, copy, x, y);
  }
  void fill(const View& y, double value) const {
    if (!meta_) SHEAF_ON_DEVICE(stream_, fill, y, value);
  }
  void pack(const View& from, int dim, const std::vector<Interval>& rows, const View& packed) const {
    if (!meta_) pack_rows([this](const View& x, const View& y) { copy(x, y); }, from, dim, rows, packed);
  }
  void unpack(const View& packed, const View& to, int dim, const std::vector<Interval>& rows) const {
    if (!meta_) unpack_rows([this](const View& x, const View& y) { copy(x, y); }, packed, to, dim, rows);
  }

  // Where ranks are simulated, their lanes count what tensors without memory would send.
  template <class Call>
  void on_lane(const Call& call) {
    Communicator& lane = gather_lane(to_.layout, m_.axis);
    if (meta_ && lane.kind() != "simulated") return;
    lane.is_waited_for();
    c_.join(call(lane, PathScope::current()));
  }

  // Where no view shows it (Slice::alias).
  void slice() {
    const Cut cut = cut_out();
    if (cut.flat) in_ = flattened(dense(scratch_));
    pack(in_, cut.dim, cut.owned[me_], out_);
  }

  void keep_on_one() {
    if (me_ == 0) copy(in_, out_);
    else fill(out_, 0);
  }

  void zero_embed() {
    const Cut cut = cut_in();
    if (!from_.layout[m_.axis].is_single()) {
      fill(out_, 0);
      unpack(in_, cut.flat ? flattened(out_) : out_, cut.dim, cut.owned[me_]);
    } else if (cut.elements(me_) > 0) {
      copy(in_, out_);
    } else {
      fill(out_, 0);
    }
  }

  void all_reduce() {
    copy(in_, out_);
    on_lane([&](Communicator& lane, const std::string& path) {
      return lane.all_reduce(out_.data, out_.numel(), out_.dtype, Reduction::sum, path);
    });
  }

  void all_gather() {
    const Cut cut = cut_in();
    char* gathered = cut.contiguous ? static_cast<char*>(out_.data) : scratch_;
    if (!in_.contiguous()) in_ = dense(scratch_ + out_.bytes());
    on_lane([&](Communicator& lane, const std::string& path) {
      return lane.all_gather(in_.data, gathered, cut.counts(), in_.dtype, path);
    });
    if (cut.contiguous) return;
    for (int r = 0; r < m_.size; ++r) {
      const View packed = block_of_rows(out_, cut.dim, cut.rows(r), gathered);
      unpack(packed, out_, cut.dim, cut.owned[r]);
      gathered += packed.bytes();
    }
  }

  void reduce_scatter() {
    const Cut cut = cut_out();
    void* send = in_.data;
    if (!cut.contiguous || !in_.contiguous()) {
      send = scratch_;
      if (cut.flat) dense(scratch_);
      char* at = scratch_;
      for (int r = 0; r < m_.size && !cut.flat; ++r) {
        const View packed = block_of_rows(in_, cut.dim, cut.rows(r), at);
        pack(in_, cut.dim, cut.owned[r], packed);
        at += packed.bytes();
      }
    }
    on_lane([&](Communicator& lane, const std::string& path) {
      return lane.reduce_scatter(send, out_.data, cut.counts(), in_.dtype, path);
    });
  }

  // What each pair of ranks shares are rows of what either has.
  void all_to_all() {
    Cut p = cut_in(), q = cut_out();
    char *const sent = scratch_, *const received = scratch_ + in_.bytes();
    if (packs_flat(m_, c_)) in_ = dense(received + out_.bytes());
    const bool one_index = p.flat || q.flat || p.dim == q.dim;
    if (p.flat || q.flat) {
      in_ = flattened(in_), out_ = flattened(out_);
      p.count_elements(), q.count_elements();
    }
    const int dim_in = one_index ? p.dim : q.dim, dim_out = p.dim;
    std::vector<int64_t> send_counts, recv_counts;
    std::vector<std::vector<Interval>> theirs;
    char* at = sent;
    for (int r = 0; r < m_.size; ++r) {
      const std::vector<Interval> mine = one_index ? shared_rows(p.owned[me_], q.owned[r]) : q.owned[r];
      theirs.push_back(one_index ? shared_rows(q.owned[me_], p.owned[r]) : p.owned[r]);
      const View packed = block_of_rows(in_, dim_in, Cut::total(mine), at);
      send_counts.push_back(packed.numel());
      recv_counts.push_back(block_of_rows(out_, dim_out, Cut::total(theirs.back()), received).numel());
      pack(in_, dim_in, mine, packed);
      at += packed.bytes();
    }
    on_lane([&](Communicator& lane, const std::string& path) {
      return lane.all_to_all(sent, send_counts, received, recv_counts, in_.dtype, path);
    });
    at = received;
    for (const auto& rows : theirs) {
      const View packed = block_of_rows(out_, dim_out, Cut::total(rows), at);
      unpack(packed, out_, dim_out, rows);
      at += packed.bytes();
    }
  }

  // What comes in, without gaps.
  View dense(char* to) const {
    const View out = View::dense(to, in_.dtype, in_.shape);
    copy(in_, out);
    return out;
  }

  Execute& c_;
  const Type &from_, &to_;
  const Move m_;
  const Stream stream_;
  const bool meta_;
  View in_, out_;
  char* const scratch_;
  int me_ = 0;
};

struct RedistributeOp {
  static constexpr const char* kName = "redistribute";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::gather;
  struct Attrs {
    Layout to;
    int32_t axis;  // the one that changes; -1: only the mesh is named
    bool operator==(const Attrs&) const = default;
  };

  static int64_t workspace(const Attrs& a, const Execute& c) {
    const Move m = move_of(c.input_type(0).layout, a.to);
    if (relabels(m)) return 0;
    const int64_t in = c.input(0).bytes(), out = c.output(0).bytes();
    // A rank that gets nothing has an address, too: it tells the lane whose memory the ranks exchange.
    if (m.to == Kind::shard && m.from == Kind::shard) return in + std::max<int64_t>(out, 1) + (packs_flat(m, c) ? in : 0);
    if (m.from == Kind::shard) return m.to == Kind::partial ? 0 : out + (c.input(0).contiguous() ? 0 : in);
    return m.to == Kind::shard && (m.from == Kind::partial || a.to[m.axis].map().is_flat()) ? in : 0;
  }

  static void execute(const Attrs&, Execute& c) { Redistribution(c).run(); }
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
  const bool to_slot = adds_up_to(c.grad().layout(), from.layout.dual()) && c.has_place(0);
  c.set(0, to_slot ? c.grad() : redistribute(c.grad(), from.layout.dual()));
}

bool adds_up_to(const Layout& g, const Layout& want) {
  for (int a = 0; a < g.num_axes(); ++a)
    if (!(g[a] == want[a]) && !(want[a].is_partial() && g[a].is_single())) return false;
  return g.mesh() == want.mesh();
}

std::string redistribution_name(const Layout& from, const Layout& to) {
  const Move m = move_of(from, to);
  if (relabels(m)) return "nothing";
  if (is_whole(m.from)) return m.to == Kind::shard ? "slice" : "keep_on_one";
  if (m.from == Kind::partial) return m.to == Kind::shard ? "reduce_scatter" : "all_reduce";
  if (is_send(*to.mesh(), m.axis, from[m.axis], to[m.axis])) return "send";
  return m.to == Kind::partial ? "zero_embed" : m.to == Kind::shard ? "all_to_all" : "all_gather";
}

namespace {

// One step of a route.
Tensor step_to(const Tensor& x, const Layout& to) {
  const Layout have = x.layout().mesh() ? x.layout() : Layout(to.mesh());
  const Move m = move_of(have, to);
  const OutputSpec spec{{x.dtype(), x.shape(), to}, {}, -1, 0};
  const bool views = relabels(m) || (is_whole(m.from) && m.to == Kind::shard);
  if (views || !is_send(*to.mesh(), m.axis, have[m.axis], to[m.axis])) {
    const RedistributeOp::Attrs attrs{to, m.axis};
    return apply_typed(views ? op_def<Slice>() : op_def<RedistributeOp>(), &attrs, std::span(&x, 1), std::span(&spec, 1))[0];
  }
  return send(x, to, m.axis);
}

}  // namespace

Tensor redistribute(const Tensor& x, const Layout& to) {
  if (x.layout() == to || !to.mesh()) return x;
  if (x.layout().mesh() && x.layout().mesh() != to.mesh())
    fail<PlacementError>("[redistribute] ", x.type(), " is on mesh ", x.layout().mesh()->to_string(), ", not ",
                         to.mesh()->to_string());
  for (int axis = 0; axis < to.num_axes(); ++axis) {  // of one rank, too, where nothing is cut
    const int dim = to[axis].map().dim();
    if (!to[axis].is_shard() || to[axis].map().is_flat() || to[axis].is_single() || (dim >= 0 && dim < x.rank())) continue;
    fail<PlacementError>("[redistribute] ", x.type(), " has no dimension ", dim, " to cut over mesh axis ", to.mesh()->name(axis),
                         ", rank ", RankContext::current().rank);
  }
  to.local_shape(x.shape());  // throws, before anything is sent, if a cut does not fit
  Tensor y = x;
  for (const Layout& next : route(x.layout(), to)) y = step_to(y, next);
  return y;
}

Tensor redistribute(const Tensor& x, const std::string& axis, const Placement& to) {
  if (!x.layout().mesh()) fail<PlacementError>("[redistribute] ", x.type(), " has no mesh; give a whole layout");
  return redistribute(x, x.layout().with(x.layout().mesh()->axis(axis), to));
}

}  // namespace sheaf
