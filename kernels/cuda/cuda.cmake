# The library fsdp_tp_cuda, or a line that says why there is none. Included from CMakeLists.txt.

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(NOTICE "fsdp_tp_cuda: not built, no CUDA compiler (nvcc) was found")
  add_custom_target(fsdp_tp_cuda)  # setup.py asks for it
  return()
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
  message(NOTICE "fsdp_tp_cuda: not built, CUDA ${CMAKE_CUDA_COMPILER_VERSION} has no C++20")
  add_custom_target(fsdp_tp_cuda)
  return()
endif()
foreach(kind STANDARD EXTENSION)  # before CMake 3.26 these are not set
  if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()
message(STATUS "fsdp_tp_cuda: built with CUDA ${CMAKE_CUDA_COMPILER_VERSION}")

add_library(fsdp_tp_cuda SHARED kernels/cuda/fsdp_tp_cuda.cu)
target_include_directories(fsdp_tp_cuda PRIVATE kernels)
# Machine code for each, and of the newest also what later GPUs compile when they load it.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  set(architectures 80-real 90)
else()
  set(architectures 80-real 90-real 100)
endif()
set_target_properties(
  fsdp_tp_cuda
  PROPERTIES CUDA_ARCHITECTURES "${architectures}"
             CUDA_STANDARD 20
             CUDA_STANDARD_REQUIRED ON
             CUDA_VISIBILITY_PRESET hidden
             CUDA_RUNTIME_LIBRARY Static)
# As on the CPU a product and a sum round each on their own. Registers that spill to memory are an error.
target_compile_options(
  fsdp_tp_cuda PRIVATE -fmad=false -Xcompiler=-Wall,-Wextra "SHELL:-Werror all-warnings" "SHELL:-Xptxas -warn-spills")
