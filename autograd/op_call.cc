// What a kernel call sees of its operands: whole tensors, rows of them, or parts; and what it waits for.
#include "sheaf/autograd/op_call.h"

#include "sheaf/autograd/recording.h"
#include "sheaf/core/rank_context.h"

namespace sheaf {

void Execute::completes_with(const Event& event) {
  for (const Tensor& t : outputs_) t.storage()->filled_by(event);
}

Stream Execute::gpu_stream() const { return RankContext::current().stream(device()); }

void Execute::fail_unasked() const {
  fail<ConfigError>("[", op_, "] ", path_label(PathScope::current()), ": inputs on ", device().to_string(),
                    ", but its execute() has a kernel for the CPU alone (it takes memory without asking for stream())");
}

View Execute::rows_of(const Tensor& t) const {
  const View v = t.storage()->pieces().empty() && !types_alone_ ? t.view() : t.view_unsynced();
  const int64_t width = v.shape.back();
  char* const data = v.data ? v.as<char>() + block_.begin * width * static_cast<int64_t>(size_of(v.dtype)) : nullptr;
  if (block_.groups == 1) return View::dense(data, v.dtype, {block_.rows, width});
  return {data, v.dtype, {block_.groups, block_.rows, width}, {block_.stride * width, width, 1}};
}

View Execute::output_rows(int i) const {
  View v = rows_of(outputs_[i]);
  return to_ && i == 0 ? View::dense(to_, v.dtype, v.shape) : v;
}

View Execute::parts_of(const Tensor& t, int dim) const {
  View v = t.storage()->pieces().empty() && !types_alone_ ? t.view() : t.view_unsynced();
  if (dim < 0) return v;
  const int64_t each = v.shape[dim] / all_parts_;
  v.shape[dim] = each * block_.rows;
  if (v.data) v.data = v.as<char>() + each * block_.begin * v.strides[dim] * static_cast<int64_t>(size_of(v.dtype));
  return v;
}

void Execute::join(const Event& event) const {
  if (device().is_cuda()) event.order(stream());
  else event.sync();
}

}  // namespace sheaf
