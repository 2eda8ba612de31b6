/* Weights in blocks: packs the bytes of a GGUF file into panels, and unpacks single rows.
 *
 * Owns the meaning of each format's bytes; blocks.h has the order of panels.
 * Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
 */
#include "blocks.h"
#include "pool.h"

/* ---- the file's bytes -------------------------------------------------------------------------- */

/* One block of one output: codes of BLOCK inputs, float16 scales and small ones. */
typedef struct {
    uint8_t codes[BLOCK], small[2];
    uint16_t header[2];
} RawBlock;

INLINE int64_t raw_bytes(int format) {
    switch (format) {
        case Q8_0: return 34;
        case MXFP4: return 17;
        case Q4_0: case IQ4_NL: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case IQ4_XS: return 136;
        case Q4_K: return 144;
        case Q5_K: return 176;
        default: return 210;
    }
}

/* Bytes of a simple block's scales. */
INLINE size_t scale_bytes(int format) { return (size_t)header_bytes(format) / PANEL; }

/* Lower bits: half of each byte is for the first 16 inputs, half for the last. */
static void read_simple(const uint8_t *raw, int format, RawBlock *to) {
    memcpy(to->header, raw, scale_bytes(format));
    raw += scale_bytes(format);
    if (format == Q8_0) {
        for (int i = 0; i < BLOCK; i++) to->codes[i] = (uint8_t)(raw[i] + 128);
        return;
    }
    uint32_t fifth = 0;
    if (code_bits(format) == 5) {
        memcpy(&fifth, raw, sizeof fifth);
        raw += sizeof fifth;
    }
    for (int i = 0; i < BLOCK; i++) {
        int low = i < BLOCK / 2 ? raw[i] & 15 : raw[i - BLOCK / 2] >> 4;
        to->codes[i] = (uint8_t)(low | (fifth >> i & 1) << 4);
    }
}

/* Q4_K and Q5_K: scales and minima of 6 bits, the last four with their upper two bits in the first
 * eight bytes; codes of two blocks in the halves of the same bytes. */
static void read_with_minima(const uint8_t *raw, int format, int64_t block, RawBlock *to) {
    const uint8_t *small = raw + 4, *codes = small + 12;
    memcpy(to->header, raw, 4);
    if (block < 4) {
        to->small[0] = small[block] & 63;
        to->small[1] = small[block + 4] & 63;
    } else {
        to->small[0] = (uint8_t)((small[block + 4] & 15) | small[block - 4] >> 6 << 4);
        to->small[1] = (uint8_t)(small[block + 4] >> 4 | small[block] >> 6 << 4);
    }
    const uint8_t *fifth = codes;
    if (format == Q5_K) codes += BLOCK;
    for (int i = 0; i < BLOCK; i++) {
        int low = codes[block / 2 * BLOCK + i] >> (block % 2 ? 4 : 0) & 15;
        to->codes[i] = (uint8_t)(low | (format == Q5_K ? (fifth[i] >> block & 1) << 4 : 0));
    }
}

/* Q6_K: 128 inputs are four blocks; see `read_raw`. */
static void read_six_bits(const uint8_t *raw, int64_t block, RawBlock *to) {
    int64_t part = block / 4, quarter = block % 4;
    const uint8_t *low = raw + 64 * part + (quarter % 2 ? BLOCK : 0);
    const uint8_t *high = raw + 128 + BLOCK * part, *small = raw + 192 + 2 * block;
    memcpy(to->small, small, 2);
    memcpy(to->header, raw + 208, 2);
    for (int i = 0; i < BLOCK; i++)
        to->codes[i] = (uint8_t)((low[i] >> (quarter < 2 ? 0 : 4) & 15) |
                                 (high[i] >> 2 * quarter & 3) << 4);
}

/* IQ4_XS: scales of four and two bits, then codes as in a simple block. */
static void read_with_table(const uint8_t *raw, int64_t block, RawBlock *to) {
    const uint8_t *codes = raw + 8 + BLOCK / 2 * block;
    uint16_t high;
    memcpy(to->header, raw, 2);
    memcpy(&high, raw + 2, sizeof high);
    int low = raw[4 + block / 2] >> (block % 2 ? 4 : 0) & 15;
    to->small[0] = (uint8_t)((low | (high >> 2 * block & 3) << 4) - 32);
    for (int i = 0; i < BLOCK / 2; i++) {
        to->codes[i] = codes[i] & 15;
        to->codes[BLOCK / 2 + i] = codes[i] >> 4;
    }
}

