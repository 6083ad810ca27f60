// The C interface: checks arguments, turns Failure into a status and a sentence.

#include "shm/fsdp_tp_shm.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <new>

#include "shm/collectives.h"
#include "shm/failure.h"
#include "shm/group.h"
#include "shm/p2p.h"
#include "shm/pool.h"
#include "shm/segment.h"

using fsdp_tp::Failure;
using fsdp_tp::Group;
using fsdp_tp::Reduction;
using fsdp_tp::Request;
using fsdp_tp::Segment;

struct fsdp_tp_group : Group {
  using Group::Group;
};
struct fsdp_tp_segment {
  std::shared_ptr<Segment> shared;
};
struct fsdp_tp_request : Request {};

namespace {

// Failures of memory become failures of the system.
template <class Body>
int guard(std::string& error, Body body) {
  try {
    body();
    return FSDP_TP_OK;
  } catch (const Failure& failure) {
    error = failure.message;
    return failure.status;
  } catch (const std::exception& exception) {
    error = exception.what();
    return FSDP_TP_SYSTEM;
  }
}

// One collective. `require` looks at its arguments; `describe` says what is called, for FSDP_TP_DEBUG.
template <class Require, class Describe, class Body>
int run(fsdp_tp_group* group, const char* name, Require require, Describe describe, Body body) {
  return guard(group->error, [&] {
    require();
    group->set_operation(name);
    try {
      group->throw_if_aborted();
      if (fsdp_tp_debugging()) fsdp_tp::compare_calls(*group, std::string(name) + " " + describe());
      body();
    } catch (const Failure& failure) {
      // Others must not wait for a rank that has given up in the middle.
      const bool usable = failure.agreed || failure.status < FSDP_TP_TIMEOUT;
      if (!usable && failure.status != FSDP_TP_ABORTED) group->abort(failure.message);
      throw;
    } catch (const std::exception& exception) {
      group->abort(exception.what());
      throw;
    }
  });
}

std::string of_bytes(std::size_t bytes) { return "of " + std::to_string(bytes) + " bytes a rank"; }

std::string from_root(std::size_t bytes, int root) { return of_bytes(bytes) + ", root " + std::to_string(root); }

std::string of_elements(std::size_t count, const Reduction& how) {
  static const char* const dtypes[] = {"float32", "float64", "bfloat16", "float16", "int32", "int64"};
  static const char* const ops[] = {"sum", "avg", "max", "min", "premul_sum"};
  return "of " + std::to_string(count) + " " + dtypes[how.dtype] + " (" + ops[how.op] + ")";
}

void nothing() {}

void require_root(const Group& group, int root) {
  if (root < 0 || root >= group.size()) {
    throw Failure{FSDP_TP_BAD_ARGUMENT,
                  "root " + std::to_string(root) + " is not a rank of a group of " + std::to_string(group.size())};
  }
}

void require_known(const Reduction& how) {
  if (fsdp_tp_dtype_size(how.dtype) == 0 || fsdp_tp_dtype_size(how.out_dtype) == 0 || how.op < FSDP_TP_SUM ||
      how.op > FSDP_TP_PREMUL_SUM) {
    throw Failure{FSDP_TP_BAD_ARGUMENT,
                  "dtype " + std::to_string(how.dtype) + " or operation " + std::to_string(how.op) + " does not exist"};
  }
}

thread_local std::string last_error;  // of calls without a group, and of those that any thread may make

// Of sends and receives.
template <class Body>
int request_or_fail(Group& group, Body body) {
  return guard(last_error, [&] {
    try {
      body();
    } catch (const Failure& failure) {
      if (failure.status != FSDP_TP_ABORTED && failure.status != FSDP_TP_BAD_ARGUMENT) group.abort(failure.message);
      throw;
    }
  });
}

int start_request(fsdp_tp_group* group, bool is_send, int peer, std::uint32_t tag, void* data, std::size_t bytes,
                  fsdp_tp_request** request) {
  return request_or_fail(*group, [&] {
    if (peer < (is_send ? 0 : fsdp_tp::kAnyRank) || peer >= group->size()) {
      throw Failure{FSDP_TP_BAD_ARGUMENT, std::string(is_send ? "send to" : "receive from") + " rank " +
                                              std::to_string(peer) + " of a group of " + std::to_string(group->size())};
    }
    group->throw_if_aborted(is_send ? "send" : "recv");
    std::unique_ptr<fsdp_tp_request> made(
        new fsdp_tp_request{{group, is_send, peer, tag, static_cast<std::byte*>(data), bytes}});
    group->mailbox->add(made.get());
    *request = made.release();
    group->mailbox->progress();
  });
}

}  // namespace

