// ThroughGpu: runs the tests of communicators, written for host buffers, on GPU buffers.
#pragma once

#include <memory>
#include <numeric>

#include <gtest/gtest.h>

#include "sheaf/core/communicator.h"
#include "sheaf/core/gpu.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/core/storage.h"
#include "sheaf/tests/needs_gpu.h"

namespace sheaf::testing {

/// A communicator for host buffers on top of one for GPU buffers: copies to the GPU, calls, and copies back, all in the order of the rank's
/// stream, so that the host waits only at the end.
class ThroughGpu final : public Communicator {
 public:
  explicit ThroughGpu(Communicator& inner, MemoryKind memory = MemoryKind::normal)
      : inner_(inner), gpu_(*RankContext::current().gpu), memory_(memory) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string_view kind() const override { return inner_.kind(); }
  Event all_gather(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                   std::string_view path) override {
    const int64_t size = static_cast<int64_t>(size_of(dtype));
    Block to(*this, out, sum(counts) * size);
    Block from(*this, in, counts[rank()] * size, &to);
    return to.back(inner_.all_gather(from.data(), to.data(), counts, dtype, path));
  }
  Event reduce_scatter(const void* in, void* out, std::span<const int64_t> counts, DType dtype,
                       std::string_view path) override {
    const int64_t size = static_cast<int64_t>(size_of(dtype));
    Block from(*this, in, sum(counts) * size);
    Block to(*this, out, counts[rank()] * size, &from);
    return to.back(inner_.reduce_scatter(from.data(), to.data(), counts, dtype, path));
  }
  Event all_reduce(void* data, int64_t count, DType dtype, Reduction reduction,
                   std::string_view path) override {
    Block block(*this, data, count * static_cast<int64_t>(size_of(dtype)));
    return block.back(inner_.all_reduce(block.data(), count, dtype, reduction, path));
  }
  Event all_to_all(const void* in, std::span<const int64_t> send, void* out,
                   std::span<const int64_t> recv, DType dtype, std::string_view path) override {
    const int64_t size = static_cast<int64_t>(size_of(dtype));
    Block from(*this, in, sum(send) * size), to(*this, out, sum(recv) * size);
    return to.back(inner_.all_to_all(from.data(), send, to.data(), recv, dtype, path));
  }
  Event broadcast(void* data, int64_t bytes, int root, std::string_view path) override {
    Block block(*this, data, bytes);
    return block.back(inner_.broadcast(block.data(), bytes, root, path));
  }
  Event barrier(std::string_view path) override { return inner_.barrier(path); }
  void abort(const std::string& reason) override { inner_.abort(reason); }
  int64_t staging_bytes() const override { return inner_.staging_bytes(); }
  uint64_t sequence() const override { return inner_.sequence(); }
  uint64_t fingerprint() const override { return inner_.fingerprint(); }
  int64_t bytes_received() const override { return inner_.bytes_received(); }

 private:
  static int64_t sum(std::span<const int64_t> counts) {
    return std::accumulate(counts.begin(), counts.end(), int64_t{0});
  }

  /// A copy of host memory on the GPU; if `around` covers it on the host, at the same place inside the copy of `around`.
  class Block {
   public:
    Block(const ThroughGpu& comm, const void* host, int64_t bytes, Block* around = nullptr)
        : gpu_(comm.gpu_),
          host_(static_cast<char*>(const_cast<void*>(host))),
          bytes_(static_cast<size_t>(bytes)) {
      if (around && host_ >= around->host_ && host_ + bytes_ <= around->host_ + around->bytes_ &&
          bytes > 0) {
        storage_ = around->storage_;
        data_ = around->data_ + (host_ - around->host_);
        return;
      }
      storage_ = Storage::allocate(gpu_.device(), bytes, comm.memory_);
      data_ = storage_->data();
      gpu_.copy(gpu_.compute(), data_, host_, bytes_, Gpu::Copy::to_device);
    }
    void* data() { return data_; }
    Event back(const Event& done) {
      done.order(gpu_.compute());
      gpu_.copy(gpu_.compute(), host_, data_, bytes_, Gpu::Copy::to_host);
      return done;
    }

   private:
    Gpu& gpu_;
    char* host_;
    size_t bytes_;
    std::shared_ptr<Storage> storage_;
    char* data_ = nullptr;
  };

  Communicator& inner_;
  Gpu& gpu_;
  const MemoryKind memory_;
};

}  // namespace sheaf::testing
