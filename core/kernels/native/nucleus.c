/* The probability down to which top-k and top-p keep tokens: core/sampling/filters.py, in C.
 *
 * Positive floats are ordered as their bits. A histogram over the leading bits (64 buckets to the
 * octave) finds the bucket in which the last kept token lies; only that bucket is sorted.
 */
#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "pool.h"
#include "vector.h"

#define SHIFT 17
#define NUM_BUCKETS 8192 /* 1.0f is in bucket 8128 */

typedef struct {
    const float *probs;
    int64_t size;
    int32_t counts[NUM_BUCKETS];
    double masses[NUM_BUCKETS];
    float *members; /* [size] */
} Row;

INLINE uint32_t bucket_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits >> SHIFT) & (NUM_BUCKETS - 1);
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void count(Row *r) {
    memset(r->counts, 0, sizeof r->counts);
    memset(r->masses, 0, sizeof r->masses);
    for (int64_t i = 0; i < r->size; i++) {
        uint32_t bucket = bucket_of(r->probs[i]);
        r->counts[bucket]++;
        r->masses[bucket] += r->probs[i];
    }
}

/* The tokens of a bucket, likeliest first, in `members`. */
static int64_t open_bucket(Row *r, uint32_t bucket) {
    int64_t num_members = 0;
    for (int64_t i = 0; i < r->size; i++)
        if (bucket_of(r->probs[i]) == bucket) r->members[num_members++] = r->probs[i];
    qsort(r->members, (size_t)num_members, sizeof(float), descending);
    return num_members;
}

/* The `k`-th largest probability; `*mass` becomes that of all tokens as likely or likelier. */
static float find_kth(Row *r, int64_t k, double *mass) {
    int bucket = NUM_BUCKETS - 1;
    *mass = 0.0;
    for (; bucket > 0 && r->counts[bucket] < k; bucket--) {
        k -= r->counts[bucket];
        *mass += r->masses[bucket];
    }
    int64_t num_members = open_bucket(r, (uint32_t)bucket);
    float kth = r->members[k - 1];
    for (int64_t i = 0; i < num_members && r->members[i] >= kth; i++) *mass += r->members[i];
    return kth;
}

/* The last token, of those at least as likely as `least`, before which there is less than `target`. */
static float find_nucleus(Row *r, double target, float least) {
    double before = 0.0;
    int bucket = NUM_BUCKETS - 1;
    for (; bucket > 0 && before + r->masses[bucket] < target; bucket--)
        before += r->masses[bucket];
    int64_t num_members = open_bucket(r, (uint32_t)bucket);
    float last = least;
    for (int64_t i = 0; i < num_members && r->members[i] >= least && before < target; i++) {
        last = r->members[i];
        before += last;
    }
    return last;
}

typedef struct {
    const float *probs;
    int64_t size;
    const int64_t *top_k;
    const float *top_p;
    float *thresholds;
    atomic_int status;
} Batch;

static float find_threshold(Row *r, int64_t top_k, float top_p) {
    double mass = 0.0;
    float least = 0.0f;
    count(r);
    if (top_k)
        least = find_kth(r, top_k, &mass);
    else
        for (int bucket = 0; bucket < NUM_BUCKETS; bucket++) mass += r->masses[bucket];
    double target = (double)top_p * mass;
    if (!(target > 0.0)) target = DBL_MIN; /* the likeliest token is always kept */
    return top_p < 1.0f ? find_nucleus(r, target, least) : least;
}

static void run_row(void *context, int64_t row, int worker) {
    (void)worker;
    Batch *b = context;
    Row r = {.probs = b->probs + row * b->size, .size = b->size};
    r.members = malloc(sizeof(float) * (size_t)b->size);
    if (r.members)
        b->thresholds[row] = find_threshold(&r, b->top_k[row], b->top_p[row]);
    else
        b->status = 1;
    free(r.members);
}

/* One threshold per row; 0 < top_k < size, or 0: off; top_p >= 1: off. Returns 1 out of memory. */
int nucleus_thresholds(const float *probs, int64_t num_rows, int64_t size, const int64_t *top_k,
                       const float *top_p, float *thresholds, int num_threads) {
    Batch batch = {probs, size, top_k, top_p, thresholds, 0};
    run_tasks(num_rows, num_threads, run_row, &batch);
    return batch.status;
}
