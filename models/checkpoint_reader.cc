// Reading the tensors of an open checkpoint, written with any sharding, in any other.
#include <algorithm>
#include <cstring>
#include <queue>
#include <tuple>

#include "sheaf/models/checkpoint_manifest.h"
#include "sheaf/models/matrix_blocks.h"

namespace sheaf::models {
namespace {

constexpr int64_t kGap = 1 << 13;     // bytes: gaps between rows up to this are read, as that costs less than skipping
constexpr int64_t kBuffer = 1 << 18;  // bytes

// Rows of equal length, in elements: where the first is and their distance.
struct Rows {
  int64_t at, stride;
};

// Copies `count` rows of `length` elements of a tensor in a file.
void copy_rows(const SafetensorsFile& file, const std::string& key, const Rows& from, int64_t count, int64_t length,
               int64_t element, std::byte* dst, const Rows& to) {
  if (count == 1 || (from.stride == length && to.stride == length))
    return file.read(key, from.at, from.at + count * length, dst + to.at * element);
  const bool near = (from.stride - length) * element <= kGap;
  const int64_t together = near ? std::max<int64_t>(kBuffer / (from.stride * element), 1) : 1;
  std::vector<std::byte> buffer;
  if (together > 1) buffer.resize(static_cast<size_t>(std::min(together, count) * from.stride * element));
  for (int64_t row = 0; row < count; row += together) {
    const int64_t rows = std::min(together, count - row), begin = from.at + row * from.stride;
    std::byte* out = dst + (to.at + row * to.stride) * element;
    const int64_t end = begin + (rows - 1) * from.stride + length;
    file.read(key, begin, end, together == 1 ? out : buffer.data());
    if (together == 1) continue;
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(out + r * to.stride * element, buffer.data() + r * from.stride * element,
                  static_cast<size_t>(length * element));
  }
}

}  // namespace

const Checkpoint::TensorInfo& Checkpoint::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    fail<CheckpointError>("[checkpoint] '", path_, "' has no tensor ", json_string(name));
  }
  return found->second;
}

std::pair<SafetensorsFile*, std::string> Checkpoint::holder(std::string_view name, const TensorInfo& info,
                                                            const Part& part) {
  ShardFile& file = files_[static_cast<size_t>(part.file)];
  if (!file.open) {
    std::optional<File> held = std::exchange(file.held, std::nullopt);
    file.open = SafetensorsFile::open(held ? std::move(*held) : File::open<CheckpointError>(file.path));
  }
  std::string key = part_key(name, info.shape, part.runs);
  const SafetensorsEntry& entry = file.open->at(key);
  check<CheckpointError>(entry.dtype == info.dtype && entry.shape.numel() == part.runs.numel(), "[checkpoint] '",
                         file.path, "': ", json_string(key), " is ", entry.dtype, entry.shape);
  return {&*file.open, std::move(key)};
}

void Checkpoint::read(std::string_view name, const Runs& runs, void* dst) {
  const TensorInfo& info = at(name);
  const int64_t elements = info.shape.numel(), last = runs[runs.count - 1].end;
  check<CheckpointError>(0 <= runs.begin && 0 <= runs.size && last <= elements, "[checkpoint] '", path_, "': elements ",
                         runs.begin, " to ", last, " of ", name, " ", info.shape, " asked for");
  if (runs.numel() == 0) return;
  // As blocks of a matrix: the request and each part are then a few blocks.
  const int64_t row_size = info.row ? info.row : runs.is_interval() ? elements : runs.stride;
  const auto element = static_cast<int64_t>(size_of(info.dtype));
  for (const MatrixBlock& wanted : blocks_of(runs, row_size)) {
    const int64_t begin = wanted.row * row_size + wanted.column;
    const int64_t end = begin + (wanted.rows - 1) * row_size + wanted.columns;
    // The parts from the first that ends after `begin`; an earlier end may follow it.
    for (auto part = std::ranges::partition_point(info.parts, [&](const Part& p) { return p.reach <= begin; });
         part != info.parts.end() && part->runs.begin < end; ++part) {
      SafetensorsFile* file = nullptr;
      std::string key;
      for (const MatrixBlock& held : blocks_of(part->runs, row_size)) {
        const MatrixBlock both = overlap(wanted, held);
        if (both.numel() == 0) continue;
        if (!file) std::tie(file, key) = holder(name, info, *part);
        copy_rows(*file, key, {held.at_of(both.row, both.column), held.columns}, both.rows, both.columns, element,
                  static_cast<std::byte*>(dst), {wanted.at_of(both.row, both.column), wanted.columns});
      }
    }
  }
}

std::vector<std::span<const std::byte>> Checkpoint::data(std::string_view name) {
  const TensorInfo& info = at(name);
  struct Next {
    int64_t begin;  // of the next run in its part
    size_t part;
    int64_t run;
    bool operator>(const Next& o) const { return begin > o.begin; }
  };
  std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
  std::vector<std::span<const std::byte>> held;
  for (const Part& part : info.parts) {
    const auto [file, key] = holder(name, info, part);
    next.push({part.runs.begin, held.size(), 0});
    held.push_back(file->data(key));
  }
  std::vector<std::span<const std::byte>> out;
  while (!next.empty()) {
    const auto [begin, part, run] = next.top();
    next.pop();
    const Runs& runs = info.parts[part].runs;
    const size_t bytes = static_cast<size_t>(runs.size) * size_of(info.dtype);
    out.push_back(held[part].subspan(static_cast<size_t>(run) * bytes, bytes));
    if (run + 1 < runs.count) next.push({begin + runs.stride, part, run + 1});
  }
  return out;
}

}  // namespace sheaf::models
