#include "torch/hierarchy.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "shm/wire.h"

namespace fsdp_tp {

namespace {

using Bytes = std::vector<char>;

// Of what crosses the link while the one before is passed on inside a host.
constexpr size_t kChunk = size_t{1} << 20;
// How many chunks of a reduction are on their way at a time.
constexpr size_t kInFlight = 4;
// Up to here one exchange of everything beats two of parts.
constexpr size_t kSmall = size_t{64} << 10;

template <typename Pointer>
Pointer* at(Pointer* data, size_t offset) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return static_cast<Byte*>(data) + offset;
}

bool is_16_bit(int dtype) { return dtype == FSDP_TP_BFLOAT16 || dtype == FSDP_TP_FLOAT16; }

// How a reduction is done in two levels. Between them values are of `dtype`.
struct TwoLevels {
  TwoLevels(const Reduction& how, int ranks) : dtype(is_16_bit(how.dtype) ? FSDP_TP_FLOAT32 : how.dtype), inside(how) {
    if (how.op == FSDP_TP_MAX || how.op == FSDP_TP_MIN) between = how.op;
    if (how.op != FSDP_TP_AVG) return;
    // A sum of 16-bit values might not have a place in 16 bits on the link, where their mean has.
    inside = is_16_bit(how.dtype) ? Reduction{how.dtype, FSDP_TP_PREMUL_SUM, 1.0 / ranks}
                                  : Reduction{how.dtype, FSDP_TP_SUM, 1};
    if (!is_16_bit(how.dtype)) divisor = ranks;
  }

  // out[0:count] = the op over `sources`, one a host, in the order of hosts.
  void combine(void* out, const std::vector<const void*>& sources, size_t count) const {
    fsdp_tp_reduce(out, dtype, sources.data(), static_cast<int>(sources.size()), count, dtype, between, 1);
    if (divisor == 1) return;
    if (dtype == FSDP_TP_FLOAT32) {
      for (size_t i = 0; i < count; ++i) static_cast<float*>(out)[i] /= static_cast<float>(divisor);
    } else {
      for (size_t i = 0; i < count; ++i) static_cast<double*>(out)[i] /= divisor;
    }
  }

  // What of a wire is used: only sums bear it.
  int wire(int wanted) const {
    return dtype == FSDP_TP_FLOAT32 && between == FSDP_TP_SUM ? wanted : static_cast<int>(FSDP_TP_EXACT);
  }

  int dtype;
  Reduction inside;
  int between = FSDP_TP_SUM;
  int divisor = 1;
};

}  // namespace

// What values look like on the link. Where they are computed with, 16-bit ones are fp32.
struct Hierarchy::Coding {
  int dtype = kBytes;
  int wire = FSDP_TP_EXACT;

  int computed() const { return is_16_bit(dtype) ? static_cast<int>(FSDP_TP_FLOAT32) : dtype; }
  size_t bytes(size_t count) const {
    return wire == FSDP_TP_EXACT ? count * fsdp_tp_dtype_size(dtype) : fsdp_tp_wire_bytes(wire, count);
  }
  void encode(void* out, const void* in, size_t count) const {
    if (wire != FSDP_TP_EXACT) return fsdp_tp_encode(wire, out, static_cast<const float*>(in), count);
    fsdp_tp_cast(out, dtype, in, computed(), count);
  }
  void decode(void* out, const void* in, size_t count) const {
    if (wire != FSDP_TP_EXACT) return fsdp_tp_decode(wire, static_cast<float*>(out), in, count);
    fsdp_tp_cast(out, computed(), in, dtype, count);
  }
};

namespace {

// Inside a host: somebody there who misses a rank of another host shall be the first to say so.
std::chrono::milliseconds patience(std::chrono::milliseconds timeout) { return timeout + timeout / 4; }

int host_of(const std::vector<std::vector<int>>& hosts, int rank) {
  const auto has = [rank](const auto& ranks) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
  return static_cast<int>(std::find_if(hosts.begin(), hosts.end(), has) - hosts.begin());
}

int place_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

}  // namespace

