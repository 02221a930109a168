// allocator: the calls of a real training step, in their order, again and again on an allocator of
// its own. Nothing is touched, so this is bookkeeping alone (and what it costs to give pages back).
// The peer is malloc with the same alignment.
#include <cstdlib>
#include <unordered_map>

#include "sheaf/core/allocator.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/tools/bench/suites.h"
#include "sheaf/tools/bench/training.h"

namespace sheaf::bench {
namespace {

// Blocks by number: `before` are there when the step begins.
struct Trace {
  struct Call {
    bool allocates;
    int block;
  };
  std::vector<size_t> sizes;  ///< of each block
  int before = 0;
  std::vector<Call> calls;  ///< end with what makes the state as it was before
};

// Passes everything on, and writes it down from start() on.
class TracingAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes, HostMemory where) override {
    void* p = inner_->allocate(bytes, where);
    const std::lock_guard lock(mutex_);
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
  // Ends the trace; blocks that came or went for good in the step go or come again.
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

  const std::shared_ptr<Allocator> inner_ = make_cpu_allocator();
  std::mutex mutex_;
  std::unordered_map<void*, Block> live_;
  bool started_ = false;
  Trace trace_;
};

// The third step: the optimizer's state is there and prefetch knows the order.
Trace trace_of(std::string_view name) {
  RankContext& context = RankContext::current();
  const std::shared_ptr<Allocator> usual = context.cpu;
  const auto tracing = std::make_shared<TracingAllocator>();
  context.cpu = tracing;
  Trace trace;
  try {
    const models::TrainConfig config = training_config(name);
    World world = solo_world();
    models::TrainingStep step(config, config.model.vocab, world, Device::cpu());
    const models::FillBatch fill = random_tokens(config);
    step.run(0, fill);
    step.run(1, fill);
    tracing->start();
    step.run(2, fill);
    trace = tracing->stop();
  } catch (...) {
    context.cpu = usual;
    throw;
  }
  context.cpu = usual;
  return trace;
}

// A trace on an allocator, given by its two calls.
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
  /// The step once; `after` is called after each of its calls.
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

void measure(Session& session, std::string_view name) {
  if (!session.wants("allocator", name)) return;
  const Trace trace = trace_of(name);
  const std::shared_ptr<Allocator> ours = make_cpu_allocator();
  Replay own(
      trace, [&](size_t bytes) { return ours->allocate(bytes); },
      [&](void* p, size_t bytes) { ours->free(p, bytes); });
  Replay system(
      trace,
      [](size_t bytes) {
        return std::aligned_alloc(128, std::max<size_t>(1, (bytes + 127) / 128) * 128);
      },
      [](void* p, size_t) { std::free(p); });
  // What is resident for each live byte where most are live.
  own.run([] {});
  MemoryStats peak;
  own.run([&] {
    const MemoryStats now = ours->stats();
    if (now.live > peak.live) peak = now;
  });
  Comparison c{.name = std::string(name), .unit = Unit::nanoseconds};
  c.amount = c.peer_amount = static_cast<double>(trace.calls.size());
  c.run = [&] { own.run([] {}); };
  c.peer = "malloc";
  c.peer_run = [&] { system.run([] {}); };
  c.more = {{"calls a step", c.amount},
            {"MiB at peak", static_cast<double>(peak.live) / (1 << 20)},
            {"reserved/live", static_cast<double>(peak.reserved) / static_cast<double>(peak.live)}};
  session.compare("allocator", c);
}

}  // namespace

void allocator_suite(Session& session) {
  measure(session, "nanogpt-f32-12x64");
  if (session.options().quick) return;
  measure(session, "char-f32-16x256");
  measure(session, "gpt2-124m-f32-4x64");
}

}  // namespace sheaf::bench
