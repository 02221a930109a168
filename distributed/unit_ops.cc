#include "sheaf/distributed/unit_ops.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "sheaf/autograd/copy_lane.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/work.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/copy.h"
#include "sheaf/kernels/dispatch.h"
#include "sheaf/kernels/quantize.h"

namespace sheaf {
namespace {

MeshRuntime& runtime_of(const Type& t) {
  MeshRuntime* runtime = RankContext::current().runtime(t.layout.mesh());
  if (!runtime) fail<PlacementError>("[unit] this rank has not joined mesh ", t.layout.mesh()->to_string());
  return *runtime;
}

// Elements of each rank's slice.
std::vector<int64_t> chunks(const Type& sharded, int axis) {
  const OwnershipMap& map = sharded.layout[axis].map();
  const Shape whole = sharded.layout.with(axis, Placement::replicate()).local_shape(sharded.shape);
  const int64_t row = map.is_flat() || whole.numel() == 0 ? 1 : whole.numel() / whole[map.dim()];
  const int n = sharded.layout.mesh()->size(axis);
  std::vector<int64_t> counts;
  for (int r = 0; r < n; ++r) counts.push_back(map.owned_size(r, n, whole) * row);
  return counts;
}

// Issues call(lane, b) for every buffer b of a unit. On meta there is nothing to move; a simulated lane still counts.
template <class Call>
void on_lane(Communicator& lane, const UnitOps::Attrs& a, Execute& c, Call&& call) {
  if (c.device().is_meta() && lane.kind() != "simulated") return;
  c.stream();  // the communicator looks at where the buffers are
  Event done;
  const auto lend = [&] {  // one lane, in order: the last event covers all calls
    if (!c.device().is_meta()) c.completes_with(done);
  };
  for (int b = 0; b < a.buffers; ++b) try {
      done = call(lane, b);
    } catch (...) {  // earlier calls are still writing
      if (b > 0) lend();
      throw;
    }
  lend();
}

/// An input's memory, which the copy lane may still be filling: the collective waits for it, not the rank's ops.
const void* on_its_way(Communicator& lane, const Execute& c, int b) {
  const Tensor& from = c.input_tensor(b);
  const Event* filling = from.storage()->filling();
  if (!filling || !from.device().is_cuda()) return c.input(b).data;
  lane.wait_before_next_call(*filling);
  return from.view_unsynced().data;
}

template <MemoryKind kind>
struct Resting {
  static constexpr const char* kName = "resting";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = HeldFor::masters;
  static constexpr MemoryKind kMemory = kind;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) { SHEAF_ON_DEVICE(c.stream(), fill, c.output(0), 0.0); }
};

template <MemoryKind kind, HeldFor held_for>
struct Cast {
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = held_for;
  static constexpr MemoryKind kMemory = kind;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) { SHEAF_ON_DEVICE(c.stream(), copy, c.input(0), c.output(0)); }
};
struct CastShard : Cast<MemoryKind::wire, HeldFor::gathered> {
  static constexpr const char* kName = "cast_shard";
};
struct CastGradient : Cast<MemoryKind::wire, HeldFor::whole_gradients> {
  static constexpr const char* kName = "cast_gradient";
};
struct CastReduced : Cast<MemoryKind::normal, HeldFor::gradients> {
  static constexpr const char* kName = "cast_reduced";
};

void to_blocks(const Stream& stream, const Execute& c, std::optional<uint32_t> key) {
  SHEAF_ON_DEVICE(stream, to_int8_blocks, c.input(0), key, c.output(0));
}

struct QuantizeShard {
  static constexpr const char* kName = "quantize_shard";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = HeldFor::gathered;
  static constexpr MemoryKind kMemory = MemoryKind::wire;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) { to_blocks(c.stream(), c, std::nullopt); }
};

// Equal values of two ranks must have independent errors: each rank rounds with its own key, its coordinate on the axis along which
// they are summed, since ranks that hold the same along other axes must send the same. For sums, whose blocks are on ranks that
// depend on the unit's layout, the key is 0.
struct QuantizeGradient {
  static constexpr const char* kName = "quantize_gradient";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = HeldFor::whole_gradients;
  static constexpr MemoryKind kMemory = MemoryKind::wire;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs& a, Execute& c) {
    const MeshSpec* mesh = c.input_type(0).layout.mesh();
    const int place = a.axis < 0 ? 0 : RankContext::current().coordinate(mesh, a.axis) + 1;
    to_blocks(c.stream(), c, static_cast<uint32_t>(place) * 0x85ebca6bu);
  }
};

