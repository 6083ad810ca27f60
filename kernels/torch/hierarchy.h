// A group whose ranks are on several hosts: shared memory inside each host, gloo between them.
//
// What must reach another host crosses the link once, sent by the rank that has it and received by one rank there,
// which passes it on through memory; sums are made inside the host before they leave it. So every rank of a host drives
// its share of the link. Long messages go in chunks: while one crosses the link, that before it is passed on.
//
// Shard s of host h (that of its s-th rank) has a carrier on every other host: of host g's ranks the one with number
// s % (how many they are). Hosts may so have different numbers of ranks.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "torch/gloo.h"
#include "torch/group.h"
#include "torch/link.h"

namespace fsdp_tp {

// Memory that is kept for the next use, which then pays for no new pages; it grows only, and is not zeroed.
class Buffer {
 public:
  char* of(size_t bytes) {
    if (bytes > size_) {
      data_.reset(new char[bytes]);
      size_ = bytes;
    }
    return data_.get();
  }
  char* data() const { return data_.get(); }

 private:
  std::unique_ptr<char[]> data_;
  size_t size_ = 0;
};

class Hierarchy : public Group {
 public:
  // `hosts` has the ranks of the group by host; `segment` is of those of this host, or null if there is only one.
  // Sums of floats cross the link as `wire` (fsdp_tp_wire) says, with int8 also what is gathered.
  Hierarchy(fsdp_tp_segment* segment, std::vector<std::vector<int>> hosts, int rank, int size,
            std::chrono::milliseconds timeout, std::shared_ptr<Gloo> gloo, int wire, std::vector<int> world_ranks);

  void all_gather(const std::vector<void*>& outs, const void* in, size_t bytes, int dtype) override;
  // Sums go in the order of ranks inside each host, then in the order of hosts; 16-bit types are rounded once
  // for the link and once at the end.
  void reduce_scatter(void* out, int out_dtype, const std::vector<const void*>& ins, size_t count,
                      const Reduction& how) override;
  void all_reduce(void* data, size_t count, const Reduction& how) override;
  void broadcast(void* data, size_t bytes, int root) override;
  void barrier() override;

  void set_timeout(std::chrono::milliseconds timeout) override;
  void abort(const std::string& reason) override;
  void leave() override;

 private:
  struct Coding;
  // A chunk of a reduction, from its first sums inside this host until its sends are done.
  struct Stage {
    size_t start = 0, length = 0;
    Buffer own;                             // this host's sum of what is for this rank
    std::vector<Buffer> partial, outgoing;  // by shard that this rank carries
    std::vector<Buffer> incoming, decoded;  // by host
    std::vector<Link::Transfer> sends, receives;
  };
  // Runs `body(link)`; a failure makes the other ranks fail at once, on this host and on others.
  template <typename Body>
  void run(const char* operation, const std::string& arguments, Body body);
  void gather(Link& link, const std::vector<void*>& outs, const void* in, size_t bytes, const Coding& coding);
  void scatter_sums(Link& link, void* out, int out_dtype, const std::vector<const void*>& ins, size_t count,
                    const Reduction& how);
  void sum_small(Link& link, void* data, size_t count, const Reduction& how);
  void spread_small(Link& link, void* data, size_t bytes, int root);
  void compare_calls(Link& link, const std::string& call);

  int ranks_of(int host) const { return static_cast<int>(hosts_[host].size()); }
  // Who on `host` carries shard `shard` of another one.
  int carrier(int host, int shard) const { return hosts_[host][shard % ranks_of(host)]; }
  // How many shards of `host` each rank here carries at most.
  int rounds_of(int host) const { return (ranks_of(host) + local_.size - 1) / local_.size; }

  const std::vector<std::vector<int>> hosts_;
  int host_ = 0;  // this rank's
  Group local_;   // its ranks
  const std::shared_ptr<Gloo> gloo_;
  const int wire_;
  Interrupt interrupt_;
  const std::vector<int> world_ranks_;  // of the group's ranks, for errors
  std::chrono::milliseconds timeout_;
  std::vector<Stage> stages_;
  std::vector<char> nowhere_;  // in place of shards that do not exist
};

}  // namespace fsdp_tp
