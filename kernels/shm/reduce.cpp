#include "shm/reduce.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "shm/reduce_kernels.h"

namespace {

using fsdp_tp::ReduceArguments;

struct InstructionSet {
  const char* name;
  bool supported;
  void (*reduce)(const ReduceArguments&);
};

InstructionSet choose() {
  const InstructionSet sets[] = {
  // best first
#ifdef __x86_64__
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq"),
       fsdp_tp::avx512::reduce},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"), fsdp_tp::avx2::reduce},
#endif
      {"scalar", true, fsdp_tp::scalar::reduce}};

  auto allowed = std::begin(sets);
  if (const char* limit = std::getenv("FSDP_TP_INSTRUCTION_SET"); limit != nullptr && *limit != '\0') {
    allowed = std::find_if(allowed, std::end(sets),
                           [&](const InstructionSet& set) { return std::strcmp(set.name, limit) == 0; });
    if (allowed == std::end(sets)) {
      std::fprintf(stderr, "fsdp_tp: FSDP_TP_INSTRUCTION_SET=%s is ignored, being none of", limit);
      for (const InstructionSet& set : sets) std::fprintf(stderr, " %s", set.name);
      std::fprintf(stderr, "\n");
      allowed = std::begin(sets);
    }
  }
  return *std::find_if(allowed, std::end(sets), [](const InstructionSet& set) { return set.supported; });
}

const InstructionSet& instruction_set() {
  static const InstructionSet chosen = choose();
  return chosen;
}

bool is_16_bit(int dtype) { return dtype == FSDP_TP_BFLOAT16 || dtype == FSDP_TP_FLOAT16; }
bool is_integer(int dtype) { return dtype == FSDP_TP_INT32 || dtype == FSDP_TP_INT64; }

}  // namespace

size_t fsdp_tp_dtype_size(int dtype) noexcept {
  switch (dtype) {
    case FSDP_TP_BFLOAT16:
    case FSDP_TP_FLOAT16:
      return 2;
    case FSDP_TP_FLOAT32:
    case FSDP_TP_INT32:
      return 4;
    case FSDP_TP_FLOAT64:
    case FSDP_TP_INT64:
      return 8;
  }
  return 0;
}

const char* fsdp_tp_instruction_set(void) noexcept { return instruction_set().name; }

int fsdp_tp::reduce_part(void* out, int out_dtype, const void* const* sources, int num_sources, size_t count, int dtype,
                         int op, double factor, size_t written) noexcept {
  if (fsdp_tp_dtype_size(dtype) == 0) return FSDP_TP_BAD_DTYPE;
  if (out_dtype != dtype && !(is_16_bit(dtype) && out_dtype == FSDP_TP_FLOAT32)) return FSDP_TP_BAD_DTYPE;
  if (op < FSDP_TP_SUM || op > FSDP_TP_PREMUL_SUM) return FSDP_TP_BAD_OP;
  if (is_integer(dtype) && (op == FSDP_TP_AVG || op == FSDP_TP_PREMUL_SUM)) return FSDP_TP_BAD_OP;
  if (num_sources < 1) return FSDP_TP_BAD_NUM_SOURCES;
  if (count == 0) return FSDP_TP_OK;  // empty tensors have null data pointers
  if (out == nullptr || sources == nullptr) return FSDP_TP_NULL_POINTER;
  if (std::any_of(sources, sources + num_sources, [](const void* source) { return source == nullptr; })) {
    return FSDP_TP_NULL_POINTER;
  }
  instruction_set().reduce({out, out_dtype, sources, num_sources, count, dtype, op, factor, written});
  return FSDP_TP_OK;
}

int fsdp_tp_reduce(void* out, int out_dtype, const void* const* sources, int num_sources, size_t count, int dtype,
                   int op, double factor) noexcept {
  return fsdp_tp::reduce_part(out, out_dtype, sources, num_sources, count, dtype, op, factor,
                              count * fsdp_tp_dtype_size(out_dtype));
}

int fsdp_tp_cast(void* out, int out_dtype, const void* in, int dtype, size_t count) noexcept {
  const bool narrows = dtype == FSDP_TP_FLOAT32 && is_16_bit(out_dtype);
  const bool widens = is_16_bit(dtype) && out_dtype == FSDP_TP_FLOAT32;
  const size_t size = fsdp_tp_dtype_size(dtype);
  if (size == 0 || (dtype != out_dtype && !narrows && !widens)) return FSDP_TP_BAD_DTYPE;
  if (count == 0) return FSDP_TP_OK;
  if (out == nullptr || in == nullptr) return FSDP_TP_NULL_POINTER;
  if (dtype == out_dtype) {
    if (out != in) std::memcpy(out, in, count * size);
  } else {
    instruction_set().reduce(
        {out, out_dtype, &in, 1, count, dtype, FSDP_TP_SUM, 0, count * fsdp_tp_dtype_size(out_dtype)});
  }
  return FSDP_TP_OK;
}