struct SumOfBlocks {
  static constexpr const char* kName = "sum_of_blocks";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = HeldFor::gradients;
  using Attrs = UnitOps::Rows;
  static void execute(const Attrs& a, Execute& c) { SHEAF_ON_DEVICE(c.stream(), sum_of_blocks, c.input(0), a.count, c.output(0)); }
};

// Of kind redistribute, like the ops that open a unit: its further outputs are the leaves' values.
struct Unpack {
  static constexpr const char* kName = "unpack";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr HeldFor kHeldFor = HeldFor::gathered;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs& a, Execute& c) {
    if (c.device().is_meta()) return;
    const Stream stream = c.stream();
    for (int b = 0; b < a.buffers; ++b) {
      if (c.input_type(b).dtype == kU8 && c.output_type(b).dtype != kU8)
        SHEAF_ON_DEVICE(stream, dequantize, c.input(b), BlockFormat::int8, c.output(b));
      else SHEAF_ON_DEVICE(stream, copy, c.input(b), c.output(b));
    }
  }
  static void work(const Attrs& a, WorkOf& w) {  // of blocks; the values are in the buffers
    double read = 0, made = 0, values = 0;
    for (int b = 0; b < a.buffers; ++b) {
      read += static_cast<double>(w.input(b).numel());
      made += static_cast<double>(w.output(b).numel());
    }
    for (int o = a.buffers; o < w.num_outputs(); ++o) values += static_cast<double>(w.output(o).numel());
    w.work.bytes = read + (w.work.bytes - read) * made / (made + values);
  }
};

// A kernel that casts reads its input over the bus.
template <MemoryKind kind>
struct OnloadShard {
  static constexpr const char* kName = "onload_shard";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = HeldFor::gathered;
  static constexpr MemoryKind kMemory = kind;
  static constexpr Lane kLane = Lane::copy;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    const DType from = c.input_type(0).dtype, to = c.output_type(0).dtype;
    if (from == to) return copy_on_copy_stream(c);
    on_copy_stream(c, &Gpu::copies, [&](Gpu&, const Stream& stream) {
      if (to == kU8) to_blocks(stream, c, std::nullopt);
      else SHEAF_ON_DEVICE(stream, copy, c.input(0), c.output(0));
    });
  }
};

struct OffloadGradient {
  static constexpr const char* kName = "offload_gradient";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = HeldFor::gradients;
  static constexpr MemoryKind kMemory = MemoryKind::host;
  static constexpr Lane kLane = Lane::copy;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) {
    if (c.num_inputs() == 1) return copy_on_copy_stream(c, &Gpu::d2h);
    on_copy_stream(c, &Gpu::d2h, [&](Gpu&, const Stream& stream) { SHEAF_ON_DEVICE(stream, add_into, c.output(0), c.input(0)); });
  }
};

template <MemoryKind kind, Lane lane_of_axis = Lane::gather, HeldFor held_for = HeldFor::gathered>
struct AllGather {
  static constexpr const char* kName = "all_gather";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr HeldFor kHeldFor = held_for;
  static constexpr MemoryKind kMemory = kind;
  static constexpr Lane kLane = lane_of_axis;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs& a, Execute& c) {
    MeshRuntime& runtime = runtime_of(c.input_type(0));
    Communicator& of_axis = kLane == Lane::gather ? runtime.gather_lane(a.axis) : runtime.reduce_lane(a.axis);
    on_lane(of_axis, a, c, [&](Communicator& lane, int b) {
      return lane.all_gather(on_its_way(lane, c, b), c.output(b).data, chunks(c.input_type(b), a.axis), c.input_type(b).dtype,
                             PathScope::current());
    });
  }
};

struct Open {
  static constexpr const char* kName = "open";
  static constexpr OpKind kKind = OpKind::redistribute;
  using Attrs = UnitOps::Attrs;
};

