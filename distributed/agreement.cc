#include "sheaf/distributed/agreement.h"

#include <algorithm>

#include "sheaf/core/communicator.h"
#include "sheaf/core/file.h"
#include "sheaf/distributed/gather_texts.h"

namespace sheaf {
namespace {

constexpr const char* kPath = "agreement";
constexpr size_t kDigest = 32;  // bytes: XXH3-128 in hex

[[noreturn]] void refuse(Communicator& lane, const std::string& message) {
  // A rank that throws ends the others' calls: after the barrier all are in this function and know what to report.
  try {
    lane.barrier(kPath).sync();
  } catch (const CommError&) {
  }
  fail<ConfigError>(message);
}

}  // namespace

void require_agreement(World& world, const std::string& what, const std::vector<Fact>& facts) {
  if (world.size() > 1) require_agreement(world.communicator(), what, facts);
}

void require_agreement(Communicator& lane, const std::string& what, const std::vector<Fact>& facts) {
  if (lane.size() == 1) return;
  // In the usual case only digests are sent.
  std::string digests;
  for (const Fact& fact : facts) digests += digest_of_text(fact.name + '\0' + fact.value).xxh3;
  const std::vector<std::string> all = gather_texts(lane, digests, kPath);
  const auto first_that = [&](auto&& differs) {
    return static_cast<int64_t>(std::find_if(all.begin(), all.end(), differs) - all.begin());
  };
  const int64_t other = first_that([&](const std::string& o) { return o.size() != all[0].size(); });
  if (other < lane.size())
    refuse(lane, str("[", what, "] ranks 0 and ", other, " run different versions of the program"));
  for (size_t i = 0; i < facts.size(); ++i) {
    const auto digest = [i](const std::string& o) { return std::string_view(o).substr(i * kDigest, kDigest); };
    const int64_t rank = first_that([&](const std::string& o) { return digest(o) != digest(all[0]); });
    if (rank == lane.size()) continue;
    const std::string& mine = facts[i].shown.empty() ? facts[i].value : facts[i].shown;
    const std::vector<std::string> shown = gather_texts(lane, mine, kPath);
    refuse(lane, str("[", what, "] ranks disagree: ", facts[i].name, " is ", shown[0], " on rank 0 and ",
                     shown[static_cast<size_t>(rank)], " on rank ", rank));
  }
}

}  // namespace sheaf