Hierarchy::Hierarchy(fsdp_tp_segment* segment, std::vector<std::vector<int>> hosts, int rank, int size,
                     std::chrono::milliseconds timeout, std::shared_ptr<Gloo> gloo, int wire,
                     std::vector<int> world_ranks)
    : Group(nullptr, rank, size, timeout),
      hosts_(std::move(hosts)),
      host_(host_of(hosts_, rank)),
      local_(segment, place_in(hosts_[host_], rank), ranks_of(host_), patience(timeout)),
      gloo_(std::move(gloo)),
      wire_(wire),
      world_ranks_(std::move(world_ranks)),
      timeout_(timeout),
      nowhere_(kChunk) {
  std::string ranks;
  for (const int each : hosts_[host_]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(each);
  local_.whose_ranks = " (rank r of this host is rank [" + ranks + "][r] of the group)";
}

template <typename Body>
void Hierarchy::run(const char* operation, const std::string& arguments, Body body) {
  Link link(*gloo_, interrupt_, operation, timeout_, world_ranks_);
  const auto give_up = [this](const std::string& reason) {
    stages_.clear();  // with the transfers in them
    local_.abort(reason);
    gloo_->give_up();
  };
  try {
    if (fsdp_tp_debugging()) compare_calls(link, std::string(operation) + " of " + arguments);
    body(link);
  } catch (const c10::Error& error) {
    give_up(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  }
}

void Hierarchy::all_gather(const std::vector<void*>& outs, const void* in, size_t bytes, int dtype) {
  // Gradients bear to be rounded to bf16 on their way; parameters are gathered as they are.
  const bool coded = wire_ == FSDP_TP_WIRE_INT8 && (dtype == FSDP_TP_FLOAT32 || is_16_bit(dtype));
  run("all_gather", std::to_string(bytes) + " bytes a rank",
      [&](Link& link) { gather(link, outs, in, bytes, coded ? Coding{dtype, wire_} : Coding{}); });
}

void Hierarchy::gather(Link& link, const std::vector<void*>& outs, const void* in, size_t bytes, const Coding& coding) {
  const bool plain = coding.wire == FSDP_TP_EXACT;
  const size_t element = plain ? 1 : fsdp_tp_dtype_size(coding.dtype);
  const auto coded = [&](size_t length) { return plain ? length : coding.bytes(length / element); };
  std::vector<float> values(plain ? 0 : std::min(kChunk, bytes) / element);
  const auto decode = [&](void* out, const char* code, size_t length) {
    coding.decode(values.data(), code, length / element);
    fsdp_tp_cast(out, coding.dtype, values.data(), FSDP_TP_FLOAT32, length / element);
  };
  struct Incoming {
    int host;
    int shard;
    Bytes encoded;
    std::vector<Link::Transfer> chunks;
  };
  std::vector<Incoming> incoming;                                 // what this rank carries, by host and round
  static_assert(std::is_nothrow_move_constructible_v<Incoming>);  // or `encoded` would be copied away from its receives
  for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
    if (host == host_) continue;
    for (int shard = local_.rank; shard < ranks_of(host); shard += local_.size) {
      Incoming& each = incoming.emplace_back(Incoming{host, shard, {}, {}});
      if (!plain) each.encoded.resize(coded(bytes));
      for (size_t offset = 0; offset < bytes; offset += kChunk) {
        void* const to = plain ? at(outs[hosts_[host][shard]], offset) : &each.encoded[coded(offset)];
        each.chunks.push_back(link.receive(to, coded(std::min(kChunk, bytes - offset)), hosts_[host][shard]));
      }
    }
  }

  Bytes encoded(plain ? 0 : coded(bytes));
  std::vector<Link::Transfer> sends;
  for (size_t offset = 0; offset < bytes; offset += kChunk) {
    const size_t length = std::min(kChunk, bytes - offset);
    const void* from = at(in, offset);
    if (!plain) {
      char* const code = &encoded[coded(offset)];
      fsdp_tp_cast(values.data(), FSDP_TP_FLOAT32, from, coding.dtype, length / element);
      coding.encode(code, values.data(), length / element);
      decode(at(outs[rank], offset), code, length);  // this host sees what the others see
      from = code;
    }
    for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
      if (host != host_) sends.push_back(link.send(from, coded(length), carrier(host, local_.rank)));
    }
  }

  std::vector<void*> pointers(local_.size);
  for (int each = 0; each < local_.size; ++each) pointers[each] = outs[hosts_[host_][each]];
  local_.all_gather(pointers, plain ? in : outs[rank], bytes);
  for (size_t offset = 0; offset < bytes; offset += kChunk) {
    const size_t length = std::min(kChunk, bytes - offset);
    auto next = incoming.begin();
    for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
      for (int round = 0; host != host_ && round < rounds_of(host); ++round) {
        if (next != incoming.end() && next->host == host && next->shard / local_.size == round) {
          link.wait(next->chunks[offset / kChunk]);
          if (!plain) {
            decode(at(outs[hosts_[host][next->shard]], offset), &next->encoded[coded(offset)], length);
          }
          ++next;
        }
        for (int each = 0; each < local_.size; ++each) {
          const int shard = round * local_.size + each;
          pointers[each] = shard < ranks_of(host) ? at(outs[hosts_[host][shard]], offset) : nowhere_.data();
        }
        local_.all_gather(pointers, pointers[local_.rank], length);
      }
    }
  }
  for (auto& send : sends) link.wait(send);
}

