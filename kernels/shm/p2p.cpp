#include "shm/p2p.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "shm/failure.h"
#include "shm/fsdp_tp_shm.h"

namespace fsdp_tp {

namespace {

// Zero is a fresh ring. Counts of bytes, of which each side writes one, in a cache line of its own.
struct Channel {
  alignas(64) std::atomic<std::uint64_t> written;
  alignas(64) std::atomic<std::uint64_t> read;
  std::byte ring[Group::kChannelBytes - 128];
};
static_assert(sizeof(Channel) == Group::kChannelBytes);
constexpr std::size_t kRing = sizeof(Channel::ring);

// A long message goes piece by piece, so that both sides copy at the same time.
constexpr std::size_t kPiece = kRing / 4;

Channel& channel_of(Group& group, int from, int to) { return *reinterpret_cast<Channel*>(group.channel(from, to)); }

void put(Channel& channel, std::uint64_t position, const void* data, std::size_t bytes) {
  const std::size_t start = position % kRing;
  const std::size_t first = std::min(bytes, kRing - start);
  std::memcpy(channel.ring + start, data, first);
  std::memcpy(channel.ring, static_cast<const std::byte*>(data) + first, bytes - first);
}

void get(const Channel& channel, std::uint64_t position, void* data, std::size_t bytes) {
  const std::size_t start = position % kRing;
  const std::size_t first = std::min(bytes, kRing - start);
  std::memcpy(data, channel.ring + start, first);
  std::memcpy(static_cast<std::byte*>(data) + first, channel.ring, bytes - first);
}

// Seen either by the sleeper, who compares the value, or here, as a sleeper: as in Signal::set.
void ring_bell(Signal& bell) {
  bell.value.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) bell.wake();
}

const char* name_of(const Request& request) { return request.is_send ? "send" : "recv"; }

}  // namespace

Mailbox::Mailbox(Group& group)
    : group_(group),
      sends_(static_cast<std::size_t>(group.size())),
      incoming_(static_cast<std::size_t>(group.size())) {}

void Mailbox::add(Request* request) {
  const std::lock_guard lock(mutex_);
  ++pending_;
  if (request->is_send) {
    sends_[static_cast<std::size_t>(request->peer)].push_back(request);
  } else if (!claim(*request)) {
    receives_.push_back(request);
  }
}

void Mailbox::remove(Request* request) {
  const std::lock_guard lock(mutex_);
  if (request->done) return;
  --pending_;
  if (request->is_send) {
    auto& sends = sends_[static_cast<std::size_t>(request->peer)];
    sends.erase(std::remove(sends.begin(), sends.end(), request), sends.end());
    return;
  }
  receives_.remove(request);
  for (Incoming& each : incoming_) {
    if (each.receive == request) each.active = false;
  }
  for (Message& each : unexpected_) {
    if (each.receive == request) each.receive = nullptr;
  }
}

