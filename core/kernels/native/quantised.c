/* Products with weights in blocks of integers.
 *
 * A row of activations is quantised once, each 32 inputs to bytes with a scale of their own. The
 * products of a block are summed in integers, which is exact; the blocks' sums in float32, one after
 * the other. So a row's result does not depend on its batch mates, nor on which of the loops below
 * computes it.
 *
 * sum(weight * x) = scale_x * (scale * (sum(code * x) - zero * sum(x)) + minimum * sum(x)), where x
 * are bytes: each row keeps the sums of its halves of blocks, too.
 */
#include "quantised.h"
#include "pool.h"
#include "unrolled.h"

#define ROWS_PER_TASK 4 /* that are quantised by one task */

/* Rows and registers of outputs whose integer sums fit into registers. */
#if defined(__AVX512F__)
#define ROWS 12
#define REGS 2
#elif defined(__AVX2__)
#define ROWS 4
#define REGS 2
#elif defined(__aarch64__)
#define ROWS 6
#define REGS 4
#else
#define ROWS 2
#define REGS 4
#endif

/* ---- rows of activations ----------------------------------------------------------------------- */

/* [num_inputs] bytes, filled up to whole blocks, then for each block a scale and two sums. */
typedef struct {
    int8_t *codes;
    float *scales;
    int32_t *sums;
} Row;

int64_t quantised_bytes(int64_t num_inputs) {
    return num_blocks(num_inputs) * (BLOCK + (int64_t)sizeof(float) + 2 * (int64_t)sizeof(int32_t));
}

INLINE Row row_at(const Linear *l, int64_t row) {
    char *at = (char *)l->quantised + row * quantised_bytes(l->num_inputs);
    float *scales = (float *)(at + num_blocks(l->num_inputs) * BLOCK);
    return (Row){(int8_t *)at, scales, (int32_t *)(scales + num_blocks(l->num_inputs))};
}

/* The number as it is: an addition that follows is not fused with the product that made it, so codes
 * are the same on every level. */
INLINE vec rounded_product(vec x) {
    __asm__("" : "+m"(x));
    return x;
}

INLINE vec magnitude(vec x) { return (vec)((uvec)x & 0x7fffffff); }

/* One block of a row. What is not finite makes the scale NaN, and with it every result. */
static void quantise_block(const void *x, int64_t first, int64_t end, int dtype, Row to) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    int64_t block = first / BLOCK;
    vec parts[2];
    if (first + BLOCK <= end) {
        for (int h = 0; h < 2; h++) parts[h] = load_as(x, first + h * LANES, dtype);
    } else {
        float rest[BLOCK] = {0};
        for (int64_t i = first; i < end; i++) rest[i - first] = read_as(x, i, dtype);
        for (int h = 0; h < 2; h++) parts[h] = load(rest + h * LANES);
    }
    const float to_integer = 12582912.0f; /* 1.5 * 2^23 */
    float most = max_lanes(max_vec(magnitude(parts[0]), magnitude(parts[1])));
    float poison = sum_lanes((parts[0] - parts[0]) + (parts[1] - parts[1]));
    float inverse = poison == 0.0f && most > 1e-30f ? 127.0f / most : 0.0f;
    to.scales[block] = (inverse != 0.0f ? most / 127.0f : 0.0f) + poison;
    for (int h = 0; h < 2; h++) {
        vec scaled = rounded_product(poison == 0.0f ? parts[h] * inverse : splat(0.0f));
        vec rounded = (scaled + to_integer) - to_integer;
        bytes codes = __builtin_convertvector(__builtin_convertvector(rounded, ivec), bytes);
        memcpy(to.codes + first + h * LANES, &codes, sizeof codes);
        to.sums[2 * block + h] = (int32_t)sum_lanes(rounded);
    }
}

static void quantise_some(void *context, int64_t index, int worker) {
    const Linear *l = context;
    int64_t row = index * ROWS_PER_TASK, end = row + ROWS_PER_TASK;
    (void)worker;
    for (; row < end && row < l->num_rows; row++) {
        const char *x = (const char *)l->x + row * l->num_inputs * size_of(l->dtype);
        Row to = row_at(l, row);
        for (int64_t first = 0; first < l->num_inputs; first += BLOCK) {
            if (l->dtype == FLOAT32)
                quantise_block(x, first, l->num_inputs, FLOAT32, to);
            else
                quantise_block(x, first, l->num_inputs, BFLOAT16, to);
        }
    }
}

