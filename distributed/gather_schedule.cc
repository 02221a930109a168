// The order in which units are used, and which gathers are issued ahead of it.
#include "sheaf/distributed/gather_schedule.h"

#include <algorithm>
#include <utility>

#include "sheaf/autograd/recording.h"
#include "sheaf/distributed/unit.h"

namespace sheaf {
namespace {
thread_local GatherSchedule* innermost_schedule = nullptr;  // of the model whose scope is innermost
}

void GatherSchedule::remove(Unit* unit) {
  std::erase(units_, unit);
  std::erase(in_flight_, unit);
  order_outside_.clear();
  orders_.clear();
  uses_.clear();
  std::erase(put_off_, unit);
  for (std::vector<Unit*>& scope : scopes_) std::erase(scope, unit);
  following_ = false;
}

// A norm between two blocks must not delay the next one.
static int64_t with_small_ones(int64_t bytes) { return bytes + bytes / 8; }

int64_t GatherSchedule::budget() const {
  if (budget_ >= 0) return budget_;
  int64_t largest = 0;
  for (const Unit* u : units_)
    if (!u->name().empty()) largest = std::max(largest, u->gathered_bytes());
  return std::max(largest, with_small_ones(usual_bytes()));
}

// The smallest size S such that units of at most S have half of all bytes: a weighted median.
int64_t GatherSchedule::usual_bytes() const {
  std::vector<int64_t> sizes;
  int64_t all = 0;
  for (const Unit* u : units_)
    if (!u->name().empty()) all += sizes.emplace_back(u->gathered_bytes());
  std::ranges::sort(sizes);
  int64_t smaller = 0;
  for (const int64_t size : sizes)
    if ((smaller += size) * 2 >= all) return size;
  return 0;
}

// A pass is one forward and the backward that follows it: it ends where the next outermost scope begins. For a model that is used
// only in another's backward (a direction), or outside of all scopes (see use()), all uses in a recording form one pass.
void GatherSchedule::begin_pass(bool held_too) {
  const Recording* r = Recording::current();
  if (r && r->in_backward() && r->serial() == recording_) return;
  flush(held_too);
  for (Unit* u : units_)  // of another recording, e.g. an evaluation's, or of old masters: nothing will use them
    if (!u->has_copies()) u->drop_copies();
  if (!uses_.empty() && recording_ == 0) {
    order_outside_ = std::move(uses_);
  } else if (!uses_.empty()) {
    if (orders_.size() <= pass_) orders_.resize(pass_ + 1);
    orders_[last_complete_pass_ = pass_] = std::move(uses_);
  }
  uses_.clear();
  cleared_at_ = 0;
  const uint64_t recording = Recording::current_serial();
  pass_ = recording == recording_ ? pass_ + 1 : 0;
  recording_ = recording;
  following_ = true;
}

const GatherSchedule::Order& GatherSchedule::foreseen() const {
  static const Order kNone;
  if (recording_ == 0) return order_outside_;
  if (pass_ < orders_.size() && !orders_[pass_].empty()) return orders_[pass_];
  return orders_.empty() ? kNone : orders_[last_complete_pass_];
}

void GatherSchedule::look_at_current() {
  if (innermost_schedule) innermost_schedule->look();
}

void GatherSchedule::enter_scope() {
  if (scopes_.empty()) {
    begin_pass();
    around_ = std::exchange(innermost_schedule, this);
  }
  scopes_.emplace_back();
}

void GatherSchedule::leave_scope() {
  for (Unit* u : scopes_.back())
    if (u->state_ == Unit::State::open && u->depth_ == 0) u->state_ = Unit::State::pending;
  scopes_.pop_back();
  if (scopes_.empty()) innermost_schedule = around_;
}

// Every unit of the recording calls this; the first call does it. Memory peaks when the backward begins: units whose discard is pending,
// and which it does not use first, are discarded before.
void GatherSchedule::backward_begins() {
  if (!following_ || cleared_at_ == uses_.size()) return;
  cleared_at_ = uses_.size();
  discard_pending(nullptr, comes_next(nullptr, /*gathers=*/false));
}

bool GatherSchedule::keeps_open() const { return keeping_open_ > 0 && !Recording::current(); }

bool GatherSchedule::closes_with_scope(const Unit& unit) const {
  return std::ranges::any_of(scopes_, [&](const std::vector<Unit*>& scope) { return std::ranges::find(scope, &unit) != scope.end(); });
}

void GatherSchedule::end_keeping_open() {
  if (--keeping_open_ > 0) return;
  for (Unit* u : units_)
    if (u->state_ == Unit::State::open && u->depth_ == 0 && u->opened_outside_recordings() && u->gathers()) u->state_ = Unit::State::pending;
  flush();
}

bool GatherSchedule::close_with_scope(Unit& unit) {
  if (scopes_.empty()) unit.state_ = Unit::State::pending;
  else scopes_.back().push_back(&unit);
  return scopes_.empty();
}

void GatherSchedule::discard_pending(const Unit* except, std::span<Unit* const> next, bool held_too) {
  for (auto it = units_.rbegin(); it != units_.rend(); ++it)
    if ((*it)->state_ == Unit::State::pending && *it != except && std::ranges::find(next, *it) == next.end() && (held_too || !(*it)->values_in_use()))
      (*it)->discard_gathered();
}

// A unit whose discard is pending is opened again: the discard and the gather cancel out. Any other is taken from the prefetched ones
// or gathered, after what is pending was discarded. Then the units that the last such pass used next are prefetched.
void GatherSchedule::use(Unit& unit) {
  using State = Unit::State;
  Recording* const r = Recording::current();
  if (scopes_.empty()) {  // of a root unit, for instance, whose modules are called and not the root itself
    const bool others_are_over = Recording::current_serial() != recording_ && !Recording::living(recording_);
    if (r && r->in_backward()) begin_pass();
    else if (others_are_over) begin_pass(/*held_too=*/false);
  }
  if (unit.state_ == State::open) {  // perhaps for another micro-batch
    if (r) r->use_group(&unit);
    return;
  }
  const Order& order = foreseen();
  const bool is_foreseen = following_ && uses_.size() < order.size() && order[uses_.size()].unit == &unit;
  const bool reopens = unit.state_ == State::pending;
  if (reopens) {
    unit.state_ = State::open;
    if (r) r->use_group(&unit);
  }
  end_use();
  if (!reopens) take_prefetched(unit, is_foreseen);
  following_ = is_foreseen;
  uses_.push_back({&unit, 0});
  const std::vector<Unit*> next = comes_next(&unit, /*gathers=*/!reopens);
  if (!reopens || following_) discard_pending(&unit, next);
  if (!reopens) gather_now(unit);
  begin_use(unit, next);
}

// `unit` leaves the prefetched ones. If it is another than foreseen, those were the wrong ones. (A foreseen one that is not among them
// may have been open when later ones were prefetched.)
void GatherSchedule::take_prefetched(Unit& unit, bool is_foreseen) {
  if (unit.state_ == Unit::State::in_flight && (is_foreseen || (!in_flight_.empty() && in_flight_.front() == &unit)))
    std::erase(in_flight_, &unit);
  else if (!is_foreseen && !unit.is_cached())
    discard_in_flight();
}

void GatherSchedule::discard_in_flight() {
  for (Unit* u : in_flight_) {
    ++mispredicted_;
    u->discard_gathered();
  }
  in_flight_.clear();
}

// The unit is open when this returns.
void GatherSchedule::gather_now(Unit& unit) {
  if (unit.is_cached()) unit.open_cached();
  if (unit.state_ == Unit::State::closed) unit.issue_gather(/*prefetched=*/false);
  unit.settle_and_unpack();
  unit.state_ = Unit::State::open;
  note_gathered();
  if (Recording* r = Recording::current()) r->use_group(&unit);
}

// The next units are gathered in the longest stretch of this one's layer without communication, as observed the last time.
void GatherSchedule::begin_use(const Unit& unit, std::vector<Unit*> next) {
  const Recording* const r = Recording::current();
  int& exchanges_before_next = uses_.back().exchanges_before_next;
  counts_ = r && !r->in_backward() && unit.mesh();
  if (counts_) {
    const size_t use = uses_.size() - 1;
    exchanges_before_next = following_ && use < foreseen().size() ? foreseen()[use].exchanges_before_next : -1;
    stretch_.begin(r->tape(), unit.mesh(), unit.axis(), /*weighs=*/exchanges_before_next < 0);
    counts_ = exchanges_before_next != 0;  // there is nothing to learn or to wait for
  }
  if (!following_) return;
  if (exchanges_before_next > 0) put_off_ = std::move(next), exchanges_before_next_ = exchanges_before_next;
  else prefetch(next);
  prefetch_copies();
}

void GatherSchedule::look() {
  const Recording* const r = Recording::current();
  if (!counts_ || !r || r->serial() != recording_ || r->in_backward()) return;
  stretch_.look(r->tape());
  if (put_off_.empty() || stretch_.exchanges() < exchanges_before_next_) return;
  prefetch(std::exchange(put_off_, {}));
}

void GatherSchedule::end_use() {
  put_off_.clear();  // the next use issues gathers itself; the end of a pass, by an exception or not, issues none
  look();
  if (counts_ && !uses_.empty() && uses_.back().exchanges_before_next < 0) uses_.back().exchanges_before_next = stretch_.longest();
  counts_ = false;
}

// The units to be used after `now`, in order, that may be gathered already. Pending units are not discarded to be gathered again:
// they count as prefetched, and always stay if nothing is gathered before their use.
std::vector<Unit*> GatherSchedule::comes_next(const Unit* now, bool gathers) const {
  std::vector<Unit*> next;
  if (!following_) return next;
  const Order& order = foreseen();
  const int64_t most = budget(), several = budget_ >= 0 ? most : with_small_ones(usual_bytes());
  int64_t ahead = 0;
  for (size_t i = uses_.size(); i < order.size(); ++i) {
    Unit* const unit = order[i].unit;
    if (unit == now || unit->state_ == Unit::State::open || unit->is_cached() || std::ranges::find(next, unit) != next.end()) continue;
    gathers = gathers || unit->state_ != Unit::State::pending;
    const int64_t bytes = unit->gathered_bytes();
    if (gathers && ahead + bytes > (ahead == 0 ? most : several)) break;
    next.push_back(unit);
    ahead += bytes;
  }
  return next;
}

void GatherSchedule::prefetch(std::span<Unit* const> next) {
  const int64_t most = budget();
  int64_t ahead = 0;  // other units may be in flight: gathered while units used before them were open
  for (const Unit* u : in_flight_) ahead += u->gathered_bytes();
  for (Unit* unit : next) {
    if (unit->state_ != Unit::State::closed) continue;
    if ((ahead += unit->gathered_bytes()) > most) return;
    if (unit->copied_bytes() > 0 && !unit->has_copies()) return;  // its gather would have to wait for them
    unit->issue_gather(/*prefetched=*/true);
    in_flight_.push_back(unit);
    note_gathered();
  }
}

// Copies cross slower links, once a step: issued one or more uses before the unit's own gather, which then hardly waits.
void GatherSchedule::prefetch_copies() {
  const Order& order = foreseen();
  const int64_t most = budget();
  int64_t ahead = 0;
  for (size_t i = uses_.size(); i < order.size(); ++i) {
    Unit* const next = order[i].unit;
    const int64_t bytes = next->copied_bytes();
    const bool there = next->has_copies();
    if (bytes == 0 || !next->gathered_.empty() || (there && !next->copies_under_way())) continue;
    if ((ahead += bytes) > most) return;
    if (!there) next->issue_copies(/*prefetched=*/true);
  }
}

void GatherSchedule::flush(bool held_too) {
  end_use();
  discard_in_flight();
  discard_pending(nullptr, {}, held_too);
  for (Unit* u : units_)
    if (u->copies_under_way()) {
      ++mispredicted_;
      u->drop_copies();
    }
  for (Unit* u : units_)
    if (keeping_open_ == 0 && u->opened_outside_recordings()) u->close_views();
}

void GatherSchedule::advance_reductions() {
  for (Unit* u : units_) u->reduction_.advance();
}

void GatherSchedule::use_reduced() {
  for (Unit* u : units_) u->reduction_.use_if_stored();
}

int64_t GatherSchedule::gathered_bytes() const {
  int64_t bytes = 0;
  for (const Unit* u : units_)
    if (!u->gathered_.empty()) bytes += u->gathered_bytes();
  return bytes;
}

void GatherSchedule::note_gathered() {
  int64_t all = 0, open = 0;
  for (const Unit* u : units_) {
    if (u->gathered_.empty()) continue;
    all += u->gathered_bytes();
    if (u->state_ != Unit::State::in_flight) open += u->gathered_bytes();
  }
  peak_gathered_ = std::max(peak_gathered_, all);
  peak_excess_ = std::max(peak_excess_, all - open);
}

}  // namespace sheaf