void Mailbox::progress() {
  if (pending_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard lock(mutex_);
  bool finished = false;
  for (int peer = 0; peer < group_.size(); ++peer) {
    finished |= push(peer);
    finished |= pull(peer);
  }
  if (finished) ring_bell(group_.bell(group_.rank()));  // another thread may wait for it
}

// Returns whether a send is done.
bool Mailbox::push(int to) {
  auto& sends = sends_[static_cast<std::size_t>(to)];
  if (sends.empty()) return false;
  Channel& channel = channel_of(group_, group_.rank(), to);
  std::uint64_t position = channel.written.load(std::memory_order_relaxed);
  bool finished = false;
  while (!sends.empty()) {
    const std::uint64_t limit = channel.read.load(std::memory_order_acquire) + kRing;
    const std::uint64_t before = position;
    Request& send = *sends.front();
    if (!send.header_sent) {
      if (limit - position < sizeof(MessageHeader)) break;
      const MessageHeader header{send.bytes, send.tag, 0};
      put(channel, position, &header, sizeof header);
      position += sizeof header;
      send.header_sent = true;
    }
    const std::size_t length = std::min<std::size_t>({limit - position, send.bytes - send.moved, kPiece});
    if (length > 0) put(channel, position, send.data + send.moved, length);
    position += length;
    send.moved += length;
    if (position == before) break;
    channel.written.store(position, std::memory_order_release);
    ring_bell(group_.bell(to));
    if (send.moved < send.bytes) continue;
    sends.pop_front();
    --pending_;
    send.done.store(true, std::memory_order_release);
    finished = true;
  }
  return finished;
}

// Returns whether a receive is done.
bool Mailbox::pull(int from) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(from)];
  Channel& channel = channel_of(group_, from, group_.rank());
  std::uint64_t position = channel.read.load(std::memory_order_relaxed);
  bool finished = false;
  for (;;) {
    const std::uint64_t limit = channel.written.load(std::memory_order_acquire);
    const std::uint64_t before = position;
    if (!incoming.active) {
      if (limit - position < sizeof(MessageHeader)) break;
      MessageHeader header;
      get(channel, position, &header, sizeof header);
      Request* const receive = find_receive(from, header.tag);
      const bool others_wait = std::any_of(receives_.begin(), receives_.end(), [&](const Request* each) {
        return each->peer == from || each->peer == kAnyRank;
      });
      if (!receive && !others_wait) break;
      if (receive && receive->bytes != header.bytes) {
        throw Failure{FSDP_TP_MISMATCH, "recv: rank " + std::to_string(from) + " sends " +
                                            std::to_string(header.bytes) + " bytes with tag " +
                                            std::to_string(header.tag) + ", but the receive is of " +
                                            std::to_string(receive->bytes)};
      }
      position += sizeof header;
      incoming = Incoming{true, header, 0, receive, {}};
      if (receive) {
        receives_.remove(receive);
        receive->source = from;
      } else {
        unexpected_.push_back({from, header, std::make_unique<std::byte[]>(header.bytes), nullptr});
        incoming.message = std::prev(unexpected_.end());
      }
    }
    const std::size_t length =
        std::min<std::size_t>({limit - position, incoming.header.bytes - incoming.moved, kPiece});
    std::byte* const to = incoming.receive ? incoming.receive->data : incoming.message->data.get();
    if (length > 0) get(channel, position, to + incoming.moved, length);
    position += length;
    incoming.moved += length;
    if (position == before) break;
    channel.read.store(position, std::memory_order_release);
    ring_bell(group_.bell(from));
    if (incoming.moved < incoming.header.bytes) continue;
    incoming.active = false;
    Request* receive = incoming.receive;
    if (!receive && (receive = incoming.message->receive)) {
      if (receive->bytes > 0) std::memcpy(receive->data, incoming.message->data.get(), receive->bytes);
      unexpected_.erase(incoming.message);
    }
    if (receive) {
      --pending_;
      receive->done.store(true, std::memory_order_release);
      finished = true;
    }
  }
  return finished;
}

Request* Mailbox::find_receive(int from, std::uint32_t tag) {
  for (Request* const each : receives_) {
    if (each->tag == tag && (each->peer == from || each->peer == kAnyRank)) return each;
  }
  return nullptr;
}

// Gives a new receive the first message that has come for it, if there is one.
bool Mailbox::claim(Request& receive) {
  for (auto each = unexpected_.begin(); each != unexpected_.end(); ++each) {
    if (each->receive || each->header.tag != receive.tag) continue;
    if (receive.peer != each->from && receive.peer != kAnyRank) continue;
    if (each->header.bytes != receive.bytes) {
      throw Failure{FSDP_TP_MISMATCH, "recv: rank " + std::to_string(each->from) + " sends " +
                                          std::to_string(each->header.bytes) + " bytes with tag " +
                                          std::to_string(receive.tag) + ", but the receive is of " +
                                          std::to_string(receive.bytes)};
    }
    receive.source = each->from;
    const Incoming& incoming = incoming_[static_cast<std::size_t>(each->from)];
    if (incoming.active && !incoming.receive && incoming.message == each) {
      each->receive = &receive;
      return true;
    }
    if (receive.bytes > 0) std::memcpy(receive.data, each->data.get(), receive.bytes);
    unexpected_.erase(each);
    --pending_;
    receive.done.store(true, std::memory_order_release);
    return true;
  }
  return false;
}

namespace {

// Throws if the request cannot complete any more, or if the timeout has passed since `start`.
void check(Request& request, Clock::time_point start) {
  Group& group = *request.group;
  if (request.peer == group.rank()) return group.throw_if_aborted(name_of(request));
  try {
    group.check(request.peer, start, name_of(request));
  } catch (const Failure&) {
    // What a rank sent before it ended or left is still there.
    group.mailbox->progress();
    if (!request.done.load(std::memory_order_acquire)) throw;
  }
}

}  // namespace

bool test(Request& request) {
  if (!request.done.load(std::memory_order_acquire)) {
    request.group->mailbox->progress();
    if (!request.done.load(std::memory_order_acquire)) check(request, Clock::now());
  }
  return request.done.load(std::memory_order_acquire);
}

void wait(Request& request) {
  Group& group = *request.group;
  Signal& bell = group.bell(group.rank());
  const auto start = Clock::now();
  Backoff backoff(group.shared_cores());
  while (!request.done.load(std::memory_order_acquire)) {
    const std::uint32_t seen = bell.value.load(std::memory_order_seq_cst);
    group.mailbox->progress();
    if (request.done.load(std::memory_order_acquire)) return;
    if (backoff.pause(bell, seen)) check(request, start);
  }
}

}  // namespace fsdp_tp
