#include "sheaf/distributed/machine.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <unordered_set>

#include "sheaf/autograd/ops/redistribute.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/autograd/work.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

constexpr uint32_t kWithin = 1, kBetween = 2;

// The ranks of one collective.
struct Group {
  int first = 0, ranks = 1;    // its lowest rank of the job, and the number of ranks
  int stride = 1;              // between neighbours
  int hosts = 1, on_host = 1;  // number of hosts, and the most ranks on one of them
};

// Ranks along an axis. If `stages` is not 0, a chain has that many, whatever its size in the mesh.
Group group_along(const MeshSpec& mesh, int axis, int stages, int rank, int ranks_per_host) {
  Group g;
  const auto size = [&](int a) { return mesh.is_chain(a) && stages > 0 ? stages : mesh.size(a); };
  for (int a = mesh.num_axes() - 1; a > axis; --a) g.stride *= size(a);
  g.ranks = size(axis);
  g.first = rank - rank / g.stride % g.ranks * g.stride;
  for (int i = 0, host = -1, here = 0; i < g.ranks; ++i) {
    const int next = (g.first + i * g.stride) / ranks_per_host;
    here = next == host ? here + 1 : 1;
    g.hosts += next != host && i > 0;
    g.on_host = std::max(g.on_host, here);
    host = next;
  }
  return g;
}

double steps(int ranks) { return std::bit_width(static_cast<unsigned>(ranks - 1)); }

// A collective in which this rank receives `bytes`. Across hosts, all ranks of a host together receive the data from other hosts,
// each through its own link, and forward it (as NCCL's rings with a rail per GPU); in an all_to_all each receives its own.
double seconds_of(const Machine& m, const std::string& name, const Group& g, double bytes) {
  const double n = g.ranks, h = g.hosts, own = g.on_host;
  const double outside = name == "all_to_all" ? bytes * (n - own) / (n - 1) : bytes * n / (n - 1) * (h - 1) / h / own;
  double seconds = 0;
  if (g.on_host > 1) seconds = std::max(seconds, bytes / m.within.bytes_per_second);
  if (g.hosts > 1) seconds = std::max(seconds, outside / m.between.bytes_per_second);
  // NCCL gathers and scatters in a ring over all ranks, except with one rank per host (PAT).
  if (g.on_host > 1 && (name == "all_gather" || name == "reduce_scatter"))
    return seconds + (n - h) * m.within.hop_seconds + (h - 1) * m.between.hop_seconds;
  if (g.on_host > 1) seconds += steps(g.on_host) * m.within.seconds;
  if (g.hosts > 1) seconds += steps(g.hosts) * m.between.seconds;
  return seconds;
}

double seconds_of(const Machine& m, const Work& w) {
  const double slower = w.fp8 && m.fp8 > 1 ? 1 / m.fp8 : w.dtype == kF64 ? m.f64 : w.dtype == kF32 ? m.f32 : 1;
  // Smaller heads mean less work per byte that is moved inside a processor.
  const double narrow = w.head > 0 ? std::max(1.0, std::sqrt(128 / w.head)) : 1;
  // Heads wider than cuDNN accepts (it does accept DeepSeek's 192), and those with a softcap, use our own kernel, which is assumed to
  // take twice as long: it uses the same tensor core instructions as FlashAttention-2, which reach half of the rate of Hopper's own
  // (FlashAttention-3's paper).
  const double refused = w.softcap || (w.head > 128 && w.head != 192) ? 2 : 1;
  const double attention = w.attention_forward / m.attention_forward.at(w.keys) + w.attention_backward / m.attention_backward.at(w.keys);
  const double operations = w.products / m.products.at(w.smallest) + narrow * refused * attention;
  const double seconds = std::max(slower * operations, w.bytes / m.bytes_per_second) + w.passes / m.bytes_per_second;
  return seconds > 0 ? std::max(seconds, m.least_seconds) : 0;
}

double bytes_of(const Type& t) { return static_cast<double>(t.local_shape().numel()) * static_cast<double>(size_of(t.dtype)); }

