// The description of a product for cuBLASLt: its operation and the layouts of its matrices.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include <cublasLt.h>
#include <cuda_runtime.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/product.h"

namespace sheaf::kernels::cuda {

// Scales by rows are new in 12.9: older headers and libraries lack them.
#if CUBLAS_VERSION >= 120900
inline constexpr bool kKnowsFp8 = true;
inline constexpr auto kScaleModeA = CUBLASLT_MATMUL_DESC_A_SCALE_MODE,
               kScaleModeB = CUBLASLT_MATMUL_DESC_B_SCALE_MODE;
inline constexpr int32_t kByRows = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
#else
inline constexpr bool kKnowsFp8 = false;
inline constexpr cublasLtMatmulDescAttributes_t kScaleModeA{}, kScaleModeB{};
inline constexpr int32_t kByRows = 0;
#endif
inline constexpr size_t kFirstWithFp8 = 120900;

inline constexpr size_t kMatrixAlignment = 16;  // also for an epilogue's

inline void check_status(cublasStatus_t status, const Product& product, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail<CudaError>(product, ": ", call, ": ", cublasLtGetStatusName(status), ", ",
                    cublasLtGetStatusString(status));
}
/// The library refuses to run an algorithm that it has offered: nothing is enqueued, and another may work.
inline bool refused(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
}
/// These are skipped, too, if other algorithms are to be tried anyway.
inline bool passed_over(cublasStatus_t status) {
  return refused(status) || status == CUBLAS_STATUS_ARCH_MISMATCH ||
         status == CUBLAS_STATUS_INTERNAL_ERROR;
}
inline void check_cuda(cudaError_t error, const Product& product) {
  if (error != cudaSuccess) fail<CudaError>(product, ": ", cudaGetErrorString(error));
}

inline cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CUDA_R_64F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::f16:
      return CUDA_R_16F;
    case DType::u8:
      return CUDA_R_8F_E4M3;
    default:
      return CUDA_R_32F;
  }
}

// Owned cuBLASLt objects.
using Operation = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulDesc_t>,
                                  decltype(&cublasLtMatmulDescDestroy)>;
using MatrixLayout = std::unique_ptr<std::remove_pointer_t<cublasLtMatrixLayout_t>,
                                     decltype(&cublasLtMatrixLayoutDestroy)>;
using Preference = std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                                   decltype(&cublasLtMatmulPreferenceDestroy)>;

template <class T>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t what, const T& value,
         const Product& p) {
  check_status(cublasLtMatmulDescSetAttribute(operation.get(), what, &value, sizeof value), p,
               "cublasLtMatmulDescSetAttribute");
}

inline cublasLtEpilogue_t epilogue_of(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::sums_of_a:
      return CUBLASLT_EPILOGUE_BGRADA;
    case Epilogue::sums_of_b:
      return CUBLASLT_EPILOGUE_BGRADB;
    case Epilogue::gelu:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::bias_gelu:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::gelu_gradient:
      return CUBLASLT_EPILOGUE_DGELU;
    default:
      return CUBLASLT_EPILOGUE_DEFAULT;
  }
}

inline Operation make_operation(const Product& p) {
  const ProductShape& s = p.shape;
  cublasLtMatmulDesc_t raw = nullptr;
  // Not TF32 for f32, f32 sums for bf16 and f16.
  check_status(
      cublasLtMatmulDescCreate(&raw, s.in == kF64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                               s.in == kF64 ? CUDA_R_64F : CUDA_R_32F),
      p, "cublasLtMatmulDescCreate");
  Operation out(raw, cublasLtMatmulDescDestroy);
  set(out, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, p);
  set(out, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, p);
  if (s.epilogue != Epilogue::none)
    set(out, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(s.epilogue), p);
  // The choice of an algorithm reads the alignment of the epilogue's memory from its address, so it is given an address with the
  // alignment guaranteed for the shape, not that of the first call's memory; try_run() sets the real one.
  const auto at = [](size_t alignment) { return reinterpret_cast<void*>(alignment); };
  if (has_vector(s.epilogue)) {
    set(out, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(type_of(s.out)), p);
    set(out, CUBLASLT_MATMUL_DESC_BIAS_POINTER, at(s.alignment[3]), p);
  }
  if (s.in == kU8) {
    set(out, kScaleModeA, kByRows, p);
    set(out, kScaleModeB, kByRows, p);
    set(out, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, at(kMatrixAlignment), p);
    set(out, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, at(kMatrixAlignment), p);
  }
  if (has_matrix(s.epilogue)) {
    set(out, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, s.ld_d, p);
    set(out, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at(kMatrixAlignment), p);
  }
  return out;
}

inline MatrixLayout make_layout(const Product& p, DType dtype, int64_t rows, int64_t cols, int64_t ld,
                         int64_t stride) {
  cublasLtMatrixLayout_t raw = nullptr;
  check_status(cublasLtMatrixLayoutCreate(&raw, type_of(dtype), static_cast<uint64_t>(rows),
                                          static_cast<uint64_t>(cols), ld),
               p, "cublasLtMatrixLayoutCreate");
  MatrixLayout out(raw, cublasLtMatrixLayoutDestroy);
  check<ShapeError>(p.shape.batches <= INT32_MAX, p, ": too many batches");
  const auto batches = static_cast<int32_t>(p.shape.batches);
  check_status(cublasLtMatrixLayoutSetAttribute(raw, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches,
                                                sizeof batches),
               p, "cublasLtMatrixLayoutSetAttribute");
  check_status(cublasLtMatrixLayoutSetAttribute(raw, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                &stride, sizeof stride),
               p, "cublasLtMatrixLayoutSetAttribute");
  return out;
}

}  // namespace sheaf::kernels::cuda
