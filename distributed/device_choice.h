// Which device this process computes on.
#pragma once

#include <string>
#include <vector>

#include "sheaf/core/device.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/rendezvous.h"

namespace sheaf {

/// The GPUs that a process finds on its host.
struct GpusHere {
  struct Properties {
    int capability = 0;                        ///< 90 for 9.0
    int64_t block_bytes = int64_t{227} << 10;  ///< shared memory that a block can have: 227 KiB with the capabilities 9.0 and 10.0
  };
  std::vector<Properties> usable = {};  ///< those that it may use
  std::string why_none = {};            ///< the driver's message, if there is none
  bool driver = false;                  ///< NVIDIA's kernel driver is loaded
  bool emulated = false;                ///< kernels run on the CPU: for tests, which request it

  static GpusHere look();
};

struct DeviceChoice {
  Device device;
  bool asked = false;    ///< by "cuda"
  std::string why = {};  ///< why an available GPU is not used; empty otherwise
};

/// "cpu"; "cuda": the GPU with this rank's number on its host, or the only one that its launcher lets it see; "auto": the same where
/// possible, else the CPU.
struct DeviceWish {
  std::string device = "auto";
  std::string source = "SHEAF_DEVICE";  ///< named in errors

  /// SHEAF_DEVICE; "auto" if it is unset or empty.
  static DeviceWish from(const Environment& environment);
};

/// ConfigError if the wish is none of the three, or "cuda" and impossible: says what is missing.
DeviceChoice choose_device(const Rendezvous& rendezvous, const DeviceWish& wish, const GpusHere& gpus = GpusHere::look());

/// The message in which a rank tells the others its choice: "cpu" and why, or "gpu" and which one, "asked gpu" if it must be.
std::string choice_for_others(const DeviceChoice& choice);
/// A job computes only on GPUs, each rank on its own, or only on CPUs: a rank's final choice, from what all ranks told. ConfigError, on
/// all ranks, if one of them was asked for a GPU that is impossible.
DeviceChoice agreed_device(const DeviceChoice& choice, const std::vector<std::string>& told);

/// Makes `device` the default device of `context`, with its own stream and allocator if it is a GPU.
void use_device(Device device, RankContext& context);

}  // namespace sheaf
