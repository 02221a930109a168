#include "sheaf/autograd/program.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "sheaf/autograd/arrangement.h"
#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/execute.h"
#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/profile.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

// Memory of a value and of everything placed in it, or of a node's workspace.
struct Program::Block {
  std::shared_ptr<Storage> storage;
  Lifetime life;
  bool host = false;  // host memory that a GPU uses
  bool workspace = false;
  int64_t offset = 0;
};

struct Program::Instruction {
  const OpDef* op;
  const void* attrs;
  const std::string* path;
  std::vector<Tensor> inputs;
  Tensors outputs;
  bool add;
  bool updates;  // outputs are placed in memory that outlives the step
  Storage* workspace = nullptr;
  Tensor sent = {};  // by the next node, with which this one is executed: see [Note: in pieces]
  int64_t sent_parts = 0;
  std::vector<Storage*> ended = {};  // filled by a lane; after this node the memory is reused
};

Program::~Program() = default;
Program::Program(Program&&) noexcept = default;
Program& Program::operator=(Program&&) noexcept = default;

// One pass through the tape.
struct Program::Builder {
  Program& program;
  const Tape& tape;
  std::vector<Tensor> values;
  std::unordered_map<const Storage*, size_t> block_of = {};
  std::unordered_map<const Storage*, std::vector<Tensor>> lent_for = {};  // by what a lane fills: what it reads
  std::vector<size_t> filled_by_lanes = {};  // indices into blocks_
  std::vector<NodeId> executed = {};         // by instruction

  void take_leaf(ValueId v, const Tensor& memory) {
    if (!memory) fail<LifetimeError>("[program] no value for leaf %", v, " (", tape.leaf_name(v), ")");
    if (!(memory.type() == tape.type(v)))
      fail<PlacementError>("[program] leaf %", v, " is ", memory.type(), ", recorded as ", tape.type(v));
    values[v] = memory;
    program.leaves_.emplace_back(v, memory);
  }

  // A lane reads what it was given until somebody waits for its results.
  void keep_lent(NodeId id, const Instruction& run) {
    for (const Tensor& t : run.inputs)
      if (const auto it = lent_for.find(t.storage().get()); it != lent_for.end()) {
        for (const Tensor& lent : it->second) live_until(lent, id);
        lent_for.erase(it);
      }
    if (run.op->lane == Lane::compute) return;
    for (const Tensor& t : run.outputs) lent_for[t.storage().get()] = run.inputs;
  }

  void add_node(NodeId id) {
    const Node& n = tape.node(id);
    const PathScope path(tape.path(n));
    Instruction run{n.op, tape.attrs(n), &tape.path(n), {}, {}, (n.flags & Node::kAdds) != 0, n.op->kind == OpKind::step};
    for (ValueId v : tape.inputs(n)) run.inputs.push_back(values[v]);
    const std::vector<OutputSpec> specs = specs_of(n);
    const Device device = detail::device_of(*n.op, run.inputs, specs);
    const auto fresh = [&](const Type& type, Device, MemoryKind where) {
      const Shape local = type.local_shape();
      const auto bytes = local.numel() * static_cast<int64_t>(size_of(type.dtype));
      if (n.op->lane != Lane::compute) filled_by_lanes.push_back(program.blocks_.size());
      return Tensor::over(add_block(id, device, bytes, where), 0, type, local, local.contiguous_strides());
    };
    bool views = false;
    run.outputs = detail::place_outputs(*n.op, run.attrs, run.inputs, specs, device, views, fresh);
    for (int o = 0; o < n.num_outputs; ++o) values[tape.output(n, o)] = run.outputs[o];
    for (const Tensor& t : run.inputs) live_until(t, id);
    for (const Tensor& t : run.outputs) live_until(t, id);
    keep_lent(id, run);
    if (views || !detail::runs_here(*n.op, run.inputs, specs)) return;
    if (n.op == &output_in_pieces_op() && redistribute_output(id, run)) return;
    if (n.op->workspace) {
      Execute execute(run.inputs, run.outputs);
      if (const int64_t bytes = detail::workspace_of(*n.op, run.attrs, execute); bytes > 0)
        run.workspace = add_block(id, device, bytes, MemoryKind::normal, /*workspace=*/true).get();
    }
    for (const Tensor& t : run.inputs) t.storage()->settle();  // from here on all of its pieces have come
    if (n.op == &in_pieces_op()) expect_pieces(run.attrs, run.inputs[0], run.outputs);
    executed.push_back(id);
    program.instructions_.push_back(std::move(run));
  }

