/* From logits to a token, one row a task: core/runtime/kernels/triton/sampling.py, in C.
 *
 * The greatest score of a row weighs 1, every other e^((score - greatest) / temperature): nothing is
 * normalized. Weights are summed by blocks of the vocabulary, in its order; the block in which the
 * mass falls is weighed again, token by token. Only rows with a filter keep their weights.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "kernels.h"
#include "nucleus.h"
#include "pool.h"

#define BLOCK 256           /* tokens */
#define IN_PROMPT (1 << 30) /* bit of a count: core/runtime/sampling/processors.py */

typedef struct {
    const float *logits, *scores, *penalties; /* repetition, frequency, presence */
    const int32_t *counts;                    /* NULL: no penalty */
    const char *mask;                         /* NULL: every token is allowed */
    int64_t size, num_blocks;
    float greatest, sharpness, least; /* weights below `least` are 0 */
    double *ends;                     /* [num_blocks]: the mass up to each block's end */
    float *weights, *sorted;          /* of filtered rows */
} Row;

INLINE vec load_some(const float *from, int64_t count, float beyond) {
    if (count >= LANES) return load(from);
    float values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = i < count ? from[i] : beyond;
    return load(values);
}

INLINE ivec load_counts(const int32_t *from, int64_t count) {
    ivec counts = {0};
    memcpy(&counts, from, sizeof(int32_t) * (size_t)(count < LANES ? count : LANES));
    return counts;
}

INLINE vec penalized(const float *penalties, vec x, ivec counts) {
    ivec num_outputs = counts & (IN_PROMPT - 1);
    vec scaled = blend(x > 0.0f, x / penalties[0], x * penalties[0]);
    return blend(counts > 0, scaled, x) - penalties[1] * __builtin_convertvector(num_outputs, vec) -
           blend(num_outputs > 0, splat(penalties[2]), splat(0.0f));
}

/* LANES scores; minus infinity for masked tokens and beyond the vocabulary. */
INLINE vec scores_from(const Row *r, int64_t first) {
    const ivec bits = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                       1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    vec x = load_some(r->scores + first, r->size - first, -INFINITY);
    if (r->counts) {
        ivec counts = load_counts(r->counts + first, r->size - first);
        if (any_lane(counts)) x = penalized(r->penalties, x, counts);
    }
    if (r->mask) {
        uint16_t allowed;
        memcpy(&allowed, r->mask + first / 8, sizeof allowed);
        x = blend((bits & allowed) != 0, x, splat(-INFINITY));
    }
    return x;
}

INLINE vec weights_from(const Row *r, int64_t first) {
    return exp_vec((scores_from(r, first) - r->greatest) * r->sharpness);
}

/* Find the greatest score; returns whether all logits are finite. */
static int survey(Row *r) {
    vec greatest = splat(-INFINITY);
    ivec is_odd = {0};
    for (int64_t i = 0; i < r->size; i += LANES) {
        ivec exponents = (ivec)load_some(r->logits + i, r->size - i, 0.0f) & 0x7f800000;
        is_odd |= exponents == 0x7f800000;
        greatest = max_vec(scores_from(r, i), greatest);
    }
    r->greatest = max_lanes(greatest);
    return !any_lane(is_odd);
}

/* The first token that has the greatest score. */
static int64_t find_likeliest(const Row *r) {
    for (int64_t first = 0; first < r->size; first += LANES) {
        ivec is_greatest = scores_from(r, first) == r->greatest;
        if (!any_lane(is_greatest)) continue;
        for (int i = 0; i < LANES; i++)
            if (is_greatest[i] && first + i < r->size) return first + i;
    }
    return 0;
}

INLINE vec kept_from(const Row *r, int64_t first) {
    vec weights = r->weights ? load(r->weights + first) : weights_from(r, first);
    return blend(weights >= r->least, weights, splat(0.0f));
}

