// A product on a GPU has several algorithms (kernels/cuda/product.h). A training run times them in its first step; then its ranks
// share their choices, and checkpoints store them, so that all ranks and every resumed run compute with the same algorithms, and so
// the same bits. CPUs have no such choices.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "sheaf/core/communicator.h"
#include "sheaf/core/device.h"

namespace sheaf::models {

/// The choices made so far for a GPU, as text from kernels::cuda::export_product_choices; empty for other devices.
std::string product_choices(Device device);
/// Adopts the choices in such a text. Returns how many: 0 if they belong to another library or kind of device. Throws DataError for
/// damaged text.
int64_t take_product_choices(Device device, std::string_view text);

/// Collective: calls `take` with every rank's `mine`, from the last rank's to rank 0's. Later ones replace earlier ones, so all ranks
/// end with the same choices: those of the first rank that made them.
void share_product_choices(Communicator& lane, const std::string& mine,
                           const std::function<void(std::string_view)>& take);

}  // namespace sheaf::models
