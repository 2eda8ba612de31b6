/* Products of small matrices of bfloat16 or bytes: the tile unit of processors with AMX, or a model of it.
 *
 * Owns the shape of the tiles: C (0 to 3) holds sums of up to 16 rows by 16 columns, A (4, 5) up to
 * 16 rows of 32 inputs, B (6, 7) 32 inputs of 16 columns, neighbouring inputs in pairs. A row of C
 * depends only on its row of A, whatever the number of rows.
 *
 * Of signed bytes (`shape_byte_tiles`) A and B hold up to 64 inputs, in fours, and C their exact sums.
 *
 * With -DMODEL_TILES the instructions are functions over ordinary memory, after Intel's description
 * (Architecture Instruction Set Extensions, TDPBF16PS and TDPBSSD), so that the code around them can be tested
 * on any processor.
 */
#pragma once

#include "vector.h"

#define TILE_ROWS 16
#define TILE_INPUTS 32

/* The configuration in the format of LDTILECFG. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} TileShapes;

#if defined(__AMX_BF16__)
#define HAS_TILES 1
#include <immintrin.h>
/* Compilers do not know what memory these instructions read: it must be written before them. */
#define TILE_FENCE() __asm__ volatile("" ::: "memory")
#define TILE_SHAPE(shapes) _tile_loadconfig(shapes)
#define TILE_RELEASE() _tile_release()
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_DOT_BYTES(c, a, b) _tile_dpbssd(c, a, b)

#elif defined(MODEL_TILES)
#define HAS_TILES 1
#define TILE_FENCE()
static _Thread_local TileShapes model_shapes;
static _Thread_local uint8_t model_tiles[8][TILE_ROWS][64];

INLINE void TILE_SHAPE(const TileShapes *shapes) {
    model_shapes = *shapes;
    memset(model_tiles, 0, sizeof model_tiles);
}

INLINE void TILE_RELEASE(void) { memset(&model_shapes, 0, sizeof model_shapes); }

INLINE void TILE_LOAD(int tile, const void *from, int64_t stride) {
    memset(model_tiles[tile], 0, sizeof model_tiles[tile]);
    for (int row = 0; row < model_shapes.num_rows[tile]; row++)
        memcpy(model_tiles[tile][row], (const char *)from + row * stride,
               model_shapes.row_bytes[tile]);
}

INLINE void TILE_STORE(int tile, void *to, int64_t stride) {
    for (int row = 0; row < model_shapes.num_rows[tile]; row++)
        memcpy((char *)to + row * stride, model_tiles[tile][row], model_shapes.row_bytes[tile]);
}

static inline void TILE_DOT(int c, int a, int b) {
    for (int row = 0; row < model_shapes.num_rows[c]; row++) {
        float sums[2][LANES] = {{0}}, *out = (float *)model_tiles[c][row];
        for (int pair = 0; pair < model_shapes.row_bytes[a] / 4; pair++)
            for (int column = 0; column < model_shapes.row_bytes[c] / 4; column++)
                for (int i = 0; i < 2; i++)
                    sums[i][column] += read_as(model_tiles[a][row], 2 * pair + i, BFLOAT16) *
                                       read_as(model_tiles[b][pair], 2 * column + i, BFLOAT16);
        for (int column = 0; column < model_shapes.row_bytes[c] / 4; column++)
            out[column] += sums[0][column] + sums[1][column];
    }
}

INLINE void TILE_ZERO(int tile) { memset(model_tiles[tile], 0, sizeof model_tiles[tile]); }

static inline void TILE_DOT_BYTES(int c, int a, int b) {
    for (int row = 0; row < model_shapes.num_rows[c]; row++)
        for (int column = 0; column < model_shapes.row_bytes[c] / 4; column++) {
            int32_t sum;
            memcpy(&sum, &model_tiles[c][row][4 * column], sizeof sum);
            for (int i = 0; i < model_shapes.row_bytes[a]; i++)
                sum += (int8_t)model_tiles[a][row][i] *
                       (int8_t)model_tiles[b][i / 4][4 * column + i % 4];
            memcpy(&model_tiles[c][row][4 * column], &sum, sizeof sum);
        }
}

