/* The layout of keys and values in a page: the order of products, so that a step packs nothing.
 *
 * A page is [num_kv_heads][blocks], of keys as of values. A block is up to PAGE_BLOCK neighbouring
 * tokens: of keys [words][tokens], a word being a float or a pair of smaller cells that are neighbours
 * in D; of values [tokens][D], smaller cells of neighbouring tokens in pairs: [tokens / 2][D][2]. Where
 * D is odd or a page holds one token there are no pairs: keys are [D][tokens] and values [tokens][D].
 *
 * Latents are rows for all heads, [tokens][D]: products read them both ways, so that either order has
 * to be turned for one of them.
 *
 * Cells of INT8 have scales, one for each token and head: [pages][num_kv_heads][tokens], in bfloat16.
 * Each token has its own, so that a page does not depend on the order of writing.
 */
#pragma once

#include "kernels.h"

#define PAGE_BLOCK 32
#define MAX_DIM 576

INLINE int tokens_per_block(const Attention *a) {
    return a->page_shift < 5 ? 1 << a->page_shift : PAGE_BLOCK;
}

INLINE int has_pairs(const Attention *a) {
    return a->kv_dtype != FLOAT32 && a->head_dim % 2 == 0 && a->page_shift > 0;
}

INLINE int64_t word_bytes(const Attention *a) {
    return has_pairs(a) ? 2 * size_of(a->kv_dtype) : size_of(a->kv_dtype);
}

INLINE int is_latent(const Attention *a) { return !a->v_pages; }

/* Index of a slot's scale. A slot is page * tokens of a page + offset. */
INLINE int64_t scale_at(const Attention *a, int64_t slot, int64_t head) {
    if (is_latent(a)) return slot;
    int64_t page = slot >> a->page_shift, offset = slot - (page << a->page_shift);
    return ((page * a->num_kv_heads + head) << a->page_shift) + offset;
}

/* The first byte of a slot's block. */
INLINE int64_t block_of(const Attention *a, int64_t slot, int64_t head) {
    int64_t tokens = tokens_per_block(a), first = scale_at(a, slot, head) / tokens * tokens;
    return first * a->head_dim * size_of(a->kv_dtype);
}

/* Prefetch the memory of a token's keys: a line for each word or two. */
INLINE void prefetch_slot(const Attention *a, const void *k_pages, int64_t slot) {
    int64_t tokens = tokens_per_block(a), num_bytes = tokens * a->head_dim * size_of(a->kv_dtype);
    int64_t lane_bytes = slot % tokens * word_bytes(a), line = tokens * word_bytes(a);
    for (int64_t head = 0; head < a->num_kv_heads; head++) {
        const char *keys = (const char *)k_pages + block_of(a, slot, head) + lane_bytes;
        for (int64_t at = 0; at < num_bytes; at += line) __builtin_prefetch(keys + at, 1, 3);
    }
}
