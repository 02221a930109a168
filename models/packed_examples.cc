#include "sheaf/models/packed_examples.h"

#include <algorithm>
#include <set>
#include <utility>

#include "sheaf/core/error.h"

namespace sheaf::models {

PackedExamples::PackedExamples(Tokens tokens, int64_t context) : tokens_(std::move(tokens)), context_(context) {
  check<ConfigError>(context >= 1 && context < INT32_MAX, "[data] a context of ", context);
  check<DataError>(tokens_.example_end().has_value(), "[data] '", tokens_.name(), "' holds no examples");
  pack(find_examples());
  check<DataError>(num_targets_ > 0, "[data] '", tokens_.name(), "': in none of ", left_out_, left_out_ == 1 ? " example" : " examples",
                   " is anything to learn within a context of ", context);
}

std::vector<PackedExamples::Example> PackedExamples::find_examples() {
  constexpr int64_t kBlock = int64_t{1} << 20;
  const int64_t size = tokens_.size(), room = context_ + 1;
  std::vector<int32_t> ids(static_cast<size_t>(std::min(size, kBlock))), targets(ids.size());
  std::vector<Example> found;
  int64_t begin = 0, counted = 0;  // of the current example of the scan
  const auto end_at = [&](int64_t end) {
    const int64_t length = end - begin;
    if (counted == 0) {
      ++left_out_;
    } else {
      shortened_ += length > room;
      found.push_back({begin, static_cast<int32_t>(std::min(length, room)), static_cast<int32_t>(counted)});
    }
    begin = end, counted = 0;
  };
  for (int64_t first = 0; first < size; first += kBlock) {
    const int64_t count = std::min(kBlock, size - first);
    tokens_.copy(first, count, ids.data());
    tokens_.copy_targets(first, count, targets.data());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = first + i - begin;  // in the example
      counted += targets[static_cast<size_t>(i)] != kIgnoreIndex && at > 0 && at < room;
      if (ids[static_cast<size_t>(i)] == tokens_.example_end()) end_at(first + i + 1);
    }
  }
  if (begin < size) end_at(size);
  return found;
}

// Windows by their remaining room: among those with the least sufficient room, the one that was added last.
void PackedExamples::pack(const std::vector<Example>& found) {
  const auto room = static_cast<size_t>(context_) + 1;
  std::vector<size_t> order(found.size()), window_of(found.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, std::ranges::greater(), [&](size_t i) { return found[i].length; });
  std::vector<std::vector<size_t>> open(room + 1);
  std::set<size_t> rooms;  // values of remaining room that occur
  size_t windows = 0;
  for (const size_t i : order) {
    const auto length = static_cast<size_t>(found[i].length);
    const auto best = rooms.lower_bound(length);
    size_t left = room;
    if (best == rooms.end()) {
      window_of[i] = windows++;
    } else {
      left = *best;
      window_of[i] = open[left].back();
      open[left].pop_back();
      if (open[left].empty()) rooms.erase(best);
    }
    left -= length;
    if (left == 0) continue;
    open[left].push_back(window_of[i]);
    rooms.insert(left);
  }

  ends_.assign(windows, 0), targets_.assign(windows, 0);
  for (size_t i = 0; i < found.size(); ++i) {
    ++ends_[window_of[i]];
    targets_[window_of[i]] += found[i].targets;
    num_targets_ += found[i].targets;
    num_tokens_ += found[i].length;
  }
  int64_t end = 0;
  for (int64_t& of_window : ends_) of_window = std::exchange(end, end + of_window);  // the start of each
  examples_.resize(found.size());
  for (size_t i = 0; i < found.size(); ++i) examples_[static_cast<size_t>(ends_[window_of[i]]++)] = found[i];
}

void PackedExamples::fill(int64_t window, int32_t* inputs, int32_t* targets) const {
  const auto w = static_cast<size_t>(window);
  int64_t at = 0;
  for (int64_t e = w == 0 ? 0 : ends_[w - 1]; e < ends_[w]; ++e) {
    const auto [begin, length, counted] = examples_[static_cast<size_t>(e)];
    tokens_.copy(begin, std::min<int64_t>(length, context_ - at), inputs + at);
    tokens_.copy_targets(begin + 1, length - 1, targets + at);
    at += length;
    if (at <= context_) targets[at - 1] = kIgnoreIndex;
  }
  if (at >= context_) return;
  std::fill(inputs + at, inputs + context_, *tokens_.example_end());
  std::fill(targets + at, targets + context_, kIgnoreIndex);
}

}  // namespace sheaf::models
