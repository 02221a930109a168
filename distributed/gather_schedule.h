// GatherSchedule: when each unit is gathered. Gathers follow the order of the same pass of the previous recording, or of the previous
// pass: when a unit is used, the next ones in that order are issued as far as a byte budget allows, so that they overlap with this
// one's layer's compute; in a forward, not before the activations that use the same lane (see [Note: quiet stretches]). The decision is a pure
// function of the order, the tape and the budget: all ranks make the same one.
//
// [Note: gathered bytes] At any time the gathered bytes are at most those of the open units, pending ones included, plus the prefetch
// budget. A unit whose discard is pending is discarded when another unit is gathered or a backward begins, unless it is used so soon
// that it would be prefetched again. Copies along a secondary axis are held for a step and not counted; copies not yet used have a
// second budget of the same size. A unit gathered in blocks counts with its unpacked size; while it is unpacked, its blocks are held,
// too.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "sheaf/distributed/quiet_stretch.h"

namespace sheaf {

class Unit;

/// Shared by the units of one model on one rank; used only from its compute thread.
class GatherSchedule {
 public:
  /// Bytes that may be prefetched. −1: one unit always, even the largest other than the root; several if together they are at most 9/8
  /// of the usual unit: the size up to which units have half of the model's bytes (a block, even if there are large tables).
  explicit GatherSchedule(int64_t prefetch_budget = -1) : budget_(prefetch_budget) {}

  void add(Unit* unit) { units_.push_back(unit); }
  void remove(Unit* unit);

  /// Makes `unit` open: takes its prefetched gather or issues one, discards what is pending, prefetches.
  void use(Unit& unit);
  /// Scopes of modules: they determine where a pass begins and what was opened outside its scope.
  void enter_scope();
  void leave_scope();
  /// Examines what has been computed since, before a parameter is read and when a module returns a tensor: the next gathers may be due.
  void look();
  /// look() for the model whose scope is innermost on this thread, if any.
  static void look_at_current();
  /// A backward begins: discards pending units that are not used next.
  void backward_begins();
  /// Closes `unit` when the currently innermost scope ends. True if there is none: the unit is then pending.
  bool close_with_scope(Unit& unit);
  /// Called where passes and recordings end: closes units that are pending, in flight or, outside a recording, open
  /// without having been gathered, and frees unused copies. Pending ones whose values are held (Unit::note_holders) only if `held_too`.
  void flush(bool held_too = true);
  void advance_reductions();
  /// Calls what waits for gradients that are reduced: Unit::update_when_reduced(). Behind the next reduction, which need not wait for it.
  void use_reduced();

  /// Between these two, units opened outside recordings stay open, and so do cast values, until masters change or a recording opens
  /// them.
  void keep_open() { ++keeping_open_; }
  void end_keeping_open();
  /// Whether what is opened now stays open.
  bool keeps_open() const;
  /// A scope around it reads its values and closes it: close_with_scope().
  bool closes_with_scope(const Unit& unit) const;

  /// The most bytes that are prefetched.
  int64_t budget() const;
  /// The number of mispredicted prefetches.
  int64_t mispredicted() const { return mispredicted_; }
  int64_t gathered_bytes() const;  ///< now
  int64_t peak_gathered_bytes() const { return peak_gathered_; }
  int64_t peak_excess() const { return peak_excess_; }  ///< most bytes gathered beyond the open and pending units
  void note_gathered();

 private:
  /// A use of a unit, and the number of exchanges (see [Note: quiet stretches]) after which the next units are gathered; -1: not known.
  struct Use {
    Unit* unit;
    int exchanges_before_next;
  };
  using Order = std::vector<Use>;

  void begin_pass(bool held_too = true);
  const Order& foreseen() const;
  void take_prefetched(Unit& unit, bool is_foreseen);
  void discard_in_flight();
  void gather_now(Unit& unit);
  void discard_pending(const Unit* except, std::span<Unit* const> next, bool held_too = false);
  int64_t usual_bytes() const;
  std::vector<Unit*> comes_next(const Unit* now, bool gathers) const;
  void begin_use(const Unit& unit, std::vector<Unit*> next);
  void end_use();
  void prefetch(std::span<Unit* const> next);
  void prefetch_copies();

  std::vector<Unit*> units_;
  std::vector<std::vector<Unit*>> scopes_;
  GatherSchedule* around_ = nullptr;              // the schedule of the model around the outermost scope
  Order order_outside_;                           // of the last complete pass outside recordings
  std::vector<Order> orders_;                     // of the last recordings' passes, by index: those of a pipeline stage differ
  size_t last_complete_pass_ = 0, pass_ = 0;      // indices of the last complete pass and of the current one
  uint64_t recording_ = 0;                        // the recording of uses_; 0: none
  Order uses_;                                    // in the current pass
  size_t cleared_at_ = 0;                         // number of uses in the pass when the last backward began
  bool following_ = false;                        // uses_ agrees with foreseen() so far
  std::deque<Unit*> in_flight_;
  bool counts_ = false;                           // the exchanges of the current use are observed
  QuietStretch stretch_;                          // the longest stretch without any in it, if so
  std::vector<Unit*> put_off_;                    // units to gather after that many exchanges:
  int exchanges_before_next_ = 0;
  int keeping_open_ = 0;                          // calls of keep_open() without their end
  int64_t budget_;
  int64_t mispredicted_ = 0, peak_gathered_ = 0, peak_excess_ = 0;
};

}  // namespace sheaf
