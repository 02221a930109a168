#include "sheaf/models/step_program.h"

#include <algorithm>
#include <vector>

#include "sheaf/autograd/passes/keep_gathered.h"
#include "sheaf/core/rank_context.h"

namespace sheaf::models {
namespace {

// What all ranks chose: collectives have to stay alike.
std::vector<Regather> agreed(const std::vector<Regather>& all, const std::vector<Regather>& chosen, World& world) {
  std::vector<uint8_t> is_chosen;
  for (const Regather& r : all) is_chosen.push_back(std::ranges::find(chosen, r) != chosen.end());
  if (world.size() > 1 && !all.empty())
    world.communicator().all_reduce(is_chosen.data(), std::ssize(is_chosen), kU8, Reduction::min, "kept units").sync();
  std::vector<Regather> out;
  for (size_t i = 0; i < all.size(); ++i)
    if (is_chosen[i]) out.push_back(all[i]);
  return out;
}

}  // namespace

Program step_program(const RecordedStep& step, int64_t memory_budget, World& world, Device device) {
  const ValueId wanted[] = {step.loss, step.grad_norm};
  const auto keeping = [&](std::span<const Regather> kept) {
    Tape tape = step.tape;
    keep_gathered(tape, kept);
    return Program(std::move(tape), [&](ValueId v) { return step.memory.at(v); }, wanted);
  };
  Program plain = keeping({});
  if (memory_budget == 0) return plain;
  const std::vector<Regather> all = regathers(step.tape);
  const std::vector<int64_t> alive = plain.alive_bytes();
  const int64_t room = memory_budget - RankContext::current().memory(device)->stats().live;
  std::vector<Regather> chosen;
  for (int64_t limit = room;;) {  // an arrangement may take more than what is alive
    chosen = choose_kept(all, alive, limit);
    const int64_t over = keeping(chosen).arena_bytes() - room;
    if (chosen.empty() || over <= 0) break;
    limit -= over;
  }
  return keeping(agreed(all, chosen, world));
}

}  // namespace sheaf::models
