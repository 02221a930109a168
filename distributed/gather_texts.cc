#include "sheaf/distributed/gather_texts.h"

#include <algorithm>
#include <numeric>

namespace sheaf {
namespace {

std::vector<int64_t> lengths_of(Communicator& lane, const std::string& mine, const std::string& path) {
  const auto ranks = static_cast<size_t>(lane.size());
  const auto length = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(ranks);
  lane.all_gather(&length, lengths.data(), std::vector<int64_t>(ranks, 1), kI64, path).sync();
  return lengths;
}

}  // namespace

std::vector<std::string> gather_texts(Communicator& lane, const std::string& mine, const std::string& path) {
  const std::vector<int64_t> lengths = lengths_of(lane, mine, path);
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

std::string join_texts_on_first(Communicator& lane, const std::string& mine, const std::string& path) {
  std::vector<int64_t> received = lengths_of(lane, mine, path), sent(received.size());
  sent[0] = static_cast<int64_t>(mine.size());
  if (lane.rank() != 0) std::ranges::fill(received, 0);
  std::string all(static_cast<size_t>(std::accumulate(received.begin(), received.end(), int64_t{0})), '\0');
  lane.all_to_all(mine.data(), sent, all.data(), received, kU8, path).sync();
  return all;
}

}  // namespace sheaf
