#include "sheaf/kernels/cuda/cudnn_headers.h"
#if SHEAF_HAS_CUDNN  // else cudnn_absent.cc

#include "sheaf/kernels/cuda/cudnn_graph.h"

#include <algorithm>

#include <cuda_runtime_api.h>

#include "sheaf/core/error.h"
#include "sheaf/kernels/cuda/library.h"

#define SHEAF_CUDNN(F)             \
  F(cudnnBackendCreateDescriptor)  \
  F(cudnnBackendDestroyDescriptor) \
  F(cudnnBackendExecute)           \
  F(cudnnBackendFinalize)          \
  F(cudnnBackendGetAttribute)      \
  F(cudnnBackendSetAttribute)      \
  F(cudnnCreate)                   \
  F(cudnnGetErrorString)           \
  F(cudnnGetLastErrorString)       \
  F(cudnnGetVersion)               \
  F(cudnnSetStream)
SHEAF_FORWARD_FUNCTIONS(kCudnn, SHEAF_CUDNN)

namespace sheaf::kernels::cuda::cudnn {
namespace {

/// Attributes that are arrays, such as engines' notes.
template <class T>
std::vector<T> notes_of(Handle engine, cudnnBackendAttributeName_t name,
                        cudnnBackendAttributeType_t type) {
  std::vector<T> out(32);
  int64_t count = 0;
  check_status(cudnnBackendGetAttribute(engine, name, type, static_cast<int64_t>(out.size()),
                                        &count, out.data()),
               "notes of an engine");
  out.resize(static_cast<size_t>(std::min<int64_t>(count, static_cast<int64_t>(out.size()))));
  return out;
}

bool deterministic(Handle config) {
  const Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  Handle handle = engine.handle();
  int64_t count = 0;
  check_status(cudnnBackendGetAttribute(config, CUDNN_ATTR_ENGINECFG_ENGINE,
                                        CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &handle),
               "engine of a configuration");
  const auto notes = notes_of<cudnnBackendNumericalNote_t>(handle, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                                           CUDNN_TYPE_NUMERICAL_NOTE);
  return std::find(notes.begin(), notes.end(), CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) ==
         notes.end();
}

/// Codes of one kind share their thousands.
bool refuses(cudnnStatus_t status) {
  switch (static_cast<int>(status)) {
    case CUDNN_STATUS_NOT_INITIALIZED:
    case CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH:
    case CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED:
    // Of one engine, when its code is generated: another one, or our own kernel, may still do.
    case CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED:
    case CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE:
      return true;
    default:
      return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_BAD_PARAM ||
             CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED;
  }
}

}  // namespace

void load() {
  try {
    load_library(SHEAF_SONAME("libcudnn.so.", CUDNN_MAJOR), kCudnn,
                 str("libnvrtc.so.", CUDART_VERSION / 1000));
  } catch (const ConfigError& error) {
    throw Refusal(error.what());
  }
}

int64_t version() { return static_cast<int64_t>(cudnnGetVersion()); }

void check_status(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char words[512] = "";
  cudnnGetLastErrorString(words, sizeof words);
  const std::string text = str(call, ": ", cudnnGetErrorString(status), ": ", words);
  if (refuses(status)) throw Refusal(text);
  fail<CudaError>("[cudnn] ", text);
}

Descriptor::Descriptor(cudnnBackendDescriptorType_t type) {
  Handle handle = nullptr;
  check_status(cudnnBackendCreateDescriptor(type, &handle), "cudnnBackendCreateDescriptor");
  handle_.reset(handle);
}

Descriptor& Descriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                            int64_t count, const void* values) {
  check_status(cudnnBackendSetAttribute(handle(), name, type, count, values),
               "cudnnBackendSetAttribute");
  return *this;
}

Descriptor& Descriptor::finalize(const char* what) {
  check_status(cudnnBackendFinalize(handle()), what);
  return *this;
}

Dims dense_strides(const Dims& dims) {
  return {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1};
}

Handle Graph::make_tensor(int64_t id, cudnnDataType_t type, const Dims& dims, const Dims& strides,
                          bool between, bool by_value) {
  return add(CUDNN_BACKEND_TENSOR_DESCRIPTOR)
      .set(CUDNN_ATTR_TENSOR_UNIQUE_ID, id)
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, type)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims.data())
      .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides.data())
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, int64_t{16})
      .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, between)
      .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, by_value)
      .finalize("tensor")
      .handle();
}

Handle Graph::tensor(int64_t id, cudnnDataType_t type, const Dims& dims, const Dims& strides) {
  return make_tensor(id, type, dims, strides, false, false);
}
Handle Graph::scalar(int64_t id, cudnnDataType_t type) {
  return make_tensor(id, type, {1, 1, 1, 1}, {1, 1, 1, 1}, false, true);
}
Handle Graph::between(cudnnDataType_t type, const Dims& dims, const Dims& strides) {
  return make_tensor(next_between_++, type, dims, strides, true, false);
}

Handle Graph::operation(Descriptor& d, Handle to) {
  operations_.push_back(d.finalize("operation").handle());
  return to;
}

