// The code of kernels/cuda on a CPU, several ranks in threads: which elements are read and written, the order of sums,
// rounding, tails, and the signals between ranks. What only a GPU can show is in bench/cuda_check.py.

#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda_emulation.h"
#include "reference.h"

namespace {

namespace cuda = fsdp_tp::cuda;
constexpr double kEpsilon = 0x1p-24;  // of fp32, to nearest
constexpr char kUntouched = 77;

struct Ranks {
  std::vector<std::vector<cuda::Vector>> memory;  // aligned as device memory is
  std::vector<std::vector<uint32_t>> pads;
  std::vector<void*> buffers;
  std::vector<uint32_t*> signals;
  std::vector<uint32_t> reports;
  double timeout = 20;
  int max_blocks = 0;

  Ranks(int world, size_t bytes, int blocks = 7) : reports(world) {
    for (int rank = 0; rank < world; ++rank) {
      memory.emplace_back(bytes / sizeof(cuda::Vector) + 1);
      pads.emplace_back(fsdp_tp_cuda_signal_words(world, blocks));
    }
    for (int rank = 0; rank < world; ++rank) {
      buffers.push_back(memory[rank].data());
      signals.push_back(pads[rank].data());
    }
  }
  int world() const { return static_cast<int>(memory.size()); }
  char* buffer(int rank) { return static_cast<char*>(buffers[rank]); }
  fsdp_tp_cuda_group group(int rank) {
    return {buffers.data(), signals.data(), pads[rank].size(), rank, world(), max_blocks, timeout, &reports[rank]};
  }
  template <class Body>
  void run(const Body& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world(); ++rank) {
      threads.emplace_back([&, rank] {
        const fsdp_tp_cuda_group own = group(rank);
        body(rank, &own);
      });
    }
    for (auto& thread : threads) thread.join();
    for (const uint32_t report : reports) CHECK(report == 0);
  }
};

// Guarded on both sides, so that a write beyond either end shows.
struct Output {
  static constexpr size_t kMargin = 64;
  std::vector<cuda::Vector> memory;
  size_t bytes, shift;

  Output(size_t bytes, size_t shift) : memory((bytes + shift + 2 * kMargin) / 16 + 1), bytes(bytes), shift(shift) {
    std::memset(memory.data(), kUntouched, memory.size() * 16);
  }
  char* data() { return reinterpret_cast<char*>(memory.data()) + kMargin + shift; }
  void check_margins() {
    for (const char* byte = data() - kMargin; byte < data(); ++byte) CHECK(*byte == kUntouched);
    for (const char* byte = data() + bytes; byte < data() + bytes + kMargin; ++byte) CHECK(*byte == kUntouched);
  }
};

class Random {
 public:
  explicit Random(unsigned seed) : generator_(seed) {}
  size_t below(size_t end) { return std::uniform_int_distribution<size_t>(0, end - 1)(generator_); }
  // Small numbers, often next to where a vector, a block or a turn of the loop ends.
  size_t count() {
    constexpr size_t edges[] = {0, 1, 8, 16, 2048, 4096, 8192, 16384};
    const size_t edge = edges[below(std::size(edges))];
    return below(2) == 0 ? below(40) : edge + below(19) - std::min<size_t>(edge, 9);
  }
  char byte() { return static_cast<char>(generator_()); }
  // Magnitudes over many binades, so that additions round, and zeros of both signs.
  float number() {
    const auto sign = below(2) == 0 ? 1.0f : -1.0f;
    return below(20) == 0 ? sign * 0.0f
                          : sign * std::ldexp(1 + below(1 << 20) * 0x1p-20f, static_cast<int>(below(16)) - 12);
  }

 private:
  std::mt19937_64 generator_;
};

