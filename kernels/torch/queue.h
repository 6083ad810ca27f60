// The operations of one backend, one at a time and in the order of the calls.

#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "torch/work.h"

namespace fsdp_tp {

// A synchronous operation runs in the thread that calls it, after all that is queued. An asynchronous
// one is run by whoever comes first: a wait() for it, or the worker thread after a moment. Functional
// collectives wait at once, and then the hand-over to another thread would cost more than the operation.
class Queue {
 public:
  // `poll` is called by the worker now and then; returns whether it wants to be called again.
  Queue(std::function<bool()> poll, std::string closed_error);
  ~Queue() { stop(); }

  void push(c10::intrusive_ptr<QueuedWork> work);
  // Runs queued operations up to and including `work`.
  void run_until(QueuedWork& work);
  // Starts or wakes the worker, which then polls.
  void poll_soon();
  // Whether an operation is queued or running.
  bool busy();
  // Ends the worker, after the operation that it is running, and fails what is still queued.
  void stop();

  // Runs `body` in this thread, after all that is queued.
  template <typename Body>
  void run(Body&& body) {
    for (;;) {
      std::unique_lock running(running_);
      if (auto head = pop()) {
        execute(*head, running);
        continue;
      }
      check_open();
      body();
      return;
    }
  }

 private:
  c10::intrusive_ptr<QueuedWork> pop();
  void execute(QueuedWork& work, std::unique_lock<std::mutex>& running);
  void check_open() const;
  void wake(std::unique_lock<std::mutex>& lock);
  void serve();

  const std::function<bool()> poll_;
  const std::string closed_error_;
  std::mutex running_;  // held while an operation runs, and to take one off the queue
  std::mutex mutex_;    // guards what follows
  std::condition_variable wake_;
  std::deque<c10::intrusive_ptr<QueuedWork>> tasks_;
  std::atomic<size_t> num_tasks_{0};  // of tasks_, to see without mutex_ that there is none
  std::thread worker_;
  bool asleep_ = false;
  bool polling_ = false;
  std::atomic<bool> stopped_{false};
};

}  // namespace fsdp_tp