struct Discard {
  static constexpr const char* kName = "discard";
  static constexpr OpKind kKind = OpKind::discard;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs&, Execute& c) {
    for (int b = 0; b < c.num_inputs(); ++b)
      c.input_tensor(b).storage()->discard(
          str("the parameters of unit '", path_label(PathScope::current()), "' were gathered and have been discarded; "
              "use them inside their module's scope, or through the Parameter, which gathers them again"));
  }
};

struct SlotMemory {
  static constexpr const char* kName = "slot_memory";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = HeldFor::whole_gradients;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) { c.stream(); }
  static void work(const Attrs&, WorkOf& w) { w.work.bytes = 0; }
};

template <MemoryKind kind>
struct GradSlots {
  static constexpr const char* kName = "grad_slots";
  static constexpr bool kOfUnits = true;
  static constexpr HeldFor kHeldFor = kind == MemoryKind::host_wire ? HeldFor::gradients : HeldFor::whole_gradients;
  static constexpr MemoryKind kMemory = kind;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs& a, Execute& c) {  // padding between and after the slots is sent too: zero it
    const Stream stream = c.stream();
    for (int b = 0; b < a.buffers; ++b) {
      char* base = static_cast<char*>(c.output(b).data);
      const auto zero = [&](int64_t begin, int64_t end) {
        if (end > begin) SHEAF_ON_DEVICE(stream, fill, View::dense(base + begin, kU8, {end - begin}), 0.0);
      };
      std::vector<std::pair<int64_t, int64_t>> used;
      for (int o = a.buffers; o < c.num_outputs(); ++o)
        if (const Tensor& t = c.output_tensor(o); t.storage() == c.output_tensor(b).storage())
          used.emplace_back(t.byte_offset(), t.byte_offset() + t.local_bytes());
      std::sort(used.begin(), used.end());
      int64_t at = 0;
      for (const auto& [begin, end] : used) {
        zero(at, begin);
        at = end;
      }
      zero(at, c.output_tensor(b).local_bytes());
    }
  }
  static void work(const Attrs&, WorkOf& w) { w.work.bytes = 0; }  // except for the padding
};

struct Zero {
  static constexpr const char* kName = "zero";
  static constexpr bool kOfUnits = true;
  using Attrs = NoAttrs;
  static void execute(const Attrs&, Execute& c) { SHEAF_ON_DEVICE(c.stream(), fill, c.output(0), 0.0); }
};

struct ReduceScatter {
  static constexpr const char* kName = "reduce_scatter";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr HeldFor kHeldFor = HeldFor::gradients;
  static constexpr Lane kLane = Lane::reduce;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs& a, Execute& c) {
    on_lane(runtime_of(c.input_type(0)).reduce_lane(a.axis), a, c, [&](Communicator& lane, int b) {
      return lane.reduce_scatter(c.input(b).data, c.output(b).data, chunks(c.output_type(b), a.axis),
                                 c.input_type(b).dtype, PathScope::current());
    });
  }
};

struct Exchange {
  static constexpr const char* kName = "all_to_all";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr HeldFor kHeldFor = HeldFor::whole_gradients;
  static constexpr Lane kLane = Lane::reduce;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs& a, Execute& c) {
    on_lane(runtime_of(c.input_type(0)).reduce_lane(a.axis), a, c, [&](Communicator& lane, int b) {
      const Type &rows = c.input_type(b), &parts = c.output_type(b);
      const int n = lane.size();
      std::vector<int64_t> send(static_cast<size_t>(n), 0), receive(static_cast<size_t>(n), parts.local_shape().numel() / n);
      const Shape whole = rows.layout.with(a.axis, Placement::replicate()).local_shape(rows.shape);
      const OwnershipMap& cut = parts.layout[a.axis].map();
      const int64_t row = whole.numel() == 0 ? 0 : whole.numel() / n / whole[cut.dim()];
      for (int r = 0; r < n; ++r) send[static_cast<size_t>(r)] = cut.owned_size(r, n, whole) * row;
      return lane.all_to_all(c.input(b).data, send, c.output(b).data, receive, rows.dtype, PathScope::current());
    });
  }
};

struct AllReduce {
  static constexpr const char* kName = "all_reduce";
  static constexpr OpKind kKind = OpKind::redistribute;
  static constexpr Lane kLane = Lane::reduce;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs& a, Execute& c) {
    on_lane(runtime_of(c.input_type(0)).reduce_lane(a.axis), a, c, [&](Communicator& lane, int b) {
      return lane.all_reduce(c.input(b).data, c.input_type(b).local_shape().numel(), c.input_type(b).dtype, Reduction::sum,
                             PathScope::current());
    });
  }
};

