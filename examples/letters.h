// A task whose answers are easy to check: sort letters. "dbca=" is answered by "abcd" and the end. Demonstrations are correct half of the
// time, so a model that imitates them is, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "sheaf/core/random.h"

namespace examples {

struct Letters {
  static constexpr int64_t kLetters = 4, kVocab = 10, kContext = 2 * kLetters + 1;
  static constexpr int32_t kAsk = 8, kEnd = 9;  // after the letters 0 to 7

  /// `count` different letters in random order, the same ones for the same `number`.
  static std::vector<int32_t> shuffled(std::vector<int32_t> letters, sheaf::Key key, int64_t number) {
    for (size_t i = letters.size(); i > 1; --i)
      std::swap(letters[i - 1], letters[sheaf::random_u64(key, static_cast<uint64_t>(number) * 16 + i) % i]);
    return letters;
  }
  static std::vector<int32_t> prompt(int64_t number) {
    std::vector<int32_t> all = shuffled({0, 1, 2, 3, 4, 5, 6, 7}, sheaf::key_of("letters", 1), number);
    all.resize(kLetters);
    all.push_back(kAsk);
    return all;
  }
  static std::vector<int32_t> demonstration(int64_t number) {
    std::vector<int32_t> letters = prompt(number);
    letters.pop_back();
    const sheaf::Key key = sheaf::key_of("demonstrations", 1);
    if (sheaf::random_u64(key, static_cast<uint64_t>(number) * 16) % 2) letters = shuffled(std::move(letters), key, number);
    else std::ranges::sort(letters);
    letters.push_back(kEnd);
    return letters;
  }
  /// 1 for the letters in order followed by the end, else 0.
  static double reward(std::span<const int32_t> prompt, std::span<const int32_t> answer) {
    std::vector<int32_t> right(prompt.begin(), prompt.end() - 1);
    std::ranges::sort(right);
    right.push_back(kEnd);
    return std::ranges::equal(answer, right) ? 1 : 0;
  }
};

}  // namespace examples
