// What tests of redistributions in pieces share.
#pragma once

#include <chrono>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/tests/probe.h"

namespace sheaf::testing {

inline constexpr double kLink = 1e8;  // bytes a second: lanes work beside the ranks
inline constexpr int64_t kIn = 12, kOut = 10;

inline LocalOptions links(double bytes_per_second = kLink) {
  return {.bytes_per_second = bytes_per_second, .timeout = std::chrono::seconds(20), .threads_per_rank = 1};
}

inline Values drawn(const Shape& shape, const std::string& stream) {
  Generator draw(stream);
  Values v(static_cast<size_t>(shape.numel()));
  for (double& e : v) e = draw.uniform(-1, 1);
  return v;
}
inline Tensor value(const std::string& name, DType dtype, const Shape& shape, const Layout& layout, const std::string& addends = "") {
  return make_local(drawn(shape, name), {dtype, shape, layout}, addends);
}

inline int64_t nodes_in_pieces(const Tape& tape) {
  int64_t n = 0;
  for (NodeId id = 0; id < tape.num_nodes(); ++id)
    n += tape.node(id).op == &in_pieces_op() || tape.node(id).op == &onward_in_pieces_op();
  return n;
}

}  // namespace sheaf::testing
