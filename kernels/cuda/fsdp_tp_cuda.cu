// The kernels for GPUs, and their launch. Without the CUDA runtime's shared library: it is linked in, so that this
// loads, and says what is missing, on a machine without CUDA.

#include <cuda_runtime.h>

#include "cuda/kernels.h"

namespace fsdp_tp::cuda {

struct Block {
  const char** sources;  // shared by the threads of the block
  int index, count;

  template <class Work>
  __device__ __forceinline__ void each(const Work& work) const {
    work(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  template <class Work>
  __device__ __forceinline__ bool all(const Work& work) const {
    return __syncthreads_and(work(static_cast<int>(threadIdx.x)) ? 1 : 0) != 0;
  }
};

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 1) run(const Kernel kernel) {
  __shared__ const char* sources[FSDP_TP_CUDA_MAX_WORLD];
  Block block{sources, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  kernel(block);
}

template <class Kernel>
int launch(const Kernel& kernel, int blocks, void* stream) {
  void* arguments[] = {const_cast<Kernel*>(&kernel)};
  const auto function = reinterpret_cast<const void*>(&run<Kernel>);
  // Returns its own error only; cudaGetLastError would return, and forget, one of other code.
  const cudaError_t error =
      cudaLaunchKernel(function, dim3(blocks), dim3(kThreads), arguments, 0, static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? FSDP_TP_OK : FSDP_TP_CUDA_FAILED + static_cast<int>(error);
}

}  // namespace fsdp_tp::cuda

#include "cuda/entry_points.h"

extern "C" {

int fsdp_tp_cuda_available() {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess && major < 8) error = cudaErrorNoKernelImageForDevice;
  return error == cudaSuccess ? FSDP_TP_OK : FSDP_TP_CUDA_FAILED + static_cast<int>(error);
}

const char* fsdp_tp_cuda_error(int status) {
  if (status >= FSDP_TP_CUDA_FAILED) return cudaGetErrorString(static_cast<cudaError_t>(status - FSDP_TP_CUDA_FAILED));
  return fsdp_tp::cuda::sentence(status);
}
}
