// GatherSchedule: when each unit is gathered. Gathers follow the order of the same pass of the previous recording, or of the previous pass:
// when a unit is used, the next ones in that order are issued as far as a byte budget allows, so that they travel while this one's layer
// computes; in a forward, after activations on the same lane (see [Note: quiet stretches]). The decision is a pure function of the
// order, the tape and the budget: all ranks make the same one.
//
// [Note: gathered bytes] At any time the gathered bytes are at most those of the open units, pending ones included,
// plus the prefetch budget. A unit whose discard is pending is discarded when another unit is gathered or a backward begins, unless it is
// used so soon that it would be gathered ahead again. Copies along a secondary axis are held for a step and not counted; copies not yet
// used have a second budget of the same size. A unit gathered in blocks counts with its unpacked size; during the unpacking its blocks are
// held, too.
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
  /// Bytes that may be gathered ahead of use; −1: one unit, even the largest other than the root, or several that together have
  /// hardly more bytes than the usual unit, the largest of the smallest ones that make up half of the model (a block, even if
  /// the model has large tables at its ends).
  explicit GatherSchedule(int64_t prefetch_budget = -1) : budget_(prefetch_budget) {}

  void add(Unit* unit) { units_.push_back(unit); }
  void remove(Unit* unit);

  /// Makes `unit` open: takes its prefetched gather or issues one, discards what is pending, prefetches.
  void use(Unit& unit);
  /// Scopes of modules, to know where a pass begins and what was opened outside its scope.
  void enter_scope();
  void leave_scope();
  /// Examines what has been computed since, before something reads a parameter and when a module is done: the next units may be due.
  void look();
  /// look() for the model whose scope is innermost on this thread, if any.
  static void look_at_current();
  /// A backward begins: discards pending units that are not used next.
  void backward_begins();
  /// Closes `unit` when the currently innermost scope ends. True if there is none: the unit is then pending.
  bool close_with_scope(Unit& unit);
  /// Called where passes and recordings end: closes units that are pending, in flight or, outside a recording, open
  /// without having been gathered, and frees unused copies.
  void flush();
  void advance_reductions();

  /// Between these two, units opened outside recordings stay open, and so do cast values, until masters change or a recording opens
  /// them.
  void hold() { ++holds_; }
  void release();
  /// Whether what is opened now is to stay open.
  bool holds() const;

  /// The most bytes that are gathered ahead.
  int64_t budget() const;
  /// The number of gathers issued ahead that turned out wrong.
  int64_t mispredicted() const { return mispredicted_; }
  int64_t gathered_bytes() const;      ///< now
  int64_t peak_gathered_bytes() const { return peak_gathered_; }
  int64_t peak_excess() const { return peak_excess_; }  ///< most bytes gathered beyond the open and pending units
  void note_gathered();

 private:
  /// A use of a unit, and after how many exchanges the next units are gathered; -1: not known.
  struct Use {
    Unit* unit;
    int behind;
  };
  using Order = std::vector<Use>;

  void begin_pass();
  const Order& foreseen() const;
  void discard_pending(const Unit* except, std::span<Unit* const> next, bool held_too = false);
  int64_t usual_bytes() const;
  std::vector<Unit*> comes_next(const Unit* now, bool gathers) const;
  void begin_use(const Unit& unit, std::vector<Unit*> next);
  void end_use();
  void prefetch(std::span<Unit* const> next);
  void prefetch_copies();

  std::vector<Unit*> units_;
  std::vector<std::vector<Unit*>> scopes_;
  GatherSchedule* around_ = nullptr;         // of the scope around the outermost
  Order alone_;                              // of the last whole pass outside recordings
  std::vector<Order> orders_;                // of the last recordings' passes, by their place: a stage of a pipeline does not do
  size_t last_ = 0, pass_ = 0;               // the same in each. The last whole one, and the one under way
  uint64_t recording_ = 0;                   // it is of; 0: of none
  Order current_;
  size_t cleared_at_ = 0;                    // uses of the pass before the backward that began last
  bool following_ = false;                   // current_ agrees with foreseen() so far
  std::deque<Unit*> in_flight_;
  QuietStretch stretch_;                      // of the use under way,
  bool counts_ = false;                       // if it is looked at
  std::vector<Unit*> put_off_;                // are gathered after this many exchanges
  int behind_ = 0;
  int holds_ = 0;
  int64_t budget_;
  int64_t mispredicted_ = 0, peak_gathered_ = 0, peak_excess_ = 0;
};

}  // namespace sheaf
