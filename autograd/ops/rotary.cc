// Rotary position embedding; its gradient is the rotation back.
#include "sheaf/kernels/rotary.h"

#include "sheaf/autograd/ops/cut.h"
#include "sheaf/autograd/ops/rows.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

using namespace ops;

constexpr int64_t kAllHeads = int64_t{1} << 40;

struct Rotary {
  static constexpr const char* kName = "rotary";
  struct Attrs {
    double theta;
    int64_t first_position, heads, width;
    int32_t neighbours, inverse, rows;  ///< rows: where rows begin is the second input
    RotaryScaling scaling;
  };
  static constexpr uint64_t kSavedInputs = 0b10;
  static void infer(const Attrs& a, Infer& c) {
    require_floating(kName, c.dtype(0));
    if (c.shape(0).rank() != 4 || width_of(a, c.shape(0)) % 2 != 0 || width_of(a, c.shape(0)) > c.shape(0)[3])
      fail<ShapeError>("[", kName, "] wants [B, T, H, D] and an even width, at most D, got ", c.input(0),
                       a.width < 0 ? "" : str(", width ", a.width));
    if (const std::string problem = a.scaling.problem(width_of(a, c.shape(0)) / 2); !problem.empty())
      fail<ConfigError>("[", kName, "] of ", c.input(0), ": the scaling's ", problem);
    if (a.rows && !(c.dtype(1) == kI32 && c.shape(1) == Shape{c.shape(0)[0], c.shape(0)[1]}))
      fail<ShapeError>("[", kName, "] of ", c.input(0), ": where rows begin is i32 [B, T], not ", c.input(1));
    c.output(c.dtype(0), c.shape(0));
  }
  static void place(const Attrs& a, Place& p) {  // both elements of a pair must be on one rank
    const Placement& in = p.in(0);
    const auto rule = [&](const Placement& x, const Placement& begins) {
      if (a.rows) p.rule({x, begins}, {x});
      else p.rule({x}, {x});
    };
    if (in.is_shard(0) || in.is_shard(1)) rule(in, in);
    else if (in.is_shard(2) && (a.heads >= p.shape(0)[2] || rotates_whole_parts(a, in.map(), p.shape(0)[2]))) rule(in, kR);
    rule(kR, kR);
    rule(kP, kR);
  }
  static bool rotates_whole_parts(const Attrs& a, const OwnershipMap& map, int64_t heads) {
    if (!map.is_parts()) return false;
    bool ends_one = false;
    int64_t end = 0;
    for (const int64_t size : map.sizes()) ends_one |= (end += size) == a.heads;
    return ends_one && end == heads;
  }
  /// How many of this rank's heads are rotated: the same fraction as of all heads.
  static int64_t local_heads(const Attrs& a, const Execute& c) {
    const int64_t local = c.input(0).shape[2], whole = c.input_type(0).shape[2];
    return a.heads >= whole ? a.heads : local_share(a.heads, local, whole);
  }
  static int64_t width_of(const Attrs& a, const Shape& x) { return a.width < 0 ? x[3] : a.width; }
  static kernels::RotaryPart part(const Attrs& a, const Execute& c) {
    return {local_heads(a, c), width_of(a, c.input(0).shape), a.neighbours != 0};
  }
  static kernels::RotaryPositions positions(const Attrs& a, const Execute& c) {
    return {a.first_position, a.rows ? c.input(1) : View()};
  }
  static int64_t workspace(const Attrs& a, const Execute& c) {
    return SHEAF_WORKSPACE(c.device(), rotary, c.input(0), part(a, c), positions(a, c));
  }
  /// If tokens are sharded, each contiguous run begins at its position in the sequence.
  static void execute(const Attrs& a, Execute& c) {
    const Stream stream = c.stream();
    const View x = c.input(0), y = c.output(0);
    const kernels::RotaryPositions all = positions(a, c);
    const auto rotate = [&](const View& from, const kernels::RotaryPositions& at, const View& to) {
      SHEAF_ON_DEVICE(stream, rotary, from, a.theta, a.scaling, at, part(a, c), a.inverse != 0, to, c.workspace);
    };
    const Type& type = c.input_type(0);
    if (x.shape[1] == type.shape[1]) return rotate(x, all, y);
    int64_t at = 0;
    for (const Interval& i : type.layout.local_rows(type.shape, 1)) {
      const Interval here{at, at + i.size()};
      rotate(rows_of(x, 1, here), {all.first + i.begin, a.rows ? rows_of(all.begins, 1, here) : View()}, rows_of(y, 1, here));
      at = here.end;
    }
  }
  static void vjp(const Attrs& a, Vjp& c) {
    Attrs back = a;
    back.inverse = !a.inverse;
    const Tensor dy = dense_rows(c.grad());
    c.set(0, a.rows ? apply<Rotary>(back, {dy, c.input(1)}) : apply<Rotary>(back, dy));
  }
  static void describe(const Attrs& a, std::string& out) {
    out += str("theta ", a.theta, a.width < 0 ? "" : str(" width ", a.width), a.neighbours ? " neighbours" : "", a.inverse ? " inverse" : "");
    const RotaryScaling& s = a.scaling;
    if (s.is_longrope()) {
      const std::vector<double>& factors = s.pair_factors();
      out += s.is_long ? " longrope's long factors" : " longrope's short factors";
      if (!factors.empty()) out += str(' ', factors.front(), " to ", factors.back());
    } else if (s.factor != 1.0) {
      out += str(s.is_yarn() ? " yarn" : "", " scaled by ", s.factor);
      if (s.original_context != 0) out += str(" (", s.low_freq_factor, " to ", s.high_freq_factor, " turns in ", s.original_context, ")");
    }
    if (s.amplitude != 1.0) out += str(" times ", s.amplitude);
    if (a.heads != kAllHeads) out += str(" heads 0 to ", a.heads);
    if (a.first_position) out += str(" from position ", a.first_position);
    if (a.rows) out += " of each row";
  }
};

}  // namespace

Tensor rotary(const Tensor& x, const RotaryOptions& o) {
  const Rotary::Attrs attrs{o.theta,   o.first_position,  o.heads < 0 ? kAllHeads : o.heads, o.width, o.neighbours,
                            0,         o.begins.defined(), o.scaling};
  return o.begins ? apply<Rotary>(attrs, {dense_rows(x), dense_rows(o.begins)}) : apply<Rotary>(attrs, dense_rows(x));
}

}  // namespace sheaf
