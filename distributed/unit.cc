// One rank's share of a unit, from the module's side: entering gathers, leaving discards. (The backward: unit_gradients.cc.)
#include "sheaf/distributed/unit.h"

#include <algorithm>

#include "sheaf/autograd/ops.h"
#include "sheaf/distributed/unit_ops.h"
#include "sheaf/kernels/dispatch.h"

namespace sheaf {

Unit::Unit(std::string name, std::vector<LeafSpec> leaves, const UnitOptions& options, std::shared_ptr<GatherSchedule> schedule)
    : UnitLayout(std::move(name), std::move(leaves), options), schedule_(std::move(schedule)) {
  values_.resize(leaves_.size());
  slots_.resize(leaves_.size());
  schedule_->add(this);
}

Unit::~Unit() { schedule_->remove(this); }

void Unit::allocate(Device device) {
  const DeviceScope scope(device);
  offloads_ = offload_ && kernels::is_for_gpu(device);
  for (FlatBuffer& b : buffers_) {
    const OutputSpec spec{.type = buffer_type(b, b.dtype, resting(b))};
    const OpDef& op = offloads_                  ? UnitOps::resting_on_host()
                      : gathers() || secondary() ? UnitOps::resting()
                                                 : UnitOps::resting_alone();
    b.shard = apply_typed(op, nullptr, {}, std::span(&spec, 1))[0];
  }
  allocated_ = true;
}

uint64_t Unit::version() const {
  uint64_t version = 0;
  for (const FlatBuffer& b : buffers_) version += b.shard.storage()->version();
  return version;
}

void Unit::zero_grad() {
  for (FlatBuffer& b : buffers_) b.grad = b.grad_scale = b.found_inf = b.squares = Tensor();
  pending_finishes_ = 0;
  has_failed_ = is_consumed_ = false;
  reduction_.forget();
}

// --- a module's scope ---

// The module is entered: from here on its parameters can be read. The schedule derives passes from scopes.
void Unit::enter() {
  schedule_->enter_scope();
  ++depth_;
  opened_by_vjp_ = false;
  try {
    ensure_open();
  } catch (...) {  // the scope was never entered
    --depth_;
    schedule_->leave_scope();
    throw;
  }
}

// With the last open scope the values become pending: the schedule discards them when it gathers another unit. What stays open: where
// the strategy keeps values for the backward, and between keep_open() and its end.
void Unit::leave() {
  --depth_;
  if (gathers() && depth_ == 0 && state_ == State::open) {
    const Recording* r = Recording::current();
    const bool keep = schedule_->closes_with_scope(*this) || (strategy_ < Strategy::full_shard && r && r->serial() == recording_) ||
                      (schedule_->keeps_open() && recording_ == 0);
    if (!keep) state_ = State::pending;
  }
  schedule_->leave_scope();
}

// Makes values_ usable in the current recording: gathered if the strategy shards, else views of the masters. What was opened in another
// recording is closed first: its tensors are not values of this tape.
void Unit::ensure_open() {
  if (!allocated_)
    fail<LifetimeError>("[unit] '", path_label(name_), "' has no memory yet: call materialize(model, device) first");
  Recording* r = Recording::current();
  const uint64_t serial = Recording::current_serial();
  const bool has_values = state_ != State::closed || is_cached();
  if (has_values && recording_ != serial) {
    if (depth_ > 1)  // an outer scope's values would be closed under it
      fail<LifetimeError>("[unit] '", path_label(name_), "' was gathered outside this recording: start a recording ",
                          "before entering the module");
    if (state_ == State::in_flight) schedule_->flush();
    else if (gathers()) discard_gathered();
  }
  if (gathers()) schedule_->use(*this);
  else if (recording_ != serial || !values_[0]) open_masters();
  else if (r) r->use_group(this);  // it may still be open from a micro-batch that has not been differentiated
}

// A parameter is read: inside its module's scope the value is there; elsewhere this opens the unit, and decides what closes it.
Tensor Unit::value(int index) {
  Recording* r = Recording::current();
  schedule_->look();
  const bool usable = state_ == State::open && recording_ == Recording::current_serial();
  if (!usable || !values_[index]) {
    ensure_open();
    // Used outside its scope: stays open until the scope around the use ends. A reverse pass closes units itself.
    if (gathers() && depth_ == 0 && !(caches_gathered() && r) && !schedule_->keeps_open()) {
      opened_by_vjp_ = r && r->in_backward();
      if (!opened_by_vjp_ && schedule_->close_with_scope(*this)) note_holders();
    }
  } else if (r) {
    r->use_group(this);  // opened before, perhaps for another micro-batch or before a derivative, by a scope that is still open
  }
  return values_[index];
}

// Outside of all scopes `a.weight - b.weight` converts both operands before the op runs: the gather of one must not discard the
// other. So a unit that was opened there stays open while its values are held, as in any C++ expression.
void Unit::note_holders() {
  if (!holders_.empty()) return;
  for (const Tensor& t : values_) holders_.push_back(t.holders());
}

bool Unit::values_in_use() const {
  for (size_t i = 0; i < holders_.size(); ++i)
    if (values_[i] && values_[i].holders() > holders_[i]) return true;
  return false;
}

std::vector<Tensor> Unit::gather_sources() {
  if (secondary()) return take_copies();
  // Casts that are not a gather's input are kept for the next micro-batch: its forward would create all of them again before memory
  // peaks.
  const bool casts = std::ranges::any_of(buffers_, [](const FlatBuffer& b) { return b.compute != b.dtype; });
  return casts && !gathers() && Recording::current() ? take_copies() : masters_for_compute();
}

std::vector<Tensor> Unit::masters_for_compute() const {
  std::vector<Tensor> out;
  Recording* r = Recording::current();
  for (const FlatBuffer& b : buffers_) {
    if (r) r->leaf(b.shard, offloads_ ? b.name + " in the host's memory" : b.name);
    out.push_back(b.shard);
  }
  if ((gathers() || secondary()) && mesh_->num_axes() > 1) {  // the replicas diverge here: I → R, which moves nothing
    std::vector<OutputSpec> specs;
    for (const FlatBuffer& b : buffers_) {
      Layout layout = whole(b).with(axis_, b.shard.layout()[axis_]);
      if (secondary()) layout[secondary_axis_] = b.shard.layout()[secondary_axis_];
      specs.push_back({.type = buffer_type(b, b.dtype, layout), .into = b.shard});
    }
    const UnitOps::Attrs attrs{axis_, buffers_.size()};
    const Tensors opened = apply_typed(UnitOps::open(), &attrs, out, specs);
    out.assign(opened.begin(), opened.end());
  }
  const OpDef& onload = alone(axis_) && !secondary() ? UnitOps::onload_values() : UnitOps::onload_shard();
  for (size_t i = 0; i < out.size(); ++i) {
    const FlatBuffer& b = buffers_[i];
    const OpDef& made = offloads_ ? onload : sends_blocks(b) ? UnitOps::quantize_shard() : UnitOps::cast_shard();
    if (is_made_for_gather(b)) out[i] = UnitOps::made_by(made, nullptr, out[i], sent_type(b, out[i].layout()));
  }
  return out;
}

std::vector<OutputSpec> Unit::gathered_specs() const {
  std::vector<OutputSpec> specs;
  for (const FlatBuffer& b : buffers_) specs.push_back({.type = buffer_type(b, b.compute, whole(b))});
  for (int i = 0; i < num_leaves(); ++i) {
    const auto [b, position] = where_[i];
    const DType dtype = buffers_[b].compute;
    specs.push_back({value_type(i, dtype), {}, b,
                     buffers_[b].layout.offsets[position] * static_cast<int64_t>(size_of(dtype))});
  }
  return specs;
}

// Without communication the masters are the values: I → R and S → R on one rank move nothing.
void Unit::open_masters() {
  const PathScope path(name_);
  bind_views_into(gather_sources());
  if (Recording* r = Recording::current()) r->use_group(this);
}

void Unit::open_cached() {
  const PathScope path(name_);
  bind_views_into(gathered_);
}

// The values are placed in existing buffers.
void Unit::bind_views_into(std::span<const Tensor> buffers) {
  std::vector<OutputSpec> specs = gathered_specs();
  for (size_t b = 0; b < buffers_.size(); ++b) specs[b].into = buffers[b];
  const UnitOps::Attrs attrs{axis_, buffers_.size()};
  const Tensors outputs = apply_typed(UnitOps::open(), &attrs, buffers, specs);
  take_values(std::span(outputs).subspan(buffers_.size()));
  recording_ = Recording::current_serial();
  state_ = State::open;
  if (Recording::current()) bind();
}

void Unit::take_values(std::span<const Tensor> values) {
  std::ranges::copy(values, values_.begin());
  for (size_t i = 0; i < values.size(); ++i) values_[i].mutable_impl().is_parameter = leaves_[i].trainable;
}

void Unit::bind() {
  const std::span<const Tensor> none;  // none exist before gathered blocks are unpacked
  Recording::current()->bind_group(shared_from_this(), values_[0] ? values_ : none);
}

// One node: the masters, cast if needed → whole buffers, and the parameters inside them. Their readers wait for the lane.
void Unit::issue_gather(bool prefetched) {
  const PathScope path(name_);
  Recording* r = Recording::current();
  const std::vector<Tensor> shards = gather_sources();
  if (r) {
    const bool mirror = mirror_next_ && (prefetched || r->in_backward());
    r->flag_next((prefetched ? Node::kPrefetched : 0) | (mirror ? Node::kMirror : 0));
  }
  const UnitOps::Attrs attrs{axis_, buffers_.size()};
  std::vector<OutputSpec> specs;
  if (!is_packed()) specs = gathered_specs();
  else for (const FlatBuffer& b : buffers_) specs.push_back({.type = sent_type(b, whole(b))});
  if (alone(axis_))  // a single rank's buffers, copied from the host, are the whole
    for (size_t b = 0; b < buffers_.size(); ++b) specs[b].into = shards[b];
  const Tensors outputs = apply_typed(alone(axis_) ? UnitOps::open() : UnitOps::all_gather(), &attrs, shards, specs);
  const auto split = outputs.begin() + buffers_.size();
  gathered_.assign(outputs.begin(), split);
  if (!alone(axis_) && !secondary())
    for (size_t b = 0; b < buffers_.size(); ++b)
      if (is_made_for_gather(buffers_[b])) gather_inputs_.push_back(shards[b]);
  take_values(std::span(split, outputs.end()));
  recording_ = Recording::current_serial();
  state_ = State::in_flight;
  if (r) bind();
}

void Unit::settle_and_unpack() {
  complete_gather();
  unpack();
}

// Casts lent to the gather are returned by a node where the unit is opened, not whenever the lane is done.
void Unit::complete_gather() {
  const bool copies_are_done = caches_gathered() && recording_ != 0 && !copies_.buffers.empty();  // cached values are not gathered again
  if (gather_inputs_.empty() && !copies_are_done) return;
  const PathScope path(name_);
  std::vector<Tensor> lent = gathered_;
  lent.insert(lent.end(), gather_inputs_.begin(), gather_inputs_.end());
  if (copies_are_done) lent.insert(lent.end(), copies_.buffers.begin(), copies_.buffers.end());
  const UnitOps::Attrs attrs{axis_, gathered_.size()};
  if (const Recording* r = Recording::current(); r && r->serial() == recording_)
    apply_typed(UnitOps::complete(), &attrs, lent, {});
  else
    execute_node(UnitOps::complete(), &attrs, lent, {});
  gather_inputs_.clear();
  if (copies_are_done) drop_copies();
}

void Unit::discard_gathered() {
  if (gathered_.empty()) return;
  const PathScope path(name_);
  // The recording that knows the buffers; another one may have begun inside it.
  if (const Recording* r = Recording::living(recording_)) mirror_next_ = r->phase() == Phase::forward;
  UnitOps::discard_buffers(axis_, gathered_, recording_);
  gathered_.clear();
  gather_inputs_.clear();
  holders_.clear();
  std::fill(values_.begin(), values_.end(), Tensor());
  state_ = State::closed;
  opened_by_vjp_ = false;
}

// --- where passes and recordings end ---

void Unit::close_views() {
  if (gathers()) return;
  std::fill(values_.begin(), values_.end(), Tensor());
  state_ = State::closed;
}

void Unit::release_after_gradient() {
  if (opened_by_vjp_ && depth_ == 0 && state_ == State::open) state_ = State::pending;
}

void Unit::close_for_change() {
  schedule_->flush();
  if (gathers()) discard_gathered();
  close_views();
  drop_copies();
}

// In the middle of a backward that no longer needs it, and has opened others.
void Unit::close_for_update() {
  if (state_ == State::in_flight) return close_for_change();
  if (gathers()) discard_gathered();
  close_views();
  drop_copies();
}

void Unit::backward_ended() {
  complete_reduction();
  close_views();  // the next micro-batch opens the unit again
  // Copies that a gather starts from were dropped where the unit's backward ended; another gather may be pending by now.
  if (const Recording* r = Recording::current(); !gathers() && r && r->is_last_micro_batch_of(this)) drop_copies();
}

void Unit::drop_slots() {
  slot_buffers_.clear();
  std::fill(slots_.begin(), slots_.end(), Tensor());
}

void Unit::recording_ended(uint64_t recording) {
  if (gathers() || secondary()) schedule_->flush();
  if (gathers()) discard_gathered();
  close_views();
  drop_copies();
  recording_ = 0;
  mirror_next_ = false;
  if (slots_of_ == recording) drop_slots();
  reduction_.recording_ended(recording);
}

}  // namespace sheaf
