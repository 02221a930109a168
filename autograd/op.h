// How an op is defined: one struct in autograd/ops/<op>.cc, or in user code, and apply<Op>(attrs, inputs).
//
//   struct Softmax {
//     static constexpr const char* kName = "softmax";
//     struct Attrs { int32_t dim; };                       // trivially copyable; the tape stores its bytes; NoAttrs: none
//     static void infer(const Attrs&, Infer&);             // dtypes and global shapes; throws ShapeError, DTypeError
//     static void place(const Attrs&, Place&);             // the forward placement rule; the backward's follows. Absent: whole operands
//     static void execute(const Attrs&, Execute&);         // calls kernels::; never allocates. Inputs have any strides, 0 where they
//                                                          // are expanded: for dense ones, pass contiguous(x) to apply()
//     static constexpr uint64_t kSavedInputs = 0, kSavedOutputs = 0b1;  // what vjp reads: bit i = input or output i
//     static void vjp(const Attrs&, Vjp&);                 // in public ops; absent: not differentiable
//   };
//
// All else is optional:
//
//     static void describe(const Attrs&, std::string&);    // attributes as text, in to_json(); kMarked: in to_text(), too
//     static int64_t workspace(const Attrs&, const Execute&);       // bytes, an upper bound from types
//     static bool alias(const Attrs&, const View& in, View& out);   // instead of execute, for views: of the last inputs, or as
//                                                                   // alias(attrs, o, in, out): output o of the one input
//     static void work(const Attrs&, WorkOf&);             // operations and bytes, from types: work.h
//     static void fuse(const Attrs&, Fuse&);               // as steps of one kernel, of elementwise ops: fuse.h
//     static void drop_layouts(Attrs&);                    // if attributes contain any: as they would be without sharding
//     static constexpr bool kCanAdd = true;                // output 0 can be added to what its memory holds: Execute::add
//     static constexpr uint64_t kStoresWide = 0b1;         // bit i: output i can be stored in a wider dtype than inferred
//     static constexpr bool kRecipe = true;                // a view or cast, repeated in the backward rather than saved
//     static constexpr bool kDefersWeights = true;         // vjp gives derivatives to Vjp::weight_gradients()
//     static constexpr int kRematerializable = 0;          // an output that takes little to compute from what vjp reads:
//     static Tensor rematerialize(const Attrs&, Vjp&);     // this does, in public ops, with the same bits
//     row_inputs, row_parts, products, kHeads              // execute() for parts of the operands: see OpDef
//
// [Note: what happens in apply] (1) infer: the outputs' types, as on one rank. (2) place: the inputs' placements select the rule, per
// mesh axis; a Replicate operand that a rule wants sharded is sliced, one that it wants Partial is kept on one rank, which moves no
// data and is a separate node; anything that would communicate is a PlacementError. (3) outputs are allocated, or placed into given
// memory, or alias the input. (4) execute, unless the values are on meta. (5) if this thread has a live recording, the node is
// recorded.
#pragma once

#include <concepts>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "sheaf/autograd/op_call.h"
#include "sheaf/autograd/place.h"
#include "sheaf/autograd/vjp.h"
#include "sheaf/core/tensor.h"

namespace sheaf {

enum class OpKind : uint8_t { leaf, op, redistribute, discard, step };
enum class Lane : uint8_t { compute, gather, reduce, copy };

/// An output whose type and memory are given.
struct OutputSpec {
  Type type;
  Tensor into = {};  ///< defined: the output is placed at the start of this tensor's memory (an update in place)
  int within = -1;   ///< >= 0: it is placed inside that earlier output of the same node, at `byte_offset`
  int64_t byte_offset = 0;
};

/// Type inference: reads the inputs' global types, declares the outputs'. Layouts are filled in by the placement rule.
class Infer {
 public:
  explicit Infer(std::span<const Tensor> inputs) : inputs_(inputs) {}
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  const Type& input(int i) const { return inputs_[i].type(); }
  const Shape& shape(int i) const { return input(i).shape; }
  DType dtype(int i) const { return input(i).dtype; }
  void output(DType dtype, const Shape& shape) {
    Type& type = outputs.emplace_back().type;
    type.dtype = dtype;
    type.shape = shape;
  }
  SmallVector<OutputSpec, 4> outputs;

