/* Stores keys and values of new tokens in their pages. */
#include "cells.h"
#include "pages.h"
#include "pool.h"

#define TOKENS 16 /* of a task */

/* Convert a head's row to cells of a type. Returns their scale if they have one. */
static float convert_row(const void *x, int dtype, void *cells, int cell_dtype, int64_t size) {
    if (cell_dtype == FLOAT32 || cell_dtype == BFLOAT16) {
        convert(x, dtype, cells, cell_dtype, size);
        return 1.0f;
    }
    _Alignas(64) float row[MAX_DIM + LANES];
    convert(x, dtype, row, FLOAT32, size);
    store(row + size, splat(0.0f)); /* pads the last vector */
    float scale = cell_dtype == INT8 ? scale_of(row, size) : 1.0f;
    for (int64_t i = 0; i < size; i += LANES)
        if (cell_dtype == INT8)
            store_int8((char *)cells + i, load(row + i), scale);
        else
            store_float8((char *)cells + i, load(row + i));
    return scale;
}

INLINE void scatter(char *to, const char *from, int64_t num, int64_t stride, const size_t unit) {
    for (int64_t i = 0; i < num; i++) memcpy(to + i * stride, from + (size_t)i * unit, unit);
}

/* Copy `num` units of 1, 2 or 4 bytes, with such strides in bytes. */
static void scatter_units(char *to, const void *from, int64_t num, int64_t stride, int64_t unit) {
    switch (unit) {
        case 1: scatter(to, from, num, stride, 1); break;
        case 2: scatter(to, from, num, stride, 2); break;
        default: scatter(to, from, num, stride, 4);
    }
}

static void store_latent(const Attention *a, int64_t slot, const void *x) {
    int64_t row_bytes = a->head_dim * size_of(a->kv_dtype);
    char *to = (char *)a->k_pages + slot * row_bytes;
    _Alignas(64) uint32_t row[MAX_DIM];
    float scale = convert_row(x, a->q_dtype, row, a->kv_dtype, a->head_dim);
    memcpy(to, row, (size_t)row_bytes);
    if (a->k_scales) write_as(a->k_scales, slot, scale, BFLOAT16);
}

void store_head(const Attention *a, int64_t slot, int64_t head, const void *k, const void *v) {
    if (is_latent(a)) {
        store_latent(a, slot, k);
        return;
    }
    _Alignas(64) uint32_t row[MAX_DIM];
    int64_t size = a->head_dim, tokens = tokens_per_block(a), lane = slot % tokens;
    int64_t at = block_of(a, slot, head), cell = size_of(a->kv_dtype), word = word_bytes(a);
    char *keys = (char *)a->k_pages + at, *values = (char *)a->v_pages + at;
    float k_scale = convert_row(k, a->q_dtype, row, a->kv_dtype, size);
    scatter_units(keys + lane * word, row, size * cell / word, tokens * word, word);
    float v_scale = convert_row(v, a->q_dtype, row, a->kv_dtype, size);
    if (has_pairs(a))
        scatter_units(values + lane / 2 * size * word + lane % 2 * cell, row, size, word, cell);
    else
        memcpy(values + lane * size * cell, row, (size_t)(size * cell));
    if (!a->k_scales) return;
    write_as(a->k_scales, scale_at(a, slot, head), k_scale, BFLOAT16);
    write_as(a->v_scales, scale_at(a, slot, head), v_scale, BFLOAT16);
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
            store_head(a, w->slots[token], head, w->k + from, is_latent(a) ? NULL : w->v + from);
        }
}

void write_pages(const Attention *a, const int64_t *slots, const void *k, const void *v) {
    Writing w = {a, slots, k, v};
    run_tasks((a->num_tokens + TOKENS - 1) / TOKENS, a->num_threads, store_tokens, &w);
}
