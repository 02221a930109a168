#include "sheaf/distributed/gather_texts.h"

namespace sheaf {

std::vector<std::string> gather_texts(Communicator& lane, const std::string& mine, const std::string& path) {
  const auto ranks = static_cast<size_t>(lane.size());
  const auto length = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(ranks);
  lane.all_gather(&length, lengths.data(), std::vector<int64_t>(ranks, 1), kI64, path).sync();
  size_t total = 0;
  for (int64_t n : lengths) total += static_cast<size_t>(n);
  std::string all(total, '\0');
  lane.all_gather(mine.data(), all.data(), lengths, kU8, path).sync();
  std::vector<std::string> texts;
  size_t at = 0;
  for (int64_t n : lengths) {
    texts.push_back(all.substr(at, static_cast<size_t>(n)));
    at += static_cast<size_t>(n);
  }
  return texts;
}

}  // namespace sheaf
