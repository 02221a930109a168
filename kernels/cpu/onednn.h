// oneDNN behind a narrow door: cached matmul and reorder primitives on plain strided matrices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sheaf/core/dtype.h"

namespace sheaf::kernels::cpu {

/// A matrix layout: one of the strides is 1 (or its dimension has size 1).
struct MatrixLayout {
  int64_t rows, cols, row_stride, col_stride;
  DType dtype;  ///< f32 or bf16
  bool operator==(const MatrixLayout&) const = default;
};

struct ProductSpec {
  MatrixLayout a, b, c;
  bool bias = false;  ///< f32 [cols of c], or of c's dtype
  DType bias_dtype = kF32;
  bool accumulate = false;  ///< c += a b
  bool pack = false;  ///< b is first copied into oneDNN's blocked layout (same bits; faster where
                      ///< b's rows alias in the cache)
  int threads = 1;
  bool operator==(const ProductSpec&) const = default;
};

/// One compiled product. Thread-safe: all state of an execution is in the workspace.
class Product {
 public:
  virtual ~Product() = default;
  virtual size_t workspace() const = 0;
  virtual void run(const void* a, const void* b, const void* bias, void* c,
                   void* workspace) const = 0;
};

/// From a locked cache. Must be called, and run, on a thread whose rank has `spec.threads` threads,
/// or with threads = 1 anywhere.
std::shared_ptr<const Product> product(const ProductSpec& spec);

/// Whether this machine multiplies bf16 in oneDNN.
bool has_bf16_products();

}  // namespace sheaf::kernels::cpu
