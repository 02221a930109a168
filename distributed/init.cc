#include "sheaf/distributed/init.h"

#include <cstdio>
#include <cstdlib>

#include "sheaf/distributed/device_choice.h"
#include "sheaf/distributed/gloo_communicator.h"
#include "sheaf/distributed/hosts_transport.h"
#include "sheaf/distributed/local_communicator.h"
#include "sheaf/distributed/nccl_communicator.h"
#include "sheaf/distributed/rendezvous.h"
#include "sheaf/distributed/shm_transport.h"

namespace sheaf::distributed {
namespace {

// The transport between ranks on CPUs. If memory sharing was negotiated, `hosts` receives which ranks share it.
std::shared_ptr<Transport> connect_hosts(const Rendezvous& r, const std::shared_ptr<Job>& job, Hosts& hosts) {
  const std::vector<std::string> wishes = job->agree("comm", r.comm);
  for (int rank = 1; rank < r.world; ++rank)
    if (wishes[rank] != wishes[0])
      fail<ConfigError>("[rendezvous] SHEAF_COMM is ", wishes[0], " on rank 0, but ", wishes[rank], " on rank ", rank);
  if (r.comm == "gloo") return std::make_shared<GlooTransport>(job);
  const ShmOffer shm = offer_shm(job);
  hosts = shm.hosts;
  if (shm.why_not.empty()) return shm.transport;
  if (r.comm == "shm") fail<ConfigError>("[rendezvous] SHEAF_COMM=shm is impossible: ", shm.why_not);
  return std::make_shared<HostsTransport>(shm.hosts, shm.transport, std::make_shared<GlooTransport>(job));
}

const char* variable(const char* name) { return std::getenv(name); }

// Tells users that have a GPU when it is not used.
void tell(const DeviceChoice& choice) {
  if (choice.device.is_cpu() && !choice.why.empty()) std::fprintf(stderr, "sheaf: computes on the CPU: %s\n", choice.why.c_str());
}

}  // namespace

Device init_device() {
  const DeviceChoice choice = choose_device({}, DeviceWish::from(variable));
  tell(choice);
  use_device(choice.device, RankContext::current());
  return choice.device;
}

World init_from_env() {
  const Rendezvous r = read_rendezvous();
  // Before CUDA is initialized: so that no stream waits for another one's kernel (nccl_communicator.h).
  if (r.world > 1) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  RankContext& context = RankContext::current();
  DeviceChoice choice = choose_device(r, DeviceWish::from(variable));
  std::shared_ptr<Transport> transport;
  if (r.world == 1) {
    transport = std::make_shared<LocalTransport>(std::make_shared<LocalJob>(1, LocalOptions{}));
    use_device(choice.device, context);
  } else {
    const std::shared_ptr<Job> job = join_job(r);
    bool agreeing = true;  // a ConfigError follows from what the ranks have told each other: all of them throw it
    try {
      choice = agreed_device(choice, job->agree("device", choice_for_others(choice)));
      transport = connect_hosts(r, job, context.hosts);
      agreeing = false;
      use_device(choice.device, context);
      if (choice.device.is_cuda()) transport = nccl_transport(job, transport);
    } catch (const std::exception& e) {
      // There is no World yet that would tell the others.
      if (!agreeing || !dynamic_cast<const ConfigError*>(&e)) job->board->raise({r.rank, ExitCode::kPeerLost, e.what()});
      throw;
    }
  }
  if (r.rank == 0) tell(choice);
  context.threads = r.threads;
  auto scope = std::make_shared<RankScope>(context);  // the compute threads of this thread
  World world(std::move(transport), context, r.rank, r.world, r.local_rank, r.local_world, choice.device);
  world.keep(std::move(scope));
  return world;
}

}  // namespace sheaf::distributed
