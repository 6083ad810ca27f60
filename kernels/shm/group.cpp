#include "shm/group.h"

#include <poll.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "shm/failure.h"
#include "shm/fsdp_tp_shm.h"
#include "shm/p2p.h"

namespace fsdp_tp {

namespace {

constexpr std::uint64_t kMagic = 0x66736470'74700002;  // "fsdp" "tp", layout 2
// A slot should stay in a core's cache: what one rank stages, another reads soon after.
constexpr std::size_t kDefaultSlotBytes = std::size_t{512} << 10;

enum State : std::uint32_t { kAbsent, kJoined, kLeft };

constexpr std::size_t align(std::size_t bytes) { return (bytes + 4095) & ~std::size_t{4095}; }

std::size_t chosen_slot_bytes(int size) {
  const char* text = std::getenv("FSDP_TP_SLOT_BYTES");
  const unsigned long long asked = text ? std::strtoull(text, nullptr, 10) : 0;
  // At least a cache line for each of the other ranks.
  return align(std::max<std::size_t>(asked >= 4096 ? asked : kDefaultSlotBytes, 64 * static_cast<std::size_t>(size)));
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// As of process_vm_readv: bytes read, or -1 and errno.
ssize_t read_process(int process, void* to, std::uint64_t address, std::size_t bytes) {
  const iovec here{to, bytes};
  const iovec there{reinterpret_cast<void*>(address), bytes};
  return process_vm_readv(process, &here, 1, &there, 1, 0);
}

int open_process(int process) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, process, 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

}  // namespace

struct Group::Header {
  std::atomic<std::uint64_t> magic;  // set by rank 0 once the rest of the header is
  std::uint32_t size;
  std::uint64_t slot_bytes;
  std::atomic<std::uint32_t> aborted;  // 0: no; 1: reason is being written; 2: reason is there
  char reason[512];
};

// The segment: header | a line and a bell a rank | a card a rank | two slots a rank | a channel a pair.
namespace {
constexpr std::size_t kLines = 4096;
std::size_t cards_at(int size) { return kLines + 2 * sizeof(Signal) * static_cast<std::size_t>(size); }
std::size_t slots_at(int size) { return align(cards_at(size) + sizeof(Card) * static_cast<std::size_t>(size)); }
std::size_t channels_at(int size, std::size_t slot_bytes) {
  return slots_at(size) + 2 * slot_bytes * static_cast<std::size_t>(size);
}
}  // namespace

std::size_t Group::segment_bytes(int size) {
  return channels_at(size, chosen_slot_bytes(size)) + kChannelBytes * static_cast<std::size_t>(size) * size;
}

Group::Header& Group::header() const {
  static_assert(sizeof(Header) <= kLines);
  return *reinterpret_cast<Header*>(at(0));
}
Signal& Group::line(int rank) const {
  return *reinterpret_cast<Signal*>(at(kLines + sizeof(Signal) * static_cast<std::size_t>(rank)));
}
Signal& Group::bell(int rank) const { return line(size_ + rank); }
Card& Group::card(int rank) const {
  return *reinterpret_cast<Card*>(at(cards_at(size_) + sizeof(Card) * static_cast<std::size_t>(rank)));
}
std::byte* Group::slot(int rank, std::uint32_t step) const {
  return at(slots_at(size_) + slot_bytes_ * (2 * static_cast<std::size_t>(rank) + step % 2));
}
std::byte* Group::channel(int from, int to) const {
  const auto index = static_cast<std::size_t>(from) * static_cast<std::size_t>(size_) + static_cast<std::size_t>(to);
  return at(channels_at(size_, slot_bytes_) + kChannelBytes * index);
}

Group::Group(std::shared_ptr<Segment> segment, int rank, int size, double timeout)
    : maker_(getpid()),
      segment_(std::move(segment)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      shared_cores_(size > usable_cores()),
      processes_(static_cast<std::size_t>(size), -1) {
  mailbox = std::make_shared<Mailbox>(*this);
  try {
    join();
  } catch (...) {
    for (const int process : processes_) {
      if (process >= 0) close(process);
    }
    throw;
  }
}

void Group::join() {
  Header& head = header();
  const auto start = Clock::now();
  if (rank_ == 0) {
    head.size = static_cast<std::uint32_t>(size_);
    head.slot_bytes = chosen_slot_bytes(size_);
    head.magic.store(kMagic, std::memory_order_release);
  }
  // Everything is zero in a new segment, so nobody needs to wait for rank 0 to be able to sleep here.
  for (Backoff backoff(true); head.magic.load(std::memory_order_acquire) != kMagic;) {
    if (backoff.pause(line(rank_), 0)) check(-1, start);
  }
  slot_bytes_ = head.slot_bytes;
  if (head.size != static_cast<std::uint32_t>(size_) ||
      channels_at(size_, slot_bytes_) + kChannelBytes * static_cast<std::size_t>(size_) * size_ > segment_->bytes()) {
    throw Failure{FSDP_TP_BAD_ARGUMENT, "the segment was made for a group of " + std::to_string(head.size) +
                                            " ranks, not of " + std::to_string(size_)};
  }
  card(rank_).process.store(getpid(), std::memory_order_relaxed);
  card(rank_).state.store(kJoined, std::memory_order_release);
  publish(next_step());
  wait_for_all(step_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    processes_[static_cast<std::size_t>(peer)] = open_process(card(peer).process);
    // Where ranks do not see each other in /proc, the number may be of another namespace.
    if (processes_[static_cast<std::size_t>(peer)] < 0 && errno == ESRCH && segment_kind() == FSDP_TP_MEMFD) {
      const std::string reason = "join: " + who(peer) + " has ended";
      abort(reason);  // others may wait for this rank
      throw Failure{FSDP_TP_PEER_DIED, reason};
    }
  }
  reads_private_ = try_reading_private();
}

// Only a trial tells: capabilities, Yama's ptrace_scope and seccomp can each forbid it, and the number of a process
// may mean another one in another namespace.
bool Group::try_reading_private() {
  // Where ranks share cores it was never faster (docs/lab_book.md).
  const char* const wanted = std::getenv("FSDP_TP_READ_PRIVATE");
  bool can = wanted && *wanted ? std::strcmp(wanted, "0") != 0 : !shared_cores_;
  if (getrandom(&token_, sizeof token_, GRND_NONBLOCK) != sizeof token_) can = false;
  const std::uint32_t step = next_step();
  acquire(step);
  card(rank_).place[step % 2] = Place{{}, reinterpret_cast<std::uintptr_t>(&token_)};
  card(rank_).number[step % 2] = token_;
  publish(step);
  wait_for_all(step);
  for (int peer = 0; can && peer < size_; ++peer) {
    std::uint64_t read = 0;
    can = read_process(card(peer).process, &read, card(peer).place[step % 2].offset, sizeof read) == sizeof read &&
          read == card(peer).number[step % 2];
  }
  return all_agree(can);
}

Group::~Group() {
  if (getpid() == maker_) {
    card(rank_).state.store(kLeft, std::memory_order_release);
    line(rank_).wake();
    bell(rank_).wake();
  }
  for (const int process : processes_) {
    if (process >= 0) close(process);
  }
}

Place Group::place_of(const void* data, std::size_t bytes) const {
  // Where a peer's /proc is not to be seen, its pools are not either.
  return segment_kind() == FSDP_TP_MEMFD ? pool_find(data, bytes) : Place{{}, reinterpret_cast<std::uintptr_t>(data)};
}

bool Group::read(void* to, int rank, const Place& place, std::size_t offset, std::size_t bytes) {
  if (place.in_pool()) {
    std::memcpy(to, attached(rank, place).get() + offset, bytes);
    return true;
  }
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t moved = read_process(card(rank).process, static_cast<std::byte*>(to) + done,
                                       place.offset + offset + done, bytes - done);
    if (moved <= 0) {
      check(rank, Clock::now());  // throws if the process has ended
      return false;
    }
    done += static_cast<std::size_t>(moved);
  }
  return true;
}

std::shared_ptr<const std::byte> Group::attached(int rank, const Place& place) {
  try {
    return attachments_.resolve(place);
  } catch (const Failure&) {
    usleep(20'000);  // a process loses its files a moment before it has ended
    check(rank, Clock::now());
    throw;
  }
}

void Group::acquire(std::uint32_t step) { wait_for_all(step - 1); }

void Group::publish(std::uint32_t step) { line(rank_).set(step); }

void Group::wait_for_all(std::uint32_t step) {
  if (reached(all_at_, step)) return;
  for (int offset = 1; offset < size_; ++offset) wait_for((rank_ + offset) % size_, step);
  all_at_ = step;
}

void Group::wait_for(int rank, std::uint32_t step) {
  Signal& signal = line(rank);
  std::uint32_t seen = signal.value.load(std::memory_order_acquire);
  if (reached(seen, step)) return;
  const auto start = Clock::now();
  Backoff backoff(shared_cores_);
  do {
    if (backoff.pause(signal, seen)) {
      mailbox->progress();  // the rank may first need what was sent to it
      try {
        check(rank, start);
      } catch (const Failure&) {
        // It may have published this step as the last thing it did.
        if (reached(signal.value.load(std::memory_order_acquire), step)) return;
        throw;
      }
    }
    seen = signal.value.load(std::memory_order_acquire);
  } while (!reached(seen, step));
}

bool Group::all_agree(bool here) {
  const std::uint32_t step = next_step();
  acquire(step);
  card(rank_).number[step % 2] = here;
  publish(step);
  wait_for_all(step);
  for (int rank = 0; rank < size_; ++rank) here = here && card(rank).number[step % 2] != 0;
  return here;
}

bool Group::has_ended(int rank) const {
  pollfd entry{processes_[static_cast<std::size_t>(rank)], POLLIN, 0};
  return entry.fd >= 0 && poll(&entry, 1, 0) == 1;
}

std::string Group::who(int rank) const {
  const int process = card(rank).process.load(std::memory_order_relaxed);
  return "rank " + std::to_string(rank) + (process ? " (process " + std::to_string(process) + ")" : "");
}

void Group::check(int rank, Clock::time_point start, const char* operation) {
  throw_if_aborted(operation);
  const std::string prefix = std::string(operation) + ": ";
  bool anybody = size_ == 1;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_ || (rank >= 0 && peer != rank)) continue;
    const bool left = card(peer).state.load(std::memory_order_acquire) == kLeft;
    if (left && rank < 0) continue;  // any other may come
    anybody = true;
    if (has_ended(peer)) throw Failure{FSDP_TP_PEER_DIED, prefix + who(peer) + " has ended"};
    if (left) throw Failure{FSDP_TP_PEER_DIED, prefix + who(peer) + " has left the group"};
  }
  if (!anybody) throw Failure{FSDP_TP_PEER_DIED, prefix + "all other ranks have left the group"};
  const std::chrono::duration<double> waited = Clock::now() - start;
  if (waited.count() < timeout_) return;
  std::string late;
  if (rank >= 0) {
    late = who(rank);
  } else {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      if (card(peer).state.load(std::memory_order_acquire) != kJoined) late += (late.empty() ? "" : ", ") + who(peer);
    }
    if (late.empty()) late = "any rank";
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", timeout_.load());
  throw Failure{FSDP_TP_TIMEOUT,
                prefix + late + " did not come within " + seconds + " s; it is stopped, or it is doing something else"};
}

void Group::throw_if_aborted(const char* operation) {
  Header& head = header();
  std::uint32_t state = head.aborted.load(std::memory_order_acquire);
  if (state == 0) return;
  // Whoever wrote 1 writes the reason at once; if it dies in between, go without.
  for (int round = 0; state != 2 && round < 1000; ++round) {
    sched_yield();
    state = head.aborted.load(std::memory_order_acquire);
  }
  throw Failure{FSDP_TP_ABORTED,
                std::string(operation) + ": the group was given up: " + (state == 2 ? head.reason : "reason unknown")};
}

void Group::abort(const std::string& reason) {
  Header& head = header();
  std::uint32_t expected = 0;
  if (head.aborted.compare_exchange_strong(expected, 1)) {
    std::snprintf(head.reason, sizeof head.reason, "rank %d: %s", rank_, reason.c_str());
    head.aborted.store(2, std::memory_order_release);
  }
  for (int peer = 0; peer < 2 * size_; ++peer) line(peer).wake();  // lines and bells
}

}  // namespace fsdp_tp
