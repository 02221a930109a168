// allocator: the allocator calls of a real training step, in order, replayed on a separate allocator. Memory is not touched, so this
// measures bookkeeping (and the cost of returning pages). The peer is malloc with the same alignment; on a GPU, CUDA's stream-ordered
// pool.
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include "sheaf/core/allocator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/simulated.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/gpu.h"
#include "sheaf/tools/bench/stream_pool.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

// Blocks by number: the first `before` exist when the step begins.
struct Trace {
  struct Call {
    bool allocates;
    int block;
  };
  std::vector<size_t> sizes;  ///< per block
  int before = 0;
  std::vector<Call> calls;  ///< end with those that restore the initial state
};

// Forwards all calls, and records them from start() on. Blocks on the meta device, which have no memory, get unique fake addresses.
class TracingAllocator final : public Allocator {
 public:
  explicit TracingAllocator(std::shared_ptr<Allocator> inner) : inner_(std::move(inner)) {}

  void* allocate(size_t bytes, MemoryKind where) override {
    void* p = inner_->allocate(bytes, where);
    const std::lock_guard lock(mutex_);
    if (!p) p = reinterpret_cast<void*>(next_ += kApart);
    note(p, bytes);
    return p;
  }
  void free(void* block, size_t bytes) override {
    {
      const std::lock_guard lock(mutex_);
      const auto found = live_.find(block);
      if (started_) trace_.calls.push_back({false, found->second.number});
      live_.erase(found);
    }
    inner_->free(block, bytes);
  }
  MemoryStats stats() const override { return inner_->stats(); }
  void reset_peak() override { inner_->reset_peak(); }
  void add_wire(SharedRange range) override { inner_->add_wire(std::move(range)); }

  void start() {
    const std::lock_guard lock(mutex_);
    for (auto& [p, block] : live_) {
      block.number = static_cast<int>(trace_.sizes.size());
      trace_.sizes.push_back(block.bytes);
    }
    trace_.before = static_cast<int>(trace_.sizes.size());
    started_ = true;
  }
  // Ends the trace. Appends calls that restore the initial state: frees of blocks that the step left allocated, allocations of those
  // that it freed.
  Trace stop() {
    const std::lock_guard lock(mutex_);
    started_ = false;
    std::vector<bool> there(trace_.sizes.size(), false);
    for (const auto& [p, block] : live_) there[static_cast<size_t>(block.number)] = true;
    for (int b = trace_.before; b < static_cast<int>(there.size()); ++b)
      if (there[static_cast<size_t>(b)]) trace_.calls.push_back({false, b});
    for (int b = 0; b < trace_.before; ++b)
      if (!there[static_cast<size_t>(b)]) trace_.calls.push_back({true, b});
    return std::move(trace_);
  }

 private:
  struct Block {
    size_t bytes;
    int number;
  };
  void note(void* p, size_t bytes) {
    int number = -1;
    if (started_) {
      number = static_cast<int>(trace_.sizes.size());
      trace_.sizes.push_back(bytes);
      trace_.calls.push_back({true, number});
    }
    live_[p] = {bytes, number};
  }

  static constexpr uintptr_t kApart = 4096;
  const std::shared_ptr<Allocator> inner_;
  uintptr_t next_ = 0;
  std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  bool started_ = false;
  Trace trace_;
};

// Traces the third step: the optimizer's state exists and prefetch knows the order of gathers.
Trace trace_step(const models::TrainConfig& config, World& world, Device device,
                 std::shared_ptr<Allocator>& allocator) {
  const auto tracing = std::make_shared<TracingAllocator>(allocator);
  allocator = tracing;
  models::TrainingStep step(config, config.model.vocab, world, device);
  const models::FillBatch fill = random_tokens(config);
  step.run(0, fill);
  step.run(1, fill);
  tracing->start();
  step.run(2, fill);
  return tracing->stop();
}

Trace trace_on_cpu(const models::TrainConfig& config) {
  RankContext& context = RankContext::current();
  struct Restore {
    RankContext& context;
    const std::shared_ptr<Allocator> usual = std::exchange(context.cpu, make_cpu_allocator());
    ~Restore() { context.cpu = usual; }
  } restore{context};
  World world = solo_world();
  return trace_step(config, world, Device::cpu(), context.cpu);
}

// A GPU's step makes the same calls as one on a meta device that represents it.
Trace trace_on_gpu(const models::TrainConfig& config) {
  World world = distributed::simulated_world(0, 1, {.comm = "local", .device = Device::cuda()});
  return trace_step(config, world, Device::meta(), RankContext::current().meta);
}

