/* A pool of threads that is quick on a quiet machine and modest on a busy one.
 *
 * A call splits its indices into one contiguous share per thread. A thread works through its own
 * share, so that the same indices, and the weights that they read, run on the same core in every
 * call; then it takes indices left in other shares. The calling thread also works: it never waits for
 * a thread that sleeps or has no core, only for running tasks. A waiting thread spins for a moment,
 * as the next call usually follows at once, then sleeps; a thread that often spun in vain spins less.
 *
 * A share is one word: the number of the call and the next index. A thread that comes late, when its
 * call is over, fails to claim an index and touches nothing. One call uses the pool at a time; a
 * caller that finds it busy, in a task or on another thread, runs its tasks itself.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>

#if defined(__linux__) && !defined(POOL_WITHOUT_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_FUTEX 1
#else
#define HAS_FUTEX 0
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_THREADS 256
#define STACK_BYTES ((size_t)4 << 20)
#define MAX_SPIN_NS 50000
#define MIN_SPIN_NS 1000
#define NUM_PAUSES 32 /* between two looks at the clock */
#define CACHE_LINE 64

/* A thread that may sleep. Only itself reads `spin_ns`. */
typedef struct {
    _Alignas(CACHE_LINE) atomic_uint is_asleep;
    int64_t spin_ns;
} Waiter;

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t next; /* number of the call << 32 | index */
    atomic_uint end;
} Share;

static struct {
    atomic_bool is_taken;
    int num_workers;
    /* The call. Atomic because a late thread may read it while the next call writes it. */
    _Atomic(Task) task;
    _Atomic(void *) context;
    atomic_int num_threads;
    atomic_uint float_mode;
    _Alignas(CACHE_LINE) atomic_uint call; /* its number */
    _Alignas(CACHE_LINE) atomic_uint num_left;
    atomic_uint finished; /* number of the last finished call */
    Waiter caller, workers[MAX_THREADS];
    Share shares[MAX_THREADS];
} pool;

/* ---- waiting ---------------------------------------------------------------------------------- */