void quantise_rows(const Linear *l) {
    int64_t num_tasks = (l->num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    run_tasks(num_tasks, l->num_threads, quantise_some, (void *)l);
}

/* ---- dot products of bytes --------------------------------------------------------------------- */

/* Four bytes of a row in every lane, as the dot product below takes them. */
#if defined(__AVX512VNNI__)
typedef struct {
    ireg bytes;
} Four;
#else
typedef int16_t sreg __attribute__((vector_size(4 * REG)));
typedef struct {
    sreg even, odd;
} Four;
#endif

INLINE Four broadcast(const int8_t *p) {
    int32_t word;
    memcpy(&word, p, sizeof word);
#if defined(__AVX512VNNI__)
    return (Four){(ireg){0} + word};
#else
    sreg words = (sreg)((ireg){0} + word);
    return (Four){words << 8 >> 8, words >> 8};
#endif
}

#if !defined(__AVX512VNNI__)
/* Sums of neighbours: a[2i] * b[2i] + a[2i + 1] * b[2i + 1]; a product fits into 16 bits. */
INLINE ireg dot_pairs(sreg a, sreg b) {
#if defined(__AVX512BW__)
    return (ireg)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ireg)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (ireg)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    ireg products = (ireg)(a * b);
    return (products << 16 >> 16) + (products >> 16);
#endif
}
#endif

/* sums[i] += the dot product of lane i's unsigned bytes with the row's signed ones. */
INLINE ireg add_dot(ireg sums, ureg codes, Four x) {
#if defined(__AVX512VNNI__)
    return (ireg)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)x.bytes);
#else
    sums += dot_pairs((sreg)(codes & 0x00ff00ff), x.even);
    return sums + dot_pairs((sreg)(codes >> 8 & 0x00ff00ff), x.odd);
#endif
}

/* ---- blocks ------------------------------------------------------------------------------------ */

#define EACH_FORMAT(X) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q4_K) X(Q5_K) X(Q6_K)

/* The sum of a row's bytes that share scales of the weight. */
INLINE int32_t sum_of(Row row, int64_t block, int half, int format) {
    const int32_t *sums = row.sums + 2 * block;
    return scale_inputs(format) < BLOCK ? sums[half] : sums[0] + sums[1];
}

/* sums += scale_x * (scale * dot + minimum * sum_x). Every loop comes through here. */
INLINE reg add_part(reg sums, ireg dot, reg scale, reg of_minimum, float scale_x) {
    reg products = fused(__builtin_convertvector(dot, reg), scale, of_minimum);
    return fused(products, splat_reg(scale_x), sums);
}

/* One row: codes are unpacked into registers. */
INLINE void sum_one_row(Row x, const uint8_t *panel, int64_t num, float *sums, const int format) {
    const int halves = BLOCK / scale_inputs(format), groups = GROUPS / halves;
    for (int first = 0; first < PANEL; first += REGS * REG) {
        reg total[REGS];
        for (int v = 0; v < REGS; v++) total[v] = load_reg(sums + first + v * REG);
        for (int64_t block = 0; block < num; block++) {
            BlockPlace place = place_of(panel, block, format);
            const uint8_t *codes = codes_of(place, format);
            for (int half = 0; half < halves; half++) {
                int32_t sum = sum_of(x, block, half, format);
                ireg dot[REGS];
                for (int v = 0; v < REGS; v++) dot[v] = (ireg){0} - code_zero(format) * sum;
                for (int g = half * groups; g < (half + 1) * groups; g++) {
                    Four four = broadcast(x.codes + block * BLOCK + 4 * g);
                    for (int v = 0; v < REGS; v++)
                        dot[v] = add_dot(dot[v], codes_at(codes, g, first + v * REG, format), four);
                }
                for (int v = 0; v < REGS; v++) {
                    int column = first + v * REG;
                    reg minimum = splat_reg(0.0f);
                    if (has_minimum(format))
                        minimum = minima_at(place, column, format) * (float)sum;
                    total[v] = add_part(total[v], dot[v], scales_at(place, column, half, format),
                                        minimum, x.scales[block]);
                }
            }
        }
        for (int v = 0; v < REGS; v++) store_reg(sums + first + v * REG, total[v]);
    }
}

#define DEFINE(FORMAT)                                                                         \
    OWN sum_one_row_##FORMAT(Row x, const uint8_t *panel, int64_t num, float *sums) {          \
        sum_one_row(x, panel, num, sums, FORMAT);                                              \
    }
EACH_FORMAT(DEFINE)
#undef DEFINE

/* Several rows: a block is unpacked for all of them. */
typedef struct {
    _Alignas(64) uint8_t codes[GROUPS * GROUP_BYTES];
    float scales[2][PANEL], minima[PANEL];
} Unpacked;

INLINE void unpack_block(BlockPlace place, Unpacked *to, const int format) {
    const uint8_t *codes = codes_of(place, format);
    for (int column = 0; column < PANEL; column += REG) {
        for (int g = 0; g < GROUPS; g++) {
            ureg four = codes_at(codes, g, column, format);
            memcpy(to->codes + g * GROUP_BYTES + 4 * column, &four, sizeof four);
        }
        for (int half = 0; half < BLOCK / scale_inputs(format); half++)
            store_reg(to->scales[half] + column, scales_at(place, column, half, format));
        if (has_minimum(format)) store_reg(to->minima + column, minima_at(place, column, format));
    }
}

