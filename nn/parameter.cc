#include "sheaf/nn/parameter.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "sheaf/autograd/ops.h"
#include "sheaf/core/transfer.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/nn/block_piece.h"
#include "sheaf/nn/module.h"
#include "sheaf/nn/unit_mark.h"

namespace sheaf {
namespace nn {
namespace {

// Why a leaf has no value: it was not materialized, or no SHEAF_FIELDS leads to it.
[[noreturn]] void no_value(const char* what, const std::string& name, DType dtype, const Shape& shape) {
  const Module* m = ModuleScope::current();
  std::string text = str("[", what, "] ");
  if (!name.empty()) text += "'" + name + "' ";
  text += str(dtype, shape);
  if (m) text += str(", used in ", m->description(), ",");
  if (name.empty() && m && ModuleAccess::is_listed(*m))
    fail<LifetimeError>(text, " has no memory: its field is missing from SHEAF_FIELDS (a base's fields are to be listed too), or it was made "
                              "after materialize()");
  fail<LifetimeError>(text, " has no memory: call materialize(model, device) first");
}

template <class S>
S& defined_state(const std::shared_ptr<S>& state, const char* what) {
  if (!state) fail<LifetimeError>("[", what, "] this one is absent (default-constructed)");
  return *state;
}

}  // namespace

Parameter::Parameter(const Shape& shape, Init init, DType dtype) : state_(std::make_shared<State>()) {
  check<DTypeError>(is_floating(dtype), "[parameter] ", dtype, shape, ": only floating types are trained");
  check<ShapeError>(byte_size(size_of(dtype), shape).has_value(), "[parameter] ", dtype, shape, ": a size is negative, or it has more bytes than ",
                    "can be counted");
  state_->shape = shape;
  state_->dtype = dtype;
  state_->init = init;
}

Parameter::State& Parameter::state() const { return defined_state(state_, "parameter"); }

Tensor Parameter::value() const {
  if (!state_) return {};
  if (state_->blocks) return dequantize(in_blocks(), *state_->blocks, state_->dtype);
  if (!state_->unit) no_value("parameter", state_->name, state_->dtype, state_->shape);
  const Tensor value = state_->unit->value(state_->index);
  return state_->constant_scopes ? stop_gradient(value) : value;
}

Tensor Parameter::in_blocks() const {
  if (!blocks()) fail<ConfigError>("[parameter] '", name(), "' ", dtype(), shape(), " does not rest in blocks");
  if (!unit()) no_value("parameter", name(), dtype(), shape());
  return unit()->value(index());
}

void Parameter::freeze() {
  if (unit()) fail<ConfigError>("[freeze] '", name(), "' is materialized: its unit is laid out; freeze before");
  state().trainable = false;
}

void Parameter::freeze_for_good() {
  freeze();
  state().frozen_for_good = true;
}

void Parameter::keep_exact() {
  if (unit()) fail<ConfigError>("[exact] '", name(), "' is materialized: its unit is laid out; say so before");
  check<ConfigError>(!blocks(), "[exact] '", name(), "' rests in blocks, which are not exact");
  state().exact = true;
}

void Parameter::quantize(BlockFormat format) {
  if (unit()) fail<ConfigError>("[quantize] '", name(), "' is materialized: its unit is laid out; quantize before");
  if (!state().frozen_for_good || exact())
    fail<ConfigError>("[quantize] '", name(), "' ", dtype(), shape(), exact() ? " is kept exact" : " is not frozen for good",
                      ": only what nothing changes rests in blocks");
  check<ShapeError>(shape().rank() > 0 && shape().back() % kBlockSize == 0, "[quantize] '", name(), "' ", shape(),
                    ": rows in blocks (", sheaf::name(format), ") are multiples of ", kBlockSize, " elements");
  state().blocks = format;
}

void Parameter::steer(double rate) {
  if (unit()) fail<ConfigError>("[steer] '", name(), "' is materialized: its unit is laid out; steer before");
  check<ConfigError>(rate > 0 && std::isfinite(rate), "[steer] '", name(), "' by ", rate, " a step: the rate must be above 0");
  state().steered = rate;
  keep_exact();
}

void Parameter::set_init(Init init) {
  if (unit()) fail<ConfigError>("[init] '", name(), "' is materialized: it has its values already");
  state().init = init;
  state().init_is_set = true;
}

void Parameter::set_cut(const OwnershipMap& map) {
  if (unit()) fail<ConfigError>("[cut] '", name(), "' is materialized: its unit is laid out; cut before");
  using Kind = OwnershipMap::Kind;
  if ((map.kind() != Kind::dim && map.kind() != Kind::parts) || map.is_inner())
    fail<PlacementError>("[cut] ", dtype(), shape(), " by ", Placement::shard(map), ": any number of ranks must be able to "
                         "share it, evenly along a dimension or parts of one", map.is_inner() ? ", and no other axis cuts it" : "");
  map.owned_size(0, 1, shape());  // throws if it does not fit
  state().cut = map;
}

void Parameter::set_matrices(const std::vector<int64_t>& rows) {
  if (shape().rank() != 2 || std::reduce(rows.begin(), rows.end()) != shape()[0])
    fail<ShapeError>("[matrices] ", dtype(), shape(), ": ", rows.size(), " matrices with ", std::reduce(rows.begin(), rows.end()), " rows");
  state().matrices = rows;
}

int Parameter::cut_axis() const { return unit() ? unit()->cut_axis(index()) : -1; }

void tie(Parameter& a, const Parameter& b) {
  if (!(a.shape() == b.shape()) || a.dtype() != b.dtype())
    fail<ShapeError>("[tie] '", a.name(), "' ", a.dtype(), a.shape(), " and '", b.name(), "' ", b.dtype(), b.shape(), " cannot be one parameter");
  const Parameter::Settings &of_a = a.state(), &of_b = b.state();
  const auto agree = [&](bool equal, const char* otherwise) {
    check<ConfigError>(equal, "[tie] '", a.name(), "' and '", b.name(), "' ", b.dtype(), b.shape(), " would be one parameter, but ", otherwise);
  };
  agree(of_a.trainable == of_b.trainable, "only one of them is frozen: freeze() both, or after tie()");
  agree(of_a.frozen_for_good == of_b.frozen_for_good, "only one of them is frozen for good: freeze both so, or after tie()");
  agree(of_a.exact == of_b.exact, "only one of them is exact: keep_exact() both, or after tie()");
  agree(of_a.steered == of_b.steered, "they are not steered alike: steer() both by one rate, or after tie()");
  agree(of_a.blocks == of_b.blocks, "they do not rest in the same blocks: quantize() both alike, or after tie()");
  agree(of_a.cut == of_b.cut, "they are cut differently along a tensor axis");
  agree(of_a.matrices == of_b.matrices, "they hold other matrices");
  agree(!of_a.init_is_set || of_a.init == of_b.init, "the first has an init that the second lacks: set_init() of both, or after tie()");
  if (a.unit() || b.unit()) fail<ConfigError>("[tie] '", a.name(), "' and '", b.name(), "': tie before materialize()");
  b.state().table = a.table() || b.table();
  b.state().bias = a.bias() && b.bias();
  a.state_ = b.state_;
}

Buffer::Buffer(const Shape& shape, Init init, DType dtype) : state_(std::make_shared<State>()) {
  state_->shape = shape;
  state_->dtype = dtype;
  state_->init = init;
}

Buffer::State& Buffer::state() const { return defined_state(state_, "buffer"); }

Tensor Buffer::value() const {
  if (!state_) return {};
  if (!state_->value) no_value("buffer", state_->name, state_->dtype, state_->shape);
  return state_->value;
}

std::vector<std::shared_ptr<Unit>> distinct_units(std::span<const Parameter> parameters) {
  std::vector<std::shared_ptr<Unit>> out;
  for (const Parameter& p : parameters) {
    if (!p.unit())
      fail<LifetimeError>("[parameter] '", p.name(), "' ", p.dtype(), p.shape(), " has no memory: call materialize() first");
    if (std::find(out.begin(), out.end(), p.unit()) == out.end()) out.push_back(p.unit());
  }
  return out;
}

}  // namespace nn

namespace {

Unit& unit_of(const nn::Parameter& p, const char* who) {
  if (!p.unit()) fail<LifetimeError>("[", who, "] '", p.name(), "' ", p.dtype(), p.shape(), " has no memory: call materialize() first");
  return *p.unit();
}

// The buffer that holds a leaf, and the leaf's offset in it.
const FlatBuffer& buffer_of(const Unit& unit, int leaf, int64_t& offset) {
  for (const FlatBuffer& b : const_cast<Unit&>(unit).buffers())
    for (size_t i = 0; i < b.leaves.size(); ++i)
      if (b.leaves[i] == leaf) {
        offset = b.layout.offsets[i];
        return b;
      }
  fail<LifetimeError>("[unit] '", unit.name(), "' has no leaf ", leaf);
}

// A leaf, from its offset in a buffer of masters or gradients: whole on every rank.
Tensor whole_of(const Tensor& buffer, const Unit& unit, int leaf, int64_t offset) {
  const int64_t at = offset * static_cast<int64_t>(size_of(buffer.dtype()));
  const auto view = [&](const Tensor& all, const Layout& layout) {
    all.storage()->settle();
    return Tensor::view_into(all, {buffer.dtype(), unit.leaves()[leaf].shape, layout}, at);
  };
  if (!unit.mesh()) return view(buffer, {}).clone();
  const Layout invariant(unit.mesh(), Placement::invariant());
  const int axis = unit.cut_axis(leaf);
  Layout blocks = invariant;
  if (axis >= 0) blocks[axis] = buffer.layout()[axis];
  const Tensor all = redistribute(buffer, blocks);
  if (axis < 0) return view(all, {}).clone();
  const Tensor block = view(all, invariant.with(axis, Placement::shard(*unit.leaves()[leaf].cut)));
  const Tensor whole = redistribute(block, invariant);
  whole.storage()->settle();
  return Tensor::view_into(whole, {whole.dtype(), whole.shape(), {}}, 0).clone();
}

void check_whole(const char* who, const std::string& name, DType dtype, const Shape& shape, const Tensor& whole) {
  expect_no_recording(who);
  for (int a = 0; a < whole.layout().num_axes(); ++a)  // even on one rank: on two it would not be whole
    if (const Placement& p = whole.layout()[a]; p.is_partial() || p.is_shard())
      fail<PlacementError>("[", who, "] ", whole.type(), " is not whole on every rank; for '", name, "' write ",
                           "redistribute(x, \"", whole.layout().mesh()->name(a), "\", Placement::invariant())");
  if (!(whole.shape() == shape) || !(whole.local_shape() == shape))
    fail<ShapeError>("[", who, "] ", whole.type(), " for '", name, "' ", dtype, shape);
  if (whole.dtype() != dtype) fail<DTypeError>("[", who, "] ", whole.type(), " for '", name, "' ", dtype, shape, ": cast() it");
}

}  // namespace

Tensor full_parameter(const nn::Parameter& p) {
  expect_no_recording("full_parameter");
  const Unit& unit = unit_of(p, "full_parameter");
  int64_t offset = 0;
  const FlatBuffer& b = buffer_of(unit, p.index(), offset);
  const Tensor whole = whole_of(b.shard, unit, p.index(), offset);
  return p.blocks() ? dequantize(whole, *p.blocks(), p.dtype()) : whole;
}

Tensor full_gradient(const nn::Parameter& p) {
  expect_no_recording("full_gradient");
  Unit& unit = unit_of(p, "full_gradient");
  unit.reduce_waiting();
  unit.complete_reduction();
  unit.expect_not_consumed("full_gradient");
  int64_t offset = 0;
  const FlatBuffer& b = buffer_of(unit, p.index(), offset);
  return b.grad ? whole_of(b.grad, unit, p.index(), offset) : Tensor();
}

void assign(const nn::Parameter& p, const Tensor& whole) {
  Unit& unit = unit_of(p, "assign");
  check_whole("assign", p.name(), p.dtype(), p.shape(), whole);
  unit.close_for_change();
  int64_t offset = 0;
  const FlatBuffer& b = buffer_of(unit, p.index(), offset);
  if (b.shard.device().is_meta()) return;
  const Tensor dense = whole.is_contiguous() ? whole : whole.clone();
  if (p.blocks()) {
    const Tensor values = cast(dense.to(Device::cpu()), kF32);
    for (const LocalPiece& piece : unit.pieces(b)) {
      if (piece.leaf != p.index()) continue;
      nn::BlockPiece blocks(p.name(), *p.blocks(), piece.runs);
      blocks.fill([&](int64_t begin, std::span<float> out) { std::copy_n(values.view().as<float>() + begin, out.size(), out.data()); });
      blocks.store(b.shard.device(), b.shard.view().as<char>() + piece.shard_offset);
    }
    b.shard.storage()->changed();
    return;
  }
  const auto size = static_cast<int64_t>(size_of(p.dtype()));
  for (const LocalPiece& piece : unit.pieces(b))
    for (int64_t k = 0; piece.leaf == p.index() && k < piece.runs.count; ++k)
      transfer(b.shard.device(), b.shard.view().as<char>() + (piece.shard_offset + k * piece.runs.size) * size, dense.device(),
               dense.view().as<char>() + piece.runs[k].begin * size, static_cast<size_t>(piece.runs.size * size));
  b.shard.storage()->changed();
}

void assign(const nn::Buffer& b, const Tensor& whole) {
  const Tensor value = b.value();
  check_whole("assign", b.name(), value.dtype(), value.shape(), whole);
  if (value.device().is_meta()) return;
  const Tensor dense = whole.is_contiguous() ? whole : whole.clone();
  transfer(value.device(), value.view().data, dense.device(), dense.view().data, static_cast<size_t>(dense.local_bytes()));
  value.storage()->changed();
}

}  // namespace sheaf