#else
#define HAS_TILES 0
#endif

#if HAS_TILES
/* Tiles for up to 32 rows: 0, 1 and 4 hold the first 16, 2, 3 and 5 the others. A holds
 * `words` of inputs, two of bfloat16 or four bytes each. Zeroes them all. */
INLINE void shape_some_tiles(int num_rows, int words) {
    int low = num_rows < TILE_ROWS ? num_rows : TILE_ROWS, high = num_rows - low;
    TileShapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        int is_high = tile == 2 || tile == 3 || tile == 5, is_a = tile == 4 || tile == 5;
        shapes.num_rows[tile] = (uint8_t)(tile >= 6 ? words : is_high ? high : low);
        shapes.row_bytes[tile] = (uint16_t)(!shapes.num_rows[tile] ? 0 : is_a ? 4 * words : 64);
    }
    TILE_FENCE();
    TILE_SHAPE(&shapes);
}

INLINE void shape_tiles(int num_rows) { shape_some_tiles(num_rows, TILE_INPUTS / 2); }

INLINE void shape_byte_tiles(int num_rows, int num_inputs) {
    shape_some_tiles(num_rows, num_inputs / 4);
}

/* c[num_rows][32] = a[num_rows][inputs] b[inputs / 4][32][4]. Strides are in bytes. */
INLINE void multiply_byte_tiles(const void *a, int64_t a_stride, const void *b, int32_t *c,
                                int num_rows) {
    int is_tall = num_rows > TILE_ROWS;
    const int64_t stride = 2 * 64;
    int32_t *tall_c = c + TILE_ROWS * 2 * LANES;
    TILE_FENCE();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_LOAD(4, a, a_stride);
    TILE_LOAD(6, b, stride);
    TILE_LOAD(7, (const char *)b + 64, stride);
    TILE_DOT_BYTES(0, 4, 6);
    TILE_DOT_BYTES(1, 4, 7);
    if (is_tall) {
        TILE_ZERO(2);
        TILE_ZERO(3);
        TILE_LOAD(5, (const char *)a + TILE_ROWS * a_stride, a_stride);
        TILE_DOT_BYTES(2, 5, 6);
        TILE_DOT_BYTES(3, 5, 7);
    }
    TILE_STORE(0, c, stride);
    TILE_STORE(1, c + LANES, stride);
    if (is_tall) {
        TILE_STORE(2, tall_c, stride);
        TILE_STORE(3, tall_c + LANES, stride);
    }
    TILE_FENCE();
}

/* c[num_rows][32] += a[num_rows][depth] b[depth / 2][32][2], for tiles of `num_rows` (at most 32)
 * and a depth of whole tiles. Strides are in bytes. */
INLINE void multiply_tiles(const void *a, int64_t a_stride, const void *b, int64_t b_stride,
                           float *c, int64_t c_stride, int64_t depth, int num_rows) {
    int is_tall = num_rows > TILE_ROWS;
    char *tall_c = (char *)c + TILE_ROWS * c_stride;
    TILE_FENCE();
    TILE_LOAD(0, c, c_stride);
    TILE_LOAD(1, c + LANES, c_stride);
    if (is_tall) {
        TILE_LOAD(2, tall_c, c_stride);
        TILE_LOAD(3, tall_c + 64, c_stride);
    }
    for (int64_t i = 0; i < depth; i += TILE_INPUTS) {
        const char *at_a = (const char *)a + 2 * i, *at_b = (const char *)b + i / 2 * b_stride;
        TILE_LOAD(4, at_a, a_stride);
        TILE_LOAD(6, at_b, b_stride);
        TILE_LOAD(7, at_b + 64, b_stride);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        if (is_tall) {
            TILE_LOAD(5, at_a + TILE_ROWS * a_stride, a_stride);
            TILE_DOT(2, 5, 6);
            TILE_DOT(3, 5, 7);
        }
    }
    TILE_STORE(0, c, c_stride);
    TILE_STORE(1, c + LANES, c_stride);
    if (is_tall) {
        TILE_STORE(2, tall_c, c_stride);
        TILE_STORE(3, tall_c + 64, c_stride);
    }
}
#endif