/* Find the mass up to the end of each block; returns that of all. */
static double sum_blocks(Row *r) {
    double mass = 0.0;
    for (int64_t block = 0; block < r->num_blocks; block++) {
        int64_t end = (block + 1) * BLOCK < r->size ? (block + 1) * BLOCK : r->size;
        vec sum = {0};
        for (int64_t i = block * BLOCK; i < end; i += LANES) sum += kept_from(r, i);
        r->ends[block] = mass += sum_lanes(sum);
    }
    return mass;
}

/* The least weight that the row's filters keep. */
static float find_least(Row *r, int64_t top_k, const float shape[4]) {
    if (!top_k && shape[2] >= 1.0f) return shape[3];
    float nucleus = find_threshold(r->weights, r->size, sum_blocks(r), top_k, shape[2], r->sorted);
    return nucleus > shape[3] ? nucleus : shape[3];
}

/* The token whose share of the mass contains `uniform`; for a row without mass, such as one with an
 * infinite score, the likeliest token. */
static int64_t sample(Row *r, double uniform) {
    double target = uniform * sum_blocks(r);
    int64_t block = 0;
    while (block < r->num_blocks && !(r->ends[block] > target)) block++;
    if (block == r->num_blocks) return find_likeliest(r);
    double start = block ? r->ends[block - 1] : 0.0;
    double share = (target - start) / (r->ends[block] - start), total = 0.0, end = 0.0;
    float weights[BLOCK] = {0};
    int64_t first = block * BLOCK;
    for (int64_t i = 0; i < BLOCK && first + i < r->size; i += LANES)
        store(weights + i, kept_from(r, first + i));
    for (int64_t i = 0; i < BLOCK; i++) total += weights[i];
    target = share * total;
    int64_t token = 0;
    for (int64_t i = 0; i < BLOCK && !(end > target); i++) {
        end += weights[i];
        if (weights[i] > 0.0f) token = i; /* rounding picks the last token with mass */
    }
    return first + token;
}

typedef struct {
    const SampleRows *samples;
    atomic_int status;
} Batch;

static int64_t sample_row(Row *r, const float shape[4], double uniform, atomic_int *status) {
    int64_t top_k = shape[1] < (float)r->size ? (int64_t)shape[1] : 0;
    int64_t num_kept = top_k || shape[2] < 1.0f || shape[3] > 0.0f ? r->num_blocks * BLOCK : 0;
    r->ends = malloc(sizeof(double) * (size_t)r->num_blocks + 2 * sizeof(float) * (size_t)num_kept);
    if (!r->ends) {
        *status = 1;
        return 0;
    }
    r->sharpness = 1.0f / shape[0];
    if (num_kept) {
        float *weights = (float *)(r->ends + r->num_blocks);
        for (int64_t i = 0; i < r->size; i += LANES) store(weights + i, weights_from(r, i));
        r->weights = weights;
        r->sorted = weights + num_kept;
        r->least = find_least(r, top_k, shape);
    }
    int64_t token = sample(r, uniform);
    free(r->ends);
    return token;
}

static void run_row(void *context, int64_t row, int worker) {
    (void)worker;
    Batch *b = context;
    const SampleRows *d = b->samples;
    int64_t slot = d->slots[row];
    const float *shape = d->shapes + slot * 4;
    Row r = {.logits = d->logits + row * d->stride, .size = d->size,
             .num_blocks = (d->size + BLOCK - 1) / BLOCK};
    r.scores = d->edited ? d->edited + row * d->size : r.logits;
    r.mask = d->masks ? d->masks[row] : NULL;
    if (d->is_penalized && d->is_penalized[row]) {
        r.counts = d->counts + slot * d->size;
        r.penalties = d->penalties + slot * 3;
    }
    d->is_finite[row] = (uint8_t)survey(&r);
    d->token_ids[row] = !d->uniforms || shape[1] == 1.0f
                            ? find_likeliest(&r)
                            : sample_row(&r, shape, d->uniforms[row], &b->status);
}

int sample_rows(const SampleRows *d) {
    Batch batch = {d, 0};
    run_tasks(d->num_rows, d->num_threads, run_row, &batch);
    return batch.status;
}
