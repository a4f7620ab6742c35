// Runs a list of calls, one after the other. Each is divided into parts, which the threads take as they come: one that
// the system has taken off its processor delays the others by the part that it holds, and by nothing else.

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

constexpr int MAX_ARGUMENTS = 15;
constexpr int PATIENCE = 2000;  // looks, before a thread that waits lets others run

struct Call {
    void (*kernel)(const int64_t* arguments, long part, long num_parts);
    int64_t num_parts;
    int64_t arguments[MAX_ARGUMENTS];
};

struct alignas(64) Progress {
    std::atomic<long> taken{0}, done{0};
};

void take_part(const Call& call, Progress& progress) {
    while (progress.taken.load(std::memory_order_relaxed) < call.num_parts) {
        const long part = progress.taken.fetch_add(1, std::memory_order_relaxed);
        if (part >= call.num_parts) break;
        call.kernel(call.arguments, part, call.num_parts);
        progress.done.fetch_add(1, std::memory_order_release);
    }
    for (int looks = 0; progress.done.load(std::memory_order_acquire) < call.num_parts; looks++)
        if (looks < PATIENCE)
            _mm_pause();
        else
            sched_yield();
}

}  // namespace

extern "C" void run(const Call* calls, long count) {
    if (count == 1 && calls->num_parts == 1) return calls->kernel(calls->arguments, 0, 1);
    std::vector<Progress> progress(count);
#pragma omp parallel
    for (long index = 0; index < count; index++) take_part(calls[index], progress[index]);
}
