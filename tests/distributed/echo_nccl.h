// EchoNccl: a stand-in for NCCL whose ranks do not meet, so that its calls can be part of graphs. A
// gather gives everybody its own part as often as there are ranks; a sum is what one rank gave.
// Streams, events and memory are used as NCCL would use them.
#pragma once

#include <memory>
#include <string>

#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/nccl.h"

namespace sheaf::testing {

class EchoComm final : public NcclComm {
 public:
  EchoComm(int size, int rank)
      : size_(size),
        rank_(rank),
        gpu_(RankContext::current().gpu),
        stream_(gpu_->make_lane()) {}
  ~EchoComm() override { gpu_->destroy_lane(stream_); }
  EchoComm(const EchoComm&) = delete;
  EchoComm& operator=(const EchoComm&) = delete;

  const Stream& stream() const override { return stream_; }
  Event record() override { return gpu_->record(stream_); }
  void group(const std::function<void()>& calls) override { calls(); }
  void all_gather(const void* in, void* out, int64_t bytes_each) override {
    for (int r = 0; r < size_; ++r) copy(static_cast<char*>(out) + r * bytes_each, in, bytes_each);
  }
  void broadcast(const void*, void*, int64_t, int) override {}
  void all_reduce(const void*, void*, int64_t, DType, Reduction) override {}
  void reduce(const void*, void*, int64_t, DType, Reduction, int) override {}
  void reduce_scatter(const void* in, void* out, int64_t count_each, DType dtype,
                      Reduction) override {
    const int64_t bytes = count_each * static_cast<int64_t>(size_of(dtype));
    copy(out, static_cast<const char*>(in) + rank_ * bytes, bytes);
  }
  void send(const void*, int64_t, int) override {}
  void receive(void*, int64_t, int) override {}
  State state(std::string&) override { return State::ready; }
  void finalize() override {}
  void abort() override {}

 private:
  void copy(void* to, const void* from, int64_t bytes) {
    if (to != from)
      gpu_->copy(stream_, to, from, static_cast<size_t>(bytes), Gpu::Copy::on_device);
  }

  const int size_, rank_;
  const std::shared_ptr<Gpu> gpu_;
  const Stream stream_;
};

class EchoNccl final : public NcclLibrary {
 public:
  std::string unique_id() override { return "echo"; }
  std::unique_ptr<NcclComm> join(const std::string&, int size, int rank,
                                 const std::string&) override {
    return std::make_unique<EchoComm>(size, rank);
  }
};

}  // namespace sheaf::testing
