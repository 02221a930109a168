#include "sheaf/distributed/collective.h"

#include "sheaf/core/random.h"

namespace sheaf {

std::string_view name(CollectiveOp op) {
  constexpr std::string_view kNames[] = {"all_gather", "reduce_scatter", "all_reduce",
                                         "all_to_all", "broadcast",      "barrier"};
  return kNames[static_cast<int>(op)];
}

std::string_view name(Reduction reduction) {
  constexpr std::string_view kNames[] = {"sum", "max", "min"};
  return kNames[static_cast<int>(reduction)];
}

std::string Collective::to_string() const {
  std::string out(name(op));
  if (op != CollectiveOp::barrier) {
    constexpr size_t kShown = 8;
    out += str(' ', name(dtype), " [");
    for (size_t i = 0; i < counts.size() && i < kShown; ++i) out += str(i ? ", " : "", counts[i]);
    out += counts.size() > kShown ? str(", ... ", counts.size(), " in all]") : "]";
  }
  if (op == CollectiveOp::all_reduce) out += str(' ', name(reduction));
  if (op == CollectiveOp::broadcast) out += str(" from ", root);
  return out + str(on_gpu ? " on GPUs (" : " (", path_label(path), ')', of.empty() ? "" : " of ", of);
}

uint64_t hash_call(const Collective& call) {
  uint64_t h = chain(static_cast<uint64_t>(call.op), static_cast<uint64_t>(call.dtype));
  h = chain(h, static_cast<uint64_t>(call.reduction));
  h = chain(h, static_cast<uint64_t>(call.root) * 2 + call.on_gpu);
  h = chain(h, call.counts.size());
  if (call.op != CollectiveOp::all_to_all)
    for (int64_t c : call.counts) h = chain(h, static_cast<uint64_t>(c));
  for (const std::string& text : {call.path, call.of})
    for (char c : text) h = chain(h, static_cast<unsigned char>(c));
  return h;
}

uint64_t chain(uint64_t fingerprint, uint64_t value) { return detail::mix(fingerprint * 0x9e3779b97f4a7c15ull + value); }

std::vector<int64_t> cuts_of(const std::vector<int64_t>& counts, int64_t element) {
  std::vector<int64_t> cuts(counts.size() + 1, 0);
  for (size_t i = 0; i < counts.size(); ++i) cuts[i + 1] = cuts[i] + counts[i] * element;
  return cuts;
}

int64_t received_bytes(const Collective& call, int rank, int size) {
  if (size == 1) return 0;
  const int64_t element = call.element_size();
  int64_t elements = 0;
  switch (call.op) {
    case CollectiveOp::all_gather:
      for (int r = 0; r < size; ++r) elements += r == rank ? 0 : call.counts[r];
      break;
    case CollectiveOp::reduce_scatter: elements = call.counts[rank] * (size - 1); break;
    case CollectiveOp::all_reduce: return all_reduce_bytes(call.counts[0], element, rank, size);
    case CollectiveOp::all_to_all:
      for (int r = 0; r < size; ++r) elements += r == rank ? 0 : call.recv_counts[r];
      break;
    case CollectiveOp::broadcast: elements = rank == call.root ? 0 : call.counts[0]; break;
    case CollectiveOp::barrier: break;
  }
  return elements * element;
}

}  // namespace sheaf
