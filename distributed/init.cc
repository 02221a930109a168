#include "sheaf/distributed/init.h"

#include <cstdlib>

#include "sheaf/distributed/device_choice.h"

#include "sheaf/distributed/gloo_communicator.h"
#include "sheaf/distributed/local_communicator.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/distributed/shm_transport.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/gpu.h"

namespace sheaf::distributed {
namespace {

std::shared_ptr<Transport> connect(const Rendezvous& r) {
  if (r.world == 1) return std::make_shared<LocalTransport>(std::make_shared<LocalJob>(1, LocalOptions{}));
  const std::shared_ptr<Job> job = join_job(r);
  const std::vector<std::string> wishes = job->agree("comm", r.comm);
  for (int rank = 1; rank < r.world; ++rank)
    if (wishes[rank] != wishes[0])
      fail<ConfigError>("[rendezvous] SHEAF_COMM is ", wishes[0], " on rank 0, but ", wishes[rank], " on rank ", rank);
  if (r.comm != "gloo") {
    const ShmOffer shm = offer_shm(job);
    if (shm.transport) return shm.transport;
    if (r.comm == "shm") fail<ConfigError>("[rendezvous] SHEAF_COMM=shm is impossible: ", shm.why_not);
  }
  return std::make_shared<GlooTransport>(job);
}

}  // namespace

namespace {

Device device_for(const Rendezvous& r, RankContext& context) {
  const Device device = choose_device(r, [](const char* name) -> const char* { return std::getenv(name); }).device;
  if constexpr (kernels::kHasCuda)
    if (device.is_cuda() && !context.gpu) context.gpu = kernels::cuda::make_gpu(device.index);
  context.device = device;
  return device;
}

}  // namespace

Device init_device() { return device_for({}, RankContext::current()); }

World init_from_env() {
  const Rendezvous r = read_rendezvous();
  RankContext& context = RankContext::current();
  const Device device = device_for(r, context);
  std::shared_ptr<Transport> transport = connect(r);
  context.threads = r.threads;
  auto scope = std::make_shared<RankScope>(context);  // this thread's OpenMP threads and flush-to-zero
  World world(std::move(transport), context, r.rank, r.world, r.local_rank, r.local_world, device);
  world.keep(std::move(scope));
  return world;
}

}  // namespace sheaf::distributed
