// EchoNccl: a stand-in for NCCL whose ranks do not meet, so that its calls can be part of graphs. A gather gives each rank its own part
// once per rank; a sum is one rank's input; a receive gets the last send. Streams, events and memory are used as NCCL would use them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/lane.h"
#include "sheaf/distributed/nccl.h"
#include "sheaf/tests/distributed/nccl_rules.h"

namespace sheaf::testing {

/// Can hold calls up.
struct EchoDelays {
  std::atomic<bool> busy = false;     ///< as if a peer were missing
  std::atomic<int> graphs = 0;        ///< that hold calls: an abort waits for them, as NCCL's does
  std::atomic<int> peers = 0;         ///< that have not ended: a communicator's end waits for them
  std::atomic<int> there = 0;         ///< communicators
  std::atomic<int> enqueue_ms = 0;    ///< that it takes to enqueue a call
  std::atomic<int> enqueued[4] = {};  ///< calls, by rank of the world
  std::atomic<int> most[4] = {};      ///< under way at once: the one that is enqueued, and those that wait for that
};

class EchoComm final : public NcclComm {
 public:
  EchoComm(int size, int rank, std::shared_ptr<NcclRules> rules, std::shared_ptr<EchoDelays> delays)
      : size_(size),
        rank_(rank),
        world_rank_(RankContext::current().rank),
        rules_(std::move(rules)),
        delays_(std::move(delays)),
        gpu_(RankContext::current().gpu),
        stream_(gpu_->make_lane()) {
    ++delays_->there;
  }
  ~EchoComm() override {
    while (delays_->peers > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rules_->forget(this);
    gpu_->destroy_lane(stream_);
    --delays_->there;
  }
  EchoComm(const EchoComm&) = delete;
  EchoComm& operator=(const EchoComm&) = delete;

  const Stream& stream() const override { return stream_; }
  Event record() override { return gpu_->record(stream_); }
  void group(const std::function<void()>& calls) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(delays_->enqueue_ms));
    std::atomic<int>& most = delays_->most[world_rank_];  // on one thread
    most = std::max(most.load(), 1 + static_cast<int>(LaneThread::waiting()));
    calls();
    ++delays_->enqueued[world_rank_];
  }
  void all_gather(const void* in, void* out, int64_t bytes_each) override {
    rules_->note(this, "all_gather in", in, bytes_each);
    rules_->note(this, "all_gather out", out, bytes_each * size_);
    for (int r = 0; r < size_; ++r) copy(static_cast<char*>(out) + r * bytes_each, in, bytes_each);
  }
  void broadcast(const void*, void*, int64_t, int) override {}
  void all_reduce(const void*, void* out, int64_t count, DType dtype, Reduction) override {
    rules_->note(this, "all_reduce out", out, count * static_cast<int64_t>(size_of(dtype)));
  }
  void reduce(const void*, void*, int64_t, DType, Reduction, int) override {}
  void reduce_scatter(const void* in, void* out, int64_t count_each, DType dtype,
                      Reduction) override {
    const int64_t bytes = count_each * static_cast<int64_t>(size_of(dtype));
    rules_->note(this, "reduce_scatter in", in, bytes * size_);
    copy(out, static_cast<const char*>(in) + rank_ * bytes, bytes);
  }
  void send(const void* in, int64_t bytes, int) override { sent_ = in, sent_bytes_ = bytes; }
  void receive(void* out, int64_t bytes, int) override {
    copy(out, sent_, std::min(bytes, sent_bytes_));
  }
  void* register_memory(void* base, int64_t bytes) override {
    return rules_->add(this, base, bytes);
  }
  void deregister_memory(void* registration) override { rules_->remove(this, registration); }
  State state(std::string& why) override {
    if (!aborted_) return delays_->busy ? State::busy : State::ready;
    why = "aborted";
    return State::failed;
  }
  void finalize() override { rules_->ended(this); }
  void abort() override {
    aborted_ = true;
    rules_->forget(this);
    while (delays_->graphs > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  void copy(void* to, const void* from, int64_t bytes) {
    if (to != from)
      gpu_->copy(stream_, to, from, static_cast<size_t>(bytes), Gpu::Copy::on_device);
  }

  const int size_, rank_, world_rank_;
  const std::shared_ptr<NcclRules> rules_;
  const std::shared_ptr<EchoDelays> delays_;
  const std::shared_ptr<Gpu> gpu_;
  const Stream stream_;
  std::atomic<bool> aborted_ = false;
  const void* sent_ = nullptr;
  int64_t sent_bytes_ = 0;
};

class EchoNccl final : public NcclLibrary {
 public:
  std::string unique_id() override { return "echo"; }
  std::unique_ptr<NcclComm> join(const std::string&, int size, int rank,
                                 const std::string&) override {
    return std::make_unique<EchoComm>(size, rank, rules, delays);
  }
  std::shared_ptr<PieceSource> memory() override { return rules->memory(); }

  const std::shared_ptr<NcclRules> rules = std::make_shared<NcclRules>();
  const std::shared_ptr<EchoDelays> delays = std::make_shared<EchoDelays>();
};

}  // namespace sheaf::testing
