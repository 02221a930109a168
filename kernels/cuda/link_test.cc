// That kernels compiled by nvcc link into our programs, and compute the same as a CPU loop where
// there is a GPU. The only test that looks for one by itself: it says so when it skips.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/kernels/cuda/adamw.h"
#include "sheaf/kernels/cuda/config.h"

#if SHEAF_HAS_CUDA
#include <cuda_runtime.h>
#endif

namespace sheaf::kernels::cuda {
namespace {

struct Shard {
  std::vector<float> param, moment1, moment2, grad;
};

void adamw_reference(Shard& shard, const std::vector<AdamWSegment>& segments, const AdamWScalars& s,
                     const AdamWConstants& c) {
  size_t segment = 0;
  for (size_t i = 0; i < shard.param.size(); ++i) {
    while (segment + 1 < segments.size() && segments[segment + 1].begin <= int64_t(i)) ++segment;
    float &p = shard.param[i], &m = shard.moment1[i], &v = shard.moment2[i];
    const float g = s.clip_scale * shard.grad[i];
    m = c.beta1 * m + (1.0f - c.beta1) * g;
    v = c.beta2 * v + ((1.0f - c.beta2) * g) * g;
    p = p - (s.learning_rate * segments[segment].weight_decay) * p;
    p = p - s.learning_rate *
                ((m / s.bias_correction1) / (std::sqrt(v / s.bias_correction2) + c.epsilon));
  }
}

TEST(CudaLink, ReferenceTakesAKnownStep) {
  // The loop that the GPU is compared with is itself right: from (4, 0, 0) with g = p, the first
  // step of Adam has length lr, and the decay takes lr * wd * p off.
  Shard shard{{4.0f}, {0.0f}, {0.0f}, {4.0f}};
  const AdamWConstants c;
  adamw_reference(shard, {{0, 0.5f}}, {0.1f, 1.0f, 1.0f - c.beta1, 1.0f - c.beta2}, c);
  EXPECT_NEAR(shard.param[0], 4.0f - 0.1f * 0.5f * 4.0f - 0.1f, 1e-5f);
}

#if SHEAF_HAS_CUDA

#define ASSERT_CUDA(call)                                                        \
  do {                                                                           \
    const cudaError_t error = (call);                                            \
    ASSERT_EQ(error, cudaSuccess) << #call << ": " << cudaGetErrorString(error); \
  } while (0)

Shard random_shard(int64_t n) {
  std::mt19937 generator(1337);
  std::normal_distribution<float> normal;
  Shard shard;
  for (auto* values : {&shard.param, &shard.moment1, &shard.grad}) {
    for (int64_t i = 0; i < n; ++i) values->push_back(normal(generator));
  }
  for (int64_t i = 0; i < n; ++i) shard.moment2.push_back(std::abs(normal(generator)));
  return shard;
}

template <class T>
T* to_device(const std::vector<T>& host) {
  void* device = nullptr;
  EXPECT_EQ(cudaMalloc(&device, host.size() * sizeof(T)), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
            cudaSuccess);
  return static_cast<T*>(device);
}

void expect_same_bits(const std::vector<float>& expected, const float* device, const char* what) {
  std::vector<float> actual(expected.size());
  ASSERT_CUDA(
      cudaMemcpy(actual.data(), device, actual.size() * sizeof(float), cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::memcmp(&expected[i], &actual[i], sizeof(float)), 0)
        << what << "[" << i << "] is " << actual[i] << ", on the CPU " << expected[i];
  }
}

TEST(CudaLink, AdamWEqualsCpuLoop) {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices);
      error != cudaSuccess || devices == 0) {
    GTEST_SKIP() << "SKIPPED: linked, but not run, for want of a GPU (" << cudaGetErrorString(error)
                 << ")";
  }
  // A block and a bit, an odd tail, a segment border inside a block and one at a block's begin.
  const int64_t n = 3 * 4096 + 7;
  Shard host = random_shard(n);
  const std::vector<AdamWSegment> segments = {{0, 0.1f}, {1000, 0.0f}, {1004, 0.3f}, {8192, 0.05f}};
  const AdamWConstants c;
  const AdamWScalars s = {3e-3f, 0.7f, 1.0f - c.beta1 * c.beta1, 1.0f - c.beta2 * c.beta2};
  float *param = to_device(host.param), *moment1 = to_device(host.moment1),
        *moment2 = to_device(host.moment2), *grad = to_device(host.grad);
  AdamWSegment* table = to_device(segments);
  AdamWScalars* scalars = to_device(std::vector<AdamWScalars>{s});

  adamw(nullptr, {param, moment1, moment2, grad, n}, table, int64_t(segments.size()), scalars, c);
  ASSERT_CUDA(cudaDeviceSynchronize());

  adamw_reference(host, segments, s, c);
  expect_same_bits(host.moment1, moment1, "moment1");
  expect_same_bits(host.moment2, moment2, "moment2");
  expect_same_bits(host.param, param, "param");
  for (void* pointer :
       {(void*)param, (void*)moment1, (void*)moment2, (void*)grad, (void*)table, (void*)scalars}) {
    ASSERT_CUDA(cudaFree(pointer));
  }
}

#else

TEST(CudaLink, AdamWEqualsCpuLoop) { GTEST_SKIP() << "SKIPPED: built without CUDA"; }

#endif

static_assert(kHasCuda == (SHEAF_HAS_CUDA == 1));

}  // namespace
}  // namespace sheaf::kernels::cuda
