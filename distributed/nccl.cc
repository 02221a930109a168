#if __has_include(<nccl.h>)

#include "sheaf/distributed/nccl.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include <cuda_runtime.h>
#include <nccl.h>

#include "sheaf/core/rank_context.h"
#include "sheaf/kernels/cuda/library.h"
#include "sheaf/kernels/cuda/runtime.h"

#define SHEAF_NCCL(F)       \
  F(ncclAllGather)          \
  F(ncclAllReduce)          \
  F(ncclBroadcast)          \
  F(ncclCommAbort)          \
  F(ncclCommDeregister)     \
  F(ncclCommDestroy)        \
  F(ncclCommFinalize)       \
  F(ncclCommGetAsyncError)  \
  F(ncclCommInitRankConfig) \
  F(ncclCommRegister)       \
  F(ncclGetErrorString)     \
  F(ncclGetLastError)       \
  F(ncclGetUniqueId)        \
  F(ncclGetVersion)         \
  F(ncclGroupEnd)           \
  F(ncclGroupStart)         \
  F(ncclMemAlloc)           \
  F(ncclMemFree)            \
  F(ncclRecv)               \
  F(ncclReduce)             \
  F(ncclReduceScatter)      \
  F(ncclSend)
SHEAF_FORWARD_FUNCTIONS(kNccl, SHEAF_NCCL)

namespace sheaf {
namespace {

std::string words(ncclResult_t result, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  return last && *last ? str(ncclGetErrorString(result), ": ", last)
                       : std::string(ncclGetErrorString(result));
}

void check_call(ncclResult_t result, const char* call, ncclComm_t comm = nullptr) {
  if (result != ncclSuccess && result != ncclInProgress)
    throw CommError(str(call, ": ", words(result, comm)), ExitCode::kPeerLost);
}

#define SHEAF_NCCL_CALL(function, ...) check_call(function(__VA_ARGS__), #function, comm_)

// Bytes are sent as this type.
constexpr ncclDataType_t kByte = ncclUint8;

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ncclFloat64;
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f16:
      return ncclFloat16;
    case DType::i64:
      return ncclInt64;
    case DType::i32:
      return ncclInt32;
    case DType::u32:
      return ncclUint32;
    case DType::u8:
      return ncclUint8;
    case DType::i8:
      return ncclInt8;
    default:
      fail<ConfigError>("[nccl] has no reductions of ", dtype);
  }
}

ncclRedOp_t op_of(Reduction reduction) {
  return reduction == Reduction::sum ? ncclSum : reduction == Reduction::max ? ncclMax : ncclMin;
}

size_t size(int64_t count) { return static_cast<size_t>(count); }

class LibraryComm final : public NcclComm {
 public:
  LibraryComm(const std::string& id, int ranks, int rank, const std::string& name)
      : gpu_(RankContext::current().gpu), stream_(gpu_->make_lane()), name_(name) {
    try {
      ncclUniqueId unique;
      check<CommError>(id.size() == sizeof unique.internal, "[nccl] the unique id has ", id.size(),
                       " bytes");
      std::memcpy(unique.internal, id.data(), id.size());
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
      config.commName = name_.c_str();
#endif
      use_device();
      SHEAF_NCCL_CALL(ncclCommInitRankConfig, &comm_, ranks, unique, rank, &config);
    } catch (...) {
      gpu_->destroy_lane(stream_);
      throw;
    }
  }
  ~LibraryComm() override {
    choose_device();
    {
      std::lock_guard lock(mutex_);
      if (comm_ && finalized_)
        ncclCommDestroy(comm_);
      else if (comm_)
        ncclCommAbort(comm_);
    }
    try {
      gpu_->destroy_lane(stream_);
    } catch (const CudaError&) {
    }  // reported by the call that failed
  }
  LibraryComm(const LibraryComm&) = delete;
  LibraryComm& operator=(const LibraryComm&) = delete;

  const Stream& stream() const override { return stream_; }
  Event record() override { return gpu_->record(stream_); }

