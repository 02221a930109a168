#include "sheaf/distributed/keep_within.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "sheaf/autograd/checks.h"
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

// The units that fit on this rank.
std::vector<Regather> choose(const Program& plain, const std::vector<Regather>& all, int64_t room) {
  const std::vector<int64_t> alive = plain.alive_bytes();
  std::vector<Regather> chosen = choose_kept(all, alive, room);
  for (int64_t limit = room;;) {  // an arrangement may take more than the bytes alive
    const int64_t over = keeping(plain, chosen).arena_bytes() - std::max(room, plain.arena_bytes());
    if (over <= 0) return chosen;
    limit -= over;
    std::vector<Regather> fewer = choose_kept(all, alive, limit);
    if (fewer.size() < chosen.size()) chosen = std::move(fewer);
    else chosen.erase(std::ranges::max_element(chosen, {}, [](const Regather& r) { return r.gather - r.discard; }));
  }
}

// Ranks that issue the same collectives, such as those of one stage, must keep issuing the same ones: keeps what all of
// them chose.
std::vector<uint8_t> agree(std::vector<uint8_t> mine, uint64_t collectives, Communicator& all) {
  const auto ranks = static_cast<size_t>(all.size());
  const int64_t header[] = {static_cast<int64_t>(collectives), std::ssize(mine)};
  std::vector<int64_t> headers(2 * ranks), sizes;
  all.all_gather(header, headers.data(), std::vector<int64_t>(ranks, 2), kI64, "keep_within").sync();
  for (size_t r = 0; r < ranks; ++r) sizes.push_back(headers[2 * r + 1]);
  std::vector<uint8_t> chosen(static_cast<size_t>(std::reduce(sizes.begin(), sizes.end())));
  all.all_gather(mine.data(), chosen.data(), sizes, kU8, "keep_within").sync();
  const uint8_t* at = chosen.data();
  for (size_t r = 0; r < ranks; at += sizes[r++])
    if (headers[2 * r] == header[0] && sizes[r] == header[1])
      for (size_t i = 0; i < mine.size(); ++i) mine[i] = mine[i] && at[i];
  return mine;
}

}  // namespace

std::function<Program(const Program&)> keep_within(int64_t bytes, World& world, Device device) {
  return [bytes, &world, device](const Program& plain) {
    const std::vector<Regather> all = regathers(plain);
    const int64_t room = bytes - RankContext::current().memory(device)->stats().live;
    const std::vector<Regather> mine = choose(plain, all, room);
    std::vector<uint8_t> chosen;
    for (const Regather& r : all) chosen.push_back(std::ranges::find(mine, r) != mine.end());
    if (world.size() > 1) chosen = agree(chosen, collective_hash(plain.tape()), world.communicator());
    std::vector<Regather> kept;
    for (size_t i = 0; i < all.size(); ++i)
      if (chosen[i]) kept.push_back(all[i]);
    return keeping(plain, kept);
  };
}

}  // namespace sheaf
