#include "sheaf/distributed/run_local.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "sheaf/core/cores.h"
#include "sheaf/distributed/device_choice.h"
#include "sheaf/kernels/cuda/config.h"

namespace sheaf {

void run_local(int ranks, const std::function<void(World&)>& body, LocalOptions options) {
  check<ConfigError>(ranks >= 1, "[run_local] needs at least one rank, not ", ranks);
  if (options.device.is_cuda())  // on this thread, where the error affects no peers
    check<ConfigError>(kernels::kHasCuda, "[run_local] ", options.device.to_string(), ": this build has no CUDA");
  auto job = std::make_shared<LocalJob>(ranks, options);
  const int threads = options.threads_per_rank > 0 ? options.threads_per_rank : default_threads(ranks);

  std::mutex mutex;
  std::vector<std::pair<int, std::exception_ptr>> thrown;  // rank, in order of time
  const auto rank_main = [&](int rank) {
    RankContext context;
    context.threads = threads;
    RankScope scope(context);
    try {
      try {
        use_device(options.device, context);
      } catch (const Error& e) {  // before there is a World to tell the others
        job->board->raise({rank, ExitCode::kPeerLost, e.what()});
        throw;
      }
      World world(std::make_shared<LocalTransport>(job), context, rank, ranks, rank, ranks, options.device);
      world.guard([&] { body(world); });
    } catch (...) {
      std::lock_guard lock(mutex);
      thrown.emplace_back(rank, std::current_exception());
    }
  };
  {
    std::vector<std::jthread> threads_of_ranks;
    for (int r = 0; r < ranks; ++r) threads_of_ranks.emplace_back(rank_main, r);
  }
  if (thrown.empty()) return;
  // The board knows who failed first; consequences on other ranks may have been caught earlier.
  const auto failure = job->board->failure();
  for (auto& [rank, exception] : thrown)
    if (failure && rank == failure->rank) std::rethrow_exception(exception);
  std::rethrow_exception(thrown.front().second);
}

}  // namespace sheaf
