#include "sheaf/autograd/work.h"

#include <algorithm>
#include <ranges>

#include "sheaf/autograd/ops/redistribute.h"

namespace sheaf {
namespace {

template <class ShapeOf>
Work work_with(const Tape& tape, const Node& n, const ShapeOf& shape_of) {
  // Collectives of units, and sends, work in place: they copy nothing locally.
  if (tape.kind(n) == OpKind::redistribute && !n.op->work && (!is_redistribute(n.op) || n.op == &send_op())) return {};
  SmallVector<Shape, 6> inputs, outputs;
  double bytes = 0;
  const auto takes = [&](ValueId v) {
    const Type& t = tape.type(v);
    Shape shape = shape_of(t);
    bytes += static_cast<double>(shape.numel()) * static_cast<double>(size_of(t.dtype));
    return shape;
  };
  for (int o = 0; o < n.num_outputs; ++o) outputs.push_back(takes(tape.output(n, o)));
  for (const ValueId v : tape.inputs(n)) inputs.push_back(takes(v));
  if (n.flags & Node::kAdds) bytes += static_cast<double>(outputs[0].numel()) * static_cast<double>(size_of(tape.type(tape.output(n)).dtype));
  const Shape none;
  WorkOf w(std::span(inputs.begin(), inputs.size()), std::span(outputs.begin(), outputs.size()),
           inputs.empty() ? none : tape.type(tape.inputs(n)[0]).shape);
  w.work.bytes = bytes;
  // The products' dtype is that of the operands, except tokens and targets.
  w.work.dtype = tape.type(tape.output(n)).dtype;
  for (const ValueId v : tape.inputs(n))
    if (is_floating(tape.type(v).dtype)) {
      w.work.dtype = tape.type(v).dtype;
      break;
    }
  if (n.op->work) n.op->work(tape.attrs(n), w);
  return w.work;
}

}  // namespace

Work work_of(const Tape& tape, const Node& n) {
  if (!n.op || n.num_outputs == 0 || tape.value(tape.output(n)).view_of >= 0) return {};
  const auto is_here = [&](int o) {
    const Layout& layout = tape.type(tape.output(n, o)).layout;
    return !layout.mesh() || !layout.is_elsewhere(tape.coordinates(layout.mesh()).data());
  };
  if (std::ranges::none_of(std::views::iota(0, static_cast<int>(n.num_outputs)), is_here)) return {};
  return work_with(tape, n, [&](const Type& t) {
    return t.layout.mesh() ? t.layout.local_shape(t.shape, tape.coordinates(t.layout.mesh()).data()) : t.shape;
  });
}

// Whether a value is dense, or a view, may differ by rank.
Work whole_work_of(const Tape& tape, const Node& n) {
  if (!n.op || n.num_outputs == 0 || n.op->alias || n.op->name == std::string_view("contiguous")) return {};
  return work_with(tape, n, [](const Type& t) { return t.shape; });
}

}  // namespace sheaf
