// A rank that dies, stops, never comes, gives up, or calls something else: the others get an error that
// names it, in time, and nothing stays behind. If this fails, look at kernels/shm/group.cpp.

#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "shm/fsdp_tp_shm.h"

namespace {

constexpr std::size_t kCount = 1 << 20;  // many slots, so that a fault falls into the middle

bool contains(const char* text, const std::string& part) {
  if (std::strstr(text, part.c_str())) return true;
  std::fprintf(stderr, "'%s' does not contain '%s'\n", text, part.c_str());
  return false;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int left_in_dev_shm() {
  int found = 0;
  if (DIR* const directory = opendir("/dev/shm")) {
    while (const dirent* entry = readdir(directory)) found += std::strncmp(entry->d_name, "fsdp_tp-", 8) == 0;
    closedir(directory);
  }
  return found;
}

int all_reduce(fsdp_tp_group* group, std::vector<float>& data) {
  return fsdp_tp_all_reduce(group, data.data(), data.size(), FSDP_TP_FLOAT32, FSDP_TP_SUM, 0);
}

// Of a size for which ranks read one another's memory, where they may.
int all_gather(fsdp_tp_group* group, std::vector<float>& data) {
  static std::vector<float> all(8 * data.size());
  void* outs[8];
  for (std::size_t rank = 0; rank < 8; ++rank) outs[rank] = all.data() + rank * data.size();
  return fsdp_tp_all_gather(group, outs, data.data(), std::size_t{1} << 20);
}

// Rank 1 gets `signal` in the middle of a collective; the others must say so within `timeout`.
void a_signal_in_the_middle(int size, int signal, bool gathers, double timeout, int expected,
                            const std::string& sentence) {
  const auto collective = gathers ? all_gather : all_reduce;
  ranks::Meeting* const at = ranks::meeting();
  auto* const victim = &at->processes[1];
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = ranks::run_processes(
      size,
      [&](fsdp_tp_group* group, int rank) {
        std::vector<float> data(kCount, 1.0f);
        if (rank == 1) {
          // From a thread, so that it falls anywhere into a collective.
          std::thread([] {
            usleep(30'000);
            kill(getpid(), SIGUSR1);
          }).detach();
        }
        static int the_signal;
        the_signal = signal;
        ::signal(SIGUSR1, [](int) { kill(getpid(), the_signal); });
        int status = FSDP_TP_OK;
        const auto began = std::chrono::steady_clock::now();
        while (status == FSDP_TP_OK && seconds_since(began) < 15) status = collective(group, data);
        if (rank == 1) return;  // it was stopped, and goes on only when the test lets it
        CHECK(status == expected || status == FSDP_TP_ABORTED);
        CHECK(contains(fsdp_tp_group_error(group), gathers ? "all_gather: " : "all_reduce: "));
        CHECK(contains(fsdp_tp_group_error(group), sentence));
        CHECK(contains(fsdp_tp_group_error(group), "process " + std::to_string(victim->load())));
        CHECK(seconds_since(began) < timeout + 3);
        // The group stays broken, and says so at once.
        CHECK(collective(group, data) == FSDP_TP_ABORTED);
        if (rank == 0 && signal == SIGSTOP) {
          usleep(300'000);  // until the others are through
          kill(victim->load(), SIGKILL);
        }
      },
      timeout, FSDP_TP_MEMFD, at);
  for (int rank = 0; rank < size; ++rank) {
    if (rank != 1) CHECK(statuses[static_cast<std::size_t>(rank)] == 0);
  }
  CHECK(WIFSIGNALED(statuses[1]) && WTERMSIG(statuses[1]) == SIGKILL);
  CHECK(seconds_since(start) < timeout + 10);
}

void a_rank_that_never_comes() {
  const pid_t child = fork();
  if (child == 0) {
    fsdp_tp_segment* segment = nullptr;
    CHECK(fsdp_tp_segment_create(fsdp_tp_group_bytes(3), FSDP_TP_MEMFD, &segment) == FSDP_TP_OK);
    fsdp_tp_group* group = nullptr;
    char error[256];
    CHECK(fsdp_tp_group_join(segment, 0, 3, 0.2, &group, error, sizeof error) == FSDP_TP_TIMEOUT);
    CHECK(contains(error, "join: rank 1 did not come within 0.2 s"));
    std::exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

void a_rank_that_leaves_or_gives_up(bool gives_up) {
  const auto statuses = ranks::run_processes(3, [&](fsdp_tp_group* group, int rank) {
    std::vector<float> data(10, 1.0f);
    CHECK(all_reduce(group, data) == FSDP_TP_OK);
    if (rank == 2) {
      if (gives_up) fsdp_tp_group_abort(group, "out of memory");
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    CHECK(all_reduce(group, data) != FSDP_TP_OK);
    CHECK(seconds_since(start) < 2);
    CHECK(contains(fsdp_tp_group_error(group), gives_up ? "rank 2: out of memory" : "rank 2 (process "));
  });
  for (const int status : statuses) CHECK(status == 0);
}

void different_calls() {
  setenv("FSDP_TP_DEBUG", "1", 1);
  const auto statuses = ranks::run_processes(2, [](fsdp_tp_group* group, int rank) {
    std::vector<float> data(10, 1.0f);
    CHECK(all_reduce(group, data) == FSDP_TP_OK);
    data.resize(rank == 0 ? 10 : 11);
    CHECK(all_reduce(group, data) == FSDP_TP_MISMATCH);
    CHECK(contains(fsdp_tp_group_error(group), "rank 0 all_reduce of 10 float32 (sum)"));
    CHECK(contains(fsdp_tp_group_error(group), "rank 1 all_reduce of 11 float32 (sum)"));
    if (rank == 0) CHECK(all_reduce(group, data) == FSDP_TP_MISMATCH);
    if (rank == 1) CHECK(fsdp_tp_broadcast(group, data.data(), 40, 0) == FSDP_TP_MISMATCH);
    CHECK(contains(fsdp_tp_group_error(group), "broadcast of 40 bytes a rank, root 0"));
    CHECK(fsdp_tp_barrier(group) == FSDP_TP_OK);
    // Sizes of an all_to_all may differ, but not between the two sides of one message.
    void* outs[] = {data.data(), data.data() + 5};
    const void* ins[] = {data.data(), data.data() + 5};
    const std::size_t in_bytes[] = {8, 8}, out_bytes[] = {8, rank == 0 ? std::size_t{12} : std::size_t{8}};
    CHECK(fsdp_tp_all_to_all(group, outs, out_bytes, ins, in_bytes) == FSDP_TP_MISMATCH);
    CHECK(contains(fsdp_tp_group_error(group), "rank 1 sends 8 bytes to rank 0, which expects 12"));
    CHECK(fsdp_tp_all_to_all(group, outs, in_bytes, ins, in_bytes) == FSDP_TP_OK);
  });
  unsetenv("FSDP_TP_DEBUG");
  for (const int status : statuses) CHECK(status == 0);
}

// A peer's buffer that no other process can read is found out in the middle; slots do the work from then on.
void memory_that_only_its_process_reads() {
#ifdef SYS_memfd_secret
  constexpr std::size_t kBytes = std::size_t{1} << 20;
  setenv("FSDP_TP_READ_PRIVATE", "1", 1);
  const auto statuses = ranks::run_processes(2, [](fsdp_tp_group* group, int rank) {
    std::vector<char> all(2 * kBytes);
    void* outs[] = {all.data(), all.data() + kBytes};
    void* in = all.data() + kBytes;
    if (rank == 1) {
      const int secret = static_cast<int>(syscall(SYS_memfd_secret, 0));
      if (secret >= 0 && ftruncate(secret, kBytes) == 0) {
        void* const mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, secret, 0);
        if (mapped != MAP_FAILED) in = mapped;
      }
      if (in == outs[1]) std::puts("memory_that_only_its_process_reads: this kernel has none");
    } else {
      in = outs[0];
    }
    for (int round = 0; round < 3; ++round) {
      std::memset(in, 10 * round + rank + 1, kBytes);
      CHECK(fsdp_tp_all_gather(group, outs, in, kBytes) == FSDP_TP_OK);
      for (std::size_t i = 0; i < kBytes; ++i) CHECK(all[i] == 10 * round + 1 && all[kBytes + i] == 10 * round + 2);
    }
  });
  for (const int status : statuses) CHECK(status == 0);
#endif
}

// Both kinds of segment, read by nobody but their owner.
void another_user_cannot_attach() {
  if (geteuid() != 0) return;
  for (const int kind : {FSDP_TP_MEMFD, FSDP_TP_NAMED}) {
    fsdp_tp_segment* segment = nullptr;
    CHECK(fsdp_tp_segment_create(1 << 16, kind, &segment) == FSDP_TP_OK);
    const std::string handle = fsdp_tp_segment_handle(segment);
    const pid_t stranger = fork();
    if (stranger == 0) {
      // A process that has not inherited the mapping: attach must go the way of a stranger.
      fsdp_tp_segment_close(segment);
      CHECK(setgid(65534) == 0 && setuid(65534) == 0);
      fsdp_tp_segment* stolen = nullptr;
      CHECK(fsdp_tp_segment_attach(handle.c_str(), &stolen) == FSDP_TP_SYSTEM);
      CHECK(contains(fsdp_tp_last_error(), "Permission denied"));
      _exit(0);
    }
    int status;
    waitpid(stranger, &status, 0);
    CHECK(status == 0);
    fsdp_tp_segment_close(segment);
  }
}

// Whether the process may make a namespace of processes; its next children are then in it.
bool enter_namespace() { return unshare(CLONE_NEWPID) == 0; }

// Runs a function in a process of its own; whether it went well.
template <class Body>
bool in_child(Body body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);  // a search for leaks hangs between two namespaces
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0;
}

// Ranks of two namespaces of processes, where the number of one means nothing to the other.
void other_numbers_of_processes() {
  if (!in_child(enter_namespace)) return void(std::puts("other_numbers_of_processes: not allowed"));
  ranks::Meeting* const at = ranks::meeting();
  const auto take_part = [at](int rank) {
    fsdp_tp_group* const group = ranks::join(at, rank, 2, 5, FSDP_TP_NAMED);
    std::vector<float> data(kCount, 1.0f);
    CHECK(all_gather(group, data) == FSDP_TP_OK && all_reduce(group, data) == FSDP_TP_OK);
    CHECK(data[0] == 2.0f);
    fsdp_tp_group_leave(group);
    return true;
  };
  std::thread elsewhere(
      [&] { CHECK(in_child([&] { return enter_namespace() && in_child([&] { return take_part(1); }); })); });
  const bool here = in_child([&] { return take_part(0); });
  elsewhere.join();
  CHECK(here);
}

}  // namespace

int main() {
  const int before = left_in_dev_shm();
  for (const int size : {2, 4}) {
    for (const bool gathers : {false, true}) {
      setenv("FSDP_TP_READ_PRIVATE", gathers ? "1" : "0", 1);
      a_signal_in_the_middle(size, SIGKILL, gathers, 20, FSDP_TP_PEER_DIED, "rank 1 (process ");
      a_signal_in_the_middle(size, SIGSTOP, gathers, 1, FSDP_TP_TIMEOUT, "did not come within 1 s");
    }
  }
  a_rank_that_never_comes();
  a_rank_that_leaves_or_gives_up(false);
  a_rank_that_leaves_or_gives_up(true);
  different_calls();
  memory_that_only_its_process_reads();
  another_user_cannot_attach();
  other_numbers_of_processes();
  CHECK(left_in_dev_shm() == before);
  return 0;
}
