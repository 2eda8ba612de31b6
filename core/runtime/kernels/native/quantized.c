/* Products with weights in blocks of integers.
 *
 * A row of activations is quantized once, to bytes with a scale for each 32 inputs. The products of a
 * block are summed in integers, which is exact; the blocks' sums in float32, one after the other. A
 * row's result therefore depends neither on other rows of its batch nor on which of the loops below
 * computes it.
 *
 * sum(weight * x) = scale_x * (scale * (sum(code * x) - zero * sum(x)) + minimum * sum(x)), where x
 * are bytes: each row also keeps the sums of its half blocks.
 *
 * Bytes are coarser than weights of 8 bits. For those the remainder makes a second byte, with a 128th
 * of the first one's scale: x = 128 * byte + fine byte, and the sums are still exact.
 */
#include "quantized.h"
#include "pool.h"
#include "tiles.h"
#include "unrolled.h"

#define CHUNK 32         /* rows stored together, which fill the tiles */
#define ROWS_PER_TASK 4  /* of a quantizing task */
#define AHEAD 4          /* blocks that are fetched before their use */
#define LINE 64          /* bytes of a line of the cache */

/* Rows and registers of outputs whose integer sums fit into registers. */
#if defined(__AVX512F__)
#define ROWS 12
#define REGS 2
#define FEW 8
#define MOST_BY_FEW CHUNK
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

#ifndef FEW
#define FEW 4 /* rows for which codes are unpacked into registers */
#endif
#ifndef MOST_BY_FEW
#define MOST_BY_FEW FEW /* rows of a chunk: more are faster with codes unpacked once */
#endif

/* ---- rows of activations ----------------------------------------------------------------------- */

#define FINE_BITS 7

/* Formats whose own error is smaller than that of inputs in one byte. */
INLINE int is_fine(int format) { return format == Q8_0; }

/* Rows are stored by CHUNK, and the rest together: for each block the rows' bytes, their fine bytes
 * if a weight needs them, their scales, and the sums of the first and of the second halves, of bytes
 * and of fine bytes. */
typedef struct {
    int8_t *codes, *fine;
    float *scales;
    int32_t *sums;
} Rows;

#define ROW_BYTES (2 * BLOCK + (int64_t)sizeof(float) + 4 * (int64_t)sizeof(int32_t)) /* of a block */

int64_t quantized_bytes(int64_t num_inputs) { return num_blocks(num_inputs) * ROW_BYTES; }

INLINE int rows_in_chunk(const Linear *l, int64_t first) {
    return (int)(l->num_rows - first < CHUNK ? l->num_rows - first : CHUNK);
}

/* The rows of a chunk of `num`, from `row` on, in the block that is stored at `at`. */
INLINE Rows rows_of(const char *at, int64_t num, int64_t row) {
    int8_t *codes = (int8_t *)at;
    float *scales = (float *)(codes + 2 * num * BLOCK);
    int32_t *sums = (int32_t *)(scales + num);
    return (Rows){codes + row * BLOCK, codes + (num + row) * BLOCK, scales + row, sums + row};
}

/* The chunk that begins with row `first`: its first block. */
INLINE char *chunk_at(const Linear *l, int64_t first) {
    return (char *)l->quantized + first * quantized_bytes(l->num_inputs);
}

/* A block of the chunk that begins with row `first`. */
INLINE Rows rows_at(const Linear *l, int64_t first, int64_t block) {
    int64_t num = rows_in_chunk(l, first);
    return rows_of(chunk_at(l, first) + block * num * ROW_BYTES, num, 0);
}

/* Returns the number: keeps the compiler from fusing its product with an addition, so that codes are
 * the same on every level. */
INLINE vec rounded_product(vec x) {
    __asm__("" : "+m"(x));
    return x;
}

INLINE vec magnitude(vec x) { return (vec)((uvec)x & 0x7fffffff); }

/* A block of one row, as it is stored among `stride` rows. */
typedef struct {
    int8_t *codes, *fine; /* no fine bytes: NULL */
    float *scale;
    int32_t *sums;
    int64_t stride;
} RowBlock;

/* Round to the nearest integers, for magnitudes below 2^22. */
INLINE vec rounded(vec x) {
    const float to_integer = 12582912.0f; /* 1.5 * 2^23 */
    return (x + to_integer) - to_integer;
}

/* Store integers as bytes; returns their sum. */
INLINE int32_t store_bytes(vec x, int8_t *to) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes some = __builtin_convertvector(__builtin_convertvector(x, ivec), bytes);
    memcpy(to, &some, sizeof some);
    return (int32_t)sum_lanes(x);
}