Handle Graph::matmul(Handle a, Handle b, Handle to) {
  const Handle kind = add(CUDNN_BACKEND_MATMUL_DESCRIPTOR)
                          .set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT)
                          .finalize("matmul")
                          .handle();
  return operation(add(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
                       .set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a)
                       .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b)
                       .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, to)
                       .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, kind),
                   to);
}

Handle Graph::pointwise(const Pointwise& p) {
  Descriptor& kind = add(CUDNN_BACKEND_POINTWISE_DESCRIPTOR)
                         .set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &p.mode)
                         .set(CUDNN_ATTR_POINTWISE_MATH_PREC, p.compute);
  if (p.axis >= 0) kind.set(CUDNN_ATTR_POINTWISE_AXIS, p.axis);
  const Handle kind_handle = kind.finalize("pointwise").handle();
  Descriptor& op = add(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
                       .set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind_handle)
                       .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p.x);
  if (p.b) op.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, p.b);
  if (p.mask) op.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, p.mask);
  return operation(op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, p.to), p.to);
}

Handle Graph::pointwise(cudnnPointwiseMode_t mode, Handle x, Handle b, Handle to) {
  return pointwise({.mode = mode, .x = x, .b = b, .to = to});
}
Handle Graph::index(int64_t axis, Handle like, Handle to) {
  return pointwise({.mode = CUDNN_POINTWISE_GEN_INDEX,
                    .compute = CUDNN_DATA_INT32,
                    .axis = axis,
                    .x = like,
                    .to = to});
}
Handle Graph::plus(Handle x, Handle b, cudnnDataType_t type, Handle to) {
  return pointwise({.mode = CUDNN_POINTWISE_ADD, .compute = type, .x = x, .b = b, .to = to});
}
Handle Graph::compare(cudnnPointwiseMode_t mode, Handle x, Handle b, Handle to) {
  return pointwise({.mode = mode, .compute = CUDNN_DATA_BOOLEAN, .x = x, .b = b, .to = to});
}
Handle Graph::select(Handle mask, Handle x, Handle b, Handle to) {
  return pointwise({.mode = CUDNN_POINTWISE_BINARY_SELECT, .x = x, .b = b, .mask = mask, .to = to});
}

Handle Graph::reduce(cudnnReduceTensorOp_t op, Handle x, Handle to) {
  const Handle kind =
      add(CUDNN_BACKEND_REDUCTION_DESCRIPTOR)
          .set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op)
          .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT)
          .finalize("reduction")
          .handle();
  return operation(add(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
                       .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x)
                       .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, to)
                       .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind),
                   to);
}

Handle Graph::reshape(Handle x, Handle to) {
  return operation(add(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)
                       .set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x)
                       .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, to),
                   to);
}

Plan::Plan(Graph graph, const Target& target) : graph_(std::move(graph)) {
  parts_.reserve(3);  // handles stay where they are
  Descriptor& operations = parts_.emplace_back(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  operations.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                 static_cast<int64_t>(graph_.operations_.size()), graph_.operations_.data());
  if (target.handle)
    operations.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &target.handle);
  operations.finalize("operation graph");

  Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations.handle())
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  if (target.properties) heuristics.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, target.properties);
  heuristics.finalize("heuristics");
  int64_t count = 0;
  check_status(cudnnBackendGetAttribute(heuristics.handle(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                        CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
               "number of engines");
  std::vector<Descriptor> configs;
  std::vector<Handle> handles;
  for (int64_t i = 0; i < count; ++i)
    handles.push_back(configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR).handle());
  check_status(
      cudnnBackendGetAttribute(heuristics.handle(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                               CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, handles.data()),
      "engines");

  std::string why = "heuristics: no engine";
  for (int64_t i = 0; i < count && !plan_; ++i) {
    try {
      Descriptor& config = configs[static_cast<size_t>(i)];
      if (!deterministic(config.handle())) continue;
      Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config.handle());
      if (target.handle)
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &target.handle);
      if (target.properties) plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, target.properties);
      plan.finalize("execution plan");
      int64_t one = 0;
      check_status(cudnnBackendGetAttribute(plan.handle(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                            CUDNN_TYPE_INT64, 1, &one, &workspace_),
                   "workspace of a plan");
      plan_ = plan.handle();
      parts_.push_back(std::move(config));
      parts_.push_back(std::move(plan));
    } catch (const Refusal& refusal) {
      why = refusal.what();
    }
  }
  if (!plan_) throw Refusal(why);
}

void Plan::run(cudnnHandle_t handle, const std::vector<int64_t>& ids,
               const std::vector<void*>& pointers, void* workspace) const {
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, static_cast<int64_t>(ids.size()),
           ids.data())
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR,
           static_cast<int64_t>(pointers.size()), pointers.data())
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace)
      .finalize("variant pack");
  check_status(cudnnBackendExecute(handle, plan_, pack.handle()), "cudnnBackendExecute");
}

Descriptor device_properties(std::string_view json) {
  Descriptor out(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  out.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
          static_cast<int64_t>(json.size()), json.data());
  out.finalize("device properties");
  return out;
}

}  // namespace sheaf::kernels::cuda::cudnn

#endif
