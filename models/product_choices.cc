#include "sheaf/models/product_choices.h"

#include <vector>

#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/cuda/product.h"

namespace sheaf::models {

std::string product_choices(Device device) {
  if constexpr (kernels::kHasCuda)
    if (device.is_cuda()) return kernels::cuda::export_product_choices(device.index);
  return {};
}

int64_t take_product_choices(Device device, std::string_view text) {
  if constexpr (kernels::kHasCuda)
    if (device.is_cuda()) return kernels::cuda::import_product_choices(device.index, text);
  return 0;
}

void share_product_choices(Communicator& lane, const std::string& mine,
                           const std::function<void(std::string_view)>& take) {
  constexpr const char* kPath = "product_choices";
  const auto ranks = static_cast<size_t>(lane.size());
  const auto length = static_cast<int64_t>(mine.size());
  std::vector<int64_t> lengths(ranks);
  lane.all_gather(&length, lengths.data(), std::vector<int64_t>(ranks, 1), kI64, kPath).sync();
  size_t end = 0;
  for (int64_t n : lengths) end += static_cast<size_t>(n);
  std::string all(end, '\0');
  lane.all_gather(mine.data(), all.data(), lengths, kU8, kPath).sync();
  for (size_t r = ranks; r-- > 0;) {
    const auto n = static_cast<size_t>(lengths[r]);
    end -= n;
    take(std::string_view(all).substr(end, n));
  }
}

}  // namespace sheaf::models