void Hierarchy::reduce_scatter(void* out, int out_dtype, const std::vector<const void*>& ins, size_t count,
                               const Reduction& how) {
  run("reduce_scatter", std::to_string(count) + " elements a rank",
      [&](Link& link) { scatter_sums(link, out, out_dtype, ins, count, how); });
}

void Hierarchy::scatter_sums(Link& link, void* out, int out_dtype, const std::vector<const void*>& ins, size_t count,
                             const Reduction& how) {
  const TwoLevels levels(how, size);
  const Coding coding{how.dtype, levels.wire(wire_)};
  const int hosts = static_cast<int>(hosts_.size());
  const size_t element = fsdp_tp_dtype_size(how.dtype), computed = fsdp_tp_dtype_size(levels.dtype);
  const bool plain = coding.wire == FSDP_TP_EXACT && how.dtype == levels.dtype;
  const size_t chunk = kChunk / computed;

  const size_t in_flight = std::min(kInFlight, (count + chunk - 1) / chunk);
  stages_.resize(std::max(stages_.size(), in_flight));

  const auto sum_inside = [&](void* to, int host, int round, size_t start, size_t length) {
    std::vector<const void*> pointers(local_.size);
    for (int each = 0; each < local_.size; ++each) {
      const int shard = round * local_.size + each;
      pointers[each] = shard < ranks_of(host) ? at(ins[hosts_[host][shard]], start * element) : nowhere_.data();
    }
    local_.reduce_scatter(to, levels.dtype, pointers, length, levels.inside);
  };
  const auto begin = [&](Stage& stage, size_t start) {
    for (auto& send : stage.sends) link.wait(send);
    stage.sends.clear();
    stage.start = start;
    stage.length = std::min(chunk, count - start);
    const size_t bytes = coding.bytes(stage.length);
    stage.incoming.resize(hosts);
    stage.receives.assign(hosts, {});
    for (int host = 0; host < hosts; ++host) {
      if (host == host_) continue;
      stage.receives[host] = link.receive(stage.incoming[host].of(bytes), bytes, carrier(host, local_.rank));
    }
    size_t used = 0;
    for (int distance = 1; distance <= hosts; ++distance) {  // this host's own last: nobody waits for it
      const int host = (host_ + distance) % hosts;
      for (int round = 0; round < rounds_of(host); ++round) {
        const int shard = round * local_.size + local_.rank;
        const bool sent = host != host_ && shard < ranks_of(host);
        if (stage.partial.size() <= used) stage.partial.emplace_back(), stage.outgoing.emplace_back();
        Buffer& partial = host == host_ && round == 0 ? stage.own : stage.partial[used];
        const void* from = partial.of(stage.length * computed);
        sum_inside(partial.data(), host, round, start, stage.length);
        if (!sent) continue;
        if (!plain) {
          coding.encode(stage.outgoing[used].of(bytes), from, stage.length);
          from = stage.outgoing[used].data();
        }
        stage.sends.push_back(link.send(from, bytes, hosts_[host][shard]));
        ++used;
      }
    }
  };
  const auto finish = [&](Stage& stage) {
    std::vector<const void*> sources(hosts, stage.own.data());
    stage.decoded.resize(hosts);
    for (int host = 0; host < hosts; ++host) {
      if (host == host_) continue;
      link.wait(stage.receives[host]);
      sources[host] = stage.incoming[host].data();
      if (plain) continue;
      coding.decode(stage.decoded[host].of(stage.length * computed), sources[host], stage.length);
      sources[host] = stage.decoded[host].data();
    }
    if (out_dtype == levels.dtype) {
      levels.combine(at(out, stage.start * computed), sources, stage.length);
    } else {
      levels.combine(stage.own.data(), sources, stage.length);
      fsdp_tp_cast(at(out, stage.start * element), out_dtype, stage.own.data(), levels.dtype, stage.length);
    }
  };

  size_t begun = 0, finished = 0;
  for (size_t start = 0; start < count; start += chunk) {
    begin(stages_[begun++ % in_flight], start);
    if (begun - finished == in_flight) finish(stages_[finished++ % in_flight]);
  }
  while (finished < begun) finish(stages_[finished++ % in_flight]);
  for (Stage& stage : stages_) {
    for (auto& send : stage.sends) link.wait(send);
  }
}

