/* y = x W^T (+ bias) (+ residual), summed in float32; weights packed by `pack_weight`, or in blocks
 * of integers (quantized.c).
 *
 * A weight is cut into panels of PANEL outputs: in float32 [num_inputs][PANEL], in bfloat16
 * [num_inputs / 2][PANEL][2], the order in which dot products and tiles read pairs of inputs. One
 * row streams a weight from memory once, and more rows reuse a panel from cache (Goto and van de
 * Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). A block of rows keeps its sums
 * in registers. Every sum runs over the inputs in order, whatever the number of rows, so a row's
 * result does not depend on other rows of its batch.
 */
#include "pool.h"
#include "quantized.h"
#include "tiles.h"
#include "unrolled.h"

#define DEPTH 512    /* inputs widened to float32 at a time, where products are of float32 */
#define NEAR 128     /* inputs whose part of a panel stays in the L1 cache: at most 16 KiB */
#define AHEAD 32     /* rows of a panel: processors do not predict that every second line is skipped */

/* Rows and registers of outputs whose sums fit into registers together with their operands; GCC
 * fits 12 rows where products are dot products, and spills them elsewhere. Where a panel is wider
 * than REGS, FEW_ROWS still fit all of it, and read it in one pass. Where ROWS leave no registers
 * to widen bfloat16, a panel is widened once for WIDE_ROWS. */
#define DOT_ROWS 12
#if defined(__AVX512F__)
#define ROWS 8
#define REGS 2
#elif defined(__AVX2__)
#define ROWS 6
#define REGS 2
#define FEW_ROWS 2
#define WIDE_ROWS TASK_ROWS
#elif defined(__aarch64__)
#define ROWS 6
#define REGS 4
#else
#define ROWS 3
#define REGS 4
#define WIDE_ROWS TASK_ROWS
#endif
#ifndef FEW_ROWS
#define FEW_ROWS 0
#endif
#ifndef WIDE_ROWS
#define WIDE_ROWS ROWS
#endif
#define MOST_REGS (PANEL / REG)
#define MOST_ROWS (2 * TILE_ROWS)
#define SUM_ROWS (WIDE_ROWS > MOST_ROWS ? WIDE_ROWS : MOST_ROWS) /* with sums at the same time */
#define UNIT TILE_INPUTS /* bfloat16 weights are padded to a multiple of this number of inputs */

/* ---- packing ---------------------------------------------------------------------------------- */

typedef struct {
    const void *weight;
    void *packed;
    int64_t num_outputs, num_inputs;
    int32_t dtype;
} Packing;

INLINE int64_t padded_inputs(int64_t num_inputs, int dtype) {
    return dtype == BFLOAT16 ? (num_inputs + UNIT - 1) / UNIT * UNIT : num_inputs;
}

static void pack_panel(void *context, int64_t index, int worker) {
    const Packing *p = context;
    int64_t row_bytes = p->num_inputs * size_of(p->dtype);
    int64_t num_words = padded_inputs(p->num_inputs, p->dtype) * size_of(p->dtype) / 4;
    uint32_t *to = (uint32_t *)p->packed + index * num_words * PANEL;
    (void)worker;
    for (int half = 0; half < PANEL; half += LANES) {
        const void *rows[LANES];
        for (int j = 0; j < LANES; j++) {
            int64_t output = index * PANEL + half + j;
            int is_stored = output < p->num_outputs;
            rows[j] = (const char *)p->weight + (is_stored ? output : 0) * row_bytes;
        }
        transpose_words(rows, row_bytes, to + half, PANEL, num_words);
        for (int64_t j = p->num_outputs - index * PANEL - half; j < LANES; j++)
            for (int64_t i = 0; j >= 0 && i < num_words; i++) to[i * PANEL + half + j] = 0;
    }
}

/* Outputs are padded with zeros to a whole panel, inputs to `padded_inputs`. */
void pack_weight(const void *weight, int64_t num_outputs, int64_t num_inputs, int32_t dtype,
                 void *packed, int32_t num_threads) {
    Packing p = {weight, packed, num_outputs, num_inputs, dtype};
    run_tasks((num_outputs + PANEL - 1) / PANEL, num_threads, pack_panel, &p);
}

