// cuDNN's graph API (cudnn_backend.h) without its boilerplate: a Graph of operations on tensors of
// four dimensions, and the Plan that cuDNN makes from it for a device.
#pragma once

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <cudnn_backend.h>

namespace sheaf::kernels::cuda::cudnn {

/// cuDNN does not accept a request, immediately or later, or is not installed; what() has the call and cuDNN's message.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Loads cuDNN; call this first. Throws Refusal if it is not installed.
void load();
/// The version of the library that load() found: 91900 for 9.19.0.
int64_t version();

/// Throws unless `status` is success: Refusal if cuDNN does not support the request, or parts of it or the device
/// are absent; CudaError for failures that may not recur, such as a lack of memory.
void check_status(cudnnStatus_t status, const char* call);

using Handle = cudnnBackendDescriptor_t;

class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type);

  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                  const void* values);
  Descriptor& set(cudnnBackendAttributeName_t name, Handle value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, int64_t value) {
    return set(name, CUDNN_TYPE_INT64, 1, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, bool value) {
    return set(name, CUDNN_TYPE_BOOLEAN, 1, &value);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnDataType_t value) {
    return set(name, CUDNN_TYPE_DATA_TYPE, 1, &value);
  }
  /// `what` is named in the error.
  Descriptor& finalize(const char* what);

  Handle handle() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(void* handle) const { cudnnBackendDestroyDescriptor(handle); }
  };
  std::unique_ptr<void, Destroy> handle_;
};

using Dims = std::array<int64_t, 4>;

/// Row-major strides.
Dims dense_strides(const Dims& dims);

/// A device to plan for: that of a handle, or properties (of a device that this machine may lack).
struct Target {
  cudnnHandle_t handle = nullptr;
  Handle properties = nullptr;
};

class Graph {
 public:
  /// A tensor in memory, known by `id` when the plan runs; 16-byte aligned.
  Handle tensor(int64_t id, cudnnDataType_t type, const Dims& dims, const Dims& strides);
  /// One f32 that is passed by value when the plan runs.
  Handle scalar(int64_t id, cudnnDataType_t type = CUDNN_DATA_FLOAT);
  /// A tensor that only operations see, dense or with strides.
  Handle between(cudnnDataType_t type, const Dims& dims) {
    return between(type, dims, dense_strides(dims));
  }
  Handle between(cudnnDataType_t type, const Dims& dims, const Dims& strides);

  // Operations in f32; each returns its result `to`.
  Handle matmul(Handle a, Handle b, Handle to);
  Handle pointwise(cudnnPointwiseMode_t mode, Handle x, Handle b, Handle to);
  /// The index of each element along `axis`.
  Handle index(int64_t axis, Handle like, Handle to);
  /// x + b, computed in `type`.
  Handle plus(Handle x, Handle b, cudnnDataType_t type, Handle to);
  /// x >= b, for example, as booleans.
  Handle compare(cudnnPointwiseMode_t mode, Handle x, Handle b, Handle to);
  /// mask ? x : b
  Handle select(Handle mask, Handle x, Handle b, Handle to);
  /// Reduces over the dimensions that have size 1 in `to`.
  Handle reduce(cudnnReduceTensorOp_t op, Handle x, Handle to);
  Handle reshape(Handle x, Handle to);

 private:
  friend class Plan;
  struct Pointwise {
    cudnnPointwiseMode_t mode;
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    int64_t axis = -1;
    Handle x = nullptr, b = nullptr, mask = nullptr, to = nullptr;
  };
  Handle pointwise(const Pointwise& p);
  Handle make_tensor(int64_t id, cudnnDataType_t type, const Dims& dims, const Dims& strides,
                     bool between, bool by_value);
  Descriptor& add(cudnnBackendDescriptorType_t type) { return parts_.emplace_back(type); }
  Handle operation(Descriptor& d, Handle to);

  std::vector<Descriptor> parts_;  // keeps alive what operations refer to
  std::vector<Handle> operations_;
  int64_t next_between_ = 1000;
};

/// cuDNN's compiled form of a graph: the first of its suggestions that it can build and does not mark as nondeterministic.
class Plan {
 public:
  Plan(Graph graph, const Target& target);  ///< throws as check_status()

  int64_t workspace() const { return workspace_; }
  /// Enqueues the plan on the handle's stream. `pointers` in the order of `ids`.
  void run(cudnnHandle_t handle, const std::vector<int64_t>& ids,
           const std::vector<void*>& pointers, void* workspace) const;

 private:
  Graph graph_;
  std::vector<Descriptor> parts_;
  Handle plan_ = nullptr;
  int64_t workspace_ = 0;
};

/// The properties of a device as cuDNN's JSON has them.
Descriptor device_properties(std::string_view json);

}  // namespace sheaf::kernels::cuda::cudnn
