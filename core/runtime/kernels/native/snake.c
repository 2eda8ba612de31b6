/* Styled instance normalization and the snake after it, in one pass over each row.
 *
 * A row is one channel of one item: it is read for its mean, again for its variance, and again to be
 * normalized and activated, all while it is in the cache. Rows share nothing, so a row's result
 * depends only on the row.
 */
#include "kernels.h"
#include "pool.h"

#define CHAINS 4 /* sums in flight: an addition takes four cycles */

/* sin(x)^2 to 3e-7 while |x| < 1000: of the distance to the nearest multiple of pi, in units of pi,
 * by a polynomial fitted at Chebyshev nodes. */
INLINE vec squared_sine(vec x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23 */
    vec turns = x * 0.318309886183790672f;
    vec r = turns - ((turns + to_integer) - to_integer);
    vec u = r * r;
    vec y = splat(-3.356592621f);
    y = y * u + 13.05009892f;
    y = y * u - 30.10146584f;
    y = y * u + 42.72719634f;
    y = y * u - 32.46967117f;
    y = y * u + 9.869604312f;
    return y * u;
}

/* The sum over a row of (x - mean)^power, without reading past its end. */
INLINE float sum_powers(const float *x, int64_t length, float mean, const int power) {
    vec sums[CHAINS];
    for (int i = 0; i < CHAINS; i++) sums[i] = splat(0.0f);
    int64_t at = 0;
    for (; at + CHAINS * LANES <= length; at += CHAINS * LANES)
        for (int i = 0; i < CHAINS; i++) {
            vec d = load(x + at + i * LANES) - mean;
            sums[i] += power == 2 ? d * d : d;
        }
    float rest = 0.0f;
    for (; at < length; at++) {
        float d = x[at] - mean;
        rest += power == 2 ? d * d : d;
    }
    return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

INLINE vec activate(vec x, float scale, float shift, float alpha, float inverse) {
    vec y = x * scale + shift;
    return y + squared_sine(y * alpha) * inverse;
}

static void snake_row(const Snake *s, int64_t row) {
    const float *x = s->x + row * s->length;
    float mean = sum_powers(x, s->length, 0.0f, 1) / (float)s->length;
    float variance = sum_powers(x, s->length, mean, 2) / (float)s->length;
    float scale = (1.0f + s->gamma[row]) / sqrtf(variance + s->eps);
    float shift = s->beta[row] - mean * scale;
    float alpha = s->alpha[row % s->num_channels], inverse = 1.0f / alpha;
    int64_t first = row * s->length, at = 0;
    for (; at + LANES <= s->length; at += LANES)
        store_as(s->y, first + at, activate(load(x + at), scale, shift, alpha, inverse), s->dtype);
    for (; at < s->length; at++)
        write_as(s->y, first + at, activate(splat(x[at]), scale, shift, alpha, inverse)[0], s->dtype);
}

static void run_row(void *context, int64_t row, int worker) {
    (void)worker;
    snake_row(context, row);
}

void snake(const Snake *s) { run_tasks(s->num_rows, s->num_threads, run_row, (void *)s); }