void Hierarchy::all_reduce(void* data, size_t count, const Reduction& how) {
  const size_t element = fsdp_tp_dtype_size(how.dtype);
  run("all_reduce", std::to_string(count) + " elements", [&](Link& link) {
    const size_t slice = count * element <= kSmall ? 0 : count / size;
    if (slice > 0) {
      std::vector<void*> slices;
      for (int each = 0; each < size; ++each) slices.push_back(at(data, each * slice * element));
      scatter_sums(link, slices[rank], how.dtype, {slices.begin(), slices.end()}, slice, how);
      // As it came, so it goes.
      const TwoLevels levels(how, size);
      const Coding coding{how.dtype, levels.wire(wire_)};
      gather(link, slices, slices[rank], slice * element, coding.wire == FSDP_TP_EXACT ? Coding{} : coding);
    }
    const size_t done = slice * size;
    if (done < count) sum_small(link, at(data, done * element), count - done, how);
  });
}

void Hierarchy::sum_small(Link& link, void* data, size_t count, const Reduction& how) {
  const TwoLevels levels(how, size);
  const size_t bytes = count * fsdp_tp_dtype_size(levels.dtype);
  Bytes sums(bytes);
  fsdp_tp_cast(sums.data(), levels.dtype, data, how.dtype, count);
  local_.all_reduce(sums.data(), count, {levels.dtype, levels.inside.op, levels.inside.factor});
  if (local_.rank == 0) {
    std::vector<Bytes> others(hosts_.size());
    std::vector<Link::Transfer> transfers;
    std::vector<const void*> sources(hosts_.size(), sums.data());
    for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
      if (host == host_) continue;
      others[host].resize(bytes);
      sources[host] = others[host].data();
      transfers.push_back(link.receive(others[host].data(), bytes, hosts_[host][0]));
      transfers.push_back(link.send(sums.data(), bytes, hosts_[host][0]));
    }
    for (auto& transfer : transfers) link.wait(transfer);
    levels.combine(sums.data(), sources, count);
  }
  local_.broadcast(sums.data(), bytes, 0);
  fsdp_tp_cast(data, how.dtype, sums.data(), levels.dtype, count);
}

// Large: each rank elsewhere gets a part from the root's host, and all gather the parts.
void Hierarchy::broadcast(void* data, size_t bytes, int root) {
  run("broadcast", std::to_string(bytes) + " bytes, root " + std::to_string(root), [&](Link& link) {
    const size_t slice = bytes <= kSmall ? 0 : bytes / size;
    if (slice > 0) {
      const int from = host_of(hosts_, root);
      std::vector<void*> slices;
      for (int each = 0; each < size; ++each) slices.push_back(at(data, each * slice));
      if (host_ == from) {
        local_.broadcast(data, slice * size, place_in(hosts_[host_], root));
        std::vector<Link::Transfer> sends;
        for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
          for (int shard = local_.rank; host != host_ && shard < ranks_of(host); shard += local_.size) {
            const int to = hosts_[host][shard];
            sends.push_back(link.send(slices[to], slice, to));
          }
        }
        for (auto& send : sends) link.wait(send);
      } else {
        auto receive = link.receive(slices[rank], slice, carrier(from, local_.rank));
        link.wait(receive);
      }
      gather(link, slices, slices[rank], slice, Coding{});
    }
    if (slice * size < bytes) spread_small(link, at(data, slice * size), bytes - slice * size, root);
  });
}

void Hierarchy::spread_small(Link& link, void* data, size_t bytes, int root) {
  const int from = host_of(hosts_, root);
  std::vector<Link::Transfer> transfers;
  for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
    if (host == from) continue;
    if (rank == root) transfers.push_back(link.send(data, bytes, hosts_[host][0]));
    if (rank == hosts_[host][0]) transfers.push_back(link.receive(data, bytes, root));
  }
  for (auto& transfer : transfers) link.wait(transfer);
  local_.broadcast(data, bytes, host_ == from ? place_in(hosts_[host_], root) : 0);
}

void Hierarchy::barrier() {
  run("barrier", "", [&](Link& link) {
    int32_t nothing = 0;
    sum_small(link, &nothing, 1, {FSDP_TP_INT32, FSDP_TP_SUM, 1});
  });
}

void Hierarchy::compare_calls(Link& link, const std::string& call) {
  constexpr size_t kText = 128;
  Bytes texts(kText * size);
  std::vector<void*> outs;
  for (int each = 0; each < size; ++each) outs.push_back(&texts[each * kText]);
  char own[kText] = "";
  std::snprintf(own, kText, "%s", call.c_str());
  gather(link, outs, own, kText, Coding{});
  for (int each = 0; each < size; ++each) {
    const char* const other = &texts[each * kText];
    TORCH_CHECK_WITH(DistBackendError, std::strcmp(other, own) == 0, "ranks called different collectives: rank ", rank,
                     " ", own, ", rank ", each, " ", other);
  }
}

void Hierarchy::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  local_.set_timeout(patience(timeout));
}

void Hierarchy::abort(const std::string& reason) {
  local_.abort(reason);
  interrupt_.raise();
}

void Hierarchy::leave() { local_.leave(); }

}  // namespace fsdp_tp
