// The collectives of a group; fsdp_tp_shm.h says what each does. All throw Failure.

#pragma once

#include <cstddef>

#include "shm/group.h"

namespace fsdp_tp {

// How to add up: the arguments of fsdp_tp_reduce.
struct Reduction {
  int dtype;
  int out_dtype;
  int op;
  double factor;
};

void barrier(Group& group);
void all_gather(Group& group, void* const* outs, const void* in, std::size_t bytes);
void reduce_scatter(Group& group, void* out, const void* const* ins, std::size_t count, const Reduction& how);
void all_reduce(Group& group, void* data, std::size_t count, const Reduction& how);
void reduce_to(Group& group, void* data, std::size_t count, const Reduction& how, int root);
void broadcast(Group& group, void* data, std::size_t bytes, int root);
void gather(Group& group, void* const* outs, const void* in, std::size_t bytes, int root);
void scatter(Group& group, void* out, const void* const* ins, std::size_t bytes, int root);
void all_to_all(Group& group, void* const* outs, const std::size_t* out_bytes, const void* const* ins,
                const std::size_t* in_bytes);
std::shared_ptr<Segment> map_together(Group& group, std::size_t bytes);

// Ranks say what they call and compare: FSDP_TP_MISMATCH if it differs. One more step.
void compare_calls(Group& group, const std::string& call);
// Of an all_to_all, where sizes may differ, but not between a sender and its receiver.
void compare_sizes(Group& group, const std::size_t* out_bytes, const std::size_t* in_bytes);

}  // namespace fsdp_tp