/* One block of a row. A value that is not finite makes the scale NaN, and with it every result. */
static void quantize_block(const void *x, int64_t first, int64_t end, int dtype, RowBlock to) {
    vec parts[2];
    if (first + BLOCK <= end) {
        for (int h = 0; h < 2; h++) parts[h] = load_as(x, first + h * LANES, dtype);
    } else {
        float rest[BLOCK] = {0};
        for (int64_t i = first; i < end; i++) rest[i - first] = read_as(x, i, dtype);
        for (int h = 0; h < 2; h++) parts[h] = load(rest + h * LANES);
    }
    float most = max_lanes(max_vec(magnitude(parts[0]), magnitude(parts[1])));
    float poison = sum_lanes((parts[0] - parts[0]) + (parts[1] - parts[1]));
    float inverse = poison == 0.0f && most > 1e-30f ? 127.0f / most : 0.0f;
    *to.scale = (inverse != 0.0f ? most / 127.0f : 0.0f) + poison;
    for (int h = 0; h < 2; h++) {
        vec scaled = rounded_product(poison == 0.0f ? parts[h] * inverse : splat(0.0f));
        vec codes = rounded(scaled);
        to.sums[h * to.stride] = store_bytes(codes, to.codes + h * LANES);
        if (!to.fine) continue;
        vec fine = rounded((scaled - codes) * (1 << FINE_BITS));
        to.sums[(2 + h) * to.stride] = store_bytes(fine, to.fine + h * LANES);
    }
}

/* Whether this product, or a following one that shares its inputs, reads fine bytes. */
static int wants_fine(const Linear *l, const Linear *end) {
    for (const void *shared = l->quantized; l < end && l->quantized == shared; l++)
        for (int i = 0; i < l->num_weights; i++)
            if (is_fine(l->weights[i].format)) return 1;
    return 0;
}

static void quantize_some(void *context, int64_t index, int worker) {
    const Tasks *t = context;
    const Linear *l = linear_of(t, &index);
    int64_t row = index * ROWS_PER_TASK, end = row + ROWS_PER_TASK;
    int has_fine = wants_fine(l, t->linears + t->num);
    (void)worker;
    for (; row < end && row < l->num_rows; row++) {
        const char *x = (const char *)l->x + row * x_stride_of(l) * size_of(l->dtype);
        int64_t first = row / CHUNK * CHUNK, at = row - first;
        for (int64_t block = 0; block < num_blocks(l->num_inputs); block++) {
            Rows rows = rows_at(l, first, block);
            RowBlock to = {rows.codes + at * BLOCK, has_fine ? rows.fine + at * BLOCK : NULL,
                           rows.scales + at, rows.sums + at, rows_in_chunk(l, first)};
            quantize_block(x, block * BLOCK, l->num_inputs, l->dtype, to);
        }
    }
}

static int has_blocks(const Linear *l) {
    for (int i = 0; i < l->num_weights; i++)
        if (is_blocks(l->weights[i].format)) return 1;
    return 0;
}

