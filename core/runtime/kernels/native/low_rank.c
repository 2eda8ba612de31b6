/* Changes of projections by adapters (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models",
 * 2021): y += up (down x), each row by its own adapter.
 *
 * A task is a block of rows of one adapter, two at a time, so that their matrices are read once for
 * both. Every sum runs over the inputs, or the rank, in order and in float32, whatever the number of
 * rows: a row's result does not depend on other rows.
 */
#include "kernels.h"
#include "pool.h"

#define PAIR 2  /* rows at a time */
#define RANKS 4 /* low values at a time */
#define VECS 4  /* vectors of outputs at a time */

typedef struct {
    const Linear *linear;
    const LowRank *adapters;
    const AdaptedRows *rows;
} Change;

/* `num_ranks` low values, from `first` on, of `num_rows` rows of x. */
INLINE void sum_down(const void *const *x, const LowRank *by, int64_t first, int64_t num_inputs,
                     float *const *low, const int num_rows, const int num_ranks, const int dtype) {
    vec sums[PAIR][RANKS];
    float rest[PAIR][RANKS] = {{0}};
    const void *down[RANKS];
    int64_t i = 0;
    for (int r = 0; r < num_ranks; r++)
        down[r] = (const char *)by->down + (first + r) * num_inputs * size_of(dtype);
    for (int row = 0; row < num_rows; row++)
        for (int r = 0; r < num_ranks; r++) sums[row][r] = splat(0.0f);
    for (; i + LANES <= num_inputs; i += LANES)
        for (int r = 0; r < num_ranks; r++) {
            vec weight = load_as(down[r], i, dtype);
            for (int row = 0; row < num_rows; row++)
                sums[row][r] += weight * load_as(x[row], i, dtype);
        }
    for (; i < num_inputs; i++)
        for (int r = 0; r < num_ranks; r++)
            for (int row = 0; row < num_rows; row++)
                rest[row][r] += read_as(down[r], i, dtype) * read_as(x[row], i, dtype);
    for (int row = 0; row < num_rows; row++)
        for (int r = 0; r < num_ranks; r++)
            low[row][first + r] = sum_lanes(sums[row][r]) + rest[row][r];
}

/* `num_vecs` vectors of outputs of a part, from `at` on, of `num_rows` rows of y. */
INLINE void add_up(const LowRankPart *part, float *const *low, void *const *y, int64_t at,
                   const int num_rows, const int num_vecs, const int dtype, const int y_dtype) {
    vec sums[PAIR][VECS];
    for (int row = 0; row < num_rows; row++)
        for (int v = 0; v < num_vecs; v++) sums[row][v] = splat(0.0f);
    for (int64_t r = 0; r < part->rank; r++)
        for (int v = 0; v < num_vecs; v++) {
            vec weight = load_as(part->up, r * part->num_outputs + at + v * LANES, dtype);
            for (int row = 0; row < num_rows; row++)
                sums[row][v] += weight * low[row][part->offset + r];
        }
    for (int row = 0; row < num_rows; row++)
        for (int v = 0; v < num_vecs; v++) {
            int64_t to = part->first + at + v * LANES;
            store_as(y[row], to, load_as(y[row], to, y_dtype) + sums[row][v], y_dtype);
        }
}

INLINE void add_part(const LowRankPart *part, float *const *low, void *const *y, const int num_rows,
                     const int dtype, const int y_dtype) {
    int64_t size = part->num_outputs, at = 0;
    for (; at + VECS * LANES <= size; at += VECS * LANES)
        add_up(part, low, y, at, num_rows, VECS, dtype, y_dtype);
    for (; at + LANES <= size; at += LANES) add_up(part, low, y, at, num_rows, 1, dtype, y_dtype);
    for (; at < size; at++)
        for (int row = 0; row < num_rows; row++) {
            int64_t to = part->first + at;
            float sum = 0.0f;
            for (int64_t r = 0; r < part->rank; r++)
                sum += read_as(part->up, r * size + at, dtype) * low[row][part->offset + r];
            write_as(y[row], to, read_as(y[row], to, y_dtype) + sum, y_dtype);
        }
}

INLINE void change_rows(const Linear *l, const LowRank *by, const void *const *x, void *const *y,
                        float *const *low, const int num_rows, const int dtype, const int y_dtype) {
    int64_t first = 0;
    for (; first + RANKS <= by->rank; first += RANKS)
        sum_down(x, by, first, l->num_inputs, low, num_rows, RANKS, dtype);
    for (; first < by->rank; first++) sum_down(x, by, first, l->num_inputs, low, num_rows, 1, dtype);
    for (int64_t p = 0; p < by->num_parts; p++)
        add_part(&by->parts[p], low, y, num_rows, dtype, y_dtype);
}

INLINE void change_block(const Change *c, const AdaptedBlock *block, const int dtype,
                         const int y_dtype) {
    const Linear *l = c->linear;
    const LowRank *by = &c->adapters[block->adapter];
    float sums[PAIR * by->rank], *low[PAIR] = {sums, sums + by->rank};
    for (int64_t at = 0; at < block->num_rows; at += PAIR) {
        int num_rows = block->num_rows - at < PAIR ? 1 : PAIR;
        const void *x[PAIR];
        void *y[PAIR];
        for (int i = 0; i < num_rows; i++) {
            int64_t row = c->rows->rows[block->first + at + i];
            x[i] = (const char *)l->x + row * x_stride_of(l) * size_of(dtype);
            y[i] = (char *)l->y + row * y_stride_of(l) * size_of(y_dtype);
        }
        if (num_rows == PAIR)
            change_rows(l, by, x, y, low, PAIR, dtype, y_dtype);
        else
            change_rows(l, by, x, y, low, 1, dtype, y_dtype);
    }
}

static void run_block(void *context, int64_t index, int worker) {
    const Change *c = context;
    const AdaptedBlock *block = &c->rows->blocks[index];
    (void)worker;
    if (!c->adapters[block->adapter].rank) return;
    if (c->linear->dtype == FLOAT32)
        change_block(c, block, FLOAT32, FLOAT32);
    else if (c->linear->y_dtype == FLOAT32)
        change_block(c, block, BFLOAT16, FLOAT32);
    else
        change_block(c, block, BFLOAT16, BFLOAT16);
}

void add_low_rank(const Linear *l, const LowRank *adapters, const AdaptedRows *rows) {
    Change c = {l, adapters, rows};
    run_tasks(rows->num_blocks, l->num_threads, run_block, &c);
}