  // The node before made what this one scatters: then it is executed there.
  bool redistribute_output(NodeId id, const Instruction& scatter) {
    if (executed.empty() || executed.back() != id - 1) return false;
    Instruction& product = program.instructions_.back();
    if (!output_pieces(tape, id - 1)) return false;
    product.sent = scatter.outputs[0];
    product.sent_parts = static_cast<const OutputInPieces*>(scatter.attrs)->parts;
    program.blocks_[block_of.at(product.sent.storage().get())].life.first = id - 1;
    Execute run(product.inputs, product.outputs);
    const int64_t bytes = detail::workspace_and_redistribute(*product.op, product.attrs, run, product.sent, product.sent_parts);
    if (!product.workspace || product.workspace->bytes() < bytes) {
      if (product.workspace) program.blocks_[block_of.at(product.workspace)].life.bytes = 0;  // another one replaces it
      if (bytes > 0) product.workspace = add_block(id - 1, run.device(), bytes, MemoryKind::normal, /*workspace=*/true).get();
    }
    return true;
  }

  // Where the tape places outputs: in fresh memory, in that of an earlier output, or of an earlier value.
  std::vector<OutputSpec> specs_of(const Node& n) const {
    std::vector<OutputSpec> specs(n.num_outputs);
    for (int o = 0; o < n.num_outputs; ++o) {
      const ValueId v = tape.output(n, o), first = tape.output(n);
      const Value& value = tape.value(v);
      specs[o].type = tape.type(v);
      if (value.base < 0) continue;
      if (value.base >= first && value.base < v) {
        specs[o].within = value.base - first;
        specs[o].byte_offset = value.byte_offset;
      } else {
        const bool whole = value.byte_offset == 0 && tape.type(value.base) == specs[o].type;  // then it may be a strided view
        specs[o].into = whole ? values[value.base] : Tensor::view_into(values[value.base], specs[o].type, value.byte_offset);
      }
    }
    return specs;
  }

  std::shared_ptr<Storage> add_block(NodeId id, Device device, int64_t bytes, MemoryKind where, bool workspace = false) {
    std::vector<Block>& blocks = program.blocks_;
    if (!blocks.empty() && !(blocks[0].storage->device() == device))
      fail<ConfigError>("[program] [", tape.op_name(tape.node(id)), "] ", path_label(PathScope::current()), " computes on ",
                        device.to_string(), ", what comes before it on ", blocks[0].storage->device().to_string());
    auto storage = std::make_shared<Storage>(device, bytes);
    block_of.emplace(storage.get(), blocks.size());
    const bool host = where == MemoryKind::host;
    blocks.push_back({storage, {id, id, bytes}, host, workspace});
    program.wire_ = program.wire_ || (where != MemoryKind::normal && !host);
    return storage;
  }

  void live_until(const Tensor& t, NodeId id) {
    const auto live = [&](const Storage* s) {
      if (const auto it = block_of.find(s); it != block_of.end()) program.blocks_[it->second].life.last = id;
    };
    live(t.storage().get());
    for (const auto& lent : t.storage()->lent()) live(lent.get());
  }

  void end_lanes() {
    for (const Block& b : program.blocks_) b.storage->settle();
    for (const size_t b : filled_by_lanes) {
      const Block& block = program.blocks_[b];
      const auto next = std::ranges::upper_bound(executed, block.life.last);
      if (next == executed.begin()) continue;  // executed on other ranks only
      program.instructions_[next - executed.begin() - 1].ended.push_back(block.storage.get());
    }
  }
};

Program::Program(Tape tape, const std::function<Tensor(ValueId)>& leaf, std::span<const ValueId> wanted)
    : tape_(std::move(tape)), wanted_ids_(wanted.begin(), wanted.end()) {
  Builder builder{*this, tape_, std::vector<Tensor>(tape_.num_values())};
  for (NodeId id = 0; id < tape_.num_nodes(); ++id) {
    const Node& n = tape_.node(id);
    if (n.op) builder.add_node(id);
    else builder.take_leaf(tape_.output(n), leaf(tape_.output(n)));
  }
  for (ValueId v : wanted) {
    if (!builder.values[v]) fail<LifetimeError>("[program] no node makes the wanted value %", v, " ", tape_.type(v));
    wanted_.push_back(builder.values[v]);
    builder.live_until(wanted_.back(), tape_.num_nodes());
  }
  builder.end_lanes();
  std::ranges::sort(leaves_, {}, [](const auto& l) { return l.first; });
  arrange_blocks();
}

void Program::arrange_blocks() {
  for (const bool host : {true, false}) {
    std::vector<Lifetime> lives;
    for (const Block& b : blocks_)
      if (b.host == host) lives.push_back(b.life);
    const Arrangement arrangement = arrange(lives);
    auto offset = arrangement.offsets.begin();
    for (Block& b : blocks_)
      if (b.host == host) b.offset = *offset++;
    (host ? host_bytes_ : arena_bytes_) = arrangement.total;
    if (!host) least_bytes_ = most_alive(lives);
  }
}