void quantize_rows(const Linear *l, int64_t num) {
    int64_t ends[num], total = 0;
    const void *last = NULL;
    for (int64_t i = 0; i < num; i++) {
        if (has_blocks(&l[i]) && l[i].quantized != last) {
            total += (l[i].num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
            last = l[i].quantized;
        }
        ends[i] = total;
    }
    Tasks t = {l, ends, num};
    run_tasks(total, l->num_threads, quantize_some, &t);
}

/* ---- dot products of bytes --------------------------------------------------------------------- */

/* Four bytes of a row in every lane, the operand of the dot product below. */
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

#define EACH_FORMAT(X) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q4_K) X(Q5_K) X(Q6_K) X(MXFP4) \
    X(IQ4_NL) X(IQ4_XS)

/* The sum of a row's inputs that share scales of the weight. */
INLINE int32_t sum_of(const int32_t *sums, int num, int half, int format) {
    if (scale_inputs(format) < BLOCK) return sums[half * num];
    int32_t sum = sums[0] + sums[num];
    return is_fine(format) ? sum * (1 << FINE_BITS) + sums[2 * num] + sums[3 * num] : sum;
}

/* The weight of one step of an input's code. */
INLINE float input_scale(float scale, int has_fine) {
    return has_fine ? scale / (1 << FINE_BITS) : scale;
}

/* sums += scale_x * (scale * dot + minimum * sum_x), used by every loop. */
INLINE reg add_part(reg sums, ireg dot, reg scale, reg of_minimum, float scale_x) {
    reg products = fused(__builtin_convertvector(dot, reg), scale, of_minimum);
    return fused(products, splat_reg(scale_x), sums);
}

/* The dot product of a row's inputs, from those of its bytes and of its fine bytes. */
INLINE ireg joined(ireg dot, ireg fine) { return dot * (1 << FINE_BITS) + fine; }

/* A few rows of a chunk: codes are unpacked into registers for all of them. */
typedef struct {
    const char *chunk; /* its first block */
    int64_t num, first; /* rows of the chunk, and the first one here */
} FewRows;

/* One group of the rows' inputs, of REGS registers of outputs. */
INLINE void add_group(ireg dot[FEW][REGS], const ureg codes[REGS], const int8_t *x, const int num) {
    for (int m = 0; m < num; m++) {
        Four four = broadcast(x + m * BLOCK);
        for (int v = 0; v < REGS; v++) dot[m][v] = add_dot(dot[m][v], codes[v], four);
    }
}

/* total += the products with one part of a block, whose inputs share scales. */
INLINE void add_part_of_few(reg total[FEW][REGS], BlockPlace place, Rows x, int64_t stride,
                            int first, int half, const int num, const int format) {
    const int groups = GROUPS / (BLOCK / scale_inputs(format));
    const uint8_t *codes = codes_of(place, format);
    ireg dot[FEW][REGS] = {{{0}}}, fine[FEW][REGS] = {{{0}}};
    for (int g = half * groups; g < (half + 1) * groups; g++) {
        ureg some[REGS];
        for (int v = 0; v < REGS; v++) some[v] = codes_at(codes, g, first + v * REG, format);
        add_group(dot, some, x.codes + 4 * g, num);
        if (is_fine(format)) add_group(fine, some, x.fine + 4 * g, num);
    }
    for (int v = 0; v < REGS; v++) {
        int column = first + v * REG;
        reg scale = scales_at(place, column, half, format), of_one = splat_reg(0.0f);
        if (has_minimum(format)) of_one = minima_at(place, column, format);
        for (int m = 0; m < num; m++) {
            int32_t sum = sum_of(x.sums + m, (int)stride, half, format);
            reg minimum = has_minimum(format) ? of_one * (float)sum : of_one;
            if (is_fine(format)) dot[m][v] = joined(dot[m][v], fine[m][v]);
            total[m][v] = add_part(total[m][v], dot[m][v] - code_zero(format) * sum, scale, minimum,
                                   input_scale(x.scales[m], is_fine(format)));
        }
    }
}

/* Fetch a block before its use: the hardware's own prefetching ends with a page of memory. One row or
 * two wait for memory all the time, where this only costs. */
INLINE void prefetch_block(BlockPlace place, const int format) {
    const uint8_t *ahead = place.block + AHEAD * block_bytes(format);
    for (int64_t at = 0; at < block_bytes(format); at += LINE) __builtin_prefetch(ahead + at);
}

INLINE void sum_few_rows(FewRows few, const uint8_t *panel, int64_t num_parts, float *sums,
                         const int num, const int format) {
    for (int first = 0; first < PANEL; first += REGS * REG) {
        const char *at = few.chunk;
        reg total[FEW][REGS];
        for (int m = 0; m < num; m++)
            for (int v = 0; v < REGS; v++)
                total[m][v] = load_reg(sums + m * PANEL + first + v * REG);
        for (int64_t block = 0; block < num_parts; block++, at += few.num * ROW_BYTES) {
            BlockPlace place = place_of(panel, block, format);
            Rows x = rows_of(at, few.num, few.first);
            if (num >= 3) prefetch_block(place, format);
            for (int half = 0; half < BLOCK / scale_inputs(format); half++)
                add_part_of_few(total, place, x, few.num, first, half, num, format);
        }
        for (int m = 0; m < num; m++)
            for (int v = 0; v < REGS; v++)
                store_reg(sums + m * PANEL + first + v * REG, total[m][v]);
    }
}

#define DEFINE_FEW(N, FORMAT)                                                                  \
    OWN sum_##N##_rows_##FORMAT(FewRows few, const uint8_t *panel, int64_t num, float *sums) { \
        sum_few_rows(few, panel, num, sums, N, FORMAT);                                        \
    }
#define DEFINE(FORMAT) UP_TO_OF(FEW, DEFINE_FEW, FORMAT)
EACH_FORMAT(DEFINE)
#undef DEFINE

/* Several rows: a block is unpacked for all of them. Tiles take codes with the zero taken off. */
typedef struct {
    _Alignas(64) uint8_t codes[GROUPS * GROUP_BYTES];
    float scales[2][PANEL], minima[PANEL];
} Unpacked;