void test_all_gather(Random& random) {
  for (int round = 0; round < 150; ++round) {
    const int world = 1 + static_cast<int>(random.below(round < 140 ? 8 : 20));
    const size_t bytes = random.count(), offset = random.below(2) * random.below(50), shift = random.below(17);
    Ranks ranks(world, offset + world * bytes + 16);
    ranks.max_blocks = static_cast<int>(random.below(9));
    std::vector<char> expected;
    std::vector<Output> outs;
    for (int rank = 0; rank < world; ++rank) {
      outs.emplace_back(world * bytes, shift);
      char* input = ranks.buffer(rank) + offset;
      for (size_t i = 0; i < bytes; ++i) expected.push_back(input[i] = random.byte());
    }
    ranks.run([&](int rank, const fsdp_tp_cuda_group* group) {
      char* out = outs[rank].data();
      CHECK(fsdp_tp_cuda_all_gather(group, out, offset, bytes, nullptr) == FSDP_TP_OK);
      CHECK(bytes == 0 || std::memcmp(out, expected.data(), expected.size()) == 0);
    });
    for (auto& out : outs) out.check_margins();
  }
}

// FSDP's own shard is a view of the output.
void test_all_gather_in_place() {
  constexpr size_t kBytes = 1003;
  for (const int world : {1, 2, 5}) {
    Ranks ranks(world, world * kBytes);
    std::vector<std::vector<void*>> seen(world, std::vector<void*>(world));
    ranks.run([&](int rank, const fsdp_tp_cuda_group* group) {
      // Each rank's input is at another offset of its buffer, so it passes the others' inputs as their buffers.
      std::memset(ranks.buffer(rank) + rank * kBytes, rank + 1, kBytes);
      for (int peer = 0; peer < world; ++peer) seen[rank][peer] = ranks.buffer(peer) + peer * kBytes;
      fsdp_tp_cuda_group own = *group;
      own.buffers = seen[rank].data();
      CHECK(fsdp_tp_cuda_all_gather(&own, ranks.buffer(rank), 0, kBytes, nullptr) == FSDP_TP_OK);
    });
    for (int rank = 0; rank < world; ++rank) {
      for (size_t i = 0; i < world * kBytes; ++i) CHECK(ranks.buffer(rank)[i] == static_cast<char>(i / kBytes + 1));
    }
  }
}

enum class Op { kReduceScatter, kAllReduce, kAllReduceOfInput };

// Against fp64 within the rounding of fp32 sums, and to the bit against sums in the order of ranks.
template <class In, class Out>
void test_sums(Random& random, Op op) {
  using Stored = typename In::Stored;
  using Result = typename Out::Stored;
  for (int round = 0; round < 40; ++round) {
    const int world = 1 + static_cast<int>(random.below(round < 35 ? 8 : 20));
    const size_t count = random.count(), offset = random.below(2) * random.below(20) * sizeof(Stored);
    const size_t shift = random.below(9) * sizeof(Result);
    const float scale = random.below(2) == 0 ? 1.0f : 1.0f / static_cast<float>(world);
    const size_t whole = op == Op::kReduceScatter ? world * count : count;
    Ranks ranks(world, offset + whole * sizeof(Stored));
    ranks.max_blocks = static_cast<int>(random.below(9));
    std::vector<std::vector<Stored>> inputs(world);
    for (int rank = 0; rank < world; ++rank) {
      for (size_t i = 0; i < whole; ++i) inputs[rank].push_back(In::narrow(random.number()));
      if (op != Op::kAllReduceOfInput && whole > 0) {
        std::memcpy(ranks.buffer(rank) + offset, inputs[rank].data(), whole * sizeof(Stored));
      }
    }
    ranks.run([&](int rank, const fsdp_tp_cuda_group* group) {
      Output out(count * sizeof(Result), shift);
      int status = FSDP_TP_OK;
      if (op == Op::kReduceScatter) {
        status = fsdp_tp_cuda_reduce_scatter(group, out.data(), Out::kDtype, offset, count, In::kDtype, scale, nullptr);
      } else {
        const void* in = op == Op::kAllReduceOfInput ? inputs[rank].data() : nullptr;
        status = fsdp_tp_cuda_all_reduce(group, out.data(), Out::kDtype, in, offset, count, In::kDtype, scale, nullptr);
      }
      CHECK(status == FSDP_TP_OK && ranks.reports[rank] == 0);
      out.check_margins();
      const size_t start = op == Op::kReduceScatter ? rank * count : 0;
      for (size_t i = 0; i < count; ++i) {
        float sum = In::widen(inputs[0][start + i]);
        double exact = 0, magnitude = 0;
        for (int source = 0; source < world; ++source) {
          const float value = In::widen(inputs[source][start + i]);
          if (source > 0) sum += value;
          exact += value;
          magnitude += std::abs(value);
        }
        Result result;
        std::memcpy(&result, out.data() + i * sizeof(Result), sizeof result);
        CHECK(same<Out>(result, Out::narrow(sum * scale)));
        // World - 1 additions and a product round, each by at most kEpsilon of what has been added up by then.
        const double bound = world * kEpsilon * magnitude * scale * 1.01;
        CHECK(std::abs(static_cast<double>(sum * scale) - exact * scale) <= bound);
      }
    });
  }
}

