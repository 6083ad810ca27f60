// Every collective against arithmetic: sizes 0, 1, odd, one slot and a bit, several slots; 1 to 8 ranks.
// If this fails while reduce_test passes, look at kernels/shm/movement.cpp and reductions.cpp.
// With the argument "threads" the ranks are threads of one process, for ThreadSanitizer.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "shm/fsdp_tp_shm.h"

namespace {

#define OK(call)                                                                        \
  do {                                                                                  \
    const int status_ = (call);                                                         \
    if (status_ != FSDP_TP_OK) {                                                        \
      std::fprintf(stderr, "%s: %d: %s\n", #call, status_, fsdp_tp_group_error(group)); \
      std::exit(1);                                                                     \
    }                                                                                   \
  } while (false)

// No two buffers alike: mixes its arguments well.
std::uint32_t noise(std::uint64_t a, std::uint64_t b, std::uint64_t c = 0) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15 + b * 0xbf58476d1ce4e5b9 + c * 0x94d049bb133111eb + 1;
  x ^= x >> 31;
  x *= 0xd6e8feb86659fd93;
  return static_cast<std::uint32_t>(x ^ (x >> 32));
}

// Values whose sum depends on the order.
float value(int rank, std::size_t index, int round) {
  return static_cast<float>(noise(static_cast<std::uint64_t>(rank), index, static_cast<std::uint64_t>(round))) / 3e5f -
         7e3f;
}

float sum_in_order(int size, std::size_t index, int round) {
  float sum = value(0, index, round);
  for (int rank = 1; rank < size; ++rank) sum += value(rank, index, round);
  return sum;
}

std::vector<float> values(int rank, std::size_t count, int round) {
  std::vector<float> result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = value(rank, i, round);
  return result;
}

// Ordinary memory, or the pool that peers read in place.
struct Buffer {
  Buffer(std::size_t count, bool pooled) : count(count), pooled(pooled) {
    data = static_cast<float*>(pooled ? fsdp_tp_alloc(count * 4) : std::malloc(count * 4 + 1));
    CHECK(data != nullptr);
    std::fill(data, data + count, -1.0f);
  }
  ~Buffer() { pooled ? fsdp_tp_free(data) : std::free(data); }
  Buffer(const Buffer&) = delete;
  float* data;
  std::size_t count;
  bool pooled;
};

void data_moves(fsdp_tp_group* group, int self, int size, std::size_t count, int round, bool pooled) {
  const auto ranks = static_cast<std::size_t>(size);
  const int root = round % size;
  Buffer in(count, pooled);
  Buffer all(count * ranks, pooled);
  std::copy_n(values(self, count, round).data(), count, in.data);
  std::vector<void*> outs(ranks);
  std::vector<const void*> ins(ranks);
  const auto is_of_rank = [&](const float* data, int rank, int of_round) {
    for (std::size_t i = 0; i < count; ++i) CHECK(data[i] == value(rank, i, of_round));
  };
  for (std::size_t rank = 0; rank < ranks; ++rank) outs[rank] = all.data + rank * count;

  OK(fsdp_tp_all_gather(group, outs.data(), in.data, count * 4));
  for (int rank = 0; rank < size; ++rank) is_of_rank(all.data + static_cast<std::size_t>(rank) * count, rank, round);
  // In place, as FSDP calls it.
  float* const own = all.data + static_cast<std::size_t>(self) * count;
  std::copy_n(values(self, count, round + 1).data(), count, own);
  OK(fsdp_tp_all_gather(group, outs.data(), own, count * 4));
  for (int rank = 0; rank < size; ++rank) {
    is_of_rank(all.data + static_cast<std::size_t>(rank) * count, rank, round + 1);
  }

  std::copy_n(values(self, count, round + 2).data(), count, in.data);
  OK(fsdp_tp_broadcast(group, in.data, count * 4, root));
  is_of_rank(in.data, root, round + 2);

  std::copy_n(values(self, count, round + 3).data(), count, in.data);
  OK(fsdp_tp_gather(group, self == root ? outs.data() : nullptr, in.data, count * 4, root));
  if (self == root) {
    for (int rank = 0; rank < size; ++rank) {
      is_of_rank(all.data + static_cast<std::size_t>(rank) * count, rank, round + 3);
    }
  }

  for (std::size_t rank = 0; rank < ranks; ++rank) {
    ins[rank] = all.data + rank * count;
    if (self == root)
      std::copy_n(values(static_cast<int>(rank), count, round + 4).data(), count, all.data + rank * count);
  }
  OK(fsdp_tp_scatter(group, in.data, self == root ? ins.data() : nullptr, count * 4, root));
  is_of_rank(in.data, self, round + 4);

  // What rank a sends to b: values(a * size + b), of another length for each pair; also of none.
  const auto length = [&](int a, int b) { return (a + 2 * b + round) % 4 == 0 ? 0 : count * (1 + (a + b) % 2) / 2; };
  std::vector<std::vector<float>> sent, received;
  std::vector<std::size_t> in_bytes, out_bytes;
  for (int peer = 0; peer < size; ++peer) {
    sent.push_back(values(self * size + peer, length(self, peer), round));
    received.emplace_back(length(peer, self), -1.0f);
    in_bytes.push_back(4 * sent.back().size());
    out_bytes.push_back(4 * received.back().size());
  }
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    ins[peer] = sent[peer].data();
    outs[peer] = received[peer].data();
  }
  OK(fsdp_tp_all_to_all(group, outs.data(), out_bytes.data(), ins.data(), in_bytes.data()));
  for (int peer = 0; peer < size; ++peer) {
    CHECK(received[static_cast<std::size_t>(peer)] == values(peer * size + self, length(peer, self), round));
  }
}

