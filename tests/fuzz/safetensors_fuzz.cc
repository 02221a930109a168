// libFuzzer target: any bytes are a safetensors file. They open or are refused; nothing else may happen.
#include <cstring>
#include <string_view>

#include "sheaf/core/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) return 0;
  // The input is the header, after its length; the size of the data section is in the first 8 bytes, so that the fuzzer need not carry data
  // that nobody reads.
  uint64_t data_bytes = 0;
  std::memcpy(&data_bytes, data, 8);
  const std::string_view header(reinterpret_cast<const char*>(data) + 8, size - 8);
  const auto file_bytes = static_cast<int64_t>(size + (data_bytes & 0xffffffffffff));
  try {
    const auto parsed = sheaf::parse_safetensors_header(header, file_bytes, "fuzz");
    int64_t total = static_cast<int64_t>(size);
    for (const auto& [name, entry] : parsed.tensors) {
      if (entry.begin < static_cast<int64_t>(size) || entry.end < entry.begin || entry.end > file_bytes) __builtin_trap();
      if (entry.shape.numel() * static_cast<int64_t>(sheaf::size_of(entry.dtype)) != entry.bytes()) __builtin_trap();
      total += entry.bytes();
    }
    if (total != file_bytes) __builtin_trap();
  } catch (const sheaf::CheckpointError&) {
  }
  return 0;
}