extern "C" {

int fsdp_tp_debugging(void) {
  static const bool on = [] {
    const char* text = std::getenv("FSDP_TP_DEBUG");
    return text && *text && std::strcmp(text, "0") != 0;
  }();
  return on;
}

size_t fsdp_tp_host(char* text, size_t size) {
  if (const char* given = std::getenv("FSDP_TP_HOST")) {
    std::snprintf(text, size, "%s", given);
    return std::strlen(text);
  }
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::string line = boot + " " + std::to_string(getuid());
  for (const char* space : {"/proc/self/ns/net", "/proc/self/ns/pid"}) {
    char target[64];
    const ssize_t length = readlink(space, target, sizeof target);
    line += " " + std::string(target, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  }
  std::snprintf(text, size, "%s", line.c_str());
  return std::strlen(text);
}

int fsdp_tp_segment_create(size_t bytes, int kind, fsdp_tp_segment** segment) {
  return guard(last_error, [&] { *segment = new fsdp_tp_segment{Segment::create(bytes, kind)}; });
}

int fsdp_tp_segment_attach(const char* handle, fsdp_tp_segment** segment) {
  return guard(last_error, [&] { *segment = new fsdp_tp_segment{Segment::attach(handle)}; });
}

const char* fsdp_tp_segment_handle(const fsdp_tp_segment* segment) { return segment->shared->handle().c_str(); }
void* fsdp_tp_segment_data(const fsdp_tp_segment* segment) { return segment->shared->data(); }
size_t fsdp_tp_segment_bytes(const fsdp_tp_segment* segment) { return segment->shared->bytes(); }
void fsdp_tp_segment_unlink(fsdp_tp_segment* segment) { segment->shared->unlink(); }
void fsdp_tp_segment_close(fsdp_tp_segment* segment) { delete segment; }
const char* fsdp_tp_last_error(void) { return last_error.c_str(); }

void* fsdp_tp_alloc(size_t bytes) {
  void* data = nullptr;
  guard(last_error, [&] { data = fsdp_tp::pool_allocate(bytes); });
  return data;
}

void fsdp_tp_free(void* data) { fsdp_tp::pool_free(data); }
void fsdp_tp_trim(void) { fsdp_tp::pool_trim(); }

size_t fsdp_tp_group_bytes(int size) { return Group::segment_bytes(size); }

int fsdp_tp_group_join(fsdp_tp_segment* segment, int rank, int size, double timeout, fsdp_tp_group** group, char* error,
                       size_t error_size) {
  std::string message;
  const std::unique_ptr<fsdp_tp_segment> owned(segment);
  const int status = guard(message, [&] {
    if (size < 1 || rank < 0 || rank >= size) {
      throw Failure{FSDP_TP_BAD_ARGUMENT,
                    "rank " + std::to_string(rank) + " is not of a group of " + std::to_string(size)};
    }
    *group = new fsdp_tp_group(owned->shared, rank, size, timeout);
  });
  if (status != FSDP_TP_OK && error_size > 0) std::snprintf(error, error_size, "%s", message.c_str());
  return status;
}

void fsdp_tp_group_set_timeout(fsdp_tp_group* group, double timeout) { group->set_timeout(timeout); }
void fsdp_tp_group_abort(fsdp_tp_group* group, const char* reason) { group->abort(reason); }
void fsdp_tp_group_leave(fsdp_tp_group* group) { delete group; }
const char* fsdp_tp_group_error(const fsdp_tp_group* group) { return group->error.c_str(); }

int fsdp_tp_group_map(fsdp_tp_group* group, size_t bytes, fsdp_tp_segment** segment) {
  return run(
      group, "map", nothing, [&] { return of_bytes(bytes); },
      [&] { *segment = new fsdp_tp_segment{fsdp_tp::map_together(*group, bytes)}; });
}

int fsdp_tp_barrier(fsdp_tp_group* group) {
  return run(group, "barrier", nothing, [] { return std::string(); }, [&] { fsdp_tp::barrier(*group); });
}

int fsdp_tp_all_gather(fsdp_tp_group* group, void* const* outs, const void* in, size_t bytes) {
  return run(
      group, "all_gather", nothing, [&] { return of_bytes(bytes); },
      [&] { fsdp_tp::all_gather(*group, outs, in, bytes); });
}

int fsdp_tp_reduce_scatter(fsdp_tp_group* group, void* out, int out_dtype, const void* const* ins, size_t count,
                           int dtype, int op, double factor) {
  const Reduction how{dtype, out_dtype, op, factor};
  return run(
      group, "reduce_scatter", [&] { require_known(how); }, [&] { return of_elements(count, how); },
      [&] { fsdp_tp::reduce_scatter(*group, out, ins, count, how); });
}

int fsdp_tp_all_reduce(fsdp_tp_group* group, void* data, size_t count, int dtype, int op, double factor) {
  const Reduction how{dtype, dtype, op, factor};
  return run(
      group, "all_reduce", [&] { require_known(how); }, [&] { return of_elements(count, how); },
      [&] { fsdp_tp::all_reduce(*group, data, count, how); });
}

int fsdp_tp_reduce_to(fsdp_tp_group* group, void* data, size_t count, int dtype, int op, double factor, int root) {
  const Reduction how{dtype, dtype, op, factor};
  return run(
      group, "reduce",
      [&] {
        require_known(how);
        require_root(*group, root);
      },
      [&] { return of_elements(count, how) + ", root " + std::to_string(root); },
      [&] { fsdp_tp::reduce_to(*group, data, count, how, root); });
}

int fsdp_tp_broadcast(fsdp_tp_group* group, void* data, size_t bytes, int root) {
  return run(
      group, "broadcast", [&] { require_root(*group, root); }, [&] { return from_root(bytes, root); },
      [&] { fsdp_tp::broadcast(*group, data, bytes, root); });
}

int fsdp_tp_gather(fsdp_tp_group* group, void* const* outs, const void* in, size_t bytes, int root) {
  return run(
      group, "gather", [&] { require_root(*group, root); }, [&] { return from_root(bytes, root); },
      [&] { fsdp_tp::gather(*group, outs, in, bytes, root); });
}

int fsdp_tp_scatter(fsdp_tp_group* group, void* out, const void* const* ins, size_t bytes, int root) {
  return run(
      group, "scatter", [&] { require_root(*group, root); }, [&] { return from_root(bytes, root); },
      [&] { fsdp_tp::scatter(*group, out, ins, bytes, root); });
}

int fsdp_tp_all_to_all(fsdp_tp_group* group, void* const* outs, const size_t* out_bytes, const void* const* ins,
                       const size_t* in_bytes) {
  return run(
      group, "all_to_all", nothing, [] { return std::string(); },
      [&] {
        if (fsdp_tp_debugging()) fsdp_tp::compare_sizes(*group, out_bytes, in_bytes);
        fsdp_tp::all_to_all(*group, outs, out_bytes, ins, in_bytes);
      });
}

int fsdp_tp_isend(fsdp_tp_group* group, const void* data, size_t bytes, int to, uint32_t tag,
                  fsdp_tp_request** request) {
  return start_request(group, true, to, tag, const_cast<void*>(data), bytes, request);
}

int fsdp_tp_irecv(fsdp_tp_group* group, void* data, size_t bytes, int from, uint32_t tag, fsdp_tp_request** request) {
  return start_request(group, false, from, tag, data, bytes, request);
}

int fsdp_tp_test(fsdp_tp_request* request, int* done) {
  return request_or_fail(*request->group, [&] { *done = fsdp_tp::test(*request); });
}

int fsdp_tp_wait(fsdp_tp_request* request) {
  return request_or_fail(*request->group, [&] { fsdp_tp::wait(*request); });
}

int fsdp_tp_request_source(const fsdp_tp_request* request) { return request->source; }

void fsdp_tp_request_free(fsdp_tp_request* request) {
  request->group->mailbox->remove(request);
  delete request;
}

}  // extern "C"