INLINE void unpack_block(BlockPlace place, Unpacked *to, int is_signed, const int format) {
    typedef uint8_t bytes __attribute__((vector_size(4 * REG)));
    const uint8_t *codes = codes_of(place, format);
    uint8_t zero = is_signed ? (uint8_t)code_zero(format) : 0;
    for (int column = 0; column < PANEL; column += REG) {
        for (int g = 0; g < GROUPS; g++) {
            bytes some = (bytes)codes_at(codes, g, column, format) - zero;
            memcpy(to->codes + g * GROUP_BYTES + 4 * column, &some, sizeof some);
        }
        for (int half = 0; half < BLOCK / scale_inputs(format); half++)
            store_reg(to->scales[half] + column, scales_at(place, column, half, format));
        if (has_minimum(format)) store_reg(to->minima + column, minima_at(place, column, format));
    }
}

#define DEFINE(FORMAT)                                                                         \
    OWN unpack_block_##FORMAT(BlockPlace place, Unpacked *to, int is_signed) {                 \
        unpack_block(place, to, is_signed, FORMAT);                                            \
    }
EACH_FORMAT(DEFINE)
#undef DEFINE

static void unpack(BlockPlace place, int format, Unpacked *to, int is_signed) {
    switch (format) {
#define CALL(FORMAT) unpack_block_##FORMAT(place, to, is_signed)
        EACH_FORMAT(CASE)
#undef CALL
    }
}

/* A part of a block whose inputs share scales, and the same of some rows. */
typedef struct {
    const uint8_t *codes; /* [num_groups][PANEL][4] */
    const float *scales, *minima; /* no minima: NULL */
    const int8_t *x, *fine; /* every BLOCK bytes a row; no fine bytes: NULL */
    const float *scales_x;
    const int32_t *sums_x;
    int num_groups, zero;
} Part;

INLINE void add_row(const Part *p, int m, int column, ireg dot, float *sums) {
    reg minimum = splat_reg(0.0f);
    if (p->minima) minimum = load_reg(p->minima + column) * (float)p->sums_x[m];
    float *at = sums + m * PANEL + column;
    store_reg(at, add_part(load_reg(at), dot, load_reg(p->scales + column), minimum,
                           input_scale(p->scales_x[m], p->fine != NULL)));
}

INLINE void add_groups(ireg dot[ROWS][REGS], const Part *p, const int8_t *rows, int first,
                       const int num) {
    for (int g = 0; g < p->num_groups; g++) {
        ureg codes[REGS];
        for (int v = 0; v < REGS; v++)
            codes[v] = load_words_reg(p->codes + g * GROUP_BYTES + 4 * (first + v * REG));
        for (int m = 0; m < num; m++) {
            Four x = broadcast(rows + m * BLOCK + 4 * g);
            for (int v = 0; v < REGS; v++) dot[m][v] = add_dot(dot[m][v], codes[v], x);
        }
    }
}

INLINE void add_rows(const Part *p, float *sums, const int num) {
    for (int first = 0; first < PANEL; first += REGS * REG) {
        ireg dot[ROWS][REGS];
        for (int m = 0; m < num; m++)
            for (int v = 0; v < REGS; v++) dot[m][v] = (ireg){0};
        add_groups(dot, p, p->x, first, num);
        if (p->fine) {
            for (int m = 0; m < num; m++)
                for (int v = 0; v < REGS; v++) dot[m][v] = joined(dot[m][v], (ireg){0});
            add_groups(dot, p, p->fine, first, num);
        }
        for (int m = 0; m < num; m++)
            for (int v = 0; v < REGS; v++)
                add_row(p, m, first + v * REG, dot[m][v] - p->zero * p->sums_x[m], sums);
    }
}

#define DEFINE(N) \
    OWN add_##N##_rows(const Part *p, float *sums) { add_rows(p, sums, N); }
UP_TO(ROWS, DEFINE)
#undef DEFINE

static void add_few_rows(const Part *p, float *sums, int num) {
    switch (num) {
#define CALL(N) add_##N##_rows(p, sums)
        UP_TO(ROWS, CASE)
#undef CALL
    }
}

/* The rows of a chunk. */
static void add_chunk(Part p, float *sums, int num) {
    for (; num > 0; num -= ROWS, sums += ROWS * PANEL) {
        add_few_rows(&p, sums, num < ROWS ? num : ROWS);
        p.x += ROWS * BLOCK;
        if (p.fine) p.fine += ROWS * BLOCK;
        p.scales_x += ROWS;
        p.sums_x += ROWS;
    }
}