/* Block `index` of a row. */
static void read_raw(const uint8_t *row, int format, int64_t index, RawBlock *to) {
    const uint8_t *raw = row + index / blocks_per_header(format) * raw_bytes(format);
    if (!is_super(format))
        read_simple(raw, format, to);
    else if (format == Q6_K)
        read_six_bits(raw, index % SUPER_BLOCKS, to);
    else if (format == IQ4_XS)
        read_with_table(raw, index % SUPER_BLOCKS, to);
    else
        read_with_minima(raw, format, index % SUPER_BLOCKS, to);
}

/* ---- packing ----------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *rows;
    uint8_t *panels;
    int64_t num_outputs, num_inputs;
    int32_t format;
} Packing;

/* Pack the codes of a block, [GROUPS][GROUP_BYTES], to their number of bits. */
static void write_codes(uint8_t codes[GROUPS][GROUP_BYTES], int format, uint8_t *to) {
    int bits = code_bits(format);
    if (bits == 8) {
        memcpy(to, codes, GROUPS * GROUP_BYTES);
        return;
    }
    memset(to, 0, (size_t)(bits * GROUP_BYTES));
    uint8_t *high = to + 4 * GROUP_BYTES;
    for (int group = 0; group < GROUPS; group++)
        for (int i = 0; i < GROUP_BYTES; i++) {
            int code = codes[group][i], upper = code >> 4;
            to[group % 4 * GROUP_BYTES + i] |= (uint8_t)((code & 15) << (group < 4 ? 0 : 4));
            if (bits == 5) high[i] |= (uint8_t)(upper << group);
            if (bits == 6)
                high[group / 4 * GROUP_BYTES + i] |= (uint8_t)(upper << 2 * (group % 4));
        }
}

static void pack_blocks_of_panel(void *context, int64_t panel, int worker) {
    const Packing *p = context;
    int format = p->format;
    int64_t row_bytes = num_blocks(p->num_inputs) / blocks_per_header(format) * raw_bytes(format);
    uint8_t *to = p->panels + panel * panel_bytes(format, p->num_inputs);
    (void)worker;
    for (int64_t index = 0; index < num_blocks(p->num_inputs); index++) {
        uint8_t codes[GROUPS][GROUP_BYTES];
        BlockPlace place = place_of(to, index, format);
        uint8_t *header = (uint8_t *)place.header, *block = (uint8_t *)place.block;
        for (int column = 0; column < PANEL; column++) {
            int64_t output = panel * PANEL + column;
            RawBlock raw = {0};
            if (output < p->num_outputs) read_raw(p->rows + output * row_bytes, format, index, &raw);
            for (int i = 0; i < BLOCK; i++) codes[i / 4][4 * column + i % 4] = raw.codes[i];
            if (format == MXFP4) {
                memcpy(header + column, &raw.header[0], 1);
                continue;
            }
            memcpy(header + 2 * column, &raw.header[0], 2);
            if (has_minimum(format)) memcpy(header + 2 * (PANEL + column), &raw.header[1], 2);
            for (int64_t i = 0; i < small_bytes(format) / PANEL; i++)
                block[i * PANEL + column] = raw.small[i];
        }
        write_codes(codes, format, (uint8_t *)codes_of(place, format));
    }
}

int64_t packed_block_bytes(int64_t num_outputs, int64_t num_inputs, int32_t format) {
    return (num_outputs + PANEL - 1) / PANEL * panel_bytes(format, num_inputs);
}

void pack_blocks(const void *rows, int64_t num_outputs, int64_t num_inputs, int32_t format,
                 void *packed, int32_t num_threads) {
    Packing p = {rows, packed, num_outputs, num_inputs, format};
    run_tasks((num_outputs + PANEL - 1) / PANEL, num_threads, pack_blocks_of_panel, &p);
}

