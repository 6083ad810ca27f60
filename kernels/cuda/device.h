// What the kernels need of the processor they run on. Their code is compiled twice: by nvcc for GPUs, and by a C++
// compiler for the tests, where a thread of a GPU is a turn of a loop (kernels/tests/cuda_emulation.h).

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FSDP_TP_DEVICE __device__ __forceinline__
#define FSDP_TP_UNROLL _Pragma("unroll")
#else
#include <atomic>
#include <chrono>
#include <thread>
#define FSDP_TP_DEVICE inline
#define FSDP_TP_UNROLL
#endif

namespace fsdp_tp::cuda {

// What a thread loads or stores at once.
struct alignas(16) Vector {
  uint32_t words[4];
};

#ifdef __CUDACC__

// Of memory that other GPUs write: never through the read-only cache, and read once, so without a place in L1.
FSDP_TP_DEVICE Vector load_peer(const Vector* from) {
  Vector value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
               : "l"(from)
               : "memory");
  return value;
}
template <class Word>
FSDP_TP_DEVICE Word load_peer(const Word* from) {
  return *static_cast<const volatile Word*>(from);
}

FSDP_TP_DEVICE uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
FSDP_TP_DEVICE uint32_t load_relaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
FSDP_TP_DEVICE void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(to), "r"(value) : "memory");
}
FSDP_TP_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
FSDP_TP_DEVICE void pause() {}
FSDP_TP_DEVICE void trap() { __trap(); }

FSDP_TP_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
FSDP_TP_DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }

#else

template <class Word>
inline Word load_peer(const Word* from) {
  return *from;
}
inline uint32_t load_acquire(const uint32_t* from) {
  return std::atomic_ref(*const_cast<uint32_t*>(from)).load(std::memory_order_acquire);
}
inline uint32_t load_relaxed(const uint32_t* from) {
  return std::atomic_ref(*const_cast<uint32_t*>(from)).load(std::memory_order_relaxed);
}
inline void store_release(uint32_t* to, uint32_t value) {
  std::atomic_ref(*to).store(value, std::memory_order_release);
}
inline uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}
inline void pause() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
inline void trap() { std::terminate(); }

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

#endif

}  // namespace fsdp_tp::cuda