typedef struct {
    const uint32_t *packed;
    const int64_t *ids;
    void *rows;
    int64_t num_inputs;
    int32_t dtype;
} RowReading;

static void read_packed_row(void *context, int64_t index, int worker) {
    const RowReading *r = context;
    int64_t row_bytes = r->num_inputs * size_of(r->dtype), id = r->ids[index];
    int64_t num_words = padded_inputs(r->num_inputs, r->dtype) * size_of(r->dtype) / 4;
    const uint32_t *from = r->packed + id / PANEL * num_words * PANEL + id % PANEL;
    char *to = (char *)r->rows + index * row_bytes;
    (void)worker;
    for (int64_t at = 0; at < row_bytes; at += 4, from += PANEL)
        memcpy(to + at, from, row_bytes - at < 4 ? (size_t)(row_bytes - at) : 4);
}

/* The rows `ids` of a weight as they were before `pack_weight`. */
void read_packed_rows(const void *packed, int64_t num_inputs, int32_t dtype, const int64_t *ids,
                      int64_t num_rows, void *rows, int32_t num_threads) {
    RowReading r = {packed, ids, rows, num_inputs, dtype};
    run_tasks(num_rows, num_threads, read_packed_row, &r);
}

/* ---- products: sums[num][PANEL] += x[num][depth] panel[depth][PANEL] -------------------------- */

#if HAS_BF16_DOT && !HAS_TILES
INLINE void multiply_pairs(const bf16 *x, int64_t stride, int64_t depth, const bf16 *panel,
                           float *sums, const int num) {
    vec acc[DOT_ROWS][2];
    for (int m = 0; m < num; m++)
        for (int v = 0; v < 2; v++) acc[m][v] = load(sums + m * PANEL + v * LANES);
    for (int64_t i = 0; i < depth; i += 2) {
        __m512bh w0 = (__m512bh)load_bits(panel + i * PANEL);
        __m512bh w1 = (__m512bh)load_bits(panel + i * PANEL + 2 * LANES);
        for (int m = 0; m < num; m++) {
            int32_t pair;
            memcpy(&pair, x + m * stride + i, sizeof pair);
            __m512bh xs = (__m512bh)_mm512_set1_epi32(pair);
            acc[m][0] = (vec)_mm512_dpbf16_ps((__m512)acc[m][0], xs, w0);
            acc[m][1] = (vec)_mm512_dpbf16_ps((__m512)acc[m][1], xs, w1);
        }
    }
    for (int m = 0; m < num; m++)
        for (int v = 0; v < 2; v++) store(sums + m * PANEL + v * LANES, acc[m][v]);
}
#endif

/* acc[m][v] += x[m * stride] * columns[v] */
INLINE void add_products(reg acc[ROWS][MOST_REGS], const float *x, int64_t stride,
                         const reg *columns, const int regs, const int num) {
    for (int m = 0; m < num; m++)
        for (int v = 0; v < regs; v++) acc[m][v] += x[m * stride] * columns[v];
}

INLINE void multiply_columns(const float *x, int64_t stride, int64_t depth, const float *w,
                             float *sums, const int regs, const int num, const int dtype) {
    reg acc[ROWS][MOST_REGS], words[MOST_REGS], columns[MOST_REGS];
    for (int m = 0; m < num; m++)
        for (int v = 0; v < regs; v++) acc[m][v] = load_reg(sums + m * PANEL + v * REG);
    for (int64_t i = 0; i < depth; w += PANEL) {
        if (regs < MOST_REGS) __builtin_prefetch(w + AHEAD * PANEL);
        for (int v = 0; v < regs; v++) words[v] = load_reg(w + v * REG);
        if (dtype == FLOAT32) {
            add_products(acc, x + i++, stride, words, regs, num);
            continue;
        }
        for (int v = 0; v < regs; v++) columns[v] = low_halves(words[v]);
        add_products(acc, x + i++, stride, columns, regs, num);
        for (int v = 0; v < regs; v++) columns[v] = high_halves(words[v]);
        add_products(acc, x + i++, stride, columns, regs, num);
    }
    for (int m = 0; m < num; m++)
        for (int v = 0; v < regs; v++) store_reg(sums + m * PANEL + v * REG, acc[m][v]);
}

