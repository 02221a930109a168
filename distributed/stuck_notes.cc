#include "sheaf/distributed/stuck_notes.h"

#include <algorithm>

namespace sheaf {
namespace {

uint64_t hash_of(const std::string& text) {
  uint64_t h = 0;
  for (char c : text) h = chain(h, static_cast<unsigned char>(c));
  return h;
}

}  // namespace

StuckNotes::StuckNotes(const CommunicatorGroup& group, Monitor& monitor)
    : group_(group), monitor_(monitor), name_hash_(hash_of(group.name)) {}

void StuckNotes::post(const Collective& call) {
  monitor_.post(
      {.group = name_hash_,
       .sequence = call.sequence,
       .fingerprint = call.fingerprint,
       .what = call.to_string(),
       .send_counts = call.op == CollectiveOp::all_to_all ? call.counts : std::vector<int64_t>{}});
}

std::string StuckNotes::disagreement(
    const Collective& call, const std::function<std::optional<FlightEntry>(uint64_t)>& ours) const {
  const int me = group_.index;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == me) continue;
    const int peer_rank = group_.members[peer];
    const auto note = monitor_.note(name_hash_, peer_rank);
    if (!note) continue;
    if (const auto own = ours(note->sequence); own && own->fingerprint != note->fingerprint)
      return str("ranks disagree on call ", note->sequence, ": rank ", group_.world_rank(),
                 " calls ", own->what, ", rank ", peer_rank, " calls ", note->what);
    if (note->sequence == call.sequence && call.op == CollectiveOp::all_to_all &&
        note->send_counts.size() == call.recv_counts.size() &&
        note->send_counts[me] != call.recv_counts[peer])
      return str("ranks disagree: rank ", peer_rank, " sends ", note->send_counts[me],
                 " elements to rank ", group_.world_rank(), ", which expects ",
                 call.recv_counts[peer]);
  }
  return {};
}

std::vector<int> StuckNotes::missing(const Collective& call, const std::vector<int>& absent,
                                     bool knows_elsewhere) const {
  std::vector<int> silent, elsewhere, waiting;
  for (int peer : absent) {
    const int peer_rank = group_.members[peer];
    const auto note = monitor_.note(name_hash_, peer_rank);
    const bool here = note && note->sequence >= call.sequence;
    std::vector<int>& list = here                                                ? waiting
                             : knows_elsewhere && monitor_.is_waiting(peer_rank) ? elsewhere
                                                                                 : silent;
    if (std::find(list.begin(), list.end(), peer) == list.end()) list.push_back(peer);
  }
  std::vector<int> out = !silent.empty() ? silent : !elsewhere.empty() ? elsewhere : waiting;
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace sheaf
