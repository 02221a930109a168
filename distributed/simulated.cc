#include "sheaf/distributed/simulated.h"

#include "sheaf/distributed/hosts.h"
#include "sheaf/distributed/staging.h"
#include "sheaf/kernels/cuda/config.h"

namespace sheaf::distributed {
namespace {

class SimulatedCommunicator final : public CommunicatorBase {
 public:
  SimulatedCommunicator(CommunicatorGroup group, std::shared_ptr<FailureBoard> board, std::string_view comm)
      : CommunicatorBase(std::move(group), std::move(board)),
        meta_(RankContext::current().meta),
        staging_(staging_bytes_of(comm, size())) {
    if (staging_ > 0) block_ = meta_->allocate(static_cast<size_t>(staging_));
  }
  ~SimulatedCommunicator() override {
    if (staging_ > 0) meta_->free(block_, static_cast<size_t>(staging_));
  }

  std::string_view kind() const override { return "simulated"; }
  int64_t staging_bytes() const override { return staging_; }

 private:
  Event dispatch(std::shared_ptr<Collective>) override { return {}; }
  void run(const Collective&) override {}

  const std::shared_ptr<Allocator> meta_;
  const int64_t staging_;
  void* block_ = nullptr;
};

class SimulatedTransport final : public Transport {
 public:
  SimulatedTransport(std::string comm, Hosts hosts) : comm_(std::move(comm)), hosts_(std::move(hosts)) {}
  std::string_view kind() const override { return "simulated"; }
  std::unique_ptr<Communicator> connect(const CommunicatorGroup& group) override {
    return std::make_unique<SimulatedCommunicator>(group, board_, kind_of_group(comm_, hosts_, group.members));
  }
  FailureBoard& board() override { return *board_; }

 private:
  const std::string comm_;
  const Hosts hosts_;
  const std::shared_ptr<FailureBoard> board_ = std::make_shared<FailureBoard>();
};

struct OwnContext {
  explicit OwnContext(const SimulationOptions& options) {
    context.threads = options.threads;
    context.meta_is = options.device;
    scope = std::make_unique<RankScope>(context);
  }
  RankContext context;
  std::unique_ptr<RankScope> scope;
};

}  // namespace

World simulated_world(int rank, int size, SimulationOptions options) {
  if (size < 1 || rank < 0 || rank >= size)
    fail<ConfigError>("[simulated_world] rank ", rank, " of ", size, " does not exist");
  check<ConfigError>(options.threads >= 1, "[simulated_world] ", options.threads, " threads");
  check<ConfigError>(kernels::kHasCuda || !options.device.is_cuda(), "[simulated_world] ", options.device.to_string(),
                     ": this build has no CUDA");
  check<ConfigError>(options.comm != "shm+gloo" || std::ssize(options.hosts) == size,
                     "[simulated_world] it is not known which of ", size, " ranks share memory: hosts has ",
                     options.hosts.size());
  auto own = std::make_shared<OwnContext>(options);
  World world(std::make_shared<SimulatedTransport>(std::move(options.comm), std::move(options.hosts)), own->context, rank,
              size, rank, size, Device::meta());
  world.keep(std::move(own));
  return world;
}

}  // namespace sheaf::distributed
