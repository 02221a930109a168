// The interface lives in core, so that ops can redistribute without knowing which network runs underneath.
#pragma once
#include "sheaf/core/communicator.h"
