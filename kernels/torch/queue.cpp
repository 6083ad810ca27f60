#include "torch/queue.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

namespace fsdp_tp {

namespace {

using std::chrono::microseconds;

// How long an operation may wait for a wait() before the worker takes it.
constexpr microseconds kPatience{200};
// The worker looks by itself for this many periods before it sleeps: waking it costs each caller more.
constexpr microseconds kPeriod{250};
constexpr int kPeriodsAwake = 20;

}  // namespace

Queue::Queue(std::function<bool()> poll, std::string closed_error)
    : poll_(std::move(poll)), closed_error_(std::move(closed_error)) {}

void Queue::push(c10::intrusive_ptr<QueuedWork> work) {
  std::unique_lock lock(mutex_);
  check_open();
  tasks_.push_back(std::move(work));
  ++num_tasks_;
  wake(lock);
}

void Queue::run_until(QueuedWork& work) {
  while (!work.executed_.load(std::memory_order_acquire)) {
    std::unique_lock running(running_);  // waits for what the worker is at, which may be `work`
    if (work.executed_) return;
    auto head = pop();
    if (!head) return;  // stopped
    execute(*head, running);
  }
}

void Queue::poll_soon() {
  std::unique_lock lock(mutex_);
  if (stopped_) return;
  polling_ = true;
  wake(lock);
}

bool Queue::busy() {
  std::unique_lock running(running_, std::try_to_lock);
  return !running || num_tasks_ > 0;
}

void Queue::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_one();
  if (worker_.joinable()) worker_.join();
  std::deque<c10::intrusive_ptr<QueuedWork>> left;
  {
    std::scoped_lock lock(running_, mutex_);
    left.swap(tasks_);
    num_tasks_ = 0;
  }
  for (auto& work : left) {
    try {
      check_open();
    } catch (...) {
      work->executed_ = true;
      work->body_ = nullptr;
      work->complete(std::current_exception());
    }
  }
}

c10::intrusive_ptr<QueuedWork> Queue::pop() {
  if (num_tasks_.load(std::memory_order_acquire) == 0) return {};
  std::lock_guard lock(mutex_);
  if (tasks_.empty()) return {};
  auto head = std::move(tasks_.front());
  tasks_.pop_front();
  --num_tasks_;
  return head;
}

void Queue::execute(QueuedWork& work, std::unique_lock<std::mutex>& running) {
  std::exception_ptr error;
  try {
    work.body_();
  } catch (...) {
    error = std::current_exception();
  }
  work.body_ = nullptr;  // lets go of the tensors
  work.executed_.store(true, std::memory_order_release);
  // A callback of the future may want to run operations of this queue.
  running.unlock();
  work.complete(error);
}

void Queue::check_open() const { TORCH_CHECK_WITH(DistBackendError, !stopped_, closed_error_); }

void Queue::wake(std::unique_lock<std::mutex>& lock) {
  if (!worker_.joinable()) worker_ = std::thread(&Queue::serve, this);
  const bool asleep = asleep_;
  lock.unlock();
  if (asleep) wake_.notify_one();
}

void Queue::serve() {
  c10::setThreadName("fsdp_tp_shm");
  std::unique_lock lock(mutex_);
  int idle = 0;
  while (!stopped_) {
    if (!tasks_.empty() && std::chrono::steady_clock::now() >= tasks_.front()->queued_ + kPatience) {
      lock.unlock();
      std::unique_lock running(running_);
      if (auto head = pop()) execute(*head, running);
      if (running) running.unlock();
      lock.lock();
      idle = 0;
      continue;
    }
    if (polling_) {
      polling_ = false;
      lock.unlock();
      const bool again = poll_();
      lock.lock();
      polling_ |= again;
      idle = 0;
    }
    if (!tasks_.empty() || polling_ || ++idle < kPeriodsAwake) {
      wake_.wait_for(lock, kPeriod, [this] { return stopped_.load(); });
      continue;
    }
    asleep_ = true;
    wake_.wait(lock, [this] { return stopped_ || polling_ || !tasks_.empty(); });
    asleep_ = false;
    idle = 0;
  }
}

}  // namespace fsdp_tp
