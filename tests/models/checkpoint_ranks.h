// Ranks that write and read checkpoints without communicators.
#pragma once

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "sheaf/models/checkpoint_store.h"

namespace sheaf::testing {

/// N ranks as threads: a CheckpointGroup for each.
class Ranks {
 public:
  explicit Ranks(int world) : world_(world), barrier_(world) {}
  template <class F>
  void run(F&& f) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_; ++rank) {
      threads.emplace_back([&, rank] {
        models::CheckpointGroup group{rank, world_, {}, {}};
        group.of_first = [&, rank](int64_t mine) {
          if (rank == 0) first_ = mine;
          barrier_.arrive_and_wait();
          const int64_t result = first_;
          barrier_.arrive_and_wait();
          return result;
        };
        group.all_true = [&](bool mine) {
          if (!mine) all_ = false;
          barrier_.arrive_and_wait();
          const bool result = all_;
          barrier_.arrive_and_wait();
          all_ = true;
          barrier_.arrive_and_wait();
          return result;
        };
        f(group);
      });
    }
    for (auto& thread : threads) thread.join();
  }

 private:
  int world_;
  std::barrier<> barrier_;
  std::atomic<bool> all_{true};
  std::atomic<int64_t> first_{0};
};

}  // namespace sheaf::testing
