// Jobs whose ranks are threads that communicate over a given NCCL: shared by the tests of
// NcclCommunicator.
#pragma once

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/core/tensor.h"
#include "sheaf/distributed/gloo_communicator.h"
#include "sheaf/distributed/nccl_communicator.h"
#include "sheaf/distributed/world.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/gpu.h"

namespace sheaf::testing::nccl {

struct Options {
  int ranks = 2;
  bool one_gpu = true;  ///< for all ranks; else each has that of its number
  std::chrono::milliseconds timeout{60'000};
};

/// Requests registered buffers as long as it lives.
struct Registered {
  Registered() { setenv("SHEAF_NCCL_REGISTER", "1", 1); }
  ~Registered() { unsetenv("SHEAF_NCCL_REGISTER"); }
};

/// The error that each rank threw: exit code and message, 0 if none.
struct Outcome {
  int code = 0;
  std::string what = {};
};

/// Ranks are threads, but otherwise this is like a job of processes: store, monitors, Gloo between
/// hosts.
inline std::vector<Outcome> run_job(NcclLibrary& library, const std::function<void(World&)>& body,
                             Options options) {
  Socket listener = listen_on("127.0.0.1", 0);
  Rendezvous r;
  r.world = r.local_world = options.ranks;
  r.port = local_port(listener);
  r.timeout = options.timeout;
  const int listen_fd = listener.release();
  std::vector<Outcome> outcomes(static_cast<size_t>(options.ranks));
  const auto rank_main = [&](int rank) {
    Outcome& outcome = outcomes[rank];
    try {
      RankContext context;
      RankScope scope(context);
      const int device = options.one_gpu ? 0 : rank;
      if constexpr (kernels::kHasCuda) context.gpu = kernels::cuda::make_gpu(device);
      Rendezvous mine = r;
      mine.rank = mine.local_rank = rank;
      if (rank == 0) mine.listen_fd = listen_fd;
      const std::shared_ptr<Job> job = join_job(mine);
      World world(
          std::make_shared<NcclTransport>(job, std::make_shared<GlooTransport>(job), library),
          context, rank, options.ranks, rank, options.ranks, Device::cuda(device));
      world.guard([&] { body(world); });
    } catch (const Error& e) {
      outcome = {e.exit_code(), e.what()};
    } catch (const std::exception& e) {
      outcome = {1, e.what()};
    }
  };
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < options.ranks; ++rank) threads.emplace_back(rank_main, rank);
  threads.clear();
  return outcomes;
}

inline void expect_well(const std::vector<Outcome>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    EXPECT_EQ(outcomes[r].code, 0) << "rank " << r << ": " << outcomes[r].what;
}

inline void expect(const Outcome& outcome, ExitCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(outcome.code, static_cast<int>(code)) << outcome.what;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.what.find(part), std::string::npos) << outcome.what;
}

inline Communicator& lane(World& world) {
  return world.mesh({{"data", world.size()}}).runtime->gather_lane(0);
}
inline Communicator& other_lane(World& world) {
  return world.mesh({{"data", world.size()}}).runtime->reduce_lane(0);
}

inline Tensor ones(World& world, int64_t n = 1000) {
  return Tensor::from(std::vector<float>(static_cast<size_t>(n), 1.0f), {n}).to(world.device());
}
inline Event add(Communicator& comm, const Tensor& x, std::string_view path) {
  return comm.all_reduce(x.view().data, x.numel(), kF32, Reduction::sum, path);
}

/// Waits until `comm` has enqueued, or finished, all its calls.
inline void settle(NcclComm& comm) {
  std::string why;
  NcclComm::State state;
  while ((state = comm.state(why)) == NcclComm::State::busy) std::this_thread::yield();
  ASSERT_EQ(state, NcclComm::State::ready) << why;
}

/// The reason why NCCL cannot be called here; empty if it can.
inline std::string why_no_nccl() {
  try {
    if constexpr (kernels::kHasCuda) return nccl_library(), "";
    return "built without CUDA";
  } catch (const ConfigError& e) {
    return e.what();
  }
}

}  // namespace sheaf::testing::nccl

#define SHEAF_NEEDS_NCCL()                                                        \
  if (const std::string why = sheaf::testing::nccl::why_no_nccl(); !why.empty()) \
  GTEST_SKIP() << "not run: " << why
