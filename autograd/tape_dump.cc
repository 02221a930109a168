#include "sheaf/autograd/tape_dump.h"

#include <algorithm>
#include <cstdio>
#include <map>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/core/communicator.h"

namespace sheaf {
namespace {

int64_t local_elements(const Type& t, const std::vector<int>& at) {
  return t.layout.mesh() ? t.layout.local_shape(t.shape, at.data()).numel() : t.shape.numel();
}

// The elements that one rank has in both shards of a value, which are therefore not communicated.
int64_t shared_elements(const Type& from, const Type& to, int axis, const std::vector<int>& at) {
  const Placement &p = from.layout[axis], &q = to.layout[axis];
  const int n = to.layout.mesh()->size(axis), me = at[static_cast<size_t>(axis)];
  const Shape whole = from.layout.with(axis, Placement::replicate()).local_shape(from.shape, at.data());
  if (whole.numel() == 0) return 0;
  const int d = p.map().dim(), e = q.map().dim();
  if (d >= 0 && e >= 0 && d != e)
    return p.map().owned_size(me, n, whole) * q.map().owned_size(me, n, whole) * (whole.numel() / whole[d] / whole[e]);
  // Intervals of one index: of the rows of dimension d, or of the flat one.
  const int64_t row = d == e ? 1 : whole.numel() / whole[0];
  int64_t shared = 0;
  for (const Interval& a : p.map().owned_intervals(me, n, whole))
    for (const Interval& b : q.map().owned_intervals(me, n, whole)) {
      const int64_t a_row = d < 0 ? 1 : row, b_row = e < 0 ? 1 : row;
      shared += std::max<int64_t>(0, std::min(a.end * a_row, b.end * b_row) - std::max(a.begin * a_row, b.begin * b_row));
    }
  return d == e && d >= 0 ? shared * (whole.numel() / whole[d]) : shared;
}

// Whether this rank takes part: not in exchanges among other ranks of an axis.
bool is_here(const Tape& tape, const Layout& from, const Layout& to) {
  const std::vector<int> at = tape.coordinates(to.mesh());
  return !from.is_elsewhere(at.data()) || !to.is_elsewhere(at.data());
}

int64_t received_bytes(const Tape& tape, const Transfer& t) {
  const Type &from = tape.type(t.from), &to = tape.type(t.to);
  const MeshSpec* mesh = to.layout.mesh();
  const std::vector<int> at = tape.coordinates(mesh);
  const int64_t n = mesh->size(t.axis), size = static_cast<int64_t>(size_of(to.dtype));
  const int64_t had = local_elements(from, at), has = local_elements(to, at);
  if (t.name == "send") return std::max<int64_t>(0, has - had) * size;
  if (t.name == "all_gather") return (has - had) * size;
  if (t.name == "reduce_scatter") return has * (n - 1) * size;
  if (t.name == "all_to_all") return (has - shared_elements(from, to, t.axis, at)) * size;
  return all_reduce_bytes(has, size, at[static_cast<size_t>(t.axis)], n);
}

}  // namespace

std::vector<Transfer> transfers(const Tape& tape, const Node& n) {
  std::vector<Transfer> out;
  if (tape.kind(n) != OpKind::redistribute) return out;
  const auto inputs = tape.inputs(n);
  for (int i = 0; i < std::min<int>(n.num_inputs, n.num_outputs); ++i) {
    const Layout& from = tape.type(inputs[static_cast<size_t>(i)]).layout;
    const Layout& to = tape.type(tape.output(n, i)).layout;
    if (!from.mesh() || from.mesh() != to.mesh()) continue;
    for (int a = 0; a < to.num_axes(); ++a) {
      if (from[a] == to[a]) continue;
      const std::string name = redistribution_name(from, to);
      if (!is_here(tape, from, to)) break;
      if (name == "all_gather" || name == "reduce_scatter" || name == "all_reduce" || name == "all_to_all" || name == "send")
      {
        Transfer t{inputs[static_cast<size_t>(i)], tape.output(n, i), a, name};
        t.bytes = received_bytes(tape, t);
        out.push_back(std::move(t));
      }
      break;
    }
  }
  return out;
}

std::string_view lane_name(const Tape& tape, const Node& n) {
  if (n.op && n.op->lane == Lane::copy) return name(Lane::copy);
  if (transfers(tape, n).empty()) return name(Lane::compute);
  if (tape.op_name(n) == "send") return "send";  // neighbouring stages have lanes of their own
  return name(n.op->lane == Lane::reduce ? Lane::reduce : Lane::gather);
}

bool is_unit_gather(const Tape& tape, const Node& n) {
  if (tape.kind(n) != OpKind::redistribute || is_redistribute(n.op)) return false;
  if (tape.op_name(n) == "all_gather") return n.op->lane == Lane::gather;  // else it gathers gradients
  if (tape.op_name(n) != "open") return false;
  const Node& made = tape.node(tape.value(tape.inputs(n)[0]).producer);
  return made.op && made.op->lane == Lane::copy;
}

std::string cut_signature(const Placement& p) {
  if (!p.is_shard()) return "";
  const OwnershipMap& m = p.map();
  if (m.is_flat()) return str("<", m.chunk(), "-", m.offset(), ">");
  std::string table;
  if (m.table())
    for (const int64_t entry : *m.table()) table += str(entry, ' ');
  return str("<", table, m.granule(), m.is_inner() ? " inner>" : ">");
}

int64_t Tape::wire_bytes(const Node& n) const {
  int64_t bytes = 0;
  for (const Transfer& t : transfers(*this, n)) bytes += t.bytes;
  return bytes;
}

std::string format_bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) value /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", value, kUnits[unit]);
  return text;
}

std::string collective_summary(const Tape& tape) {
  struct Row { std::string path, name; int64_t count = 0, bytes = 0; };
  std::vector<Row> rows, totals;  // one total for each of several axes, since their links differ
  std::map<std::pair<std::string, std::string>, size_t> known;
  const auto total_of = [&totals](const std::string& axis) -> Row& {
    const auto it = std::ranges::find(totals, axis, &Row::name);
    return it != totals.end() ? *it : totals.emplace_back(Row{"total", axis});
  };
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    for (const Transfer& t : transfers(tape, n)) {
      const std::string path(path_label(tape.path(n)));
      const MeshSpec* mesh = tape.type(t.to).layout.mesh();
      const std::string axis = mesh->num_axes() > 1 ? "@" + mesh->name(t.axis) : "";
      const auto [at, fresh] = known.try_emplace({path, t.name + axis}, rows.size());
      if (fresh) rows.push_back({path, t.name + axis});
      for (Row* row : {&rows[at->second], &total_of(axis)}) ++row->count, row->bytes += t.bytes;
    }
  }
  std::map<std::string, size_t> order;  // of the paths, by their first collective; rows of a path are adjacent
  for (const Row& r : rows) order.try_emplace(r.path, order.size());
  std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) { return order[a.path] < order[b.path]; });
  if (totals.empty()) total_of("");
  rows.insert(rows.end(), totals.begin(), totals.end());
  size_t path_width = 0, name_width = 0;
  for (const Row& r : rows) path_width = std::max(path_width, r.path.size()), name_width = std::max(name_width, r.name.size());
  std::string out;
  for (const Row& r : rows) {
    char line[64];
    std::snprintf(line, sizeof line, "%5lld  %12s", static_cast<long long>(r.count), format_bytes(r.bytes).c_str());
    out += r.path + std::string(path_width - r.path.size() + 2, ' ') + r.name + std::string(name_width - r.name.size(), ' ') +
           line + "\n";
  }
  return out;
}

}  // namespace sheaf
