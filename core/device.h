// Device: where values live. `meta` has types and byte counts but no memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace sheaf {

struct Device {
  enum class Kind : uint8_t { cpu, cuda, meta };
  Kind kind = Kind::cpu;
  int8_t index = 0;

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {Kind::cuda, static_cast<int8_t>(index)}; }
  static constexpr Device meta() { return {Kind::meta, 0}; }
  constexpr bool is_cpu() const { return kind == Kind::cpu; }
  constexpr bool is_cuda() const { return kind == Kind::cuda; }
  constexpr bool is_meta() const { return kind == Kind::meta; }
  constexpr bool operator==(const Device&) const = default;
  std::string to_string() const {
    return is_cpu() ? "cpu" : is_meta() ? "meta" : "cuda:" + std::to_string(index);
  }
};

/// An ordered lane of work on a device; on CPUs, the calling thread.
struct Stream {
  Device device;
  void* handle = nullptr;  ///< cudaStream_t
};

/// Scratch memory of a kernel, owned by the executor: kernels never allocate.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace sheaf
