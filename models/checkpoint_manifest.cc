#include "sheaf/models/checkpoint_manifest.h"

#include <algorithm>
#include <iterator>

#include "sheaf/models/matrix_blocks.h"

namespace sheaf::models {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 56;

bool is_whole(const Shape& shape, const Runs& runs) { return runs == Runs::of({0, shape.numel()}); }

// Whether these are elements of a tensor of `elements` elements; computes nothing that could overflow.
bool is_inside(const Runs& runs, int64_t elements) {
  const auto [begin, size, count, stride] = runs;
  if (begin < 0 || size < 0 || begin > elements || size > elements) return false;
  if (runs.is_interval()) return size <= elements - begin;
  // The same part of several rows, as of sharded columns.
  return count > 1 && 0 < size && size < stride && stride <= elements && elements % stride == 0 &&
         begin % stride + size <= stride && count <= elements / stride - begin / stride;
}

// Runs as shown in messages.
std::string shown(const Runs& runs) {
  if (runs.is_interval()) return str("elements ", runs.begin, " to ", runs.begin + runs.size);
  return str(runs.count, " runs of ", runs.size, " elements, ", runs.stride, " apart, from element ", runs.begin);
}

// [Note: coverage] The parts are blocks of a matrix whose rows are as long as the parts' stride. From top to bottom, the columns that
// blocks cover change only where one begins or ends. So it is enough to check those rows, without splitting blocks: a part of 2^50
// runs costs as much as one of two.
void check_covered(const std::string& name, const Checkpoint::TensorInfo& info) {
  const int64_t elements = info.shape.numel(), row_size = info.row ? info.row : elements;
  if (elements == 0) return;
  struct Event {
    int64_t row;
    bool begins;
    MatrixBlock block;
  };
  std::vector<Event> events;
  for (const Checkpoint::Part& part : info.parts)
    for (const MatrixBlock& block : blocks_of(part.runs, row_size)) {
      events.push_back({block.row, true, block});
      events.push_back({block.row + block.rows, false, block});
    }
  std::ranges::stable_sort(events, {}, [](const Event& e) { return std::pair(e.row, e.begins); });

  std::map<int64_t, int64_t> filled;  // column → end, of blocks that cover this row
  int64_t columns = 0;                // their number
  const auto at = [&](int64_t row, int64_t column) {
    return str("tensor ", json_string(name), ": element ", row * row_size + column);
  };
  auto event = events.begin();
  for (int64_t row = 0; row < elements / row_size;) {
    for (; event != events.end() && event->row == row; ++event) {
      const int64_t begin = event->block.column, end = begin + event->block.columns;
      columns += event->begins ? end - begin : begin - end;
      if (!event->begins) {
        filled.erase(begin);
        continue;
      }
      const auto next = filled.lower_bound(begin);
      if (next != filled.end() && next->first < end) fail<CheckpointError>(at(row, next->first), " is there twice");
      if (next != filled.begin() && std::prev(next)->second > begin)
        fail<CheckpointError>(at(row, begin), " is there twice");
      filled[begin] = end;
    }
    if (columns != row_size) {
      int64_t missing = 0;
      for (const auto& [begin, end] : filled)
        if (begin == missing) missing = end;
      const int64_t before = row * row_size + missing;
      if (info.parts.empty() || before == info.parts.back().reach)
        fail<CheckpointError>("tensor ", json_string(name), ": ", before, " elements of ", elements);
      fail<CheckpointError>(at(row, missing), " is missing");
    }
    row = event == events.end() ? elements / row_size : event->row;
  }
}

}  // namespace

Runs simplified(const Runs& runs) {
  const bool interval = runs.numel() == 0 || runs.count == 1 || runs.size == runs.stride;
  return interval ? Runs::of({runs.begin, runs.begin + runs.numel()}) : runs;
}

std::string part_key(std::string_view name, const Shape& shape, const Runs& runs) {
  if (is_whole(shape, runs)) return std::string(name);
  if (runs.is_interval()) return str(name, "[", runs.begin, ":", runs.begin + runs.size, "]");
  return str(name, "[", runs.begin, ":", runs.size, ":", runs.count, ":", runs.stride, "]");
}

Shape part_shape(const Shape& shape, const Runs& runs) {
  if (is_whole(shape, runs)) return shape;
  return runs.is_interval() ? Shape{runs.size} : Shape{runs.count, runs.size};
}

Json json_of(const Checkpoint::Part& part) {
  const auto [begin, size, count, stride] = part.runs;
  if (part.runs.is_interval()) return Json::Array{part.file, begin, begin + size};
  return Json::Array{part.file, begin, size, count, stride};
}