template <class In, class Out>
void test_all_sums(Random& random) {
  for (const Op op : {Op::kReduceScatter, Op::kAllReduce, Op::kAllReduceOfInput}) test_sums<In, Out>(random, op);
}

// Every 16-bit value, and for each the fp32 numbers around the middle between it and the next.
template <class Ours, class Reference>
void test_format() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto stored = static_cast<uint16_t>(bits);
    const float value = Reference::widen(stored);
    CHECK(Ours::widen(stored) == value || (value != value && Ours::widen(stored) != Ours::widen(stored)));
    const float next = Reference::widen(static_cast<uint16_t>(bits + 1));
    const float middle = value + (next - value) / 2;
    for (const float near : {value, middle, std::nextafter(middle, value), std::nextafter(middle, next)}) {
      CHECK(same<Reference>(Ours::narrow(near), Reference::narrow(near)));
    }
  }
}

// One group, calls of all kinds in turn: a kernel may not begin before its like on other ranks, nor change what they
// still read. The numbers of meetings wrap around on the way.
void test_calls_in_a_row() {
  constexpr int kWorld = 3;
  constexpr size_t kCount = 5000;
  Ranks ranks(kWorld, kWorld * kCount * sizeof(float));
  for (int rank = 0; rank < kWorld; ++rank) {
    for (int block = 0; block < 7; ++block) {
      uint32_t* words = ranks.signals[rank] + 1 + block * (kWorld + 1);
      for (int i = 0; i <= kWorld; ++i) words[i] = 0xfffffff0;
    }
  }
  ranks.run([&](int rank, const fsdp_tp_cuda_group* group) {
    auto* const own = reinterpret_cast<float*>(ranks.buffer(rank));
    std::vector<float> out(kWorld * kCount), in(kCount);
    for (int turn = 0; turn < 30; ++turn) {
      const size_t count = kCount - 1000 * (turn % 5);
      const auto of = [&](int r) { return static_cast<float>(1000 * r + turn); };
      for (size_t i = 0; i < kWorld * count; ++i) own[i] = of(rank);
      if (turn % 3 == 0) {
        CHECK(fsdp_tp_cuda_all_gather(group, out.data(), 0, count * sizeof(float), nullptr) == FSDP_TP_OK);
        for (size_t i = 0; i < kWorld * count; ++i) CHECK(out[i] == of(static_cast<int>(i / count)));
        continue;
      }
      std::fill(in.begin(), in.end(), of(rank));
      const int status = turn % 3 == 1
                             ? fsdp_tp_cuda_reduce_scatter(group, out.data(), 0, 0, count, 0, 1, nullptr)
                             : fsdp_tp_cuda_all_reduce(group, in.data(), 0, in.data(), 0, count, 0, 1, nullptr);
      CHECK(status == FSDP_TP_OK);
      const auto& result = turn % 3 == 1 ? out : in;
      for (size_t i = 0; i < count; ++i) CHECK(result[i] == of(0) + of(1) + of(2));
    }
  });
}

