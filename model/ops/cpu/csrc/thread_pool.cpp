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

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "shared_struct.h"

namespace {

constexpr int SPINS_BEFORE_YIELD = 2000;
constexpr int64_t IDLE_BEFORE_SLEEP = 5'000'000;  // nanoseconds

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Tells the processor that this thread only waits.
void relax() {
#ifdef __aarch64__
    asm volatile("isb");
#else
    __builtin_ia32_pause();
#endif
}

// Waits, awake, until `is_done` holds or the deadline has passed. Returns whether it holds.
template <class IsDone>
bool spin_until(IsDone is_done, int64_t deadline = std::numeric_limits<int64_t>::max()) {
    for (int spins = 0; spins < SPINS_BEFORE_YIELD; spins++) {
        if (is_done()) return true;
        relax();
    }
    while (!is_done()) {
        if (now() > deadline) return false;
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
    std::atomic<bool> in_use{false};
    long num_workers = 0;
    long max_workers = std::numeric_limits<long>::max();  // smaller after the system has refused to start a thread
    CallList* list = nullptr;             // the list to help with
    std::atomic<uint32_t> generation{0};  // grows with each list, so that workers notice a new one
    std::atomic<long> num_wanted{0};      // workers with a smaller index help with the list
    std::atomic<long> num_active{0};      // workers that may be using `list`
    std::atomic<long> num_asleep{0};      // workers that sleep, or are about to
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t is_new_list = PTHREAD_COND_INITIALIZER;

    // Starts workers until there are `total`, unless the system refuses one: then no more are started later, either.
    void start_workers(long total) {
        while (num_workers < std::min(total, max_workers)) {
            pthread_t thread;
            if (pthread_create(&thread, nullptr, start_worker, (void*)num_workers)) {
                max_workers = num_workers;
            } else {
                pthread_detach(thread);
                num_workers++;
            }
        }
    }

    static void* start_worker(void* index);

    // Sleeps while the generation is `seen`.
    void sleep(uint32_t seen) {
        num_asleep.fetch_add(1);
        pthread_mutex_lock(&mutex);
        while (generation.load() == seen) pthread_cond_wait(&is_new_list, &mutex);
        pthread_mutex_unlock(&mutex);
        num_asleep.fetch_sub(1);
    }

    void wake_all() {
        if (num_asleep.load() == 0) return;
        pthread_mutex_lock(&mutex);  // then no worker is between its look at the generation and its wait
        pthread_mutex_unlock(&mutex);
        pthread_cond_broadcast(&is_new_list);
    }

    void work(long index) {
        for (uint32_t seen = 0;;) {
            const auto is_new = [&] { return generation.load(std::memory_order_acquire) != seen; };
            if (!spin_until(is_new, now() + IDLE_BEFORE_SLEEP)) sleep(seen);
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
        generation.fetch_add(1);
        wake_all();
        new_list.run();
        num_wanted.store(0);  // a worker that has not begun by now has nothing left to do
        spin_until([&] { return num_active.load() == 0; });
    }
};

constinit ThreadPool pool;  // never destroyed: its threads use it until the process ends

void* ThreadPool::start_worker(void* index) {
    pool.work((long)index);
    return nullptr;
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
    // One thread needs no pool. While another caller uses the pool, this one computes alone.
    if (num_threads == 1 || pool.in_use.exchange(true, std::memory_order_acquire)) {
        list.run();
        return num_threads;
    }
    pool.run(list, num_threads);
    const long num_available = std::min(num_threads, pool.num_workers + 1);
    pool.in_use.store(false, std::memory_order_release);
    return num_available;
}

// Runs one call.
extern "C" long run_call(Kernel* kernel, long num_tasks, const void* arguments, long num_threads) {
    const KernelCall call = {kernel, num_tasks, arguments};
    return run_calls(&call, 1, num_threads);
}