struct Complete {
  static constexpr const char* kName = "complete";
  static constexpr bool kOfUnits = true;
  using Attrs = UnitOps::Attrs;
  static void execute(const Attrs&, Execute& c) {
    for (int i = 0; i < c.num_inputs(); ++i) c.input_tensor(i).storage()->settle();
  }
};

}  // namespace

const OpDef& UnitOps::resting() { return op_def<Resting<MemoryKind::wire>>(); }
const OpDef& UnitOps::resting_alone() { return op_def<Resting<MemoryKind::normal>>(); }
const OpDef& UnitOps::resting_on_host() { return op_def<Resting<MemoryKind::host>>(); }
const OpDef& UnitOps::quantize_shard() { return op_def<QuantizeShard>(); }
const OpDef& UnitOps::unpack() { return op_def<Unpack>(); }
const OpDef& UnitOps::quantize_gradient() { return op_def<QuantizeGradient>(); }
const OpDef& UnitOps::exchange() { return op_def<Exchange>(); }
const OpDef& UnitOps::sum_of_blocks() { return op_def<SumOfBlocks>(); }
const OpDef& UnitOps::gather_blocks() { return op_def<AllGather<MemoryKind::landing, Lane::reduce, HeldFor::gradients>>(); }
const OpDef& UnitOps::cast_shard() { return op_def<CastShard>(); }
const OpDef& UnitOps::onload_shard() { return op_def<OnloadShard<MemoryKind::wire>>(); }
const OpDef& UnitOps::onload_values() { return op_def<OnloadShard<MemoryKind::normal>>(); }
const OpDef& UnitOps::all_gather() { return op_def<AllGather<MemoryKind::landing>>(); }
const OpDef& UnitOps::gather_copies() { return op_def<AllGather<MemoryKind::wire>>(); }
const OpDef& UnitOps::open() { return op_def<Open>(); }
const OpDef& UnitOps::discard() { return op_def<Discard>(); }
const OpDef& UnitOps::grad_slots() { return op_def<GradSlots<MemoryKind::wire>>(); }
const OpDef& UnitOps::lasting_grad_slots() { return op_def<GradSlots<MemoryKind::host_wire>>(); }
const OpDef& UnitOps::slot_memory() { return op_def<SlotMemory>(); }
const OpDef& UnitOps::zero() { return op_def<Zero>(); }
const OpDef& UnitOps::cast_gradient() { return op_def<CastGradient>(); }
const OpDef& UnitOps::cast_reduced() { return op_def<CastReduced>(); }
const OpDef& UnitOps::reduce_scatter() { return op_def<ReduceScatter>(); }
const OpDef& UnitOps::all_reduce() { return op_def<AllReduce>(); }
const OpDef& UnitOps::offload_gradient() { return op_def<OffloadGradient>(); }
const OpDef& UnitOps::complete() { return op_def<Complete>(); }

Tensor UnitOps::cast_by(const OpDef& cast, const Tensor& buffer, DType dtype) {
  Type type = buffer.type();
  type.dtype = dtype;
  return made_by(cast, nullptr, buffer, type);
}

Tensor UnitOps::made_by(const OpDef& op, const void* attrs, const Tensor& from, const Type& type) {
  const OutputSpec spec{.type = type};
  return apply_typed(op, attrs, std::span(&from, 1), std::span(&spec, 1))[0];
}

void UnitOps::discard_buffers(int axis, std::span<const Tensor> buffers, uint64_t recording) {
  const Attrs attrs{axis, buffers.size()};
  execute_node(discard(), &attrs, buffers, {});
  if (Recording* r = Recording::living(recording)) r->record(discard(), &attrs, buffers, {}, {});
}

void UnitOps::complete_results(int axis, std::span<const Tensor> results, std::span<const Tensor> lent) {
  std::vector<Tensor> all(results.begin(), results.end());
  all.insert(all.end(), lent.begin(), lent.end());
  const Attrs attrs{axis, results.size()};
  apply_typed(complete(), &attrs, all, {});
}

}  // namespace sheaf