void test_a_rank_that_does_not_come_is_named() {
  Ranks ranks(3, 64);
  ranks.timeout = 0.05;
  std::vector<std::thread> threads;
  for (const int rank : {0, 2}) {
    threads.emplace_back([&, rank] {
      const fsdp_tp_cuda_group group = ranks.group(rank);
      float own = 5;
      for (int call = 0; call < 2; ++call) {  // the second one returns at once
        CHECK(fsdp_tp_cuda_all_reduce(&group, &own, 0, nullptr, 0, 1, 0, 1, nullptr) == FSDP_TP_OK);
      }
      CHECK(own == 5);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(ranks.reports[0] == 2 && ranks.reports[2] == 2 && ranks.reports[1] == 0);
}

void test_bad_arguments() {
  Ranks ranks(2, 64);
  const fsdp_tp_cuda_group good = ranks.group(0);
  alignas(16) char out[64] = {};
  const auto sum = [&](const fsdp_tp_cuda_group* group, void* to, int out_dtype, int dtype, size_t offset) {
    return fsdp_tp_cuda_reduce_scatter(group, to, out_dtype, offset, 1, dtype, 1, nullptr);
  };
  CHECK(sum(nullptr, out, 0, 0, 0) == FSDP_TP_NULL_POINTER);
  CHECK(sum(&good, nullptr, 0, 0, 0) == FSDP_TP_NULL_POINTER);
  CHECK(fsdp_tp_cuda_all_gather(&good, nullptr, 0, 1, nullptr) == FSDP_TP_NULL_POINTER);
  for (const int dtype : {-1, +FSDP_TP_FLOAT64, +FSDP_TP_INT32, +FSDP_TP_INT64, 6}) {
    CHECK(sum(&good, out, dtype, dtype, 0) == FSDP_TP_BAD_DTYPE);
    CHECK(sum(&good, out, dtype, FSDP_TP_FLOAT32, 0) == FSDP_TP_BAD_DTYPE);
  }
  CHECK(sum(&good, out, FSDP_TP_BFLOAT16, FSDP_TP_FLOAT16, 0) == FSDP_TP_BAD_DTYPE);
  CHECK(sum(&good, out, FSDP_TP_FLOAT16, FSDP_TP_BFLOAT16, 0) == FSDP_TP_BAD_DTYPE);
  CHECK(sum(&good, out, 0, 0, 2) == FSDP_TP_CUDA_BAD_ALIGNMENT);
  CHECK(sum(&good, out + 2, 0, 0, 0) == FSDP_TP_CUDA_BAD_ALIGNMENT);
  CHECK(fsdp_tp_cuda_all_reduce(&good, out, 0, out + 1, 0, 1, 0, 1, nullptr) == FSDP_TP_CUDA_BAD_ALIGNMENT);
  for (const auto& [rank, world] : {std::pair{-1, 2}, {2, 2}, {0, 0}, {0, +FSDP_TP_CUDA_MAX_WORLD + 1}}) {
    fsdp_tp_cuda_group bad = good;
    bad.rank = rank, bad.world = world;
    CHECK(sum(&bad, out, 0, 0, 0) == FSDP_TP_CUDA_BAD_RANK);
  }
  fsdp_tp_cuda_group bad = good;
  bad.signal_words = fsdp_tp_cuda_signal_words(2, 1) - 1;
  CHECK(sum(&bad, out, 0, 0, 0) == FSDP_TP_CUDA_BAD_SIGNALS);
  for (const char byte : out) CHECK(byte == 0);
  // Nothing to do is never wrong, and needs nobody else.
  CHECK(fsdp_tp_cuda_all_gather(nullptr, nullptr, 0, 0, nullptr) == FSDP_TP_OK);
  CHECK(fsdp_tp_cuda_reduce_scatter(nullptr, nullptr, 0, 0, 0, 0, 1, nullptr) == FSDP_TP_OK);
}

}  // namespace

int main() {
  Random random(1);
  test_format<cuda::BFloat16, BFloat16>();
  test_format<cuda::Float16, Float16>();
  test_all_gather(random);
  test_all_gather_in_place();
  test_all_sums<Float32, Float32>(random);
  test_all_sums<Float32, BFloat16>(random);
  test_all_sums<BFloat16, Float32>(random);
  test_all_sums<BFloat16, BFloat16>(random);
  test_all_sums<Float16, Float32>(random);
  test_all_sums<Float16, Float16>(random);
  test_calls_in_a_row();
  test_a_rank_that_does_not_come_is_named();
  test_bad_arguments();
}
