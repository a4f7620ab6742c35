// A thread pool that runs a list of kernel calls, one call after the other.
//
// Each call is divided into tasks. A thread takes the next task whenever it has finished one, so a thread that the
// system has suspended delays the others by its one task at most.
//
// The threads are started once and kept. After a list they spin for some milliseconds, since the next list usually
// follows soon, and then sleep: waking a thread takes longer than many calls do, above all in a virtual machine.
//
// If the system refuses to start a thread (a container limits their number, or memory is short), the pool goes on with
// the threads that it has.

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "shared_struct.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int SPINS_BEFORE_YIELD = 2000;
constexpr std::chrono::milliseconds IDLE_BEFORE_SLEEP{5};

// Waits, awake, until `is_done` holds or the deadline has passed. Returns whether it holds.
template <class IsDone>
bool spin_until(IsDone is_done, Clock::time_point deadline = Clock::time_point::max()) {
    for (int spins = 0; spins < SPINS_BEFORE_YIELD; spins++) {
        if (is_done()) return true;
        _mm_pause();
    }
    while (!is_done()) {
        if (Clock::now() > deadline) return false;
        sched_yield();
    }
    return true;
}

using Kernel = void(const void* arguments, long task, long num_tasks);

STRUCT(KernelCall, (Kernel*, kernel), (long, num_tasks), (const void*, arguments));

// How many tasks of a call have been taken, and how many are done. Each call has a cache line of its own.
struct alignas(64) Progress {
    std::atomic<long> num_taken{0}, num_done{0};
};

struct CallList {
    const KernelCall* calls;
    long num_calls;
    std::vector<Progress> progress;

    // Every thread that helps runs this function. A call starts when all tasks of the call before it are done.
    void run() {
        for (long index = 0; index < num_calls; index++) {
            const KernelCall& call = calls[index];
            Progress& at = progress[index];
            while (at.num_taken.load(std::memory_order_relaxed) < call.num_tasks) {
                const long task = at.num_taken.fetch_add(1, std::memory_order_relaxed);
                if (task >= call.num_tasks) break;
                call.kernel(call.arguments, task, call.num_tasks);
                at.num_done.fetch_add(1, std::memory_order_release);
            }
            spin_until([&] { return at.num_done.load(std::memory_order_acquire) == call.num_tasks; });
        }
    }
};

// Worker threads that help the calling thread with one list at a time. They end with the process.
struct ThreadPool {
    std::mutex in_use;
    long num_workers = 0;
    long max_workers = std::numeric_limits<long>::max();  // smaller after the system has refused to start a thread
    CallList* list = nullptr;             // the list to help with
    std::atomic<uint32_t> generation{0};  // grows with each list, so that workers notice a new one
    std::atomic<long> num_wanted{0};      // workers with a smaller index help with the list
    std::atomic<long> num_active{0};      // workers that may be using `list`

    // Starts workers until there are `total`, unless the system refuses one: then no more are started later, either.
    void start_workers(long total) {
        try {
            for (; num_workers < std::min(total, max_workers); num_workers++)
                std::thread(&ThreadPool::work, this, num_workers).detach();
        } catch (const std::system_error&) {
            max_workers = num_workers;
        }
    }

    void work(long index) {
        for (uint32_t seen = 0;;) {
            const auto is_new = [&] { return generation.load(std::memory_order_acquire) != seen; };
            if (!spin_until(is_new, Clock::now() + IDLE_BEFORE_SLEEP)) generation.wait(seen, std::memory_order_acquire);
            seen = generation.load(std::memory_order_acquire);
            num_active.fetch_add(1);
            if (index < num_wanted.load()) list->run();
            num_active.fetch_sub(1);
        }
    }

    void run(CallList& new_list, long num_threads) {
        start_workers(num_threads - 1);
        list = &new_list;
        num_wanted.store(num_threads - 1);
        generation.fetch_add(1, std::memory_order_release);
        generation.notify_all();
        new_list.run();
        num_wanted.store(0);  // a worker that has not begun by now has nothing left to do
        spin_until([&] { return num_active.load() == 0; });
    }
};

ThreadPool& thread_pool() {
    static ThreadPool* pool = new ThreadPool;  // never destroyed: its threads use it until the process ends
    return *pool;
}

}  // namespace

EXPORT_DESCRIPTION(kernel_call, KernelCall)

// Runs `num_calls` calls on `num_threads` threads, the calling thread among them. Returns on how many threads at most,
// which is less than `num_threads` if the system has refused to start a thread.
extern "C" long run_calls(const KernelCall* calls, long num_calls, long num_threads) {
    if (num_calls == 1 && calls->num_tasks == 1) {
        calls->kernel(calls->arguments, 0, 1);
        return num_threads;
    }
    CallList list{calls, num_calls, std::vector<Progress>(num_calls)};
    std::unique_lock lock(thread_pool().in_use, std::defer_lock);
    // One thread needs no pool. While another caller uses the pool, this one computes alone.
    if (num_threads == 1 || !lock.try_lock()) {
        list.run();
        return num_threads;
    }
    thread_pool().run(list, num_threads);
    return std::min(num_threads, thread_pool().num_workers + 1);
}

// Runs one call.
extern "C" long run_call(Kernel* kernel, long num_tasks, const void* arguments, long num_threads) {
    const KernelCall call = {kernel, num_tasks, arguments};
    return run_calls(&call, 1, num_threads);
}
