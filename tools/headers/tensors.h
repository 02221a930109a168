// In addition to headers.h: the headers of tapes and tensors that modules, models and commands include most.
#ifndef SHEAF_TOOLS_HEADERS_TENSORS_H_
#define SHEAF_TOOLS_HEADERS_TENSORS_H_

#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/json.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/tools/headers/headers.h"

#endif
