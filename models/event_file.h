// EventFile: a run's metrics in the form that TensorBoard reads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "sheaf/core/append_file.h"
#include "sheaf/models/metrics.h"

namespace sheaf::models {

/// A file of records, each an Event of TensorFlow's event.proto: scalars by name and step. A record is its length (u64, little
/// endian), the masked CRC-32C of those 8 bytes, the event's bytes, and their CRC (TensorFlow's record_writer.h). Used by rank
/// 0 only.
class EventFile {
 public:
  /// Begins a new file in `folder`. TensorBoard then hides, in earlier files there, steps from `first_step` on, which a stopped run
  /// had not saved. Throws IoError.
  EventFile(const std::string& folder, int64_t first_step);

  /// One event, by one system call; doubles become f32. Throws IoError.
  void write(int64_t step, std::span<const Metric> metrics);

 private:
  void append(std::string_view event);
  std::unique_ptr<AppendFile> file_;
};

/// CRC-32C (Castagnoli) of `bytes`.
uint32_t crc32c(std::string_view bytes);

}  // namespace sheaf::models
