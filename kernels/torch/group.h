// fsdp_tp_group as C++ likes it: an owner, and errors as exceptions.

#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <string>

#include "shm/fsdp_tp_shm.h"

namespace fsdp_tp {

class Group {
 public:
  // A group of one rank has no segment: nullptr.
  Group(fsdp_tp_segment* segment, int rank, int size, std::chrono::milliseconds timeout);
  ~Group() { leave(); }
  Group(const Group&) = delete;

  // Throws once the group was left.
  fsdp_tp_group* handle() const;
  // Throws with the library's sentence: of a collective, or of a call about a send or receive in this thread.
  void check(int status) const;
  void check_request(int status) const;

  void set_timeout(std::chrono::milliseconds timeout);
  // Makes what runs in another thread, here or on other ranks, fail.
  void abort(const std::string& reason);
  // Nothing may run in it any more.
  void leave();

  const int rank;
  const int size;

 private:
  std::atomic<fsdp_tp_group*> handle_{nullptr};
};

}  // namespace fsdp_tp
