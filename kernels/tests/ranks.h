// Runs a function as several ranks, each in a process of its own; or in threads, where a sanitizer can see
// what ranks do to one another's memory.

#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "shm/fsdp_tp_shm.h"

namespace ranks {

struct Meeting {
  std::atomic<int> ready;
  char handle[256];
  std::atomic<int> processes[16];
};

// Shared by the processes that fork from here on.
inline Meeting* meeting() {
  void* const page = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(page != MAP_FAILED);
  return new (page) Meeting{};
}

using Body = std::function<void(fsdp_tp_group*, int rank)>;

inline fsdp_tp_group* join(Meeting* at, int rank, int size, double timeout, int kind) {
  fsdp_tp_segment* segment = nullptr;
  if (rank == 0) {
    CHECK(fsdp_tp_segment_create(fsdp_tp_group_bytes(size), kind, &segment) == FSDP_TP_OK);
    std::strcpy(at->handle, fsdp_tp_segment_handle(segment));
    at->ready.store(1);
  } else {
    while (at->ready.load() == 0) sched_yield();
    CHECK(fsdp_tp_segment_attach(at->handle, &segment) == FSDP_TP_OK);
  }
  at->processes[rank].store(getpid());
  fsdp_tp_group* group = nullptr;
  char error[512] = "";
  if (fsdp_tp_group_join(segment, rank, size, timeout, &group, error, sizeof error) != FSDP_TP_OK) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error);
    std::exit(1);
  }
  return group;
}

// Exit statuses of the ranks: 0, or what a signal or a CHECK left.
inline std::vector<int> run_processes(int size, const Body& body, double timeout = 20, int kind = FSDP_TP_MEMFD,
                                      Meeting* at = meeting()) {
  std::vector<pid_t> children;
  std::fflush(nullptr);
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      fsdp_tp_group* const group = join(at, rank, size, timeout, kind);
      body(group, rank);
      fsdp_tp_group_leave(group);
      std::fflush(nullptr);
      std::exit(0);
    }
    children.push_back(child);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    statuses.push_back(status);
  }
  munmap(at, sizeof(Meeting));
  return statuses;
}

inline void run_threads(int size, const Body& body, double timeout = 60) {
  Meeting* const at = meeting();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([=, &body] {
      fsdp_tp_group* const group = join(at, rank, size, timeout, FSDP_TP_MEMFD);
      body(group, rank);
      CHECK(fsdp_tp_barrier(group) == FSDP_TP_OK);
      fsdp_tp_group_leave(group);
    });
  }
  for (std::thread& thread : threads) thread.join();
  munmap(at, sizeof(Meeting));
}

}  // namespace ranks
