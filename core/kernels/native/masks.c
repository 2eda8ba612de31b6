/* Logits with minus infinity for what a row's mask leaves out: core/sampling/processors.py, in C.
 *
 * Most words of a mask have all their tokens, or none: these are copied or filled whole.
 */
#include "pool.h"
#include "vector.h"

#define WORD 32 /* tokens; bit 0 is the first of them */

typedef struct {
    const float *logits;
    const char *const *masks;
    float *kept;
    int64_t size;
} Batch;

static void keep_word(const float *from, uint32_t word, float *to) {
    if (word == UINT32_MAX)
        memcpy(to, from, sizeof(float) * WORD);
    else if (word == 0)
        for (int i = 0; i < WORD; i++) to[i] = -INFINITY;
    else
        for (int i = 0; i < WORD; i++) to[i] = word >> i & 1 ? from[i] : -INFINITY;
}

static void keep_row(void *context, int64_t row, int worker) {
    (void)worker;
    const Batch *b = context;
    const float *from = b->logits + row * b->size;
    const char *mask = b->masks[row];
    float *to = b->kept + row * b->size;
    if (!mask) {
        memcpy(to, from, sizeof(float) * (size_t)b->size);
        return;
    }
    int64_t first = 0;
    for (; first + WORD <= b->size; first += WORD) {
        uint32_t word;
        memcpy(&word, mask + first / 8, sizeof word);
        keep_word(from + first, word, to + first);
    }
    for (; first < b->size; first++)
        to[first] = mask[first / 8] >> first % 8 & 1 ? from[first] : -INFINITY;
}

/* `masks` has a bit per token, in little-endian words, for each row; NULL: it may draw all. */
void keep_allowed(const float *logits, const char *const *masks, float *kept, int64_t num_rows,
                  int64_t size, int num_threads) {
    Batch batch = {logits, masks, kept, size};
    run_tasks(num_rows, num_threads, keep_row, &batch);
}
