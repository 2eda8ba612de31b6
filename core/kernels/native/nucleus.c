/* The probability down to which top-k and top-p keep tokens: core/sampling/filters.py, in C.
 *
 * Positive floats are ordered as their bits. A histogram over the leading bits (64 buckets to the
 * octave) finds the bucket in which the last kept token lies; only that bucket is sorted.
 */
#include <float.h>
#include <stdlib.h>

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

/* One threshold per row; 0 < top_k < size, or 0: off; top_p >= 1: off. Returns 1 out of memory. */
int nucleus_thresholds(const float *probs, int64_t num_rows, int64_t size, const int64_t *top_k,
                       const float *top_p, float *thresholds, int num_threads) {
    int status = 0;
#pragma omp parallel for num_threads(num_threads) reduction(| : status)
    for (int64_t row = 0; row < num_rows; row++) {
        Row r = {.probs = probs + row * size, .size = size};
        r.members = malloc(sizeof(float) * (size_t)size);
        if (!r.members) {
            status = 1;
            continue;
        }
        count(&r);
        double mass = 0.0;
        float least = 0.0f;
        if (top_k[row])
            least = find_kth(&r, top_k[row], &mass);
        else
            for (int bucket = 0; bucket < NUM_BUCKETS; bucket++) mass += r.masses[bucket];
        double target = (double)top_p[row] * mass;
        if (!(target > 0.0)) target = DBL_MIN; /* the likeliest token is always kept */
        thresholds[row] = top_p[row] < 1.0f ? find_nucleus(&r, target, least) : least;
        free(r.members);
    }
    return status;
}