/// Which values are in host memory, according to what the copy lane moves from and to it.
class OnHost {
 public:
  explicit OnHost(const Tape& tape) : tape_(tape), roots_(static_cast<size_t>(tape.num_values())) {
    for (NodeId id = 0; id < tape.num_nodes(); ++id) {
      const Node& n = tape.node(id);
      if (!n.op || n.op->lane != Lane::copy) continue;
      const ValueId v = n.op->memory == MemoryKind::host ? tape.output(n, 0) : tape.inputs(n)[0];
      roots_[static_cast<size_t>(tape_.whole_of(v))] = true;
    }
  }
  /// The bytes that a node reads there. If several nodes update parts of one buffer, all of it counts for the first.
  double bytes_read(const Node& n) {
    double bytes = 0;
    for (const ValueId v : tape_.inputs(n)) {
      const auto r = static_cast<size_t>(tape_.whole_of(v));
      if (!roots_[r] || (tape_.kind(n) == OpKind::step && !updated_.insert(r).second)) continue;
      bytes += bytes_of(tape_.type(v));
    }
    return bytes;
  }

 private:
  const Tape& tape_;
  std::vector<bool> roots_;
  std::unordered_set<size_t> updated_;
};

// Bytes of state that a step updates in place in addition to its parameters, each read and written.
double state_bytes(const Tape& tape, const Node& n) {
  double bytes = 0;
  for (int o = 1; o < n.num_outputs; ++o) {
    if (tape.value(tape.output(n, o)).base < 0) continue;
    bytes += bytes_of(tape.type(tape.output(n, o)));
  }
  return bytes;
}

bool is_here(const Tape& tape, const Node& n) {
  if (n.num_outputs == 0) return true;
  for (int o = 0; o < n.num_outputs; ++o)
    if (!tape.type(tape.output(n, o)).layout.is_elsewhere()) return true;
  return n.op && n.op->lane != Lane::compute && !transfers(tape, n).empty();
}

// Lanes of a rank by name, which are those of its communicators.
class Lanes {
 public:
  int32_t operator()(const std::string& name) {
    const auto [found, fresh] = known_.try_emplace(name, static_cast<int32_t>(names.size()));
    if (fresh) names.push_back(name);
    return found->second;
  }
  std::vector<std::string> names;

 private:
  std::map<std::string, int32_t> known_;
};

}  // namespace

Machine machine_named(std::string_view name) {
  // Peaks and memory as in NVIDIA's data sheets. Attention: cuDNN 9.19 on an H200, 484, 591, 644, 673 TFLOP/s forward and 370,
  // 474, 541, 579 backward at 2,048 to 16,384 keys (benchmarks of cudnn-frontend); heads of 64 reach 0.7 of that (FlashAttention-3's
  // paper). Products: some 790 TFLOP/s of large ones, 650 to 730 where the smallest dimension is 768 to 1,600. Memory: RMSNorm's
  // backward there, 3.8 TB/s. NCCL within a host: 360 GB/s of NVLink's 450 (nccl-tests#326); between hosts nine tenths of one
  // 400 (A100: 200) Gbit/s adapter for each GPU; a ring's hops as in NCCL's model of itself (src/graph/tuning.cc, LL128). The H100 and
  // the A100: the same fractions of their peaks.
  Machine m;
  m.name = name;
  m.least_seconds = 2e-6, m.issue_seconds = 5e-6;
  m.ranks_per_host = 8;
  m.f32 = 15, m.f64 = 15;
  if (name == "h200" || name == "h100") {
    const double slower = name == "h200" ? 1 : 1.07;  // less memory bandwidth, and power
    m.peak = 989e12;
    m.products = {790e12 / slower, 150};
    m.fp8 = 1.7;
    m.attention_forward = {700e12 / slower, 800}, m.attention_backward = {620e12 / slower, 1300};
    m.bytes_per_second = name == "h200" ? 3.8e12 : 2.65e12;
    m.memory = name == "h200" ? 140'000'000'000 : 78'000'000'000;
    m.host_bytes_per_second = 50e9;
    m.within = {360e9, 5e-6, 2e-6}, m.between = {45e9, 10e-6, 4e-6};
    return m;
  }
  if (name == "a100") {
    m.peak = 312e12;
    m.products = {270e12, 100};
    m.attention_forward = {215e12, 800}, m.attention_backward = {190e12, 1300};
    m.bytes_per_second = 1.6e12;
    m.memory = 78'000'000'000;
    m.host_bytes_per_second = 24e9;
    m.within = {230e9, 5e-6, 2e-6}, m.between = {22e9, 10e-6, 4e-6};
    return m;
  }
  fail<ConfigError>("[machine] unknown machine '", name, "'; known: h200, h100, a100");
}

