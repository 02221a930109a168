#include "sheaf/core/memory_ledger.h"

#include <algorithm>
#include <functional>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "sheaf/core/allocator.h"
#include "sheaf/core/error.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {
namespace {

thread_local const MemoryUse* innermost = nullptr;

}  // namespace

std::string_view name(HeldFor use) {
  switch (use) {
    case HeldFor::activations: return "activations";
    case HeldFor::activation_gradients: return "gradients of activations";
    case HeldFor::gathered: return "gathered weights";
    case HeldFor::masters: return "masters";
    case HeldFor::optimizer_state: return "optimizer state";
    case HeldFor::gradients: return "gradients";
    case HeldFor::whole_gradients: return "gradients before their reduction";
    case HeldFor::temporaries: return "temporaries";
    case HeldFor::inputs: return "inputs";
    case HeldFor::idle: return "idle in the program's memory";
    case HeldFor::other: break;
  }
  return "other";
}

MemoryUse::MemoryUse(HeldFor use, std::string_view op, std::string_view module)
    : use_(use), op_(op), module_(module), previous_(innermost) {
  innermost = this;
}
MemoryUse::~MemoryUse() { innermost = previous_; }
const MemoryUse* MemoryUse::current() { return innermost; }

// Allocations and frees since the last reset_peak(), in order; who held what when is computed on demand.
struct MemoryLog::Lists {
  struct Change {
    HolderId holder;
    int32_t memory;  // index
    int64_t bytes;   // below 0: freed
    int64_t live;    // of the memory, after it
    int32_t now;
  };
  struct Holding {
    int64_t bytes = 0, blocks = 0;
    void apply(const Change& c) { bytes += c.bytes, blocks += c.bytes > 0 ? 1 : -1; }
  };
  struct Memory {
    const Allocator* allocator;
    int64_t live;                    // before the changes,
    std::vector<Holding> held = {};  // and their holders: indexed by HolderId, as far as it goes
    Holding& of(HolderId holder) {
      if (held.size() <= static_cast<size_t>(holder)) held.resize(static_cast<size_t>(holder) + 1);
      return held[static_cast<size_t>(holder)];
    }
  };
  std::mutex mutex;
  std::vector<MemoryLedger::Holder> holders;  // their bytes are kept elsewhere
  std::unordered_map<std::string, HolderId> ids;
  std::string key;
  std::vector<Memory> memories;
  std::vector<Change> changes;
  std::function<int64_t()> now;

  HolderId holder() {
    const MemoryUse* use = MemoryUse::current();
    key.assign(1, static_cast<char>(use ? use->use() : HeldFor::other));
    if (use) ((key += use->op()) += '\0') += use->module();
    const auto [at, is_new] = ids.try_emplace(key, static_cast<HolderId>(holders.size()));
    if (is_new) {
      holders.emplace_back();
      if (use) holders.back().use = use->use(), holders.back().op = use->op(), holders.back().module = use->module();
    }
    return at->second;
  }
  bool is_idle(HolderId holder) const { return holders[static_cast<size_t>(holder)].use == HeldFor::idle; }
  int32_t index(const Allocator& memory) const {
    return static_cast<int32_t>(std::ranges::find(memories, &memory, &Memory::allocator) - memories.begin());
  }
  void add(const Allocator& memory, HolderId holder, int64_t bytes, int64_t live) {
    const int32_t m = index(memory);
    if (static_cast<size_t>(m) == memories.size()) memories.push_back({&memory, 0});
    changes.push_back({holder, m, bytes, live, now ? static_cast<int32_t>(now()) : 0});
  }
};

MemoryLog::MemoryLog() : lists_(std::make_unique<Lists>()) {}
MemoryLog::~MemoryLog() = default;

MemoryLog::HolderId MemoryLog::holder() {
  const std::lock_guard lock(lists_->mutex);
  return lists_->holder();
}

MemoryLog::HolderId MemoryLog::take(const Allocator& memory, int64_t bytes) {
  if (bytes == 0) return kNobody;
  const int64_t live = memory.stats().live;
  const std::lock_guard lock(lists_->mutex);
  const HolderId holder = lists_->holder();
  lists_->add(memory, holder, bytes, live);
  return holder;
}

void MemoryLog::give_back(const Allocator& memory, int64_t bytes, HolderId holder) {
  if (holder == kNobody) return;
  const int64_t live = memory.stats().live;
  const std::lock_guard lock(lists_->mutex);
  lists_->add(memory, holder, -bytes, live);
}

void MemoryLog::pass_on(const Allocator& memory, int64_t bytes, HolderId from, HolderId to) {
  if (bytes == 0) return;
  const int64_t live = memory.stats().live;
  const std::lock_guard lock(lists_->mutex);
  if (from != kNobody) lists_->add(memory, from, -bytes, live);
  if (to != kNobody) lists_->add(memory, to, bytes, live);
}

