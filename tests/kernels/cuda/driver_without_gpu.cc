// A CUDA driver that knows no GPU, as libcuda.so.1: it says so when it is initialised, and accepts
// any code that it is given to load. cuDNN needs no more to plan for a device described in JSON, so
// plans can be tested on machines without a driver.
#include <cstdint>

namespace {
constexpr int kSuccess = 0, kNoDevice = 100;
int something;  // what handles point to
}  // namespace

#define SHEAF_DRIVER extern "C" __attribute__((visibility("default"))) int

SHEAF_DRIVER cuInit(unsigned) { return kNoDevice; }
SHEAF_DRIVER cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
SHEAF_DRIVER cuDeviceGetCount(int* count) {
  *count = 0;
  return kSuccess;
}
SHEAF_DRIVER cuLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*,
                               unsigned) {
  *library = &something;
  return kSuccess;
}
SHEAF_DRIVER cuLibraryGetKernel(void** kernel, void*, const char*) {
  *kernel = &something;
  return kSuccess;
}
SHEAF_DRIVER cuLibraryUnload(void*) { return kSuccess; }
SHEAF_DRIVER cuKernelSetAttribute(int, int, void*, int) { return kSuccess; }
SHEAF_DRIVER cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return kSuccess;
}
SHEAF_DRIVER cuGetErrorName(int, const char** words) {
  *words = "an error of the driver that knows no GPU";
  return kSuccess;
}
SHEAF_DRIVER cuGetErrorString(int error, const char** words) {
  return cuGetErrorName(error, words);
}

// Looked up when cuDNN starts, and never called while it plans.
#define SHEAF_DRIVER_REFUSES(name) \
  SHEAF_DRIVER name() { return kNoDevice; }
SHEAF_DRIVER_REFUSES(cuCtxGetCurrent)
SHEAF_DRIVER_REFUSES(cuCtxGetLimit)
SHEAF_DRIVER_REFUSES(cuCtxPopCurrent)
SHEAF_DRIVER_REFUSES(cuCtxPushCurrent)
SHEAF_DRIVER_REFUSES(cuDeviceGet)
SHEAF_DRIVER_REFUSES(cuLaunchCooperativeKernel)
SHEAF_DRIVER_REFUSES(cuLaunchKernel)
SHEAF_DRIVER_REFUSES(cuLaunchKernelEx)
SHEAF_DRIVER_REFUSES(cuKernelGetFunction)
SHEAF_DRIVER_REFUSES(cuModuleLoadData)
SHEAF_DRIVER_REFUSES(cuModuleGetFunction)
SHEAF_DRIVER_REFUSES(cuModuleUnload)
SHEAF_DRIVER_REFUSES(cuTensorMapEncodeTiled)
SHEAF_DRIVER_REFUSES(cuTensorMapEncodeIm2col)
SHEAF_DRIVER_REFUSES(cuLibraryLoadFromFile)
SHEAF_DRIVER_REFUSES(cuLinkAddData)
SHEAF_DRIVER_REFUSES(cuLinkComplete)
SHEAF_DRIVER_REFUSES(cuLinkCreate)
SHEAF_DRIVER_REFUSES(cuLinkDestroy)
SHEAF_DRIVER_REFUSES(cuOccupancyMaxPotentialClusterSize)
SHEAF_DRIVER_REFUSES(cuStreamGetCtx)