// A trace replayed on an allocator, given by its two functions.
template <class Allocate, class Free>
class Replay {
 public:
  Replay(const Trace& trace, Allocate allocate, Free free)
      : trace_(trace), allocate_(allocate), free_(free), blocks_(trace.sizes.size()) {
    for (int b = 0; b < trace.before; ++b) take(static_cast<size_t>(b));
  }
  ~Replay() {
    for (int b = 0; b < trace_.before; ++b) give(static_cast<size_t>(b));
  }
  /// Replays the step once; calls `after` after each of its calls.
  template <class After>
  void run(After after) {
    for (const Trace::Call& call : trace_.calls) {
      const auto block = static_cast<size_t>(call.block);
      call.allocates ? take(block) : give(block);
      after();
    }
  }

 private:
  void take(size_t b) { blocks_[b] = allocate_(trace_.sizes[b]); }
  void give(size_t b) { free_(blocks_[b], trace_.sizes[b]); }
  const Trace& trace_;
  Allocate allocate_;
  Free free_;
  std::vector<void*> blocks_;
};

/// `make_trace` returns the trace, `make_ours` one of our allocators; they are called where an error makes the line "not available".
template <class MakeTrace, class MakeOurs, class Allocate, class Free>
void measure(Session& session, std::string_view name, MakeTrace make_trace, MakeOurs make_ours,
             const std::string& peer, Allocate peer_allocate, Free peer_free) {
  if (!session.wants("allocator", name)) return;
  Trace trace;
  std::shared_ptr<Allocator> ours;
  const auto allocate = [&](size_t bytes) { return ours->allocate(bytes); };
  const auto free = [&](void* p, size_t bytes) { ours->free(p, bytes); };
  std::unique_ptr<Replay<decltype(allocate), decltype(free)>> own;
  std::unique_ptr<Replay<Allocate, Free>> others;
  Comparison c{.name = std::string(name), .unit = Unit::nanoseconds};
  c.on_host = true;
  c.peer = peer;
  c.prepare = [&] {
    trace = make_trace();
    ours = make_ours();
    own = std::make_unique<Replay<decltype(allocate), decltype(free)>>(trace, allocate, free);
    others = std::make_unique<Replay<Allocate, Free>>(trace, peer_allocate, peer_free);
    c.amount = c.peer_amount = static_cast<double>(trace.calls.size());
    // Resident bytes per live byte at the peak of live bytes.
    own->run([] {});
    MemoryStats peak;
    own->run([&] {
      const MemoryStats now = ours->stats();
      if (now.live > peak.live) peak = now;
    });
    c.more = {
        {"calls a step", c.amount},
        {"MiB at peak", static_cast<double>(peak.live) / (1 << 20)},
        {"reserved/live", static_cast<double>(peak.reserved) / static_cast<double>(peak.live)}};
  };
  c.run = [&] { own->run([] {}); };
  c.peer_run = [&] { others->run([] {}); };
  session.compare("allocator", c);
}

void measure_on_cpu(Session& session, std::string_view name) {
  measure(
      session, name, [&] { return trace_on_cpu(training_config(name)); }, make_cpu_allocator,
      "malloc",
      [](size_t bytes) {
        return std::aligned_alloc(128, std::max<size_t>(1, (bytes + 127) / 128) * 128);
      },
      [](void* p, size_t) { std::free(p); });
}

// Micro-batches of four sequences: the same number of calls as with more, in less memory.
void measure_on_gpu(Session& session, const std::string& model) {
  if constexpr (kernels::kHasCuda) {
    std::vector<std::string> more{"--train.batch=16", "--train.micro_batches=4"};
    if (session.options().quick) more = tiny_model();
    const Stream stream = session.stream();
    const int device = session.device().index;
    StreamPool pool(device);
    measure(
        session, model + "-bf16-16x1024",
        [&] { return trace_on_gpu(training_config(model + "-bf16-512x1024", more)); },
        [&] { return kernels::cuda::make_device_allocator(device); }, StreamPool::name(),
        [&](size_t bytes) { return pool.allocate(bytes, stream); },
        [&](void* p, size_t) { pool.free(p, stream); });
  }
}

}  // namespace

void allocator_suite(Session& session) {
  if (session.on_gpu()) {
    measure_on_gpu(session, "gpt2-124m");
    measure_on_gpu(session, "gpt2-1558m");
    return;
  }
  measure_on_cpu(session, "nanogpt-f32-12x64");
  if (session.options().quick) return;
  measure_on_cpu(session, "char-f32-16x256");
  measure_on_cpu(session, "gpt2-124m-f32-4x64");
}

}  // namespace sheaf::bench
