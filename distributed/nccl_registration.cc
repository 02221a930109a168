#include "sheaf/distributed/nccl_registration.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

/// Off by default: the pool costs memory, and its gain has not been measured yet.
bool wanted() {
  const char* const value = std::getenv("SHEAF_NCCL_REGISTER");
  return value && std::string_view(value) == "1";
}

void say_once(const std::string& text) {
  static std::once_flag said;
  std::call_once(said, [&] { std::fprintf(stderr, "sheaf: %s\n", text.c_str()); });
}

}  // namespace

void use_nccl_memory(NcclLibrary& library) {
  const std::shared_ptr<Gpu>& gpu = RankContext::current().gpu;
  if (!gpu || !wanted()) return;
  try {
    gpu->set_wire(library.memory());
  } catch (const OutOfMemory&) {
  }  // of its kind: the rank continues with its own
}

NcclRegistration::NcclRegistration(NcclComm& comm, std::shared_ptr<Gpu> gpu, Communicator& host,
                                   const std::string& name)
    : comm_(comm), gpu_(std::move(gpu)) {
  std::string why_not = wanted() ? "this NCCL gives no memory that can be registered"
                                 : "SHEAF_NCCL_REGISTER is not 1 there";
  try {
    catch_up();
  } catch (const CommError& e) {
    end();
    why_not = e.what();
  }
  // The first member that cannot, and (below 0) whether any was asked to.
  int32_t settled[] = {registrations_.empty() ? host.rank() : host.size(), wanted() ? -1 : 0};
  host.all_reduce(settled, 2, kI32, Reduction::min, "nccl/registration").sync();
  if (settled[0] == host.size()) return;
  if (settled[0] == host.rank() && settled[1] < 0)
    say_once(str("buffers of ", name, " are not registered with NCCL: rank ", RankContext::current().rank, ": ", why_not));
  end();
  on_ = false;
}

void NcclRegistration::catch_up() {
  if (!on_) return;
  for (const MemoryPiece& piece : gpu_->wire_pieces(registrations_.size()))
    registrations_.push_back(comm_.register_memory(piece.base, static_cast<int64_t>(piece.bytes)));
}

void NcclRegistration::end() {
  for (; !registrations_.empty(); registrations_.pop_back()) comm_.deregister_memory(registrations_.back());
}

}  // namespace sheaf