/* ---- single rows ------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *panels;
    const int64_t *ids;
    void *rows;
    int64_t num_inputs;
    int32_t format, dtype;
} Reading;

static void read_block(BlockPlace place, int column, int format, float values[BLOCK]) {
    int first = column / REG * REG, lane = column - first;
    const uint8_t *codes = codes_of(place, format);
    float minimum = has_minimum(format) ? minima_at(place, first, format)[lane] : 0.0f;
    for (int i = 0; i < BLOCK; i++) {
        float scale = scales_at(place, first, i / scale_inputs(format), format)[lane];
        uint32_t four = codes_at(codes, i / 4, first, format)[lane];
        int code = (int)(four >> 8 * (i % 4) & 255) - code_zero(format);
        values[i] = (float)code * scale + minimum;
    }
}

static void read_row(void *context, int64_t index, int worker) {
    const Reading *r = context;
    int64_t id = r->ids[index], size = panel_bytes(r->format, r->num_inputs);
    char *row = (char *)r->rows + index * r->num_inputs * size_of(r->dtype);
    (void)worker;
    for (int64_t block = 0; block < num_blocks(r->num_inputs); block++) {
        float values[BLOCK];
        BlockPlace place = place_of(r->panels + id / PANEL * size, block, r->format);
        read_block(place, (int)(id % PANEL), r->format, values);
        convert(values, FLOAT32, row + block * BLOCK * size_of(r->dtype), r->dtype, BLOCK);
    }
}

void read_rows(const void *packed, int64_t num_inputs, int32_t format, const int64_t *ids,
               int64_t num_rows, void *rows, int32_t dtype, int32_t num_threads) {
    Reading r = {packed, ids, rows, num_inputs, format, dtype};
    run_tasks(num_rows, num_threads, read_row, &r);
}

/* ---- whole matrices ---------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *blocks;
    void *values;
    int64_t num_inputs;
    int32_t format, dtype;
} Unpacking;

/* A number in float16, which is finite. */
static float half_value(uint16_t bits) {
    uint16_t lanes[REG] = {bits};
    return load_halves(lanes)[0];
}

/* The power of two that is MXFP4's scale. */
static float power_value(uint16_t header) {
    uint8_t exponents[REG] = {0};
    memcpy(exponents, &header, 1);
    return load_powers(exponents)[0];
}

/* Every product is exact in float32, so that only the sum is rounded. */
static void values_of(const RawBlock *raw, int format, float values[BLOCK]) {
    float scale = format == MXFP4 ? power_value(raw->header[0]) : half_value(raw->header[0]);
    float minimum = -0.0f; /* keeps even the sign of zero */
    float scales[2] = {scale, scale};
    if (has_minimum(format)) minimum = half_value(raw->header[1]);
    if (format == Q6_K) {
        for (int half = 0; half < 2; half++) scales[half] = scale * (float)(int8_t)raw->small[half];
    } else if (format == IQ4_XS) {
        scales[0] = scales[1] = scale * (float)(int8_t)raw->small[0];
    } else if (is_super(format)) {
        scales[0] = scales[1] = scale * (float)raw->small[0];
        minimum *= -(float)raw->small[1];
    }
    for (int i = 0; i < BLOCK; i++) {
        int code = has_table(format) ? table_of(format)[raw->codes[i]] : raw->codes[i];
        values[i] = (float)(code - code_zero(format)) * scales[i / (BLOCK / 2)] + minimum;
    }
}

static void unpack_row(void *context, int64_t index, int worker) {
    const Unpacking *u = context;
    int64_t num_raw = num_blocks(u->num_inputs) / blocks_per_header(u->format);
    const uint8_t *row = u->blocks + index * num_raw * raw_bytes(u->format);
    char *to = (char *)u->values + index * u->num_inputs * size_of(u->dtype);
    (void)worker;
    for (int64_t block = 0; block < num_blocks(u->num_inputs); block++) {
        RawBlock raw;
        float values[BLOCK];
        read_raw(row, u->format, block, &raw);
        values_of(&raw, u->format, values);
        convert(values, FLOAT32, to + block * BLOCK * size_of(u->dtype), u->dtype, BLOCK);
    }
}

void unpack_blocks(const void *blocks, int64_t num_outputs, int64_t num_inputs, int32_t format,
                   void *values, int32_t dtype, int32_t num_threads) {
    Unpacking u = {blocks, values, num_inputs, format, dtype};
    run_tasks(num_outputs, num_threads, unpack_row, &u);
}
