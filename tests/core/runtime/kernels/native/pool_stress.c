/* Drives core/runtime/kernels/native/pool.c: each check returns 0, or says what went wrong and returns 1. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"

#define MAX_TASKS 3000
#define MAX_THREADS 40

#define EXPECT(condition)                                                  \
    do                                                                     \
        if (!(condition)) {                                                \
            fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
            return 1;                                                      \
        }                                                                  \
    while (0)

typedef struct {
    int64_t num_tasks;
    int num_threads, num_nested;
    atomic_int counts[MAX_TASKS];  /* how often each index ran */
    atomic_int is_busy[MAX_THREADS]; /* by worker */
    atomic_int is_wrong;
    int64_t plain[MAX_TASKS]; /* not atomic: the pool must order these */
} Job;

static void run(Job *job);

static void do_task(void *context, int64_t index, int worker) {
    Job *job = context;
    if (worker < 0 || worker >= job->num_threads || atomic_exchange(&job->is_busy[worker], 1))
        job->is_wrong = 1;
    atomic_fetch_add(&job->counts[index], 1);
    job->plain[index] += index;
    if (job->num_nested && index % 7 == 0) {
        Job *inner = calloc(1, sizeof *inner);
        inner->num_tasks = job->num_nested;
        inner->num_threads = job->num_threads;
        run(inner);
        if (inner->is_wrong) job->is_wrong = 1;
        free(inner);
    }
    job->is_busy[worker] = 0;
}

/* Runs the job once more, over results that the caller wrote itself. */
static void run(Job *job) {
    memset(job->counts, 0, sizeof job->counts);
    for (int64_t i = 0; i < job->num_tasks; i++) job->plain[i] = i;
    run_tasks(job->num_tasks, job->num_threads, do_task, job);
    for (int64_t i = 0; i < job->num_tasks; i++)
        if (job->counts[i] != 1 || job->plain[i] != 2 * i) job->is_wrong = 1;
}

static int run_many(int num_turns, int64_t max_tasks, int max_threads, int num_nested) {
    Job *job = calloc(1, sizeof *job);
    job->num_nested = num_nested;
    for (int turn = 0; turn < num_turns; turn++) {
        job->num_tasks = (turn * 37) % (max_tasks + 1);
        job->num_threads = 1 + turn % max_threads;
        run(job);
    }
    int is_wrong = job->is_wrong;
    free(job);
    return is_wrong;
}

static int check_sizes(void) {
    EXPECT(!run_many(20000, 40, 4, 0));
    EXPECT(!run_many(300, MAX_TASKS, MAX_THREADS, 0));
    return 0;
}

static int check_nesting(void) {
    EXPECT(!run_many(500, 50, 4, 9));
    return 0;
}

static void *call_often(void *status) {
    *(int *)status = run_many(5000, 60, 5, 0);
    return NULL;
}

static int check_concurrency(void) {
    pthread_t threads[4];
    int statuses[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, call_often, &statuses[i]);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++) EXPECT(!statuses[i]);
    return 0;
}

static void meet(void *context, int64_t index, int worker) {
    (void)index;
    (void)worker;
    atomic_int *num_here = context;
    atomic_fetch_add(num_here, 1);
    for (int i = 0; i < 20000 && *num_here < 3; i++) usleep(1000);
}

/* Three tasks that each wait for the others, long, but not for ever. */
static int call_together(void) {
    atomic_int num_here = 0;
    int64_t start = time(NULL);
    run_tasks(3, 3, meet, &num_here);
    return time(NULL) - start > 15;
}

/* Workers that sleep are woken: the pauses outlast every spin. */
static int check_pauses(void) {
    for (int turn = 0; turn < 300; turn++) {
        usleep(turn % 3 ? 200 : 2000);
        EXPECT(!run_many(3, 40, 4, 0));
    }
    usleep(10000);
    EXPECT(!call_together());
    return 0;
}

static int run_child(void) {
    pid_t child = fork();
    if (!child) {
        alarm(60); /* a child that hangs dies of it */
        _exit(run_many(200, 40, 4, 0) || call_together());
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

/* Forks while another thread's calls are under way, and while the pool rests. */
static int check_fork(void) {
    pthread_t thread;
    int status = 0;
    EXPECT(!run_many(10, 40, 4, 0));
    EXPECT(!run_child());
    pthread_create(&thread, NULL, call_often, &status);
    for (int i = 0; i < 10; i++) EXPECT(!run_child());
    pthread_join(thread, NULL);
    EXPECT(!status);
    EXPECT(!run_many(200, 40, 4, 0));
    return 0;
}

typedef struct {
    volatile float tiny;
    float halves[64];
} Modes;

static void halve(void *context, int64_t index, int worker) {
    (void)worker;
    Modes *modes = context;
    modes->halves[index] = modes->tiny / 2;
    usleep(100); /* so that every worker comes to its share */
}

/* Workers flush denormals as the caller does at the time. */
static int check_float_mode(void) {
    Modes modes = {.tiny = 1.2e-38f};
    for (int flushes = 0; flushes < 4; flushes++) {
#if defined(__x86_64__)
        unsigned mode = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(flushes % 2 ? mode | 0x8000 : mode & ~0x8000u);
#endif
        run_tasks(64, 4, halve, &modes);
        for (int i = 0; i < 64; i++) EXPECT(modes.halves[i] == modes.tiny / 2);
    }
    return 0;
}

static void reject_signal(int signal) {
    (void)signal;
    _exit(3);
}

/* A signal that the process's own threads block stays pending: no worker handles it. */
static int check_signals(void) {
    sigset_t blocked;
    signal(SIGUSR1, reject_signal);
    EXPECT(!call_together());
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &blocked, NULL);
    kill(getpid(), SIGUSR1);
    EXPECT(!call_together());
    sigpending(&blocked);
    EXPECT(sigismember(&blocked, SIGUSR1) == 1);
    return 0;
}

int main(int num_arguments, char **arguments) {
    static const struct {
        const char *name;
        int (*check)(void);
    } checks[] = {
        {"sizes", check_sizes},   {"nesting", check_nesting}, {"concurrency", check_concurrency},
        {"pauses", check_pauses}, {"fork", check_fork},       {"float_mode", check_float_mode},
        {"signals", check_signals},
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (num_arguments > 1 && !strcmp(arguments[1], checks[i].name)) return checks[i].check();
    return 2;
}
