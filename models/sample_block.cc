#include "sheaf/models/sample_block.h"

#include <algorithm>
#include <vector>

namespace sheaf::models {

void fill_block(int64_t first, const FillBatch& fill, const Tensor& tokens, const Tensor& targets) {
  const bool has_tokens = !tokens.layout().is_elsewhere(), has_targets = !targets.layout().is_elsewhere();
  if (!has_tokens && !has_targets) return;
  const Type& type = (has_tokens ? tokens : targets).type();
  const std::vector<Interval> rows = type.layout.local_rows(type.shape, 0), columns = type.layout.local_rows(type.shape, 1);
  if (rows.empty()) return;
  const int64_t context = type.shape[1], count = rows[0].size();
  check<PlacementError>(rows.size() == 1, "[samples] those of a rank must be one interval, not several of ", type);
  const auto write = [&](int32_t* inputs, int32_t* outputs) { fill(first + rows[0].begin, count, inputs, outputs); };
  auto *x = tokens.view().as<int32_t>(), *y = targets.view().as<int32_t>();
  if (has_tokens && has_targets && type.local_shape()[1] == context) return write(x, y);
  std::vector<int32_t> inputs(static_cast<size_t>(count * context)), outputs(inputs.size());
  write(inputs.data(), outputs.data());
  for (int64_t r = 0; r < count; ++r)
    for (const Interval& part : columns) {
      if (has_tokens) x = std::copy_n(&inputs[r * context + part.begin], part.size(), x);
      if (has_targets) y = std::copy_n(&outputs[r * context + part.begin], part.size(), y);
    }
}

}  // namespace sheaf::models
