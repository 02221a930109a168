// In addition to headers.h: the headers that tests of tensors, modules and ranks include most.
#ifndef SHEAF_TESTS_HEADERS_TENSORS_H_
#define SHEAF_TESTS_HEADERS_TENSORS_H_

#include "sheaf/autograd/checks.h"
#include "sheaf/autograd/ops.h"
#include "sheaf/autograd/recording.h"
#include "sheaf/autograd/tape_dump.h"
#include "sheaf/core/communicator.h"
#include "sheaf/core/json.h"
#include "sheaf/core/rank_context.h"
#include "sheaf/distributed/run_local.h"
#include "sheaf/distributed/unit.h"
#include "sheaf/nn/module.h"
#include "sheaf/nn/shard.h"
#include "sheaf/tests/headers/headers.h"

#endif
