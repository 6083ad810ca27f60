// Pools that peers map: they go when they are given back, and their owner may end meanwhile. If this fails, look at
// kernels/shm/pool.cpp.

#include <dirent.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "shm/fsdp_tp_shm.h"

namespace {

int lines_in(const char* file, const char* part) {
  int found = 0;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) found += line.find(part) != std::string::npos;
  return found;
}

int open_files() {
  int found = 0;
  DIR* const directory = opendir("/proc/self/fd");
  while (readdir(directory)) ++found;
  closedir(directory);
  return found;
}

// Segments keep no file open once all have them, and a peer's pool goes when its owner has given it back.
void nothing_piles_up() {
  const auto statuses = ranks::run_processes(2, [](fsdp_tp_group* group, int) {
    constexpr std::size_t kCount = 1 << 20;
    const int files = open_files();
    fsdp_tp_segment* segments[5];
    for (fsdp_tp_segment*& segment : segments) CHECK(fsdp_tp_group_map(group, 4096, &segment) == FSDP_TP_OK);
    CHECK(open_files() == files);
    for (fsdp_tp_segment* segment : segments) fsdp_tp_segment_close(segment);
    const int mapped = lines_in("/proc/self/maps", "memfd:fsdp_tp");
    std::vector<float> out(kCount / 2);
    for (int round = 0; round < 5; ++round) {
      auto* const data = static_cast<float*>(fsdp_tp_alloc(4 * kCount));
      std::fill(data, data + kCount, 1.0f);
      const void* ins[] = {data, data + kCount / 2};
      CHECK(fsdp_tp_reduce_scatter(group, out.data(), FSDP_TP_FLOAT32, ins, kCount / 2, FSDP_TP_FLOAT32, FSDP_TP_SUM,
                                   0) == FSDP_TP_OK);
      CHECK(out[0] == 2.0f && out[kCount / 2 - 1] == 2.0f);
      CHECK(fsdp_tp_barrier(group) == FSDP_TP_OK);
      fsdp_tp_free(data);
      fsdp_tp_trim();
      CHECK(fsdp_tp_barrier(group) == FSDP_TP_OK);
    }
    CHECK(lines_in("/proc/self/maps", "memfd:fsdp_tp") == mapped + 1);  // the last one's
  });
  for (const int status : statuses) CHECK(status == 0);
}

// The others say which rank it was, also if they miss its pool first.
void a_rank_that_ends() {
  for (int round = 0; round < 15; ++round) {
    const auto statuses = ranks::run_processes(3, [round](fsdp_tp_group* group, int rank) {
      constexpr std::size_t kCount = std::size_t{1} << 18;
      std::vector<float> out(kCount);
      if (rank == 1) {
        std::thread([round] {
          usleep(static_cast<useconds_t>(5'000 + 300 * round));
          kill(getpid(), SIGKILL);
        }).detach();
      }
      int status = FSDP_TP_OK;
      while (status == FSDP_TP_OK) {
        auto* const data = static_cast<float*>(fsdp_tp_alloc((3 + rank) * kCount * 4));
        const void* ins[] = {data, data + kCount, data + 2 * kCount};
        status =
            fsdp_tp_reduce_scatter(group, out.data(), FSDP_TP_FLOAT32, ins, kCount, FSDP_TP_FLOAT32, FSDP_TP_SUM, 0);
        fsdp_tp_free(data);
        fsdp_tp_trim();
      }
      const char* const error = fsdp_tp_group_error(group);
      if (!std::strstr(error, "rank 1 (process ")) std::fprintf(stderr, "%s\n", error);
      CHECK(std::strstr(error, "rank 1 (process "));
    });
    CHECK(statuses[0] == 0 && statuses[2] == 0);
  }
}

}  // namespace

int main() {
  nothing_piles_up();
  a_rank_that_ends();
  return 0;
}
