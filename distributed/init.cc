#include "sheaf/distributed/init.h"

#include "sheaf/distributed/gloo_communicator.h"
#include "sheaf/distributed/local_communicator.h"
#include "sheaf/distributed/rendezvous.h"

namespace sheaf::distributed {

World init_from_env() {
  const Rendezvous r = read_rendezvous();
  std::shared_ptr<Transport> transport;
  if (r.world == 1) transport = std::make_shared<LocalTransport>(std::make_shared<LocalJob>(1, LocalOptions{}));
  else transport = std::make_shared<GlooTransport>(join_gloo_job(r));
  RankContext& context = RankContext::current();
  context.threads = r.threads;
  auto scope = std::make_shared<RankScope>(context);  // this thread's OpenMP threads and flush-to-zero
  World world(std::move(transport), context, r.rank, r.world, r.local_rank, r.local_world);
  world.keep(std::move(scope));
  return world;
}

}  // namespace sheaf::distributed