void sums(fsdp_tp_group* group, int self, int size, std::size_t count, int round, bool pooled) {
  const auto ranks = static_cast<std::size_t>(size);
  const int root = round % size;
  Buffer data(count, pooled);
  std::copy_n(values(self, count, round).data(), count, data.data);
  OK(fsdp_tp_all_reduce(group, data.data, count, FSDP_TP_FLOAT32, FSDP_TP_SUM, 0));
  for (std::size_t i = 0; i < count; ++i) CHECK(data.data[i] == sum_in_order(size, i, round));

  std::copy_n(values(self, count, round).data(), count, data.data);
  OK(fsdp_tp_all_reduce(group, data.data, count, FSDP_TP_FLOAT32, FSDP_TP_AVG, 0));
  for (std::size_t i = 0; i < count; ++i)
    CHECK(data.data[i] == sum_in_order(size, i, round) / static_cast<float>(size));

  std::copy_n(values(self, count, round).data(), count, data.data);
  OK(fsdp_tp_reduce_to(group, data.data, count, FSDP_TP_FLOAT32, FSDP_TP_SUM, 0, root));
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(data.data[i] == (self == root ? sum_in_order(size, i, round) : value(self, i, round)));
  }

  Buffer in(count * ranks, pooled);
  const std::vector<float> before = values(self, count * ranks, round);
  std::copy_n(before.data(), count * ranks, in.data);
  std::vector<const void*> ins(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) ins[rank] = in.data + rank * count;
  const std::size_t start = static_cast<std::size_t>(self) * count;
  OK(fsdp_tp_reduce_scatter(group, data.data, FSDP_TP_FLOAT32, ins.data(), count, FSDP_TP_FLOAT32, FSDP_TP_SUM, 0));
  for (std::size_t i = 0; i < count; ++i) CHECK(data.data[i] == sum_in_order(size, start + i, round));
  CHECK(std::equal(before.begin(), before.end(), in.data));

  // 16 bits on the wire, summed and kept in fp32.
  std::vector<std::uint16_t> wire(count * ranks);
  OK(fsdp_tp_cast(wire.data(), FSDP_TP_BFLOAT16, in.data, FSDP_TP_FLOAT32, count * ranks));
  for (std::size_t rank = 0; rank < ranks; ++rank) ins[rank] = wire.data() + rank * count;
  OK(fsdp_tp_reduce_scatter(group, data.data, FSDP_TP_FLOAT32, ins.data(), count, FSDP_TP_BFLOAT16, FSDP_TP_SUM, 0));
  const auto rounded = [](float x) {
    std::uint16_t half;
    float back;
    fsdp_tp_cast(&half, FSDP_TP_BFLOAT16, &x, FSDP_TP_FLOAT32, 1);
    fsdp_tp_cast(&back, FSDP_TP_FLOAT32, &half, FSDP_TP_BFLOAT16, 1);
    return back;
  };
  for (std::size_t i = 0; i < count; ++i) {
    float sum = rounded(value(0, start + i, round));
    for (int rank = 1; rank < size; ++rank) sum += rounded(value(rank, start + i, round));
    CHECK(data.data[i] == sum);
  }
}