/* Outputs that do not fit at once are read in alternating passes over short parts of the panel: the
 * adjacent line is still in the cache. */
INLINE void multiply_floats(const float *x, int64_t stride, int64_t depth, const void *panel,
                            float *sums, const int num, const int dtype) {
    const int regs = num > FEW_ROWS ? REGS : MOST_REGS;
    int64_t part = regs == MOST_REGS ? depth : NEAR;
    for (int64_t i = 0; i < depth; i += part) {
        const float *w = (const float *)panel + i * PANEL * size_of(dtype) / 4;
        int64_t left = depth - i < part ? depth - i : part;
        for (int first = 0; first < PANEL; first += regs * REG)
            multiply_columns(x + i, stride, left, w + first, sums + first, regs, num, dtype);
    }
}

#if !HAS_TILES && !HAS_BF16_DOT
INLINE void multiply_widened(const float *x, int64_t stride, int64_t depth, const bf16 *panel,
                             float *sums, const int num) {
    multiply_floats(x, stride, depth, panel, sums, num, BFLOAT16);
}
#endif

/* The same for a number of rows that is known only at run time. */
#define DEFINE(N)                                                                      \
    OWN multiply_##N##_floats(const float *x, int64_t stride, int64_t depth,           \
                              const void *panel, float *sums) {                        \
        multiply_floats(x, stride, depth, panel, sums, N, FLOAT32);                    \
    }
UP_TO(ROWS, DEFINE)
#undef DEFINE

static void multiply_whole(const float *x, int64_t stride, int64_t depth, const void *panel,
                           float *sums, int num) {
    switch (num) {
#define CALL(N) multiply_##N##_floats(x, stride, depth, panel, sums)
        UP_TO(ROWS, CASE)
#undef CALL
    }
}

#if HAS_TILES
INLINE void multiply_part(const void *x, int64_t stride, int64_t depth, const bf16 *panel,
                          float *sums, int num) {
    multiply_tiles(x, 2 * stride, panel, 4 * PANEL, sums, 4 * PANEL, depth, num);
}
#else
#if HAS_BF16_DOT
#define PART_ROWS DOT_ROWS
#define MULTIPLY_PART multiply_pairs
#else
#define PART_ROWS ROWS
#define MULTIPLY_PART multiply_widened
#endif
#define DEFINE(N)                                                                      \
    OWN multiply_##N##_pairs(const void *x, int64_t stride, int64_t depth,             \
                             const bf16 *panel, float *sums) {                         \
        MULTIPLY_PART(x, stride, depth, panel, sums, N);                               \
    }
UP_TO(PART_ROWS, DEFINE)
#undef DEFINE

/* x is bfloat16 where there are dot products, and widened to float32 elsewhere. */
static void multiply_part(const void *x, int64_t stride, int64_t depth, const bf16 *panel,
                          float *sums, int num) {
    switch (num) {
#define CALL(N) multiply_##N##_pairs(x, stride, depth, panel, sums)
        UP_TO(PART_ROWS, CASE)
#undef CALL
    }
}
#endif

/* ---- blocks of rows --------------------------------------------------------------------------- */

static void sum_floats(const Linear *l, const float *panel, int64_t row, int num, float *sums) {
    const float *x = (const float *)l->x + row * x_stride_of(l);
    multiply_whole(x, x_stride_of(l), l->num_inputs, panel, sums, num);
}

