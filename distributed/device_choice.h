// Which device this process computes on.
#pragma once

#include <string>

#include "sheaf/core/device.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/rendezvous.h"

namespace sheaf {

struct DeviceChoice {
  Device device;
  bool asked = false;    ///< by SHEAF_DEVICE=cuda
  std::string why = {};  ///< why not on the GPU that is there; empty otherwise
};

/// By SHEAF_DEVICE: "cpu"; "cuda": the GPU with the number of this rank on its host, or a ConfigError that says what is
/// missing; "auto", the default: the same where it is possible, else the CPU. One rank per GPU.
DeviceChoice choose_device(const Rendezvous& rendezvous, const Environment& environment);

/// Makes `device` the one that `context` computes on by default, with a stream and memory of its own if it is a GPU.
void use_device(Device device, RankContext& context);

}  // namespace sheaf
