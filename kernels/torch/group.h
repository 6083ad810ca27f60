// The collectives that this backend runs itself, over plain memory; and fsdp_tp_group as C++ likes it.

#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "shm/fsdp_tp_shm.h"

namespace fsdp_tp {

// As of fsdp_tp_reduce.
struct Reduction {
  int dtype;
  int op;
  double factor;
};

// Ranks that share the memory of one host. Errors are exceptions with the library's sentence.
class Group {
 public:
  // A group of one rank has no segment: nullptr.
  Group(fsdp_tp_segment* segment, int rank, int size, std::chrono::milliseconds timeout);
  virtual ~Group() { Group::leave(); }
  Group(const Group&) = delete;

  // --- Collectives, as in shm/fsdp_tp_shm.h ---
  // `dtype` of the values (fsdp_tp_dtype), or kBytes if they are not to be touched.
  static constexpr int kBytes = -1;
  virtual void all_gather(const std::vector<void*>& outs, const void* in, size_t bytes, int dtype = kBytes);
  // The output is of the inputs' dtype, or with `out_dtype` of fp32.
  virtual void reduce_scatter(void* out, int out_dtype, const std::vector<const void*>& ins, size_t count,
                              const Reduction& how);
  virtual void all_reduce(void* data, size_t count, const Reduction& how);
  virtual void broadcast(void* data, size_t bytes, int root);
  virtual void barrier();

  // Throws once the group was left.
  fsdp_tp_group* handle() const;
  // Throws with the library's sentence: of a collective, or of a call about a send or receive in this thread.
  void check(int status) const;
  void check_request(int status) const;

  // --- Of all operations ---
  virtual void set_timeout(std::chrono::milliseconds timeout);
  // Makes what runs in another thread, here or on other ranks, fail.
  virtual void abort(const std::string& reason);
  // Nothing may run in it any more.
  virtual void leave();

  const int rank;
  const int size;
  // Behind the library's sentences, which say ranks of this group.
  std::string whose_ranks;

 private:
  std::atomic<fsdp_tp_group*> handle_{nullptr};
};

}  // namespace fsdp_tp