#if HAS_FUTEX
static void sleep_while_asleep(Waiter *w) {
    syscall(SYS_futex, &w->is_asleep, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
}

static void rouse(Waiter *w) {
    syscall(SYS_futex, &w->is_asleep, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
#else
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;

static void sleep_while_asleep(Waiter *w) {
    pthread_mutex_lock(&mutex);
    while (atomic_load(&w->is_asleep)) pthread_cond_wait(&woken, &mutex);
    pthread_mutex_unlock(&mutex);
}

static void rouse(Waiter *w) {
    (void)w;
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&mutex);
}
#endif

static void wake(Waiter *w) {
    if (atomic_load(&w->is_asleep) && atomic_exchange(&w->is_asleep, 0)) rouse(w);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` does nothing on most cores */
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Whether `*word` changed from `value` before the time was up. */
static bool spin_while(atomic_uint *word, unsigned value, int64_t spin_ns) {
    int64_t end_ns = now_ns() + spin_ns;
    do
        for (int i = 0; i < NUM_PAUSES; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return true;
            pause_briefly();
        }
    while (now_ns() < end_ns);
    return false;
}

/* Return once `*word` is not `value`. The thread that changes it calls `wake` afterwards. */
static void wait_while(Waiter *w, atomic_uint *word, unsigned value) {
    if (w->spin_ns && spin_while(word, value, w->spin_ns)) {
        w->spin_ns = 2 * w->spin_ns < MAX_SPIN_NS ? 2 * w->spin_ns : MAX_SPIN_NS;
        return;
    }
    w->spin_ns = w->spin_ns / 2 > MIN_SPIN_NS ? w->spin_ns / 2 : MIN_SPIN_NS;
    for (;;) {
        atomic_store(&w->is_asleep, 1);
        if (atomic_load(word) != value) break;
        sleep_while_asleep(w);
    }
    atomic_store(&w->is_asleep, 0);
}

/* ---- working ---------------------------------------------------------------------------------- */

/* This thread's rounding and denormal modes, without the flags that sums leave. */
static unsigned get_float_mode(void) {
#if defined(__x86_64__)
    return _mm_getcsr() & ~0x3Fu;
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (unsigned)mode;
#else
    return 0;
#endif
}

static void set_float_mode(unsigned mode) {
#if defined(__x86_64__)
    _mm_setcsr(mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode));
#else
    (void)mode;
#endif
}

/* The next index of a share, or -1 if none is left or the call is over. */
static int64_t claim(Share *share, unsigned call) {
    unsigned end = atomic_load(&share->end);
    uint64_t next = atomic_load(&share->next);
    do
        if (next >> 32 != call || (uint32_t)next >= end) return -1;
    while (!atomic_compare_exchange_weak(&share->next, &next, next + 1));
    return (uint32_t)next;
}

/* Run the tasks left in a call. Until a claim succeeds the call may be over, and the values read
 * belong to another; a call with an index left is not over until that task is counted. */
static void take_part(unsigned call, int worker) {
    Task task = atomic_load(&pool.task);
    void *context = atomic_load(&pool.context);
    unsigned float_mode = atomic_load(&pool.float_mode), num_done = 0;
    int num_threads = atomic_load(&pool.num_threads);
    for (int i = 0; i < num_threads; i++) {
        Share *share = &pool.shares[(worker + i) % num_threads];
        int64_t index;
        while ((index = claim(share, call)) >= 0) {
            if (!num_done++) set_float_mode(float_mode);
            task(context, index, worker);
        }
    }
    if (num_done && atomic_fetch_sub(&pool.num_left, num_done) == num_done) {
        atomic_store(&pool.finished, call);
        wake(&pool.caller);
    }
}

static void *work(void *argument) {
    int worker = (int)(intptr_t)argument;
    Waiter *w = &pool.workers[worker];
    char name[16];
    snprintf(name, sizeof name, "kernels-%d", worker);
#if defined(__linux__)
    pthread_setname_np(pthread_self(), name);
#elif defined(__APPLE__)
    pthread_setname_np(name);
#endif
    for (unsigned call = 0;; call = atomic_load(&pool.call)) {
        if (worker < atomic_load(&pool.num_threads))
            take_part(call, worker);
        else
            w->spin_ns = 0;
        wait_while(w, &pool.call, call);
    }
    return NULL;
}

/* ---- calling ---------------------------------------------------------------------------------- */

/* After a fork the child has none of the threads. */
static void forget_workers(void) {
#if !HAS_FUTEX
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    woken = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
#endif
    for (int i = 0; i < MAX_THREADS; i++) atomic_store(&pool.workers[i].is_asleep, 0);
    atomic_store(&pool.caller.is_asleep, 0);
    atomic_store(&pool.finished, atomic_load(&pool.call));
    pool.num_workers = 0;
    atomic_store(&pool.is_taken, false);
}

/* Workers block signals: the process's own threads handle them. */
static bool start_worker(int worker) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&thread, &attributes, work, (void *)(intptr_t)worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return status == 0;
}

static void start_workers(int num_workers) {
    static bool is_fork_handled;
    if (!is_fork_handled) is_fork_handled = !pthread_atfork(NULL, NULL, forget_workers);
    while (pool.num_workers < num_workers && start_worker(pool.num_workers + 1)) pool.num_workers++;
}

/* A share gets its new number before its new end: a late thread with the old number either finds the
 * old share, in which nothing is left, or fails. */
static unsigned publish(uint64_t num_tasks, int num_threads, Task task, void *context) {
    unsigned call = atomic_load(&pool.call) + 1;
    for (int i = 0; i < num_threads; i++) {
        uint64_t begin = num_tasks * (uint64_t)i / (uint64_t)num_threads;
        uint64_t end = num_tasks * (uint64_t)(i + 1) / (uint64_t)num_threads;
        atomic_store_explicit(&pool.shares[i].next, (uint64_t)call << 32 | begin,
                              memory_order_release);
        atomic_store_explicit(&pool.shares[i].end, (unsigned)end, memory_order_release);
    }
    atomic_store_explicit(&pool.task, task, memory_order_release);
    atomic_store_explicit(&pool.context, context, memory_order_release);
    atomic_store_explicit(&pool.num_threads, num_threads, memory_order_release);
    atomic_store_explicit(&pool.float_mode, get_float_mode(), memory_order_release);
    atomic_store_explicit(&pool.num_left, (unsigned)num_tasks, memory_order_release);
    atomic_store(&pool.call, call);
    return call;
}

static void run_alone(int64_t num_tasks, Task task, void *context) {
    for (int64_t index = 0; index < num_tasks; index++) task(context, index, 0);
}

void run_tasks(int64_t num_tasks, int num_threads, Task task, void *context) {
    if (num_threads > num_tasks) num_threads = (int)num_tasks;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    if (num_threads <= 1 || num_tasks > UINT32_MAX || atomic_exchange(&pool.is_taken, true)) {
        run_alone(num_tasks, task, context);
        return;
    }
    start_workers(num_threads - 1);
    unsigned call = publish((uint64_t)num_tasks, num_threads, task, context);
    for (int worker = 1; worker < num_threads; worker++) wake(&pool.workers[worker]);
    take_part(call, 0);
    wait_while(&pool.caller, &pool.finished, call - 1);
    atomic_store(&pool.is_taken, false);
}
