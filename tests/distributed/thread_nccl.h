// ThreadNccl: NCCL's behaviour between ranks that are threads and share a GPU. Matching groups of calls are executed when the last member
// has submitted its group; groups that do not match, or that a member never submits, never finish.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "sheaf/distributed/nccl.h"
#include "sheaf/tests/distributed/nccl_rules.h"

namespace sheaf::testing {

class ThreadNccl final : public NcclLibrary {
 public:
  std::string unique_id() override;
  std::unique_ptr<NcclComm> join(const std::string& id, int size, int rank,
                                 const std::string& name) override;

  std::shared_ptr<PieceSource> memory() override { return empty ? std::make_shared<NoMemory>() : rules->memory(); }

  struct Clique;  // the members of one communicator

  const std::shared_ptr<NcclRules> rules = std::make_shared<NcclRules>();
  bool empty = false;  ///< has no memory that can be registered
  int refusing = -1;   ///< a member of each communicator where registering fails

 private:
  struct NoMemory final : PieceSource {
    void* allocate(int, size_t) override { return nullptr; }
    void free(void*) override {}
  };

  std::mutex mutex_;
  int ids_ = 0;
  std::map<std::string, std::shared_ptr<Clique>> cliques_;
};

}  // namespace sheaf::testing