Checkpoint::Part part_of(const Json& json, const std::string& name, int64_t files) {
  const auto& numbers = json.as_array();
  check<CheckpointError>(numbers.size() == 3 || numbers.size() == 5, "a part of ", json_string(name),
                         " is not [file, begin, end] or [file, begin, size, count, stride]");
  const int64_t file = numbers[0].as_int(), begin = numbers[1].as_int(), second = numbers[2].as_int();
  check<CheckpointError>(0 <= file && file < files, "a part of ", json_string(name), " in file ", file);
  if (numbers.size() == 3) {
    check<CheckpointError>(0 <= begin && begin <= second, "tensor ", json_string(name), ": elements ", begin, " to ", second);
    return {static_cast<int>(file), Runs::of({begin, second})};
  }
  const Runs runs{begin, second, numbers[3].as_int(), numbers[4].as_int()};
  check<CheckpointError>(runs.count > 1, "tensor ", json_string(name), ": a part of ", runs.count, " runs");
  return {static_cast<int>(file), runs};
}

Json json_of(const Shape& shape) {
  Json::Array sizes;
  for (int64_t size : shape) sizes.emplace_back(size);
  return sizes;
}

Shape shape_of(const Json& json) {
  Shape shape;
  int64_t elements = 1;
  for (const Json& item : json.as_array()) {
    const int64_t size = item.as_int();
    check<CheckpointError>(size >= 0 && size <= kMaxElements && shape.rank() < kMaxDims, "unusable shape ", json.dump());
    const bool overflow = size > 0 && __builtin_mul_overflow(elements, size, &elements);
    check<CheckpointError>(!overflow && elements <= kMaxElements, "unusable shape ", json.dump());
    shape.push_back(size);
  }
  return shape;
}

DType dtype_of_name(const std::string& text) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name(static_cast<DType>(i)) == text) return static_cast<DType>(i);
  }
  fail<CheckpointError>("unknown dtype ", json_string(text));
}

void add_part(Checkpoint::Tensors& tensors, const std::string& name, DType dtype, const Shape& shape,
              const Checkpoint::Part& part) {
  const Runs& runs = part.runs;
  auto [found, fresh] = tensors.try_emplace(name, Checkpoint::TensorInfo{dtype, shape, 0, {}});
  Checkpoint::TensorInfo& info = found->second;
  check<CheckpointError>(fresh || (info.dtype == dtype && info.shape == shape), "tensor ", json_string(name), " is ",
                         info.dtype, info.shape, " on one rank and ", dtype, shape, " on another");
  if (!is_inside(runs, shape.numel()))
    fail<CheckpointError>("tensor ", json_string(name), ": ", shown(runs), " of ", shape);
  if (!runs.is_interval()) {
    if (info.row == 0) info.row = runs.stride;
    check<CheckpointError>(info.row == runs.stride, "tensor ", json_string(name), " is cut in rows of ", info.row,
                           " elements in one part and of ", runs.stride, " in another");
  }
  if (runs.size > 0) info.parts.push_back(part);
}

void check_coverage(Checkpoint::Tensors& tensors) {
  for (auto& [name, info] : tensors) {
    std::ranges::sort(info.parts, {}, [](const Checkpoint::Part& p) { return p.runs.begin; });
    int64_t reach = 0;
    for (Checkpoint::Part& part : info.parts) part.reach = reach = std::max(reach, part.runs[part.runs.count - 1].end);
    check_covered(name, info);
  }
}

Json json_of(const Checkpoint::Tensors& tensors) {
  Json::Object described;
  for (const auto& [name, info] : tensors) {
    Json::Array parts;
    for (const Checkpoint::Part& part : info.parts) parts.push_back(json_of(part));
    described.emplace_back(name, Json::Object{{"dtype", sheaf::name(info.dtype)},
                                              {"shape", json_of(info.shape)},
                                              {"parts", std::move(parts)}});
  }
  return described;
}

Checkpoint::Tensors tensors_of(const Json& json, int64_t files) {
  Checkpoint::Tensors tensors;
  for (const auto& [name, item] : json.as_object()) {
    const DType dtype = dtype_of_name(item.at("dtype").as_string());
    const Shape shape = shape_of(item.at("shape"));
    tensors[name] = {dtype, shape, 0, {}};
    for (const Json& part : item.at("parts").as_array())
      add_part(tensors, name, dtype, shape, part_of(part, name, files));
  }
  check_coverage(tensors);
  return tensors;
}

}  // namespace sheaf::models
