// The peer of our communicators: Gloo's own collectives, called as in its examples.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace sheaf::bench {

class RawGloo {
 public:
  /// Connects `size` ranks over TCP on loopback; `folder` is their rendezvous.
  RawGloo(int rank, int size, const std::string& folder);
  ~RawGloo();

  /// A call of gloo::allgather: every rank's `count` floats to `out` (size * count) on all.
  std::function<void()> all_gather(const float* in, float* out, size_t count);
  /// A call of gloo::ReduceScatterHalvingDoubling, in place: each rank's `count` of size * count.
  std::function<void()> reduce_scatter(float* data, size_t count);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sheaf::bench
