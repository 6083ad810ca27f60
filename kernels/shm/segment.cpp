#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "shm/failure.h"
#include "shm/fsdp_tp_shm.h"

namespace fsdp_tp {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

ino_t inode(int fd) {
  struct stat status;
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Segment>> segments;  // by handle
};

Registry& registry() {
  static Registry* const the_registry = new Registry;
  return *the_registry;
}

// Closes the file unless a segment has taken it over.
struct File {
  explicit File(int descriptor) : fd(descriptor) {}
  ~File() {
    if (fd >= 0) close(fd);
  }
  File(File&& other) noexcept : fd(other.release()) {}
  File& operator=(const File&) = delete;
  int release() {
    const int released = fd;
    fd = -1;
    return released;
  }
  int fd;
};

}  // namespace

Failure system_failure(const std::string& call) { return {FSDP_TP_SYSTEM, call + ": " + std::strerror(errno)}; }

namespace {

struct Found {
  File file;
  std::size_t bytes;
  int kind;
};

// The file that a handle names.
Found open_handle(const std::string& handle) {
  char path[64] = "";
  int process = 0;
  int descriptor = 0;
  unsigned long long node = 0;
  std::size_t bytes = 0;
  int kind = FSDP_TP_MEMFD;
  int fd = -1;
  if (std::sscanf(handle.c_str(), "memfd %d %d %llu %zu", &process, &descriptor, &node, &bytes) == 4) {
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", process, descriptor);
    fd = open(path, O_RDWR | O_CLOEXEC);
  } else if (std::sscanf(handle.c_str(), "named %63s %llu %zu", path, &node, &bytes) == 3) {
    kind = FSDP_TP_NAMED;
    fd = shm_open(path, O_RDWR, 0600);
  } else {
    throw Failure{FSDP_TP_BAD_ARGUMENT, "'" + handle + "' is not the handle of a segment"};
  }
  if (fd < 0) throw system_failure(std::string("open of ") + path);
  Found found{File(fd), bytes, kind};
  struct stat status;
  if (fstat(fd, &status) != 0) throw system_failure("fstat");
  if (status.st_ino != node || static_cast<std::size_t>(status.st_size) != bytes) {
    throw Failure{FSDP_TP_SYSTEM,
                  std::string(path) + " is not the segment that its handle names; has its process ended?"};
  }
  return found;
}

}  // namespace

Segment::Segment(int file, std::size_t bytes, int kind) : bytes_(bytes), kind_(kind) {
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) throw system_failure("mmap of " + std::to_string(bytes) + " bytes");
  data_ = static_cast<std::byte*>(mapped);
  // Advice only: without huge pages everything works, with more page faults.
  if (bytes >= kHugePage) madvise(mapped, bytes, MADV_HUGEPAGE);
}

std::shared_ptr<Segment> Segment::create(std::size_t bytes, int kind) {
  std::string name;
  int fd;
  if (kind == FSDP_TP_MEMFD) {
    fd = memfd_create("fsdp_tp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) throw system_failure("memfd_create");
  } else {
    unsigned long long random;
    if (getrandom(&random, sizeof random, 0) != sizeof random) throw system_failure("getrandom");
    char text[64];
    std::snprintf(text, sizeof text, "/fsdp_tp-%d-%016llx", getpid(), random);
    name = text;
    fd = shm_open(text, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0) throw system_failure("shm_open of " + name);
  }
  File file(fd);
  std::shared_ptr<Segment> segment;
  try {
    if (fchmod(fd, 0600) != 0) throw system_failure("fchmod");
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw system_failure("ftruncate to " + std::to_string(bytes));
    // A full /dev/shm must be an error here, not a SIGBUS at some later access. A memfd has no such limit.
    if (kind == FSDP_TP_NAMED && (errno = posix_fallocate(fd, 0, static_cast<off_t>(bytes))) != 0) {
      throw system_failure("reserving " + std::to_string(bytes) + " bytes of /dev/shm");
    }
    segment.reset(new Segment(fd, bytes, kind));
  } catch (...) {
    if (!name.empty()) shm_unlink(name.c_str());
    throw;
  }
  segment->fd_ = file.release();
  char text[128];
  if (kind == FSDP_TP_MEMFD) {
    // A peer that shrank the file would turn our next access into SIGBUS.
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    std::snprintf(text, sizeof text, "memfd %d %d %llu %zu", getpid(), fd, static_cast<unsigned long long>(inode(fd)),
                  bytes);
  } else {
    std::snprintf(text, sizeof text, "named %s %llu %zu", name.c_str(), static_cast<unsigned long long>(inode(fd)),
                  bytes);
    segment->name_ = name;
    segment->maker_ = getpid();
  }
  segment->handle_ = text;
  const std::lock_guard lock(registry().mutex);
  registry().segments[text] = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(const std::string& handle) {
  const std::lock_guard lock(registry().mutex);
  std::weak_ptr<Segment>& known = registry().segments[handle];
  if (auto segment = known.lock()) return segment;
  Found found = open_handle(handle);
  std::shared_ptr<Segment> segment(new Segment(found.file.fd, found.bytes, found.kind));
  segment->handle_ = handle;
  known = segment;
  return segment;
}

Segment::~Segment() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().segments.erase(handle_);
  }
  unlink();
  munmap(data_, bytes_);
}

void Segment::unlink() {
  if (!name_.empty() && maker_ == getpid()) shm_unlink(name_.c_str());
  name_.clear();
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

bool Segment::exists(const std::string& handle) {
  try {
    open_handle(handle);
    return true;
  } catch (const Failure&) {
    return false;
  }
}

void Segment::prefault() {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data_, bytes_, MADV_POPULATE_WRITE) == 0) return;
  if (errno == ENOMEM || errno == EFAULT) throw system_failure("making " + std::to_string(bytes_) + " bytes present");
#endif
  // Older kernels: one read a page maps it, and changes nothing that a peer has written.
  const long page = sysconf(_SC_PAGESIZE);
  for (std::size_t at = 0; at < bytes_; at += static_cast<std::size_t>(page)) {
    static_cast<void>(*reinterpret_cast<const volatile std::byte*>(data_ + at));
  }
}

}  // namespace fsdp_tp
