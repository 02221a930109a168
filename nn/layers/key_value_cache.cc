#include "sheaf/nn/layers/key_value_cache.h"

#include "sheaf/autograd/local_map.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"

namespace sheaf::nn {
namespace {

void expect_no_recording(const std::string& name) {
  check<LifetimeError>(!Recording::current(), "[key_value_cache] ", name,
                       ": appends in place, which no backward could follow; generate outside of any recording");
}

}  // namespace

std::pair<int64_t, Tensor> RecurrentTail::state_at(const std::string& name, int64_t position) {
  states_.erase(states_.upper_bound(position), states_.end());
  length_ = std::clamp<int64_t>(position - first_, 0, length_);
  if (position == 0) first_ = 0;
  if (!states_.empty()) return *states_.rbegin();
  check<LifetimeError>(first_ == 0, "[key_value_cache] ", name, ": the cache was shortened to ", position,
                       " tokens, before what a recurrent layer can go back to; clear it");
  return {0, Tensor()};
}

Tensor RecurrentTail::rows_and(size_t i, const Tensor& x_BTE) const {
  return length_ ? concat({slice(rows_[i], 1, 0, length_), x_BTE}, 1) : x_BTE;
}

void RecurrentTail::keep_rows(const std::vector<Tensor>& all, int64_t margin) {
  while (states_.size() > 2) states_.erase(states_.begin());
  const int64_t end = first_ + all[0].size(1), begin = first_;
  first_ = states_.size() < 2 ? first_ : std::max(first_, states_.begin()->first - margin);
  length_ = end - first_;
  rows_.clear();
  for (const Tensor& x : all) rows_.push_back(copy_of(slice(x, 1, first_ - begin, x.size(1))));
}

void RecurrentTail::for_each_kept(const std::function<void(Tensor&)>& f) {
  for (Tensor& x : rows_) f(x);
  for (auto& [position, state] : states_) f(state);
}

Tensor KeyValueCache::is_read(int64_t tokens) {
  const auto from = static_cast<double>(length_), to = static_cast<double>(length_ + tokens);
  return ge(arange(from, to, 1, kI32), unsqueeze(begins_, {1}));
}

Tensor KeyValueCache::begins(int64_t tokens) {
  if (begins_ && !(shown_ && shown_.size(1) == tokens)) {
    const Tensor begins_B1 = unsqueeze(begins_, {1});
    shown_ = where(is_read(tokens), begins_B1, 0.0);
  }
  return shown_;
}

void KeyValueCache::keep_sequences(const std::vector<int64_t>& which) {
  const auto kept = std::ssize(which);
  // Each rank selects among its own sequences.
  const auto chosen_of = [&](const Tensor& x) {
    const Tensor index = Tensor::from(which, {kept}).to(x.device());
    if (!x.layout().mesh()) return take(x, index);
    if (x.local_shape()[0] == 0) return x;
    Type type = x.type();
    type.shape[0] = type.shape[0] / x.local_shape()[0] * kept;
    return local_map([&](const Tensor& mine) { return take(mine, index); }, type, x);
  };
  if (begins_) set_begins(chosen_of(begins_));
  for (auto& [name, kv] : kept_) {
    const Tensor chosen = chosen_of(slice(kv, 1, 0, length_));
    Type all = chosen.type();
    all.shape[1] = capacity_;
    kv = Tensor::empty(all, kv.device());
    store_into(slice(kv, 1, 0, length_), chosen);
  }
  for (auto& [name, tail] : tails_) tail.for_each_kept([&](Tensor& x) { if (x) x = chosen_of(x); });
}

RecurrentTail& KeyValueCache::tail(const std::string& name) {
  expect_no_recording(name);
  return tails_[name];
}

Tensor KeyValueCache::append(const std::string& name, const Tensor& kv_BTGD) {
  expect_no_recording(name);
  const int64_t end = length_ + kv_BTGD.size(1);
  check<ShapeError>(end <= capacity_, "[key_value_cache] ", name, ": ", end, " tokens are more than the capacity of ",
                    capacity_);
  Type all = kv_BTGD.type();
  all.shape[1] = capacity_;
  Tensor& kv = kept_[name];
  if (!kv) kv = Tensor::empty(all, kv_BTGD.device());
  check<ShapeError>(kv.type() == all, "[key_value_cache] ", name, ": ", kv_BTGD.type(), " cannot follow ", kv.type());
  store_into(slice(kv, 1, length_, end), kv_BTGD);
  return slice(kv, 1, 0, end);
}

}  // namespace sheaf::nn