#define DEFINE(FORMAT)                                                                         \
    OWN unpack_block_##FORMAT(BlockPlace place, Unpacked *to) {                                \
        unpack_block(place, to, FORMAT);                                                       \
    }
EACH_FORMAT(DEFINE)
#undef DEFINE

static void unpack(BlockPlace place, int format, Unpacked *to) {
    switch (format) {
#define CALL(FORMAT) unpack_block_##FORMAT(place, to)
        EACH_FORMAT(CASE)
#undef CALL
    }
}

/* A part of a block whose inputs share scales, and of the row that is first. */
typedef struct {
    const uint8_t *codes; /* [num_groups][PANEL][4] */
    const float *scales, *minima; /* no minima: NULL */
    const int8_t *x;
    const float *scale_x;
    int64_t stride; /* bytes from row to row, of x and of its scales */
    int num_groups;
} Part;

INLINE void add_rows(const Part *p, const int32_t *sums_x, int zero, float *sums, const int num) {
    for (int first = 0; first < PANEL; first += REGS * REG) {
        ireg dot[ROWS][REGS];
        for (int m = 0; m < num; m++)
            for (int v = 0; v < REGS; v++) dot[m][v] = (ireg){0} - zero * sums_x[m];
        for (int g = 0; g < p->num_groups; g++) {
            ureg codes[REGS];
            for (int v = 0; v < REGS; v++)
                codes[v] = load_words_reg(p->codes + g * GROUP_BYTES + 4 * (first + v * REG));
            for (int m = 0; m < num; m++) {
                Four x = broadcast(p->x + m * p->stride + 4 * g);
                for (int v = 0; v < REGS; v++) dot[m][v] = add_dot(dot[m][v], codes[v], x);
            }
        }
        for (int m = 0; m < num; m++)
            for (int v = 0; v < REGS; v++) {
                int column = first + v * REG;
                float *at = sums + m * PANEL + column;
                float scale_x = *(const float *)((const char *)p->scale_x + m * p->stride);
                reg minimum = splat_reg(0.0f);
                if (p->minima) minimum = load_reg(p->minima + column) * (float)sums_x[m];
                store_reg(at, add_part(load_reg(at), dot[m][v], load_reg(p->scales + column),
                                       minimum, scale_x));
            }
    }
}

#define DEFINE(N)                                                                              \
    OWN add_##N##_rows(const Part *p, const int32_t *sums_x, int zero, float *sums) {          \
        add_rows(p, sums_x, zero, sums, N);                                                    \
    }
UP_TO(ROWS, DEFINE)
#undef DEFINE

static void add_some_rows(const Part *p, const int32_t *sums_x, int zero, float *sums, int num) {
    switch (num) {
#define CALL(N) add_##N##_rows(p, sums_x, zero, sums)
        UP_TO(ROWS, CASE)
#undef CALL
    }
}

static void sum_part(const Linear *l, int64_t row, int num, int64_t block, int half, int format,
                     const Unpacked *unpacked, float *sums) {
    int groups = scale_inputs(format) / 4;
    Part p = {.codes = unpacked->codes + half * groups * GROUP_BYTES,
              .scales = unpacked->scales[half],
              .minima = has_minimum(format) ? unpacked->minima : NULL,
              .stride = quantised_bytes(l->num_inputs),
              .num_groups = groups};
    for (int done = 0; done < num; done += ROWS) {
        int count = num - done < ROWS ? num - done : ROWS;
        int32_t sums_x[ROWS];
        Row x = row_at(l, row + done);
        for (int m = 0; m < count; m++)
            sums_x[m] = sum_of(row_at(l, row + done + m), block, half, format);
        p.x = x.codes + block * BLOCK + half * groups * 4;
        p.scale_x = x.scales + block;
        add_some_rows(&p, sums_x, code_zero(format), sums + done * PANEL, count);
    }
}

void sum_blocks(const Linear *l, const Weight *weight, int64_t panel, int64_t row, int num,
                float *sums) {
    int format = weight->format;
    const uint8_t *at = (const uint8_t *)weight->data + panel * panel_bytes(format, l->num_inputs);
    if (num == 1) {
        Row x = row_at(l, row);
        switch (format) {
#define CALL(FORMAT) sum_one_row_##FORMAT(x, at, num_blocks(l->num_inputs), sums)
            EACH_FORMAT(CASE)
#undef CALL
        }
        return;
    }
    for (int64_t block = 0; block < num_blocks(l->num_inputs); block++) {
        Unpacked unpacked;
        unpack(place_of(at, block, format), format, &unpacked);
        for (int half = 0; half < BLOCK / scale_inputs(format); half++)
            sum_part(l, row, num, block, half, format, &unpacked, sums);
    }
}
