// SHEAF_HAS_CUDNN: whether cuDNN's headers are there, and have what Sheaf uses: 9.8 added properties of devices that are not there.
#pragma once

#if __has_include(<cudnn_backend.h>) && __has_include(<cudnn_version.h>)
#include <cudnn_version.h>
#define SHEAF_HAS_CUDNN (CUDNN_VERSION >= 90800)
#else
#define SHEAF_HAS_CUDNN 0
#endif