  void group(const std::function<void()>& calls) override {
    std::lock_guard lock(mutex_);
    check_alive();
    use_device();
    SHEAF_NCCL_CALL(ncclGroupStart);
    try {
      calls();
    } catch (...) {
      ncclGroupEnd();  // the group belongs to this thread and would absorb its next calls
      throw;
    }
    SHEAF_NCCL_CALL(ncclGroupEnd);
  }
  void all_gather(const void* in, void* out, int64_t bytes_each) override {
    SHEAF_NCCL_CALL(ncclAllGather, in, out, size(bytes_each), kByte, comm_, handle());
  }
  void broadcast(const void* in, void* out, int64_t bytes, int root) override {
    SHEAF_NCCL_CALL(ncclBroadcast, in, out, size(bytes), kByte, root, comm_, handle());
  }
  void all_reduce(const void* in, void* out, int64_t count, DType dtype,
                  Reduction reduction) override {
    SHEAF_NCCL_CALL(ncclAllReduce, in, out, size(count), type_of(dtype), op_of(reduction), comm_,
                    handle());
  }
  void reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
              int root) override {
    SHEAF_NCCL_CALL(ncclReduce, in, out, size(count), type_of(dtype), op_of(reduction), root, comm_,
                    handle());
  }
  void reduce_scatter(const void* in, void* out, int64_t count_each, DType dtype,
                      Reduction reduction) override {
    SHEAF_NCCL_CALL(ncclReduceScatter, in, out, size(count_each), type_of(dtype), op_of(reduction),
                    comm_, handle());
  }
  void send(const void* data, int64_t bytes, int peer) override {
    SHEAF_NCCL_CALL(ncclSend, data, size(bytes), kByte, peer, comm_, handle());
  }
  void receive(void* data, int64_t bytes, int peer) override {
    SHEAF_NCCL_CALL(ncclRecv, data, size(bytes), kByte, peer, comm_, handle());
  }

  // Both are done when they return, even if the communicator does not block.
  void* register_memory(void* base, int64_t bytes) override {
    std::lock_guard lock(mutex_);
    check_alive();
    use_device();
    void* registration = nullptr;  // stays null if NCCL_LOCAL_REGISTER=0
    SHEAF_NCCL_CALL(ncclCommRegister, comm_, base, size(bytes), &registration);
    return registration;
  }
  void deregister_memory(void* registration) override {
    std::lock_guard lock(mutex_);
    check_alive();
    use_device();
    if (registration) SHEAF_NCCL_CALL(ncclCommDeregister, comm_, registration);
  }

  State state(std::string& why) override {
    std::lock_guard lock(mutex_);
    if (!comm_) {
      why = "the communicator was aborted";
      return State::failed;
    }
    ncclResult_t now = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &now);
    if (asked != ncclSuccess) now = asked;
    if (now == ncclSuccess) return State::ready;
    if (now == ncclInProgress) return State::busy;
    why = words(now, comm_);
    return State::failed;
  }
  void finalize() override {
    std::lock_guard lock(mutex_);
    if (!comm_) return;
    SHEAF_NCCL_CALL(ncclCommFinalize, comm_);
    finalized_ = true;
  }
  void abort() override {
    ncclComm_t comm;
    {
      std::lock_guard lock(mutex_);
      comm = std::exchange(comm_, nullptr);
    }
    if (!comm) return;
    choose_device();
    // Ends the kernels first, then waits for graphs: not under the lock, which others need in order to learn of it.
    ncclCommAbort(comm);
  }

 private:
  void check_alive() const {
    if (!comm_) throw CommError("[nccl] the communicator was aborted", ExitCode::kPeerLost);
  }
  void use_device() { kernels::cuda::use_device(gpu_->device().index); }
  // For a thread that has not selected a device NCCL would create a context on GPU 0.
  void choose_device() noexcept {
    try {
      use_device();
    } catch (const CudaError&) {
    }  // reported by the call that failed: after a fault every call fails
  }
  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_.handle); }

  const std::shared_ptr<Gpu> gpu_;
  const Stream stream_;
  const std::string name_;
  std::mutex mutex_;  // NCCL requires one thread at a time; nothing waits while it is held
  ncclComm_t comm_ = nullptr;
  bool finalized_ = false;
};

/// ncclMemAlloc: each piece is an allocation with a handle that can be given to peers.
class LibraryMemory final : public PieceSource {
 public:
  void* allocate(int device, size_t bytes) override {
    kernels::cuda::use_device(device);
    void* piece = nullptr;
    return ncclMemAlloc(&piece, bytes) == ncclSuccess ? piece : nullptr;
  }
  void free(void* piece) override { ncclMemFree(piece); }
};

class Library final : public NcclLibrary {
 public:
  Library() {
    // In a graph NCCL tries to register the buffers of a call itself, which it cannot: only pieces of the pool have a handle for
    // peers, and those are registered already. But a rank whose buffer spans two mappings of its memory gives up before it meets the
    // others, who wait for it.
    setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
    // [Note: one thread issues] in nccl_communicator.h.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
    const std::string name = SHEAF_SONAME("libnccl.so.", NCCL_MAJOR);
    kernels::cuda::load_library(name, kNccl);
    int version = 0;
    check_call(ncclGetVersion(&version), "ncclGetVersion");
    check<ConfigError>(version >= NCCL_VERSION(2, 26, 0), "[nccl] the ", name, " that is found is of version ", version / 10000, ".",
                       version / 100 % 100, ", and ranks need 2.26 or later: older ones may deadlock if a rank has several ",
                       "communicators; SHEAF_CUDA_LIBRARIES names a folder with another");
  }

  std::string unique_id() override {
    ncclUniqueId id;
    check_call(ncclGetUniqueId(&id), "ncclGetUniqueId");
    return {id.internal, sizeof id.internal};
  }
  std::unique_ptr<NcclComm> join(const std::string& id, int size, int rank,
                                 const std::string& name) override {
    return std::make_unique<LibraryComm>(id, size, rank, name);
  }
  std::shared_ptr<PieceSource> memory() override { return std::make_shared<LibraryMemory>(); }
};

}  // namespace

NcclLibrary& nccl_library() {
  static Library library;
  return library;
}

}  // namespace sheaf

#endif
