#include "sheaf/distributed/keep_within.h"

#include <algorithm>
#include <vector>

#include "sheaf/autograd/passes/keep_gathered.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

Program keeping(const Program& plain, std::span<const Regather> kept) {
  Tape tape = plain.tape();
  keep_gathered(tape, kept);
  return plain.with_tape(std::move(tape));
}

// What fits on this rank.
std::vector<Regather> choose(const Program& plain, const std::vector<Regather>& all, int64_t room) {
  const std::vector<int64_t> alive = plain.alive_bytes();
  std::vector<Regather> chosen = choose_kept(all, alive, room);
  for (int64_t limit = room;;) {  // an arrangement may take more than what is alive
    const int64_t over = keeping(plain, chosen).arena_bytes() - std::max(room, plain.arena_bytes());
    if (over <= 0) return chosen;
    limit -= over;
    std::vector<Regather> fewer = choose_kept(all, alive, limit);
    if (fewer.size() < chosen.size()) chosen = std::move(fewer);
    else chosen.erase(std::ranges::max_element(chosen, {}, [](const Regather& r) { return r.gather - r.discard; }));
  }
}

}  // namespace

std::function<Program(const Program&)> keep_within(int64_t bytes, World& world, Device device) {
  return [bytes, &world, device](const Program& plain) {
    const std::vector<Regather> all = regathers(plain.tape());
    const int64_t room = bytes - RankContext::current().memory(device)->stats().live;
    const std::vector<Regather> mine = choose(plain, all, room);
    // Collectives have to stay alike: what all ranks chose.
    std::vector<uint8_t> chosen;
    for (const Regather& r : all) chosen.push_back(std::ranges::find(mine, r) != mine.end());
    if (world.size() > 1 && !all.empty())
      world.communicator().all_reduce(chosen.data(), std::ssize(chosen), kU8, Reduction::min, "keep_within").sync();
    std::vector<Regather> kept;
    for (size_t i = 0; i < all.size(); ++i)
      if (chosen[i]) kept.push_back(all[i]);
    return keeping(plain, kept);
  };
}

}  // namespace sheaf
