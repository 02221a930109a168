#include "sheaf/models/sample_block.h"

#include <algorithm>
#include <vector>

namespace sheaf::models {

void fill_block(int64_t first, const FillBatch& fill, const Tensor& tokens, const Tensor& targets) {
  const bool has_tokens = !tokens.layout().is_elsewhere(), has_targets = !targets.layout().is_elsewhere();
  if (!has_tokens && !has_targets) return;
  const Type& type = (has_tokens ? tokens : targets).type();
  const Shape block = type.local_shape(), start = type.layout.local_start(type.shape);
  const int64_t rows = block[0], columns = block[1], context = type.shape[1];
  if (rows == 0) return;
  const auto write = [&](int32_t* inputs, int32_t* outputs) { fill(first + start[0], rows, inputs, outputs); };
  auto *x = tokens.view().as<int32_t>(), *y = targets.view().as<int32_t>();
  if (has_tokens && has_targets && columns == context) return write(x, y);
  std::vector<int32_t> inputs(static_cast<size_t>(rows * context)), outputs(inputs.size());
  write(inputs.data(), outputs.data());
  for (int64_t r = 0; r < rows; ++r) {
    if (has_tokens) std::copy_n(&inputs[r * context + start[1]], columns, x + r * columns);
    if (has_targets) std::copy_n(&outputs[r * context + start[1]], columns, y + r * columns);
  }
}

}  // namespace sheaf::models
