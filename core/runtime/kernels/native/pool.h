/* Threads for the kernels: see pool.c. */
#pragma once

#include <stdint.h>

/* One task of a call; `worker` is below the call's number of threads, and no other task of the call
 * has the same worker at the same time. */
typedef void (*Task)(void *context, int64_t index, int worker);

/* Calls task(context, 0 .. num_tasks - 1, worker), each index once, on the calling thread and up to
 * `num_threads` - 1 others; returns when all have returned. Any thread may call it, also a task. */
void run_tasks(int64_t num_tasks, int num_threads, Task task, void *context);