#if HAS_TILES || HAS_BF16_DOT
/* The inputs of some rows from `first` on, padded with zeros to `padded`. */
static void copy_inputs(const Linear *l, int64_t row, int num, int64_t first, int64_t padded,
                        bf16 *to) {
    size_t size = sizeof(bf16) * (size_t)(l->num_inputs - first);
    memset(to, 0, sizeof(bf16) * (size_t)(num * padded));
    for (int m = 0; m < num; m++)
        memcpy(to + m * padded, (const bf16 *)l->x + (row + m) * x_stride_of(l) + first, size);
}

/* Inputs are read in place, except a last part that does not fill a unit. */
static void sum_pairs(const Linear *l, const bf16 *panel, int64_t row, int num, float *sums) {
    enum { PART = HAS_TILES ? UNIT : 2 };
    int64_t whole = l->num_inputs / PART * PART;
    const bf16 *x = (const bf16 *)l->x + row * x_stride_of(l);
    multiply_part(x, x_stride_of(l), whole, panel, sums, num);
    if (whole == l->num_inputs) return;
    bf16 rest[MOST_ROWS * PART];
    copy_inputs(l, row, num, whole, PART, rest);
    multiply_part(rest, PART, PART, panel + whole * PANEL, sums, num);
}
#else
/* Some inputs of some rows as float32; an odd last one is paired with a zero. */
static void widen_inputs(const Linear *l, int64_t row, int num, int64_t first, int64_t depth,
                         float *to) {
    for (int m = 0; m < num; m++) {
        const bf16 *x = (const bf16 *)l->x + (row + m) * x_stride_of(l) + first;
        int64_t i = 0, stored = l->num_inputs - first < depth ? l->num_inputs - first : depth;
        for (; i + LANES <= stored; i += LANES) store(to + m * DEPTH + i, load_bf16(x + i));
        for (; i < depth; i++) to[m * DEPTH + i] = i < stored ? read_as(x, i, BFLOAT16) : 0.0f;
    }
}

/* Some pairs of a panel's inputs as float32, in the order of a panel of float32. */
static void widen_panel(const bf16 *panel, int64_t depth, float *to) {
    for (int64_t i = 0; i < depth; i += 2)
        for (int v = 0; v < PANEL; v += REG) {
            reg words = load_reg(panel + i * PANEL + 2 * v);
            store_reg(to + i * PANEL + v, low_halves(words));
            store_reg(to + (i + 1) * PANEL + v, high_halves(words));
        }
}

/* Some inputs at a time. One block of rows widens the panel in registers; more share a copy. */
static void sum_pairs(const Linear *l, const bf16 *panel, int64_t row, int num, float *sums) {
    _Alignas(64) float x[ROWS * DEPTH], widened[DEPTH * PANEL];
    const int is_shared = WIDE_ROWS > ROWS && num > ROWS;
    for (int64_t first = 0; first < l->num_inputs; first += DEPTH) {
        int64_t left = (l->num_inputs - first + 1) / 2 * 2, depth = left < DEPTH ? left : DEPTH;
        const bf16 *part = panel + first * PANEL;
        if (is_shared) widen_panel(part, depth, widened);
        for (int m = 0; m < num; m += ROWS) {
            int some = num - m < ROWS ? num - m : ROWS;
            widen_inputs(l, row + m, some, first, depth, x);
            if (is_shared)
                multiply_whole(x, DEPTH, depth, widened, sums + m * PANEL, some);
            else
                multiply_part(x, DEPTH, depth, part, sums, some);
        }
    }
}
#endif

/* Some of a weight's outputs, which are `first` and following of all outputs. */
typedef struct {
    const Weight *weight;
    int64_t panel, first;
    int count;
} Outputs;

static void finish_row(const Linear *l, int64_t row, const Outputs *o, const float *sums) {
    int64_t first = o->first, at = row * y_stride_of(l) + first;
    int count = o->count, j = 0;
    for (; j + LANES <= count; j += LANES) {
        vec y = load(sums + j);
        if (l->bias) y += load_as(l->bias, first + j, l->dtype);
        if (l->residual) y += load_as(l->residual, at + j, l->y_dtype);
        store_as(l->y, at + j, y, l->y_dtype);
    }
    for (; j < count; j++) {
        float y = sums[j];
        if (l->bias) y += read_as(l->bias, first + j, l->dtype);
        if (l->residual) y += read_as(l->residual, at + j, l->y_dtype);
        write_as(l->y, at + j, y, l->y_dtype);
    }
}

