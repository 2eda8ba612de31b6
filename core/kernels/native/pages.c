/* Keys and values of new tokens into their pages. */
#include "pages.h"
#include "pool.h"

#define TOKENS 16 /* that one task stores */

INLINE void store_words(uint32_t *block, const uint32_t *row, int64_t num_words, int64_t lane,
                        int64_t stride) {
    for (int64_t i = 0; i < num_words; i++) block[i * stride + lane] = row[i];
}

INLINE void store_halves(bf16 *block, const bf16 *row, int64_t num, int64_t first, int64_t stride) {
    for (int64_t i = 0; i < num; i++) block[first + i * stride] = row[i];
}

void store_head(const Attention *a, int64_t slot, int64_t head, const void *k, const void *v) {
    _Alignas(64) uint32_t row[MAX_DIM];
    int64_t size = a->head_dim, tokens = tokens_per_block(a), lane = slot % tokens;
    int64_t at = block_of(a, slot, head);
    char *keys = (char *)a->k_pages + at, *values = (char *)a->v_pages + at;
    convert(k, a->q_dtype, row, a->kv_dtype, size);
    if (a->kv_dtype == FLOAT32)
        store_words((uint32_t *)keys, row, size, lane, tokens);
    else if (has_pairs(a))
        store_words((uint32_t *)keys, row, size / 2, lane, tokens);
    else
        store_halves((bf16 *)keys, (bf16 *)row, size, lane, tokens);
    convert(v, a->q_dtype, row, a->kv_dtype, size);
    if (has_pairs(a))
        store_halves((bf16 *)values, (bf16 *)row, size, lane / 2 * 2 * size + lane % 2, 2);
    else
        memcpy(values + lane * size * size_of(a->kv_dtype), row,
               (size_t)(size * size_of(a->kv_dtype)));
}

typedef struct {
    const Attention *a;
    const int64_t *slots;
    const char *k, *v;
} Writing;

static void store_tokens(void *context, int64_t index, int worker) {
    const Writing *w = context;
    const Attention *a = w->a;
    int64_t first = index * TOKENS, end = first + TOKENS, num_heads = a->num_kv_heads;
    int64_t bytes = a->head_dim * size_of(a->q_dtype);
    (void)worker;
    for (int64_t token = first; token < end && token < a->num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            int64_t from = (token * num_heads + head) * bytes;
            store_head(a, w->slots[token], head, w->k + from, w->v + from);
        }
}

void write_pages(const Attention *a, const int64_t *slots, const void *k, const void *v) {
    Writing w = {a, slots, k, v};
    run_tasks((a->num_tokens + TOKENS - 1) / TOKENS, a->num_threads, store_tokens, &w);
}
