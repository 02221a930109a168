// Filling, copying and accumulating memory.
#include "sheaf/autograd/leaf_group.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/ops/redistribution.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {
namespace {

struct Full {
  static constexpr const char* kName = "full";
  struct Attrs { double value; };
  static void execute(const Attrs& a, Execute& c) {
    // A Partial value is held by rank 0; the others hold zeros.
    const Layout& l = c.output_type(0).layout;
    bool mine = true;
    for (int i = 0; i < l.num_axes(); ++i)
      if (l[i].is_partial() && RankContext::current().coordinate(l.mesh(), i) != 0) mine = false;
    SHEAF_ON_DEVICE(c.stream(), fill, c.output(0), mine ? a.value : 0.0);
  }
  static void describe(const Attrs& a, std::string& out) { out += str(a.value); }
};

struct Contiguous {
  static constexpr const char* kName = "contiguous";
  using Attrs = NoAttrs;
  static void infer(const Attrs&, Infer& c) { c.output(c.dtype(0), c.shape(0)); }
  static void place(const Attrs&, Place& p) { rules::pointwise_linear(p); }
  static void execute(const Attrs&, Execute& c) { SHEAF_ON_DEVICE(c.stream(), copy, c.input(0), c.output(0)); }
  static void vjp(const Attrs&, Vjp& c) { c.set(0, c.grad()); }
};

struct StoreInto {
  static constexpr const char* kName = "store";
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    if (c.input_type(0).layout.is_elsewhere()) SHEAF_ON_DEVICE(c.stream(), fill, c.output(0), 0.0);
    else SHEAF_ON_DEVICE(c.stream(), copy, c.input(0), c.output(0));
  }
};

struct AddInto {  // inputs: the addend, the memory; the output lies in the memory
  static constexpr const char* kName = "add_into";
  static constexpr bool kOfUnits = true;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    const Stream stream = c.stream();
    if (!c.input_type(0).layout.is_elsewhere()) SHEAF_ON_DEVICE(stream, add_into, c.output(0), c.input(0));
  }
};

void store_to(const Tensor& to, const Tensor& x) {
  const OutputSpec spec{.type = to.type(), .into = to};
  apply_typed(op_def<StoreInto>(), nullptr, std::span(&x, 1), std::span(&spec, 1));
  to.storage()->changed();
}

void add_to(const Tensor& to, const Tensor& x) {
  const OutputSpec spec{.type = to.type(), .into = to};
  const Tensor inputs[] = {x, to};
  apply_typed(op_def<AddInto>(), nullptr, inputs, std::span(&spec, 1));
  to.storage()->changed();
}

bool is_whole(const Layout& l) {
  for (int a = 0; a < l.num_axes(); ++a)
    if (!Redistribution::Move::is_whole(l[a].kind())) return false;
  return true;
}

// For an in-place change: values of `x`'s type, each at a distinct address.
void check_change(const char* op, const Tensor& to, const Tensor& x) {
  if (!(x.shape() == to.shape())) fail<ShapeError>("[", op, "] a value ", x.type(), " into memory of ", to.type());
  if (x.dtype() != to.dtype()) fail<DTypeError>("[", op, "] a value ", x.type(), " into memory of ", to.type(), ": cast() it");
  if (x.layout().mesh() && (to.layout().mesh() ? !(x.layout() == to.layout()) : !is_whole(x.layout())))
    fail<PlacementError>("[", op, "] a value ", x.type(), " into memory of ", to.type(), ": redistribute() it");
  const View view = to.view_unsynced();
  for (int d = 0; d < view.rank(); ++d)
    if (view.strides[d] == 0 && view.shape[d] > 1 && view.numel() > 0)
      fail<ShapeError>("[", op, "] memory of ", to.type(), " has one address for all of dimension ", d, ": what is expanded cannot be changed");
}

// Memory that the recording has not seen becomes a leaf before it is changed: a replay starts from what it held.
void begin_change(const char* op, const Tensor& to) {
  Recording* const r = Recording::current();
  if (!r) return;
  r->expect_no_recomputation(op);
  r->expect_no_gradient(op, to);
  r->leaf(to, "memory");
}

// x as it is stored into `to`, or added to it: without a mesh it is Replicate on that of `to`; a copy, if it lies elsewhere in the same
// memory, where elements could be written before they are read.
Tensor operand(const Tensor& to, const Tensor& x) {
  const Tensor here = !x.layout().mesh() && to.layout().mesh() ? redistribute(x, to.layout()) : x;
  const bool moves = here.byte_offset() != to.byte_offset() || !(here.local_strides() == to.local_strides());
  return here.storage() == to.storage() && moves ? copy_of(here) : here;
}

}  // namespace

Tensor full_of(const Type& type, double value) {
  const OutputSpec spec{.type = type};
  const Full::Attrs attrs{value};
  return apply_typed(op_def<Full>(), &attrs, {}, std::span(&spec, 1))[0];
}

Tensor full_like(const Tensor& x, double value) {
  expect_defined("full_like", x);
  const DeviceScope device(x.device());
  return full_of(x.type(), value);
}

Tensor copy_of(const Tensor& x) { return apply<Contiguous>({}, x); }
Tensor contiguous(const Tensor& x) { return !x || x.is_contiguous() ? x : apply<Contiguous>({}, x); }

void store_into(const Tensor& to, const Tensor& x) {
  check_change("store", to, x);
  begin_change("store", to);
  store_to(to, operand(to, x));
  if (Recording* r = Recording::current()) r->note_change(to, x);
}

void add_into(const Tensor& to, const Tensor& x) {
  check_change("add_into", to, x);
  begin_change("add_into", to);
  add_to(to, operand(to, x));
  if (Recording* r = Recording::current()) r->note_change(to, x);
}

void store_gradient(const Tensor& slot, const Tensor& gradient) { store_to(slot, gradient); }
void add_gradient(const Tensor& slot, const Tensor& gradient) { add_to(slot, gradient); }

}  // namespace sheaf
