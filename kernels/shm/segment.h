// Memory that several processes map.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace fsdp_tp {

class Segment {
 public:
  // New, zero, for this user alone. `kind` is a fsdp_tp_segment_kind.
  static std::shared_ptr<Segment> create(std::size_t bytes, int kind);
  // What another process made, by its handle. A process maps a segment once, however often it attaches.
  static std::shared_ptr<Segment> attach(const std::string& handle);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  const std::string& handle() const { return handle_; }
  int kind() const { return kind_; }
  // Whether it can still be attached.
  static bool exists(const std::string& handle);
  // All who need it have attached: removes the name, if it has one, and closes the file. Mappings stay.
  void unlink();
  // Makes all pages present, in this process's page table too, so that no later use pays for page faults.
  void prefault();

 private:
  // Maps a file, and leaves it to the caller.
  Segment(int file, std::size_t bytes, int kind);

  int fd_ = -1;  // of what this process has made, for others to open
  std::byte* data_ = nullptr;
  std::size_t bytes_;
  int kind_;
  std::string handle_;
  std::string name_;  // of a named segment that this process has to unlink, else empty
  int maker_ = 0;     // its process: a fork of it has a copy of this object, and must leave the name alone
};

}  // namespace fsdp_tp