 private:
  std::span<const Tensor> inputs_;
};

class WorkOf;
class Fuse;
using InputTypes = std::span<const Type* const>;

/// The functions of an op, built by op_def<Op>(); constant for the life of the process.
struct OpDef {
  const char* name;
  OpKind kind;
  Lane lane;
  bool of_units;        ///< works on units' buffers, which are not values of the model
  bool stops_gradient;  ///< outputs are constants, whatever the inputs are
  bool recipe;          ///< cheap to repeat: a view or a cast, replayed in backward on gathered parameters instead of saved
  bool can_add;
  bool defers_weights;   ///< its vjp calls weight_gradients()
  MemoryKind memory;     ///< of fresh outputs: see MemoryKind
  HeldFor held_for;      ///< what the memory of fresh outputs is held for; other: it follows from the phase, see held_for() of a node
  uint64_t stores_wide;  ///< outputs that are stored in f32, if given f32 memory, where infer says bf16 or f16
  uint32_t attrs_size;
  uint64_t saved_inputs, saved_outputs;
  void (*infer)(const void*, Infer&);
  void (*place)(const void*, Place&);
  int64_t (*workspace)(const void*, const Execute&);
  bool (*alias)(const void*, int output, const View&, View&);
  void (*execute)(const void*, Execute&);
  /// Bit mask of inputs, including input 0, such that row i of every output depends on row i of these and on the other inputs whole:
  /// execute() can then be called for subsets of rows. 0: not for these inputs. Null: never.
  uint64_t (*row_inputs)(const void*, InputTypes);
  /// If set, execute() must be called for whole parts of a dimension, the first of input 0 that has several indices: given that
  /// input's local shape, which dimension that is in each operand; null if there is none. Null: any rows.
  const PartDims* (*row_parts)(const Shape&);
  /// Over roughly how many products these rows are distributed, on any rank. Null: one.
  double (*products)(const void*, InputTypes);
  const PartDims* heads;  ///< execute() can be called for a few heads of keys and values (inputs 1 and 2) at a time; null: it cannot
  void (*vjp)(const void*, Vjp&);
  int rematerializable;          ///< the output that rematerialize() computes, cheaply, from what the derivative reads; -1: none
  uint64_t rematerialize_reads;  ///< inputs that are read by rematerialize() only
  Tensor (*rematerialize)(const void*, Vjp&);
  /// Narrows what is saved to what the wanted gradients need: needs, saved inputs, saved outputs.
  void (*saves)(const void*, uint64_t, uint64_t&, uint64_t&);
  void (*work)(const void*, WorkOf&);
  void (*fuse)(const void*, Fuse&);
  void (*describe)(const void*, std::string&);
  bool marked;                  ///< the tape's text includes the description
  void (*drop_layouts)(void*);  ///< of attributes: as they would be without sharding; null if they contain no layouts
  bool (*same_attrs)(const void*, const void*);
};

namespace detail {
/// Attributes without members occupy no bytes on the tape, and have no address there.
template <class Attrs>
const Attrs& attrs_of(const void* attrs) {
  if constexpr (std::is_empty_v<Attrs>) {
    static constexpr Attrs kNone{};
    return kNone;
  } else {
    return *static_cast<const Attrs*>(attrs);
  }
}

/// By ==, if the attributes define it: those with a Shape or a Layout need it, as not all of their bytes are significant. Otherwise
/// byte by byte; there must be no padding.
template <class Attrs>
bool same_attrs(Attrs a, Attrs b) {
  if constexpr (std::is_empty_v<Attrs>) {
    return true;
  } else if constexpr (std::equality_comparable<Attrs>) {
    return a == b;
  } else {
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&a);
    __builtin_clear_padding(&b);
#endif
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
}

template <class Op>
constexpr OpDef make_op_def() {
  using Attrs = typename Op::Attrs;
  static_assert(std::is_trivially_copyable_v<Attrs>, "attributes are stored as bytes on the tape");
  static_assert(alignof(Attrs) <= 8);
  OpDef d{};
  d.name = Op::kName;
  d.kind = OpKind::op;
  if constexpr (requires { Op::kKind; }) d.kind = Op::kKind;
  if constexpr (requires { Op::kLane; }) d.lane = Op::kLane;
  if constexpr (requires { Op::kOfUnits; }) d.of_units = Op::kOfUnits;
  if constexpr (requires { Op::kStopsGradient; }) d.stops_gradient = Op::kStopsGradient;
  if constexpr (requires { Op::kRecipe; }) d.recipe = Op::kRecipe;
  if constexpr (requires { Op::kCanAdd; }) d.can_add = Op::kCanAdd;
  if constexpr (requires { Op::kDefersWeights; }) d.defers_weights = Op::kDefersWeights;
  if constexpr (requires { Op::kMemory; }) d.memory = Op::kMemory;
  if constexpr (requires { Op::kHeldFor; }) d.held_for = Op::kHeldFor;
  if constexpr (requires { Op::kStoresWide; }) d.stores_wide = Op::kStoresWide;
  d.attrs_size = std::is_empty_v<Attrs> ? 0 : sizeof(Attrs);
  if constexpr (requires { Op::kSavedInputs; }) d.saved_inputs = Op::kSavedInputs;
  if constexpr (requires { Op::kSavedOutputs; }) d.saved_outputs = Op::kSavedOutputs;
  if constexpr (requires(const Attrs& a, Infer& c) { Op::infer(a, c); })
    d.infer = [](const void* a, Infer& c) { Op::infer(attrs_of<Attrs>(a), c); };
  if constexpr (requires(const Attrs& a, Place& c) { Op::place(a, c); })
    d.place = [](const void* a, Place& c) { Op::place(attrs_of<Attrs>(a), c); };
  if constexpr (requires(const Attrs& a, const Execute& c) { Op::workspace(a, c); })
    d.workspace = [](const void* a, const Execute& c) -> int64_t {
      return Op::workspace(attrs_of<Attrs>(a), c);
    };
  if constexpr (requires(const Attrs& a, const View& v, View& o) { Op::alias(a, v, o); })
    d.alias = [](const void* a, int, const View& v, View& o) { return Op::alias(attrs_of<Attrs>(a), v, o); };
  if constexpr (requires(const Attrs& a, const View& v, View& o) { Op::alias(a, 0, v, o); })
    d.alias = [](const void* a, int output, const View& v, View& o) { return Op::alias(attrs_of<Attrs>(a), output, v, o); };
  if constexpr (requires(const Attrs& a, Execute& c) { Op::execute(a, c); })
    d.execute = [](const void* a, Execute& c) { Op::execute(attrs_of<Attrs>(a), c); };
  if constexpr (requires(const Attrs& a, InputTypes t) { Op::row_inputs(a, t); })
    d.row_inputs = [](const void* a, InputTypes t) -> uint64_t { return Op::row_inputs(attrs_of<Attrs>(a), t); };
  if constexpr (requires(const Shape& x) { Op::row_parts(x); }) d.row_parts = &Op::row_parts;
  if constexpr (requires(const Attrs& a, InputTypes t) { Op::products(a, t); })
    d.products = [](const void* a, InputTypes t) -> double { return Op::products(attrs_of<Attrs>(a), t); };
  if constexpr (requires { Op::kHeads; }) d.heads = &Op::kHeads;
  if constexpr (requires(const Attrs& a, Vjp& c) { Op::vjp(a, c); })
    d.vjp = [](const void* a, Vjp& c) { Op::vjp(attrs_of<Attrs>(a), c); };
  d.rematerializable = -1;
  if constexpr (requires(const Attrs& a, Vjp& c) { Op::rematerialize(a, c); }) {
    d.rematerializable = Op::kRematerializable;
    d.rematerialize = [](const void* a, Vjp& c) -> Tensor { return Op::rematerialize(attrs_of<Attrs>(a), c); };
    if constexpr (requires { Op::kRematerializeReads; }) d.rematerialize_reads = Op::kRematerializeReads;
  }
  if constexpr (requires(const Attrs& a, uint64_t n, uint64_t& i, uint64_t& o) { Op::saves(a, n, i, o); })
    d.saves = [](const void* a, uint64_t n, uint64_t& i, uint64_t& o) {
      Op::saves(attrs_of<Attrs>(a), n, i, o);
    };
  if constexpr (requires(const Attrs& a, WorkOf& w) { Op::work(a, w); })
    d.work = [](const void* a, WorkOf& w) { Op::work(attrs_of<Attrs>(a), w); };
  if constexpr (requires(const Attrs& a, Fuse& f) { Op::fuse(a, f); })
    d.fuse = [](const void* a, Fuse& f) { Op::fuse(attrs_of<Attrs>(a), f); };
  if constexpr (requires(const Attrs& a, std::string& s) { Op::describe(a, s); })
    d.describe = [](const void* a, std::string& s) { Op::describe(attrs_of<Attrs>(a), s); };
  d.marked = requires { Op::kMarked; };
  if constexpr (requires(Attrs& a) { Op::drop_layouts(a); })
    d.drop_layouts = [](void* a) { Op::drop_layouts(*static_cast<Attrs*>(a)); };
  d.same_attrs = [](const void* a, const void* b) { return same_attrs(attrs_of<Attrs>(a), attrs_of<Attrs>(b)); };
  return d;
}
template <class Op>
inline constexpr OpDef op_def_of = make_op_def<Op>();
}  // namespace detail

template <class Op>
const OpDef& op_def() { return detail::op_def_of<Op>; }

/// Runs an op whose types follow from its own rules; `into`: the destinations of its first outputs. Throws ShapeError, DTypeError,
/// PlacementError, LifetimeError.
Tensors apply(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, std::span<const Into> into = {});
/// The layout to which a result of this type is redistributed; null, or its current layout: not redistributed.
using OutputLayout = std::function<Layout(const Type&)>;
/// `to` on one mesh axis, the result's own layout on the others.
OutputLayout along(int axis, const Placement& to);
/// redistribute(y, output_layout(y's type)) of the op's only output y. If that is a reduce_scatter of rows, or an all_to_all from
/// rows to columns or back from experts, of sufficiently many rows (RecordingOptions::piece_rows), and the op has row_inputs(), and
/// no derivative reads y, then y is sent in pieces, each while the next is computed: values to be reduced are then in the order of
/// the wire on the tape. See [Note: in pieces].
Tensor apply_and_redistribute(const OpDef& op, const void* attrs, std::span<const Tensor> inputs, const OutputLayout& output_layout);
/// The same for an existing y.
Tensor redistribute_output(const Tensor& y, const OutputLayout& output_layout);
/// Runs an op with given outputs (ops of units and optimizers, whose types come from elsewhere).
Tensors apply_typed(const OpDef& op, const void* attrs, std::span<const Tensor> inputs,
                    std::span<const OutputSpec> outputs);
/// Executes without recording: allocates or places the outputs and runs the kernel. What apply and replay share.
Tensors execute_node(const OpDef& op, const void* attrs, std::span<const Tensor> inputs,
                     std::span<const OutputSpec> outputs, bool add = false);

/// LifetimeError if x is undefined, as apply() would throw it for this input: for functions that look at operands before.
void expect_defined(const char* op, const Tensor& x, int input = 0);

/// Inputs in braces. Where their number varies, fill a vector and call apply(op_def<Op>(), &attrs, inputs): g++ 12
/// destroys too much when an element of a braced list inside `a ? b : c` throws.
template <class Op>
Tensors apply_all(const typename Op::Attrs& attrs, std::initializer_list<Tensor> inputs,
                  std::initializer_list<Into> into = {}) {
  return apply(op_def<Op>(), &attrs, std::span(inputs.begin(), inputs.size()), std::span(into.begin(), into.size()));
}
/// The same for ops with one output.
template <class Op>
Tensor apply(const typename Op::Attrs& attrs, std::initializer_list<Tensor> inputs, const Into& into = {}) {
  return std::move(apply_all<Op>(attrs, inputs, {into})[0]);
}
/// The same for ops with one input, which is then not copied into a list.
template <class Op>
Tensor apply(const typename Op::Attrs& attrs, const Tensor& input, const Into& into = {}) {
  return std::move(apply(op_def<Op>(), &attrs, std::span(&input, 1), std::span(&into, 1))[0]);
}

/// Attributes of ops that have none.
struct NoAttrs {};

}  // namespace sheaf
