#include "sheaf/models/event_file.h"

#include <nmmintrin.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <system_error>

#include "sheaf/core/error.h"
#include "sheaf/core/file.h"

namespace sheaf::models {
namespace {

static_assert(std::endian::native == std::endian::little);

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

template <class T>
std::string bytes_of(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// The encoding of protocol buffers: fields, each its number and wire type, then its value.
std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string field(int number, int wire_type) { return varint(static_cast<uint64_t>(number) << 3 | static_cast<uint64_t>(wire_type)); }
std::string field(int number, double value) { return field(number, 1) + bytes_of(value); }
std::string field(int number, float value) { return field(number, 5) + bytes_of(value); }
std::string field(int number, int64_t value) { return field(number, 0) + varint(static_cast<uint64_t>(value)); }
std::string field(int number, std::string_view bytes) { return field(number, 2) + varint(bytes.size()).append(bytes); }

// Numbers of fields in event.proto and summary.proto.
enum Event { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
enum SessionLog { kStatus = 1 };
enum Summary { kValue = 1, kTag = 1, kSimpleValue = 2 };

std::string event(int64_t step) { return field(kWallTime, seconds_since_epoch()) + field(kStep, step); }

uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

// TensorBoard reads the files of a folder in the order of their names, in which seconds since the epoch follow: the largest of them, 0 if
// there are no files. It may be in the future of a clock that went back.
constexpr std::string_view kPrefix = "events.out.tfevents.";
int64_t last_number(const std::string& folder) {
  int64_t last = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    int64_t number = 0;
    if (name.starts_with(kPrefix)) std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), number);
    last = std::max(last, number);
  }
  if (error) fail<IoError>("[metrics] cannot list '", folder, "': ", error.message());
  return last;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = _mm_crc32_u8(crc, static_cast<unsigned char>(c));
  return ~crc;
}

EventFile::EventFile(const std::string& folder, int64_t first_step) {
  make_folders(folder);
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  const int64_t number = std::max(static_cast<int64_t>(seconds_since_epoch()), last_number(folder) + 1);
  file_ = std::make_unique<AppendFile>("metrics", str(folder, '/', kPrefix, number, '.', host, '.', getpid()));
  append(field(kWallTime, seconds_since_epoch()) + field(kFileVersion, std::string_view("brain.Event:2")));
  constexpr int64_t kStart = 1;
  append(event(first_step) + field(kSessionLog, field(kStatus, kStart)));
}

void EventFile::write(int64_t step, std::span<const Metric> metrics) {
  std::string summary;
  for (const Metric& metric : metrics) {
    const auto value = std::visit([](auto x) { return static_cast<float>(x); }, metric.value);
    summary += field(kValue, field(kTag, std::string_view(metric.name)) + field(kSimpleValue, value));
  }
  append(event(step) + field(kSummary, summary));
}

void EventFile::append(std::string_view event) {
  const std::string length = bytes_of(static_cast<uint64_t>(event.size()));
  file_->write(length + bytes_of(masked(crc32c(length))) + std::string(event) + bytes_of(masked(crc32c(event))));
}

}  // namespace sheaf::models
