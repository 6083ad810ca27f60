// Sends and receives between ranks. If this fails, look at kernels/shm/p2p.cpp.
// With the argument "threads" the ranks are threads, for ThreadSanitizer.

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "shm/fsdp_tp_shm.h"

namespace {

bool contains(const char* text, const std::string& part) {
  if (std::strstr(text, part.c_str())) return true;
  std::fprintf(stderr, "'%s' does not contain '%s'\n", text, part.c_str());
  return false;
}

fsdp_tp_request* send(fsdp_tp_group* group, const std::vector<char>& data, int to, uint32_t tag) {
  fsdp_tp_request* request = nullptr;
  CHECK(fsdp_tp_isend(group, data.data(), data.size(), to, tag, &request) == FSDP_TP_OK);
  return request;
}

fsdp_tp_request* receive(fsdp_tp_group* group, std::vector<char>& data, int from, uint32_t tag) {
  fsdp_tp_request* request = nullptr;
  CHECK(fsdp_tp_irecv(group, data.data(), data.size(), from, tag, &request) == FSDP_TP_OK);
  return request;
}

int finish(fsdp_tp_request* request) {
  CHECK(fsdp_tp_wait(request) == FSDP_TP_OK);
  const int source = fsdp_tp_request_source(request);
  fsdp_tp_request_free(request);
  return source;
}

struct Message {
  uint32_t tag;
  std::vector<char> data;
};

// What `from` sends to `to`, in this order; both know it.
std::vector<Message> messages(int from, int to, int seed) {
  std::mt19937 random(static_cast<unsigned>(1000 * seed + 100 * from + to));
  std::vector<Message> made(random() % 12);
  for (Message& each : made) {
    const size_t sizes[] = {0, 1, random() % 100, random() % 5000, random() % 300'000};
    each.tag = random() % 3;
    each.data.resize(sizes[random() % 5]);
    for (char& byte : each.data) byte = static_cast<char>(random());
  }
  return made;
}

// All ranks send to all, themselves too; receives come in another order than sends, but for those of one tag.
void everybody_to_everybody(fsdp_tp_group* group, int rank, int size, int seed) {
  std::vector<std::vector<Message>> sent, expected;
  std::vector<fsdp_tp_request*> requests;
  for (int peer = 0; peer < size; ++peer) {
    sent.push_back(messages(rank, peer, seed));
    expected.push_back(messages(peer, rank, seed));
  }
  struct Receive {
    int from;
    size_t number;
    std::vector<char> data;
  };
  std::vector<Receive> receives;
  for (int peer = 0; peer < size; ++peer) {
    const auto& list = expected[static_cast<size_t>(peer)];
    for (size_t i = 0; i < list.size(); ++i) receives.push_back({peer, i, std::vector<char>(list[i].data.size())});
  }
  std::shuffle(receives.begin(), receives.end(), std::mt19937(static_cast<unsigned>(seed + rank)));
  const auto tag_of = [&](const Receive& each) { return expected[static_cast<size_t>(each.from)][each.number].tag; };
  // Back into order within a source and tag, at the places where these stand.
  for (size_t i = 0; i < receives.size(); ++i) {
    for (size_t j = i + 1; j < receives.size(); ++j) {
      const bool alike = receives[i].from == receives[j].from && tag_of(receives[i]) == tag_of(receives[j]);
      if (alike && receives[i].number > receives[j].number) std::swap(receives[i], receives[j]);
    }
  }
  const size_t early = receives.size() / 2;
  for (size_t i = 0; i < early; ++i) {
    requests.push_back(receive(group, receives[i].data, receives[i].from, tag_of(receives[i])));
  }
  for (int peer = 0; peer < size; ++peer) {
    for (const Message& each : sent[static_cast<size_t>(peer)]) {
      requests.push_back(send(group, each.data, peer, each.tag));
    }
  }
  if (seed % 2) CHECK(fsdp_tp_barrier(group) == FSDP_TP_OK);  // a collective while messages are on their way
  for (size_t i = early; i < receives.size(); ++i) {
    requests.push_back(receive(group, receives[i].data, receives[i].from, tag_of(receives[i])));
  }
  std::shuffle(requests.begin(), requests.end(), std::mt19937(static_cast<unsigned>(seed)));
  for (fsdp_tp_request* const request : requests) finish(request);
  for (const Receive& each : receives) {
    CHECK(each.data == expected[static_cast<size_t>(each.from)][each.number].data);
  }
}

void from_anybody(fsdp_tp_group* group, int rank, int size) {
  std::vector<char> data(100'000, static_cast<char>(rank));
  if (rank != 0) {
    finish(send(group, data, 0, 7));
    return;
  }
  std::vector<bool> seen(static_cast<size_t>(size));
  for (int i = 1; i < size; ++i) {
    const int source = finish(receive(group, data, -1, 7));
    CHECK(source > 0 && !seen[static_cast<size_t>(source)]);
    seen[static_cast<size_t>(source)] = true;
    CHECK(data.front() == source && data.back() == source);
  }
}

// More than the ring holds: the receiver must get it though the sender is in a collective.
void a_send_goes_on_during_a_collective(fsdp_tp_group* group, int rank) {
  std::vector<char> data(300'000, 'x');
  fsdp_tp_request* request = nullptr;
  if (rank == 0) request = send(group, data, 1, 0);
  if (rank == 1) finish(receive(group, data, 0, 0));
  CHECK(fsdp_tp_barrier(group) == FSDP_TP_OK);
  if (request) finish(request);
}

void all(fsdp_tp_group* group, int rank, int size) {
  for (int seed = 0; seed < 20; ++seed) everybody_to_everybody(group, rank, size, seed);
  from_anybody(group, rank, size);
  a_send_goes_on_during_a_collective(group, rank);
}

void faults() {
  // A rank that has sent and gone: what it sent arrives, what it did not is an error.
  auto statuses = ranks::run_processes(2, [](fsdp_tp_group* group, int rank) {
    std::vector<char> data(1000, 'x');
    if (rank == 1) {
      finish(send(group, data, 0, 0));
      raise(SIGKILL);
    }
    usleep(100'000);
    std::fill(data.begin(), data.end(), '-');
    finish(receive(group, data, 1, 0));
    CHECK(data.back() == 'x');
    fsdp_tp_request* const request = receive(group, data, 1, 0);
    CHECK(fsdp_tp_wait(request) == FSDP_TP_PEER_DIED);
    CHECK(contains(fsdp_tp_last_error(), "recv: rank 1 (process "));
    fsdp_tp_request_free(request);
    CHECK(fsdp_tp_barrier(group) == FSDP_TP_ABORTED);
  });
  CHECK(statuses[0] == 0 && WTERMSIG(statuses[1]) == SIGKILL);

  // Asking again and again is not endless either.
  statuses = ranks::run_processes(2, [](fsdp_tp_group* group, int rank) {
    std::vector<char> data(300'000);
    if (rank == 1) raise(SIGKILL);
    fsdp_tp_request* const request = send(group, data, 1, 0);
    int done = 0, status = FSDP_TP_OK;
    while (status == FSDP_TP_OK && !done) status = fsdp_tp_test(request, &done);
    CHECK(status == FSDP_TP_PEER_DIED && contains(fsdp_tp_last_error(), "send: rank 1 (process "));
    fsdp_tp_request_free(request);
  });
  CHECK(statuses[0] == 0);

  // A message that never comes, from a rank and from any.
  for (const int from : {1, -1}) {
    statuses = ranks::run_processes(
        2,
        [from](fsdp_tp_group* group, int rank) {
          if (rank == 1) {
            usleep(600'000);
            return;
          }
          std::vector<char> data(10);
          fsdp_tp_request* const request = receive(group, data, from, 0);
          CHECK(fsdp_tp_wait(request) == FSDP_TP_TIMEOUT);
          CHECK(contains(fsdp_tp_last_error(), from == 1 ? "rank 1 (process " : "recv: any rank did not come"));
          fsdp_tp_request_free(request);
        },
        0.3);
    for (const int status : statuses) CHECK(status == 0);
  }

  statuses = ranks::run_processes(2, [](fsdp_tp_group* group, int rank) {
    std::vector<char> data(rank == 0 ? 10 : 11);
    if (rank == 0) {
      fsdp_tp_request* request = nullptr;
      CHECK(fsdp_tp_isend(group, data.data(), data.size(), 2, 0, &request) == FSDP_TP_BAD_ARGUMENT);
      CHECK(contains(fsdp_tp_last_error(), "send to rank 2 of a group of 2"));
      finish(send(group, data, 1, 0));
      return;
    }
    fsdp_tp_request* request = nullptr;
    int status = fsdp_tp_irecv(group, data.data(), data.size(), 0, 0, &request);
    if (status == FSDP_TP_OK) status = fsdp_tp_wait(request);
    CHECK(status == FSDP_TP_MISMATCH);
    CHECK(contains(fsdp_tp_last_error(), "rank 0 sends 10 bytes with tag 0, but the receive is of 11"));
    if (request) fsdp_tp_request_free(request);
  });
  for (const int status : statuses) CHECK(status == 0);
}

}  // namespace

int main(int argc, char** argv) {
  for (const int size : {2, 3, 4}) {
    const auto body = [size](fsdp_tp_group* group, int rank) { all(group, rank, size); };
    if (argc > 1 && !std::strcmp(argv[1], "threads")) {
      ranks::run_threads(size, body);
    } else {
      for (const int status : ranks::run_processes(size, body, 60)) CHECK(status == 0);
    }
  }
  if (argc == 1) faults();
  return 0;
}