// An arena is allocated as a whole, before a run: which values will hold which part of it, and when, is logged at once.
void Program::note_holders(MemoryLog& log) const {
  std::vector<std::vector<const Block*>> first(tape_.num_nodes() + 1), last(tape_.num_nodes() + 1);
  for (const Block& b : blocks_) first[b.life.first].push_back(&b), last[b.life.last].push_back(&b);
  const auto pass_on = [&](const Block& b, bool back) {
    const Node& n = tape_.node(b.life.first);
    const MemoryUse use(b.workspace ? HeldFor::temporaries : held_for(*n.op, n.phase, n.flags), n.op->name, tape_.path(n));
    const MemoryLog::HolderId holder = log.holder(), arena = (b.host ? host_arena_ : arena_)->holder_in(log);
    log.pass_on(*RankContext::current().memory(b.storage->device(), b.host ? MemoryKind::host : MemoryKind::normal), b.life.bytes,
                back ? holder : arena, back ? arena : holder);
  };
  for (NodeId id = 0; id <= tape_.num_nodes(); ++id) {
    for (const Block* b : first[id]) pass_on(*b, /*back=*/false);
    for (const Block* b : last[id]) pass_on(*b, /*back=*/true);
  }
}

void Program::reserve() {
  if (arena_ || blocks_.empty()) return;
  const Device device = blocks_[0].storage->device();
  RankContext::current().memory(device)->give_back();  // eager ops may hold memory of another kind
  const MemoryUse use(HeldFor::idle, "program", "");
  arena_ = Storage::allocate(device, arena_bytes_, wire_ ? MemoryKind::wire : MemoryKind::normal);
  if (host_bytes_) host_arena_ = Storage::allocate(device, host_bytes_, MemoryKind::host);
  if (device.is_meta()) return;
  for (const Block& b : blocks_) b.storage->place((b.host ? host_arena_ : arena_)->data() + b.offset);
}

std::vector<Tensor> Program::run() {
  reserve();
  if (const auto& log = RankContext::current().memory_log) note_holders(*log);
  for (const Instruction& i : instructions_) {
    const PathScope path(*i.path);
    detail::located([&] { execute(i); });
  }
  std::vector<Tensor> out;
  for (const Tensor& t : wanted_) out.push_back(t.device().is_meta() ? Tensor::empty(t.type(), t.device()) : t.clone());
  return out;
}

void Program::execute(const Instruction& i) {
  Execute run(i.inputs, i.outputs);
  run.add = i.add, run.in_program = true;
  if (i.workspace) run.workspace = {i.workspace->data(), static_cast<size_t>(i.workspace->bytes())};
  const bool meta = run.device().is_meta();
  if (i.op->kind != OpKind::discard && i.op->execute && (!meta || i.op->kind == OpKind::redistribute || i.sent)) {
    run.will_execute(i.op->name);
    const ProfileSpan span(Profile::kCompute, i.op->name, *i.path);
    if (i.sent) detail::execute_and_redistribute(*i.op, i.attrs, run, i.sent, i.sent_parts);
    else detail::execute(*i.op, i.attrs, run);
  }
  if (i.updates)
    for (const Tensor& t : i.outputs) t.storage()->changed();
  for (Storage* s : i.ended) s->settle();
}

Program Program::with_tape(Tape tape, std::span<const ValueId> also) const {
  if (const std::vector<Finding> found = check_tape(tape); !found.empty())
    fail<LifetimeError>("[program] this tape would not compute what it says, in ", found.size(), found.size() == 1 ? " place" : " places", "; ",
                        found[0]);
  std::vector<ValueId> wanted = wanted_ids_;
  wanted.insert(wanted.end(), also.begin(), also.end());
  return Program(std::move(tape), [this](ValueId v) { return leaf(v); }, wanted);
}

const Tensor& Program::leaf(ValueId v) const {
  const auto it = std::ranges::lower_bound(leaves_, v, {}, [](const auto& l) { return l.first; });
  if (it == leaves_.end() || it->first != v) fail<LifetimeError>("[program] %", v, " is no leaf");
  return it->second;
}

std::map<ValueId, ValueId> Program::leaves_of_same_memory() const {
  std::map<const Storage*, ValueId> first;
  std::map<ValueId, ValueId> same;
  for (const auto& [v, memory] : leaves_) same[v] = first.try_emplace(memory.storage().get(), v).first->second;
  return same;
}

ValueId memory_of(const Tape& tape, const std::map<ValueId, ValueId>& same, ValueId v) {
  const ValueId whole = tape.whole_of(v);
  const auto it = same.find(whole);
  return it == same.end() ? whole : it->second;
}

std::vector<int64_t> Program::alive_bytes() const {
  std::vector<int64_t> alive(tape_.num_nodes() + 2);
  for (const Block& b : blocks_) {
    if (b.host) continue;
    alive[b.life.first] += b.life.bytes;
    alive[b.life.last + 1] -= b.life.bytes;
  }
  std::partial_sum(alive.begin(), alive.end(), alive.begin());
  alive.resize(tape_.num_nodes());
  return alive;
}

void Program::release() {
  for (const Block& b : blocks_) b.storage->settle();  // after a run that failed
  if (!arena_) return;
  const Device device = arena_->device();
  arena_ = host_arena_ = nullptr;
  RankContext::current().memory(device)->give_back();
}

std::vector<Tensor> replay(const Tape& tape, const std::function<Tensor(ValueId)>& leaf,
                           std::span<const ValueId> wanted) {
  return Program(tape, leaf, wanted).run();
}

}  // namespace sheaf
