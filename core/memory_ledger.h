// MemoryLedger: what a rank's memory is held for, by who asked for it, when it is at its fullest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sheaf {

class Allocator;
class MemoryLog;
class RankContext;

enum class HeldFor : uint8_t {
  other,                 ///< what was there before, and what nobody says anything about
  activations,           ///< values of a forward, or of one that is computed again
  activation_gradients,  ///< values of a backward
  gathered,              ///< weights as they are computed with: gathered, or cast for that
  masters,
  optimizer_state,
  gradients,             ///< as they rest until the step
  whole_gradients,       ///< before they are reduced to a rank's part
  temporaries,           ///< workspaces of ops, and values of the step
  inputs,                ///< tokens and what else changes with each step
  idle,                  ///< a program's memory that no value lies in
};
std::string_view name(HeldFor use);

/// While it lives, it notes who takes memory for values (Storage) on the rank of the calling thread, and for how long; at most one
/// per rank. What Storage knows nothing of, such as the staging of communicators, is `other`. Its notes grow until reset_peak().
class MemoryLedger {
 public:
  MemoryLedger();
  ~MemoryLedger();
  MemoryLedger(const MemoryLedger&) = delete;
  MemoryLedger& operator=(const MemoryLedger&) = delete;

  /// Forgets when memory was full; what is held stays known.
  void reset_peak();

  struct Holder {
    HeldFor use = HeldFor::other;
    std::string op;      ///< that the memory was taken by; may be empty
    std::string module;  ///< path
    int64_t bytes = 0;
    int64_t blocks = 0;
    bool operator==(const Holder&) const = default;
  };
  struct Peak {
    int64_t bytes = 0;             ///< the sum of the holders': MemoryStats::peak, but for what is taken and given back beside Storage
    Holder last;                   ///< by whom it came to that; bytes and blocks are this one's
    std::vector<Holder> holders;   ///< the largest first
    int64_t held_for(HeldFor use) const;
    bool operator==(const Peak&) const = default;
  };
  /// Since the last reset_peak(), of one of the rank's allocators.
  Peak peak(const Allocator& memory) const;

 private:
  RankContext& context_;
  std::shared_ptr<MemoryLog> log_;
};

/// For people: "activations 61%, optimizer state 20%, …".
std::string to_words(const MemoryLedger::Peak& peak);
/// Tables: what it is held for, and the largest of who took it, with modules that differ in a number alone ("blocks.*.mlp") together.
std::string to_text(const MemoryLedger::Peak& peak);

/// Says for what, and by whom, the calling thread takes memory while this lives. What is passed must outlive it.
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

/// What the ledger is written in: it outlives it for blocks that are still alive. Thread-safe.
class MemoryLog {
 public:
  MemoryLog();
  ~MemoryLog();
  using HolderId = int32_t;
  static constexpr HolderId kNobody = -1;  ///< whose memory this log knows nothing of
  /// Whoever MemoryUse names.
  HolderId holder();
  /// `memory` has just given that many bytes to holder(), who is returned.
  HolderId take(const Allocator& memory, int64_t bytes);
  /// They have gone back.
  void give_back(const Allocator& memory, int64_t bytes, HolderId holder);
  /// Bytes that one holds are from now on another's.
  void pass_on(const Allocator& memory, int64_t bytes, HolderId from, HolderId to);

 private:
  friend class MemoryLedger;
  struct Lists;
  std::unique_ptr<Lists> lists_;
};

}  // namespace sheaf