RankTimes times_on(const Machine& machine, const Tape& tape, const TapeOf& of) {
  const int rank = of.rank;
  RankTimes times;
  times.tape = &tape;
  times.issue_seconds = machine.issue_seconds;
  times.nodes.resize(static_cast<size_t>(tape.num_nodes()));
  Lanes lanes;
  OnHost on_host(tape);
  std::map<std::pair<const MeshSpec*, int>, Group> groups;
  for (NodeId id = 0; id < tape.num_nodes(); ++id) {
    const Node& n = tape.node(id);
    NodeTime& time = times.nodes[static_cast<size_t>(id)];
    if (of.like && of.like->nodes[static_cast<size_t>(id)].lane < 0) {
      time = of.like->nodes[static_cast<size_t>(id)];
      continue;
    }
    if (!n.op || !(time.runs = is_here(tape, n))) continue;
    if (n.op->lane == Lane::copy) {
      time.lane = lanes(str("rank ", rank, n.op->of_units && n.op->memory == MemoryKind::host ? " leaving" : " copies"));
      const double bytes = std::max(bytes_of(tape.type(tape.inputs(n)[0])), bytes_of(tape.type(tape.output(n, 0))));
      time.travels = bytes / machine.host_bytes_per_second;  // casts run on the GPU: the wider dtype crosses the bus
      continue;
    }
    time.computes = seconds_of(machine, work_of(tape, n));
    if (tape.kind(n) != OpKind::redistribute && n.num_outputs > 0) {  // over the bus, in both directions at once
      const double state = of.offloads_state && tape.kind(n) == OpKind::step ? state_bytes(tape, n) : 0;
      time.computes = std::max(time.computes, (state + on_host.bytes_read(n)) / machine.host_bytes_per_second);
    }
    const auto travels = transfers(tape, n);
    if (travels.empty()) continue;
    const Transfer& t = travels[0];  // all transfers of a node are along one axis
    const Layout& to = tape.type(t.to).layout;
    const MeshSpec& mesh = *to.mesh();
    const bool longer = mesh.is_chain(t.axis) && of.stages > 0;
    const auto [known, fresh] = groups.try_emplace({&mesh, t.axis});
    if (fresh) known->second = group_along(mesh, t.axis, of.stages, rank, machine.ranks_per_host);
    const Group& g = known->second;
    time.receives = tape.wire_bytes(n);
    if (t.name == "send") {
      const Type& sent = tape.type(t.from);
      const int from = sent.layout[t.axis].map().owner(), there = to[t.axis].map().owner();
      const int me = (rank - g.first) / g.stride;
      const auto rank_of = [&](int stage) {  // in a ring the last is next to the first
        const int on = stage + of.stages_before - me, step = mesh.is_ring(t.axis) && std::abs(on) > 1 ? (on > 0 ? -1 : 1) : on;
        return g.first + (me + step + g.ranks) % g.ranks * g.stride;
      };
      const int a = rank_of(from), b = rank_of(there);
      const Link& link = a / machine.ranks_per_host == b / machine.ranks_per_host ? machine.within : machine.between;
      const Type& got = rank == a ? sent : tape.type(t.to);
      time.travels = bytes_of(got) / link.bytes_per_second + link.seconds;
      time.lane = lanes(str("rank ", a, sends_back(tape, n) ? " back to " : " to ", b));
      continue;
    }
    if (longer && t.name == "all_reduce") {
      time.receives = 0;
      for (const Transfer& each : travels) {
        const Type& type = tape.type(each.to);
        time.receives += all_reduce_bytes(type.local_shape().numel(), static_cast<int64_t>(size_of(type.dtype)),
                                          (rank - g.first) / g.stride, g.ranks);
      }
    }
    time.travels = seconds_of(machine, t.name, g, static_cast<double>(time.receives));
    if (const int32_t pieces = rounds_of(tape, id); pieces > 1) time.travels += (pieces - 1) * seconds_of(machine, t.name, g, 0);
    time.links = (g.on_host > 1 ? kWithin : 0) | (g.hosts > 1 ? kBetween : 0);
    time.lane = lanes(str(mesh.name(t.axis), n.op->lane == Lane::reduce ? " reduce, ranks from " : " gather, ranks from ", g.first));
  }
  times.lanes = std::move(lanes.names);
  return times;
}

}  // namespace sheaf
