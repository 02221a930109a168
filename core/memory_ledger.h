// MemoryLedger: the purposes and owners of a rank's memory at its peak.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sheaf {

class Allocator;
class MemoryLog;
class RankContext;

enum class HeldFor : uint8_t {
  other,                 ///< memory from before the ledger, and undeclared memory
  activations,           ///< values of a forward, recomputed ones included
  activation_gradients,  ///< values of a backward
  gathered,              ///< weights as compute uses them: gathered, or cast for it
  masters,
  optimizer_state,
  gradients,        ///< kept until the step
  whole_gradients,  ///< before they are reduced to a rank's part
  temporaries,      ///< workspaces of ops, and values of the step
  inputs,           ///< tokens and other inputs that change with each step
  idle,             ///< a program's memory that holds no value
};
inline constexpr size_t kNumHeldFor = static_cast<size_t>(HeldFor::idle) + 1;
std::string_view name(HeldFor use);

/// While it lives, it records who allocates memory for values (Storage) on the rank of the calling thread, and for how long; at most
/// one per rank. Memory that Storage does not manage, such as the staging of communicators, is `other`. The records grow until
/// reset_peak().
class MemoryLedger {
 public:
  /// `now`, if given, dates each change for history(); it is called by whichever thread allocates or frees.
  explicit MemoryLedger(std::function<int64_t()> now = {});
  ~MemoryLedger();
  MemoryLedger(const MemoryLedger&) = delete;
  MemoryLedger& operator=(const MemoryLedger&) = delete;

  /// Forgets past peaks; current holders stay known.
  void reset_peak();

  struct Holder {
    HeldFor use = HeldFor::other;
    std::string op;      ///< that allocated the memory; may be empty
    std::string module;  ///< path
    int64_t bytes = 0;
    int64_t blocks = 0;
    bool operator==(const Holder&) const = default;
  };
  struct Peak {
    int64_t bytes = 0;            ///< the sum over holders: MemoryStats::peak, except for memory allocated and freed outside Storage
    Holder last;                  ///< who allocated the last bytes of the peak; bytes and blocks are its own
    std::vector<Holder> holders;  ///< largest first
    int64_t held_for(HeldFor use) const;
    bool operator==(const Peak&) const = default;
  };
  /// Since the last reset_peak(), of one of the rank's allocators.
  Peak peak(const Allocator& memory) const;

  struct Change {
    int64_t bytes;  ///< below 0: freed
    int32_t now;    ///< 0 without a clock
    HeldFor use;
  };
  struct History {
    std::array<int64_t, kNumHeldFor> before = {};  ///< bytes by purpose
    std::vector<Change> changes;                   ///< since then, in order
  };
  /// Since the last reset_peak(), as peak().
  History history(const Allocator& memory) const;

 private:
  RankContext& context_;
  std::shared_ptr<MemoryLog> log_;
};

/// For people: "activations 61%, optimizer state 20%, …".
std::string to_words(const MemoryLedger::Peak& peak);
/// Tables: the bytes per purpose, and the largest holders, with modules that differ only in a number taken together ("blocks.*.mlp").
std::string to_text(const MemoryLedger::Peak& peak);

/// Declares for what, and by whom, the calling thread allocates memory while this lives. The arguments must outlive it.
class MemoryUse {
 public:
  MemoryUse(HeldFor use, std::string_view op, std::string_view module);
  ~MemoryUse();
  MemoryUse(const MemoryUse&) = delete;
  MemoryUse& operator=(const MemoryUse&) = delete;
  HeldFor use() const { return use_; }
  std::string_view op() const { return op_; }
  std::string_view module() const { return module_; }
  static const MemoryUse* current();  ///< the innermost; may be null

 private:
  HeldFor use_;
  std::string_view op_, module_;
  const MemoryUse* previous_;
};

/// The ledger's record; it outlives the ledger for blocks that are still alive. Thread-safe.
class MemoryLog {
 public:
  MemoryLog();
  ~MemoryLog();
  using HolderId = int32_t;
  static constexpr HolderId kNobody = -1;  ///< holder of memory that this log does not know
  /// The holder that MemoryUse names.
  HolderId holder();
  /// `memory` has just given that many bytes to holder(), which is returned.
  HolderId take(const Allocator& memory, int64_t bytes);
  /// The holder has freed them.
  void give_back(const Allocator& memory, int64_t bytes, HolderId holder);
  /// From now on these bytes of one holder are another's.
  void pass_on(const Allocator& memory, int64_t bytes, HolderId from, HolderId to);

 private:
  friend class MemoryLedger;
  struct Lists;
  std::unique_ptr<Lists> lists_;
};

}  // namespace sheaf