INLINE int rows_at_once(int dtype) {
    return dtype == FLOAT32 ? ROWS : HAS_TILES ? MOST_ROWS : HAS_BF16_DOT ? DOT_ROWS : WIDE_ROWS;
}

static void project_rows(const Linear *l, const Outputs *o, int64_t row, int64_t end) {
    int64_t depth = padded_inputs(l->num_inputs, l->dtype);
    const char *panel =
        (const char *)o->weight->data + o->panel * PANEL * depth * size_of(l->dtype);
    int most = rows_at_once(l->dtype);
#if HAS_TILES
    int shaped = 0;
#endif
    for (; row < end; row += most) {
        _Alignas(64) float sums[SUM_ROWS * PANEL];
        int num = (int)(end - row < most ? end - row : most);
        memset(sums, 0, sizeof(float) * (size_t)(num * PANEL));
#if HAS_TILES
        if (l->dtype == BFLOAT16 && num != shaped) shape_tiles(shaped = num);
#endif
        if (l->dtype == FLOAT32)
            sum_floats(l, (const float *)panel, row, num, sums);
        else
            sum_pairs(l, (const bf16 *)panel, row, num, sums);
        for (int m = 0; m < num; m++) finish_row(l, row + m, o, sums + m * PANEL);
    }
#if HAS_TILES
    if (shaped) TILE_RELEASE(); /* else the system saves the tiles at each context switch */
#endif
}

static void project_quantized(const Linear *l, const Outputs *o, int64_t row, int64_t end) {
    _Alignas(64) float sums[TASK_ROWS * PANEL];
    int num = (int)(end - row);
    memset(sums, 0, sizeof(float) * (size_t)(num * PANEL));
    sum_blocks(l, o->weight, o->panel, row, num, sums);
    for (int m = 0; m < num; m++) finish_row(l, row + m, o, sums + m * PANEL);
}

INLINE int64_t blocks_per_panel(const Linear *l) {
    return (l->num_rows + TASK_ROWS - 1) / TASK_ROWS;
}

INLINE int64_t num_panels(const Weight *weight) { return (weight->num_outputs + PANEL - 1) / PANEL; }

static Outputs outputs_of(const Linear *l, int64_t panel) {
    Outputs o = {.weight = l->weights};
    for (; panel >= num_panels(o.weight); o.weight++) {
        panel -= num_panels(o.weight);
        o.first += o.weight->num_outputs;
    }
    int64_t left = o.weight->num_outputs - panel * PANEL;
    o.panel = panel;
    o.first += panel * PANEL;
    o.count = (int)(left < PANEL ? left : PANEL);
    return o;
}

/* Neighbouring tasks share a panel, so a thread finds it in its cache. */
static void project(void *context, int64_t index, int worker) {
    const Linear *l = linear_of(context, &index);
    int64_t row = index % blocks_per_panel(l) * TASK_ROWS, end = row + TASK_ROWS;
    Outputs o = outputs_of(l, index / blocks_per_panel(l));
    (void)worker;
    if (end > l->num_rows) end = l->num_rows;
    if (is_blocks(o.weight->format))
        project_quantized(l, &o, row, end);
    else
        project_rows(l, &o, row, end);
}

void linears(const Linear *l, int64_t num) {
    int64_t ends[num], total = 0;
    for (int64_t i = 0; i < num; i++) {
        int64_t panels = 0;
        for (int w = 0; w < l[i].num_weights; w++) panels += num_panels(&l[i].weights[w]);
        ends[i] = total += panels * blocks_per_panel(&l[i]);
    }
    Tasks t = {l, ends, num};
    quantize_rows(l, num);
    run_tasks(total, l->num_threads, project, &t);
}

void linear(const Linear *l) { linears(l, 1); }
