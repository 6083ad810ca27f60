// Collectives between the processes of one host, through shared memory. Knows nothing of torch.
//
// The interface is C: the c10d backend (kernels/torch) and ctypes call it. Functions return a
// fsdp_tp_status; a sentence about the last failure of a group is in fsdp_tp_group_error().
//
// A group is joined by all its ranks together. Its collectives follow the rules of torch.distributed:
// every rank calls the same ones in the same order, one thread at a time per group (fsdp_tp_isend,
// fsdp_tp_irecv and fsdp_tp_test may be called from any thread). Ranks are those of the group.
//
// Reductions add in the order of ranks, so every run gives the same bits, and so does every rank.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "shm/reduce.h"  // fsdp_tp_dtype, fsdp_tp_op, FSDP_TP_EXPORT

#ifdef __cplusplus
extern "C" {
#endif

enum fsdp_tp_group_status {
  FSDP_TP_TIMEOUT = 16,       // a rank did not come within the timeout; it may be stopped
  FSDP_TP_PEER_DIED = 17,     // the process of a rank has ended
  FSDP_TP_ABORTED = 18,       // another rank gave up on this group first, or this one did earlier
  FSDP_TP_MISMATCH = 19,      // ranks called different operations (found where FSDP_TP_DEBUG=1)
  FSDP_TP_BAD_ARGUMENT = 20,  // a rank, size, dtype or operation that does not exist
  FSDP_TP_SYSTEM = 21,        // a system call failed
};

// --- Segments: memory that several processes map -----------------------------------------------

// One line of text that is equal for processes that may share a segment: same boot, same user, same
// network and process namespaces (so "hosts" made of network namespaces count as several).
// FSDP_TP_HOST overrides it. Returns the length, at most size - 1.
FSDP_TP_EXPORT size_t fsdp_tp_host(char* text, size_t size);

// Whether FSDP_TP_DEBUG asks for a comparison of what ranks call.
FSDP_TP_EXPORT int fsdp_tp_debugging(void);

typedef struct fsdp_tp_segment fsdp_tp_segment;

enum fsdp_tp_segment_kind {
  FSDP_TP_MEMFD = 0,  // has no name, so nothing outlives its processes; passed on through /proc
  FSDP_TP_NAMED = 1,  // a file of /dev/shm, where /proc of a peer is not to be seen; unlink it once all have it
};

// A new segment of `bytes`, zero, readable by this user alone.
FSDP_TP_EXPORT int fsdp_tp_segment_create(size_t bytes, int kind, fsdp_tp_segment** segment);
// Maps what another process made; `handle` is its fsdp_tp_segment_handle().
FSDP_TP_EXPORT int fsdp_tp_segment_attach(const char* handle, fsdp_tp_segment** segment);
FSDP_TP_EXPORT const char* fsdp_tp_segment_handle(const fsdp_tp_segment* segment);
FSDP_TP_EXPORT void* fsdp_tp_segment_data(const fsdp_tp_segment* segment);
FSDP_TP_EXPORT size_t fsdp_tp_segment_bytes(const fsdp_tp_segment* segment);
// Once all who need it have attached: removes the name of a FSDP_TP_NAMED segment, closes a FSDP_TP_MEMFD; mappings
// stay.
FSDP_TP_EXPORT void fsdp_tp_segment_unlink(fsdp_tp_segment* segment);
FSDP_TP_EXPORT void fsdp_tp_segment_close(fsdp_tp_segment* segment);
// About the last failure in this thread of a call that has no group.
FSDP_TP_EXPORT const char* fsdp_tp_last_error(void);

// --- A pool of shared memory in this process ----------------------------------------------------

// Memory that peers of any group read in place: collectives whose buffers lie in it skip one copy.
// Local to this rank (no other rank need call it), 64-byte aligned, not zeroed, pages present.
// Freed memory is kept for the next allocation until fsdp_tp_trim(). NULL where there is no memory.
FSDP_TP_EXPORT void* fsdp_tp_alloc(size_t bytes);
FSDP_TP_EXPORT void fsdp_tp_free(void* data);
FSDP_TP_EXPORT void fsdp_tp_trim(void);

// --- Groups ------------------------------------------------------------------------------------

typedef struct fsdp_tp_group fsdp_tp_group;

// How large the segment of a group is.
FSDP_TP_EXPORT size_t fsdp_tp_group_bytes(int size);
// Joins: returns when all `size` ranks have. The group owns `segment` from now on, also on failure.
// `timeout` in seconds holds for every wait of the group. `error` takes a sentence on failure.
FSDP_TP_EXPORT int fsdp_tp_group_join(fsdp_tp_segment* segment, int rank, int size, double timeout,
                                      fsdp_tp_group** group, char* error, size_t error_size);
FSDP_TP_EXPORT void fsdp_tp_group_set_timeout(fsdp_tp_group* group, double timeout);
// Makes every rank's present and later operations fail with FSDP_TP_ABORTED.
FSDP_TP_EXPORT void fsdp_tp_group_abort(fsdp_tp_group* group, const char* reason);
FSDP_TP_EXPORT void fsdp_tp_group_leave(fsdp_tp_group* group);
// About the last failure: which operation, which rank, what happened.
FSDP_TP_EXPORT const char* fsdp_tp_group_error(const fsdp_tp_group* group);

// A segment that all ranks of the group map (rank 0 makes it); zero, pages present. The caller closes it.
FSDP_TP_EXPORT int fsdp_tp_group_map(fsdp_tp_group* group, size_t bytes, fsdp_tp_segment** segment);

// --- Collectives -------------------------------------------------------------------------------
// `ins` and `outs` are arrays of one pointer a rank, so that one tensor and a list of tensors are the same.

FSDP_TP_EXPORT int fsdp_tp_barrier(fsdp_tp_group* group);
// outs[r][0:bytes] = in of rank r. outs[rank] may be `in`.
FSDP_TP_EXPORT int fsdp_tp_all_gather(fsdp_tp_group* group, void* const* outs, const void* in, size_t bytes);
// out[0:count] = op over ranks r of (ins of rank r)[rank]. `out` may be ins[rank]. Arguments as in fsdp_tp_reduce.
FSDP_TP_EXPORT int fsdp_tp_reduce_scatter(fsdp_tp_group* group, void* out, int out_dtype, const void* const* ins,
                                          size_t count, int dtype, int op, double factor);
// In place.
FSDP_TP_EXPORT int fsdp_tp_all_reduce(fsdp_tp_group* group, void* data, size_t count, int dtype, int op, double factor);
// In place on `root`; elsewhere `data` stays.
FSDP_TP_EXPORT int fsdp_tp_reduce_to(fsdp_tp_group* group, void* data, size_t count, int dtype, int op, double factor,
                                     int root);
FSDP_TP_EXPORT int fsdp_tp_broadcast(fsdp_tp_group* group, void* data, size_t bytes, int root);
// `outs` on root only, elsewhere NULL.
FSDP_TP_EXPORT int fsdp_tp_gather(fsdp_tp_group* group, void* const* outs, const void* in, size_t bytes, int root);
// `ins` on root only, elsewhere NULL.
FSDP_TP_EXPORT int fsdp_tp_scatter(fsdp_tp_group* group, void* out, const void* const* ins, size_t bytes, int root);
// outs[r][0:out_bytes[r]] = what rank r has at its ins[rank]. What r sends must be as long as what rank expects.
FSDP_TP_EXPORT int fsdp_tp_all_to_all(fsdp_tp_group* group, void* const* outs, const size_t* out_bytes,
                                      const void* const* ins, const size_t* in_bytes);

// --- Point to point ----------------------------------------------------------------------------
// Neither call blocks. Messages of one pair and tag arrive in order; different tags may overtake.
// A request moves on whenever fsdp_tp_test is called on any request of the group, on both sides.

typedef struct fsdp_tp_request fsdp_tp_request;

FSDP_TP_EXPORT int fsdp_tp_isend(fsdp_tp_group* group, const void* data, size_t bytes, int to, uint32_t tag,
                                 fsdp_tp_request** request);
// `from` may be -1: any rank. The message must have `bytes` bytes.
FSDP_TP_EXPORT int fsdp_tp_irecv(fsdp_tp_group* group, void* data, size_t bytes, int from, uint32_t tag,
                                 fsdp_tp_request** request);
// *done = 1 once it is complete; does not wait.
FSDP_TP_EXPORT int fsdp_tp_test(fsdp_tp_request* request, int* done);
// Waits until it is complete, or until the group's timeout.
FSDP_TP_EXPORT int fsdp_tp_wait(fsdp_tp_request* request);
// The rank a completed receive came from.
FSDP_TP_EXPORT int fsdp_tp_request_source(const fsdp_tp_request* request);
// Of a complete request, or of one of a group that has failed.
FSDP_TP_EXPORT void fsdp_tp_request_free(fsdp_tp_request* request);

#ifdef __cplusplus
}
#endif
