#include "shm/pool.h"

#include <cstdio>
#include <mutex>
#include <new>

#include "shm/failure.h"
#include "shm/fsdp_tp_shm.h"

namespace fsdp_tp {

namespace {

constexpr std::size_t kUnit = std::size_t{64} << 10;

struct Block {
  std::shared_ptr<Segment> segment;
  bool used;
};

struct Pool {
  std::mutex mutex;
  std::map<const std::byte*, Block> blocks;  // by address
};

// Never destroyed: tensors may be freed after static destructors have run.
Pool& pool() {
  static Pool* const the_pool = new Pool;
  return *the_pool;
}

}  // namespace

void* pool_allocate(std::size_t bytes) {
  const std::size_t size = (bytes + kUnit - 1) / kUnit * kUnit + (bytes == 0 ? kUnit : 0);
  Pool& all = pool();
  const std::lock_guard lock(all.mutex);
  Block* best = nullptr;
  for (auto& [address, block] : all.blocks) {
    const std::size_t has = block.segment->bytes();
    // Twice as much as is needed would waste more than new pages cost.
    if (!block.used && has >= size && has <= 2 * size && (!best || has < best->segment->bytes())) best = &block;
  }
  if (!best) {
    auto segment = Segment::create(size, FSDP_TP_MEMFD);
    segment->prefault();
    const std::byte* const address = segment->data();
    best = &(all.blocks[address] = Block{std::move(segment), false});
  }
  best->used = true;
  return best->segment->data();
}

void pool_free(void* data) {
  Pool& all = pool();
  const std::lock_guard lock(all.mutex);
  const auto found = all.blocks.find(static_cast<const std::byte*>(data));
  if (found != all.blocks.end()) found->second.used = false;
}

void pool_trim() {
  Pool& all = pool();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.blocks, [](const auto& entry) { return !entry.second.used; });
}

Place pool_find(const void* data, std::size_t bytes) {
  Place place{{}, reinterpret_cast<std::uintptr_t>(data)};
  Pool& all = pool();
  const std::lock_guard lock(all.mutex);
  const auto* const start = static_cast<const std::byte*>(data);
  auto after = all.blocks.upper_bound(start);
  if (after == all.blocks.begin()) return place;
  const auto& [address, block] = *--after;
  if (start + bytes > address + block.segment->bytes()) return place;
  std::snprintf(place.segment, sizeof place.segment, "%s", block.segment->handle().c_str());
  place.offset = static_cast<std::uint64_t>(start - address);
  return place;
}

std::shared_ptr<const std::byte> Attachments::resolve(const Place& place) {
  std::shared_ptr<Segment>& segment = segments_[place.segment];
  if (!segment) {
    std::erase_if(segments_, [](const auto& entry) { return entry.second && !Segment::exists(entry.first); });
    segment = Segment::attach(place.segment);
    segment->prefault();
  }
  return {segment, segment->data() + place.offset};
}

}  // namespace fsdp_tp