void every_size(fsdp_tp_group* group, int self, int size, bool thorough) {
  // The slots are 4096 bytes here (see main), 1024 floats.
  std::vector<std::size_t> counts = {0, 1, 2, 7, 1023, 1024, 1025, 2048, 5000, 9001};
  if (!thorough) counts = {1, 1025, 9001};
  int round = 0;
  for (const std::size_t count : counts) {
    for (const bool pooled : {false, true}) {
      data_moves(group, self, size, count, round, pooled);
      sums(group, self, size, count, round, pooled);
      ++round;
    }
  }
  // A long run of small ones, of ranks that are not in step: slots must not be reused too early.
  for (int i = 0; i < 300; ++i) {
    float x = value(self, 0, i);
    if (noise(static_cast<std::uint64_t>(self), static_cast<std::uint64_t>(i)) % 8 == 0) sched_yield();
    OK(fsdp_tp_all_reduce(group, &x, 1, FSDP_TP_FLOAT32, FSDP_TP_SUM, 0));
    CHECK(x == sum_in_order(size, 0, i));
    float y = value(self, 1, i);
    OK(fsdp_tp_broadcast(group, &y, 4, i % size));
    CHECK(y == value(i % size, 1, i));
  }
  OK(fsdp_tp_barrier(group));
}

// Enough for outputs that are written past the caches; to addresses that are not aligned, and with odd ends.
void large(fsdp_tp_group* group, int self) {
  constexpr std::size_t kCount = (std::size_t{13} << 18) + 5;  // 13 MiB, of which each of 2 ranks writes 2
  std::vector<char> memory(2 * kCount * 4 + 64);
  auto* const all = reinterpret_cast<float*>(memory.data() + 4);
  const std::vector<float> own = values(self, kCount, 1);
  void* outs[] = {all, all + kCount};
  OK(fsdp_tp_all_gather(group, outs, own.data(), kCount * 4));
  for (int rank = 0; rank < 2; ++rank) {
    for (std::size_t i = 0; i < kCount; ++i)
      CHECK(all[static_cast<std::size_t>(rank) * kCount + i] == value(rank, i, 1));
  }
  const std::vector<float> in = values(self, 4 * kCount, 2);
  const void* ins[] = {in.data(), in.data() + 2 * kCount};
  OK(fsdp_tp_reduce_scatter(group, all, FSDP_TP_FLOAT32, ins, 2 * kCount, FSDP_TP_FLOAT32, FSDP_TP_SUM, 0));
  const std::size_t start = static_cast<std::size_t>(self) * 2 * kCount;
  for (std::size_t i = 0; i < 2 * kCount; ++i) CHECK(all[i] == sum_in_order(2, start + i, 2));
}

void mapped_together(fsdp_tp_group* group, int self, int size) {
  fsdp_tp_segment* segment = nullptr;
  OK(fsdp_tp_group_map(group, 100000, &segment));
  auto* const data = static_cast<int*>(fsdp_tp_segment_data(segment));
  data[self] = self + 1;
  OK(fsdp_tp_barrier(group));
  for (int rank = 0; rank < size; ++rank) CHECK(data[rank] == rank + 1);
  OK(fsdp_tp_barrier(group));
  fsdp_tp_segment_close(segment);
}

void bad_arguments(fsdp_tp_group* group, int size) {
  float x = 1;
  CHECK(fsdp_tp_broadcast(group, &x, 4, size) == FSDP_TP_BAD_ARGUMENT);
  CHECK(std::strstr(fsdp_tp_group_error(group), "root"));
  CHECK(fsdp_tp_all_reduce(group, &x, 1, 77, FSDP_TP_SUM, 0) == FSDP_TP_BAD_ARGUMENT);
  CHECK(fsdp_tp_all_reduce(group, &x, 1, FSDP_TP_INT32, FSDP_TP_AVG, 0) == FSDP_TP_BAD_OP);
  OK(fsdp_tp_all_reduce(group, &x, 1, FSDP_TP_FLOAT32, FSDP_TP_SUM, 0));  // the group is still fit for use
  CHECK(x == static_cast<float>(size));
}

}  // namespace

int main(int argc, char** argv) {
  setenv("FSDP_TP_SLOT_BYTES", "4096", 1);
  if (argc > 1 && std::string(argv[1]) == "threads") {
    setenv("FSDP_TP_READ_PRIVATE", "1", 1);
    for (const int size : {2, 3, 5}) {
      ranks::run_threads(size, [size](fsdp_tp_group* group, int rank) { every_size(group, rank, size, size == 3); });
    }
    return 0;
  }
  for (int size = 1; size <= 8; ++size) {
    for (const int kind : {FSDP_TP_MEMFD, FSDP_TP_NAMED}) {
      // One of the two reads private memory of peers, also where ranks share cores (where this machine lets it).
      setenv("FSDP_TP_READ_PRIVATE", (size + kind) % 2 == 0 ? "1" : "0", 1);
      const auto statuses = ranks::run_processes(
          size,
          [size](fsdp_tp_group* group, int rank) {
            every_size(group, rank, size, size <= 4);
            mapped_together(group, rank, size);
            bad_arguments(group, size);
            if (size == 2) large(group, rank);
          },
          20, kind);
      for (const int status : statuses) CHECK(status == 0);
    }
  }
  return 0;
}
