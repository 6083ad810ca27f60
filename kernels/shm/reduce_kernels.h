// What reduce.cpp, which checks arguments and picks an instruction set, asks of reduce_kernels.cpp,
// which CMake compiles once for each instruction set, with its flags.

#pragma once

#include <cstddef>

namespace fsdp_tp {

// The arguments of fsdp_tp_reduce, already checked. Casts from float32 are SUMs over one source.
struct ReduceArguments {
  void* out;
  int out_dtype;
  const void* const* sources;
  int num_sources;
  size_t count;
  int dtype;
  int op;
  double factor;
  size_t written;  // see reduce_part
};

namespace scalar {
void reduce(const ReduceArguments& arguments);
}
namespace avx2 {
void reduce(const ReduceArguments& arguments);
}
namespace avx512 {
void reduce(const ReduceArguments& arguments);
}

}  // namespace fsdp_tp
