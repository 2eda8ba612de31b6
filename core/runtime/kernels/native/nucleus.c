/* The least weight that top-k and top-p keep: core/runtime/sampling/filters.py, in C.
 *
 * Positive floats are ordered as their bits. A histogram over the leading bits (64 buckets to the
 * octave) finds the bucket of the last kept token; only that bucket is sorted. Usually that token is
 * one of a few heavy ones, and no other is read.
 */
#include "nucleus.h"

#include <float.h>
#include <stdlib.h>

#include "vector.h"

#define SHIFT 17
#define NUM_BUCKETS 8192 /* 1.0f is in bucket 8128 */
#define HEAVY 0.001f     /* of the likeliest token's weight */

typedef struct {
    const float *weights;
    int64_t size;
    int32_t counts[NUM_BUCKETS];
    double masses[NUM_BUCKETS];
    float *members; /* [size] */
} Histogram;

INLINE uint32_t bucket_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits >> SHIFT) & (NUM_BUCKETS - 1);
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void count(Histogram *h) {
    for (int64_t i = 0; i < h->size; i++) {
        uint32_t bucket = bucket_of(h->weights[i]);
        h->counts[bucket]++;
        h->masses[bucket] += h->weights[i];
    }
}

/* The tokens of a bucket, likeliest first, in `members`. */
static int64_t open_bucket(Histogram *h, uint32_t bucket) {
    int64_t num_members = 0;
    for (int64_t i = 0; i < h->size; i++)
        if (bucket_of(h->weights[i]) == bucket) h->members[num_members++] = h->weights[i];
    qsort(h->members, (size_t)num_members, sizeof(float), descending);
    return num_members;
}

/* The `k`-th largest weight; sets `*mass` to that of all tokens at least as likely. */
static float find_kth(Histogram *h, int64_t k, double *mass) {
    int bucket = NUM_BUCKETS - 1;
    *mass = 0.0;
    for (; bucket > 0 && h->counts[bucket] < k; bucket--) {
        k -= h->counts[bucket];
        *mass += h->masses[bucket];
    }
    int64_t num_members = open_bucket(h, (uint32_t)bucket);
    float kth = h->members[k - 1];
    for (int64_t i = 0; i < num_members && h->members[i] >= kth; i++) *mass += h->members[i];
    return kth;
}

/* The last token at least as likely as `least` with less than `target` mass before it. */
static float find_nucleus(Histogram *h, double target, float least) {
    double before = 0.0;
    int bucket = NUM_BUCKETS - 1;
    for (; bucket > 0 && before + h->masses[bucket] < target; bucket--)
        before += h->masses[bucket];
    int64_t num_members = open_bucket(h, (uint32_t)bucket);
    float last = least;
    for (int64_t i = 0; i < num_members && h->members[i] >= least && before < target; i++) {
        last = h->members[i];
        before += last;
    }
    return last;
}

static float search(Histogram *h, double mass, int64_t top_k, float top_p) {
    float least = 0.0f;
    count(h);
    if (top_k) least = find_kth(h, top_k, &mass);
    double target = (double)top_p * mass;
    if (!(target > 0.0)) target = DBL_MIN; /* the likeliest token is always kept */
    return top_p < 1.0f ? find_nucleus(h, target, least) : least;
}

/* Copy the heavy weights and set `*mass` to their sum. */
static int64_t gather_heavy(const float *weights, int64_t size, float *heavy, double *mass) {
    int64_t num_heavy = 0;
    *mass = 0.0;
    for (int64_t first = 0; first < size; first += LANES) {
        int64_t end = first + LANES < size ? first + LANES : size;
        if (end == first + LANES && !any_lane(load(weights + first) >= HEAVY)) continue;
        for (int64_t i = first; i < end; i++)
            if (weights[i] >= HEAVY) *mass += heavy[num_heavy++] = weights[i];
    }
    return num_heavy;
}

float find_threshold(const float *weights, int64_t size, double mass, int64_t top_k, float top_p,
                     float *scratch) {
    double heavy_mass;
    int64_t num_heavy = gather_heavy(weights, size, scratch, &heavy_mass);
    /* Sums in another order differ in their last digits. */
    int has_last = top_k ? num_heavy >= top_k : heavy_mass >= (top_p + 1e-9) * mass;
    Histogram h = {.weights = weights, .size = size, .members = scratch};
    if (has_last && 2 * num_heavy <= size)
        h.weights = scratch, h.size = num_heavy, h.members = scratch + num_heavy;
    return search(&h, mass, top_k, top_p);
}