#if HAS_TILES
/* The same by tiles, which have been shaped for it. */
INLINE void add_chunk_by_tiles(const Part *p, float *sums, int num) {
    _Alignas(64) int32_t dots[CHUNK * PANEL], fine_dots[CHUNK * PANEL];
    multiply_byte_tiles(p->x, BLOCK, p->codes, dots, num);
    if (p->fine) multiply_byte_tiles(p->fine, BLOCK, p->codes, fine_dots, num);
    for (int m = 0; m < num; m++)
        for (int column = 0; column < PANEL; column += REG) {
            ireg dot, fine;
            memcpy(&dot, dots + m * PANEL + column, sizeof dot);
            if (p->fine) {
                memcpy(&fine, fine_dots + m * PANEL + column, sizeof fine);
                dot = joined(dot, fine);
            }
            add_row(p, m, column, dot, sums);
        }
}

#define USES_TILES(num) ((num) >= 4) /* fewer rows are faster without tiles */
#else
#define USES_TILES(num) 0
#endif

/* `num` rows in chunks of `most`, the last one whole. */
static void sum_rows(const Linear *l, const uint8_t *panel, int format, int64_t row, int num,
                     float *sums) {
    int inputs = scale_inputs(format), most = num < CHUNK ? num : CHUNK;
#if HAS_TILES
    if (USES_TILES(most)) shape_byte_tiles(most, inputs);
#endif
    for (int64_t block = 0; block < num_blocks(l->num_inputs); block++) {
        Unpacked unpacked;
        unpack(place_of(panel, block, format), format, &unpacked, USES_TILES(most));
        for (int done = 0; done < num; done += most) {
            Rows x = rows_at(l, row + done, block);
            for (int half = 0; half < BLOCK / inputs; half++) {
                int32_t sums_x[CHUNK];
                for (int m = 0; m < most; m++) sums_x[m] = sum_of(x.sums + m, most, half, format);
                Part p = {unpacked.codes + half * inputs * PANEL, unpacked.scales[half],
                          has_minimum(format) ? unpacked.minima : NULL,
                          x.codes + half * inputs, is_fine(format) ? x.fine : NULL, x.scales,
                          sums_x, inputs / 4,
                          code_zero(format)};
#if HAS_TILES
                if (USES_TILES(most)) {
                    add_chunk_by_tiles(&p, sums + done * PANEL, most);
                    continue;
                }
#endif
                add_chunk(p, sums + done * PANEL, most);
            }
        }
    }
#if HAS_TILES
    if (USES_TILES(most)) TILE_RELEASE();
#endif
}

/* At most FEW rows. */
static void sum_some_rows(FewRows few, int num, const uint8_t *panel, int format,
                          int64_t num_parts, float *sums) {
    switch (FEW * format + num) {
#define CASE_OF(N, FORMAT)                                       \
    case FEW * FORMAT + N:                                       \
        sum_##N##_rows_##FORMAT(few, panel, num_parts, sums);    \
        break;
#define CALLS(FORMAT) UP_TO_OF(FEW, CASE_OF, FORMAT)
        EACH_FORMAT(CALLS)
#undef CALLS
#undef CASE_OF
    }
}

/* The rows of a chunk, a few at a time. */
static void sum_by_few(const Linear *l, const uint8_t *panel, int format, int64_t row, int num,
                       float *sums) {
    for (int done = 0; done < num; done += FEW) {
        FewRows few = {chunk_at(l, row), num, done};
        int some = num - done < FEW ? num - done : FEW;
        sum_some_rows(few, some, panel, format, num_blocks(l->num_inputs), sums + done * PANEL);
    }
}

/* Whether a chunk of so many rows is summed a few at a time. */
INLINE int goes_by_few(int num) { return num <= MOST_BY_FEW && !USES_TILES(num); }

void sum_blocks(const Linear *l, const Weight *weight, int64_t panel, int64_t row, int num,
                float *sums) {
    int format = weight->format, whole = num / CHUNK * CHUNK, done = 0;
    const uint8_t *at = (const uint8_t *)weight->data + panel * panel_bytes(format, l->num_inputs);
    if (whole && !goes_by_few(CHUNK)) {
        sum_rows(l, at, format, row, whole, sums);
        done = whole;
    }
    for (int some; done < num; done += some) {
        some = num - done < CHUNK ? num - done : CHUNK;
        if (goes_by_few(some))
            sum_by_few(l, at, format, row + done, some, sums + done * PANEL);
        else
            sum_rows(l, at, format, row + done, some, sums + done * PANEL);
    }
}
