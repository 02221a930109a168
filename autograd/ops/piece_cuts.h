// What redistributions by rows and by heads share: in how many pieces a value is cut, and calls of a lane that are under way.
#pragma once

#include <algorithm>
#include <exception>
#include <vector>

#include "sheaf/core/communicator.h"
#include "sheaf/core/event.h"
#include "sheaf/core/placement.h"

namespace sheaf::pieces {

inline constexpr int64_t kMostPieces = 4;  // each has a call of the lane, and a product

// Calls under way. Whoever leaves by an exception waits for them: they read and write memory that is about to be freed.
struct InFlight {
  std::vector<Event> events;
  ~InFlight() {
    for (const Event& event : events) {
      try {
        event.sync();
      } catch (const std::exception&) {  // what goes on is the first
      }
    }
  }
};

inline int64_t if_several(int64_t parts) { return parts > 1 ? std::min(kMostPieces, parts) : 0; }

inline Interval part(Interval i, int64_t p, int64_t parts) {
  return {i.begin + even_cut(i.size(), p, parts), i.begin + even_cut(i.size(), p + 1, parts)};
}

}  // namespace sheaf::pieces
