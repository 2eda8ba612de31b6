/* A tile of a row's keys: its place in the pages; and latents of a tile, in both orders of products. */
#pragma once

#include "cells.h"
#include "scores.h"

/* The first slots of its blocks, and the number of its visible keys. */
typedef struct {
    int64_t slots[TILE];
    int num_keys;
} Tile;

static void find_tile(const Attention *a, int64_t row, int64_t first_key, int64_t end_key, Tile *t) {
    const int64_t *pages = a->page_table + row * a->table_stride;
    int64_t offset_mask = ((int64_t)1 << a->page_shift) - 1;
    t->num_keys = (int)(end_key - first_key < TILE ? end_key - first_key : TILE);
    for (int j = 0; j < t->num_keys; j += tokens_per_block(a)) {
        int64_t key = first_key + j;
        t->slots[j] = (pages[key >> a->page_shift] << a->page_shift) + (key & offset_mask);
    }
}

INLINE int has_small_cells(const Attention *a) { return size_of(a->kv_dtype) == 1; }

static void open_scales(const Attention *a, Block *b, const Tile *t, int64_t head) {
    int tokens = tokens_per_block(a);
    memset(b->k_scales, 0, sizeof b->k_scales);
    memset(b->v_scales, 0, sizeof b->v_scales);
    for (int j = 0; j < t->num_keys; j += tokens) {
        int64_t at = scale_at(a, t->slots[j], head);
        int num = t->num_keys - j < tokens ? t->num_keys - j : tokens;
        convert(a->k_scales + at, BFLOAT16, b->k_scales + j, FLOAT32, num);
        convert(a->v_scales + at, BFLOAT16, b->v_scales + j, FLOAT32, num);
    }
}

/* The tile's rows, in float32 or bfloat16; zeros past the end. */
static void find_rows(const Attention *a, const Tile *t, bf16 *wide, const void *rows[TILE]) {
    static const uint32_t zeros[MAX_DIM];
    int tokens = tokens_per_block(a);
    for (int j = 0; j < TILE; j++) {
        rows[j] = zeros;
        if (j >= t->num_keys) continue;
        int64_t slot = t->slots[j / tokens * tokens] + j % tokens;
        const char *row = (const char *)a->k_pages + slot * a->head_dim * size_of(a->kv_dtype);
        rows[j] = row;
        if (!has_small_cells(a)) continue;
        rows[j] = wide + j * MAX_DIM;
        if (a->kv_dtype == INT8)
            widen(row, wide + j * MAX_DIM, a->head_dim, INT8);
        else
            widen(row, wide + j * MAX_DIM, a->head_dim, FLOAT8);
    }
}

/* Columns past the values are keys, or zeros: sums of them are not used. */
static void copy_latent_values(Block *b, const void *const rows[TILE], int64_t row_bytes) {
    for (int j = 0; j < TILE; j += b->is_bf16 ? 2 : 1)
        for (int d = 0; d < b->value_dim; d += b->is_bf16 ? 2 * LANES : LANES) {
            uint32_t *to = b->v + (b->is_bf16 ? j / 2 : j) * b->value_dim + d;
            uvec words = load_words(rows[j], b->is_bf16 ? d / 2 : d, row_bytes);
            if (!b->is_bf16) {
                memcpy(to, &words, sizeof words);
                continue;
            }
            wvec first = (wvec)words, second = (wvec)load_words(rows[j + 1], d / 2, row_bytes);
            wvec low = interleave_low(first, second), high = interleave_high(first, second);
            memcpy(to, &low, sizeof low);
            memcpy(to + LANES, &high, sizeof high);
        }
}

static void open_latents(const Attention *a, Block *b, const Tile *t) {
    _Alignas(64) bf16 wide[TILE * MAX_DIM];
    const void *rows[TILE];
    int64_t row_bytes = a->head_dim * size_of(b->is_bf16 ? BFLOAT16 : FLOAT32);
    find_rows(a, t, wide, rows);
    for (int first = 0; first < TILE; first += LANES)
        transpose_words(rows + first, row_bytes, b->k + first, TILE, b->is_bf16 ? b->dim / 2 : b->dim);
    copy_latent_values(b, rows, row_bytes);
    b->keys = b->k;
    b->values = b->v;
}