MemoryLedger::MemoryLedger(std::function<int64_t()> now) : context_(RankContext::current()), log_(std::make_shared<MemoryLog>()) {
  log_->lists_->now = std::move(now);
  if (context_.memory_log) fail<ConfigError>("[memory] rank ", context_.rank, " has a ledger already");
  for (const auto& memory : context_.memories()) log_->lists_->memories.push_back({memory.get(), memory->stats().live});
  context_.memory_log = log_;
}
MemoryLedger::~MemoryLedger() { context_.memory_log = nullptr; }

void MemoryLedger::reset_peak() {
  MemoryLog::Lists& lists = *log_->lists_;
  const std::lock_guard lock(lists.mutex);
  for (const auto& c : lists.changes) lists.memories[static_cast<size_t>(c.memory)].of(c.holder).apply(c);
  lists.changes.clear();
  for (auto& memory : lists.memories) memory.live = memory.allocator->stats().live;
}

MemoryLedger::Peak MemoryLedger::peak(const Allocator& memory) const {
  MemoryLog::Lists& lists = *log_->lists_;
  const std::lock_guard lock(lists.mutex);
  const int32_t m = lists.index(memory);
  Peak peak;
  if (static_cast<size_t>(m) == lists.memories.size()) return peak;
  MemoryLog::Lists::Memory held = lists.memories[static_cast<size_t>(m)];

  // Finds when the most bytes are in use. A program allocates its memory once, and part of it is idle.
  int64_t idle = 0;
  for (size_t h = 0; h < held.held.size(); ++h) idle += lists.is_idle(static_cast<MemoryLog::HolderId>(h)) ? held.held[h].bytes : 0;
  peak.bytes = held.live;
  int64_t most_held = held.live - idle;
  size_t then = 0;  // after that many changes
  for (size_t i = 0; i < lists.changes.size(); ++i) {
    const auto& c = lists.changes[i];
    if (c.memory != m) continue;
    if (lists.is_idle(c.holder)) idle += c.bytes;
    if (c.bytes < 0) continue;
    peak.bytes = std::max(peak.bytes, c.live);
    if (c.live - idle <= most_held) continue;
    most_held = c.live - idle;
    then = i + 1;
  }

  for (size_t i = 0; i < then; ++i)
    if (lists.changes[i].memory == m) held.of(lists.changes[i].holder).apply(lists.changes[i]);
  const auto entry = [&](MemoryLog::HolderId id, int64_t bytes, int64_t blocks) {
    Holder h = lists.holders[static_cast<size_t>(id)];
    h.bytes = bytes, h.blocks = blocks;
    return h;
  };
  if (then > 0) peak.last = entry(lists.changes[then - 1].holder, lists.changes[then - 1].bytes, 1);
  int64_t before = most_held;
  for (size_t h = 0; h < held.held.size(); ++h) {
    const auto id = static_cast<MemoryLog::HolderId>(h);
    if (held.held[h].bytes == 0 || lists.is_idle(id)) continue;
    peak.holders.push_back(entry(id, held.held[h].bytes, held.held[h].blocks));
    before -= held.held[h].bytes;
  }
  const auto rest = [&](HeldFor use, int64_t bytes) {
    if (bytes != 0) peak.holders.push_back({use, "", "", bytes, 1});
  };
  rest(HeldFor::other, before);
  rest(HeldFor::idle, peak.bytes - most_held);
  std::ranges::sort(peak.holders, [](const Holder& a, const Holder& b) {
    return std::tie(b.bytes, a.use, a.op, a.module) < std::tie(a.bytes, b.use, b.op, b.module);
  });
  return peak;
}

MemoryLedger::History MemoryLedger::history(const Allocator& memory) const {
  MemoryLog::Lists& lists = *log_->lists_;
  const std::lock_guard lock(lists.mutex);
  const int32_t m = lists.index(memory);
  History history;
  if (static_cast<size_t>(m) == lists.memories.size()) return history;
  const MemoryLog::Lists::Memory& at_first = lists.memories[static_cast<size_t>(m)];
  int64_t& other = history.before[static_cast<size_t>(HeldFor::other)] = at_first.live;
  for (size_t h = 0; h < at_first.held.size(); ++h) {
    other -= at_first.held[h].bytes;
    history.before[static_cast<size_t>(lists.holders[h].use)] += at_first.held[h].bytes;
  }
  int64_t live = at_first.live;
  for (const auto& c : lists.changes) {
    if (c.memory != m) continue;
    history.changes.push_back({c.bytes, c.now, lists.holders[static_cast<size_t>(c.holder)].use});
    live += c.bytes;
    if (live != c.live) history.changes.push_back({c.live - std::exchange(live, c.live), c.now, HeldFor::other});  // outside of Storage
  }
  return history;
}

int64_t MemoryLedger::Peak::held_for(HeldFor use) const {
  int64_t bytes = 0;
  for (const Holder& h : holders) bytes += h.use == use ? h.bytes : 0;
  return bytes;
}

}  // namespace sheaf
