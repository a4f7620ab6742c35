// Runs a list of calls, one after the other. Each is divided into parts, which the threads take as they come: one that
// the system has taken off its processor delays the others by the part that it holds, and by nothing else.
//
// The threads are kept. Between two lists they look for the next one for some milliseconds, then they sleep: to wake one
// takes longer than many a call, in a virtual machine above all.

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int MAX_ARGUMENTS = 18;
constexpr int LOOKS = 2000;                    // before a thread that waits lets others run between its looks
constexpr std::chrono::milliseconds AWAKE{5};  // before it sleeps, where nothing is computed

// Looks whether it `is_over` until it is, or until the `end`; whether it is.
template <class IsOver>
bool look(IsOver is_over, Clock::time_point end = Clock::time_point::max()) {
    for (int looks = 0; looks < LOOKS; looks++) {
        if (is_over()) return true;
        _mm_pause();
    }
    while (!is_over()) {
        if (Clock::now() > end) return false;
        sched_yield();
    }
    return true;
}

struct Call {
    void (*kernel)(const int64_t* arguments, long part, long num_parts);
    int64_t num_parts;
    int64_t arguments[MAX_ARGUMENTS];
};

struct alignas(64) Progress {
    std::atomic<long> taken{0}, done{0};
};

struct List {
    const Call* calls;
    long count;
    std::vector<Progress> progress;

    void run() {
        for (long index = 0; index < count; index++) {
            const Call& call = calls[index];
            Progress& at = progress[index];
            while (at.taken.load(std::memory_order_relaxed) < call.num_parts) {
                const long part = at.taken.fetch_add(1, std::memory_order_relaxed);
                if (part >= call.num_parts) break;
                call.kernel(call.arguments, part, call.num_parts);
                at.done.fetch_add(1, std::memory_order_release);
            }
            look([&] { return at.done.load(std::memory_order_acquire) == call.num_parts; });
        }
    }
};

// Threads beside the caller's that help with one list at a time. They end with the process.
struct Helpers {
    std::mutex in_use;
    long count = 0;
    List* list = nullptr;             // the one to help with
    std::atomic<uint32_t> number{0};  // of the list; it grows with each
    std::atomic<long> wanted{0}, inside{0};

    void start(long total) {
        for (; count < total; count++) std::thread(&Helpers::help, this, count).detach();
    }

    void help(long own) {
        for (uint32_t seen = 0;;) {
            const auto is_new = [&] { return number.load(std::memory_order_acquire) != seen; };
            if (!look(is_new, Clock::now() + AWAKE)) number.wait(seen, std::memory_order_acquire);
            seen = number.load(std::memory_order_acquire);
            inside.fetch_add(1);
            if (own < wanted.load()) list->run();
            inside.fetch_sub(1);
        }
    }

    void run(List& given, long num_threads) {
        start(num_threads - 1);
        list = &given;
        wanted.store(num_threads - 1);
        number.fetch_add(1, std::memory_order_release);
        number.notify_all();
        given.run();
        wanted.store(0);  // who has not begun by now has nothing left to do
        look([&] { return inside.load() == 0; });
    }
};

Helpers& helpers() {
    static Helpers* all = new Helpers;  // never destroyed: its threads look at it until the process has ended
    return *all;
}

}  // namespace

extern "C" void run(const Call* calls, long count, long num_threads) {
    if (count == 1 && calls->num_parts == 1) return calls->kernel(calls->arguments, 0, 1);
    List list{calls, count, std::vector<Progress>(count)};
    std::unique_lock lock(helpers().in_use, std::try_to_lock);  // who comes meanwhile computes alone
    lock.owns_lock() && num_threads > 1 ? helpers().run(list, num_threads) : list.run();
}
