#include "sheaf/models/product_choices.h"

#include <vector>

#include "sheaf/distributed/gather_texts.h"
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
  const std::vector<std::string> all = gather_texts(lane, mine, "product_choices");
  for (auto text = all.rbegin(); text != all.rend(); ++text) take(*text);
}

}  // namespace sheaf::models
