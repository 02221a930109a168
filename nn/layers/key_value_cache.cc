#include "sheaf/nn/layers/key_value_cache.h"

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"

namespace sheaf::nn {

Tensor KeyValueCache::append(const std::string& name, const Tensor& kv_BTGD) {
  check<LifetimeError>(!Recording::current(), "[key_value_cache] ", name,
                       ": appends in place, which no backward could follow; generate outside of any recording");
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
