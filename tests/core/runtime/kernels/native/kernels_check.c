/* Products and attention beside plain loops, over memory that ends where it must.
 *
 * Prints the number of wrong results and returns whether there were any. Meant for sanitizers and for
 * processors that are at hand only as a compiler and an emulator.
 */
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

void pack_weight(const void *weight, int64_t num_outputs, int64_t num_inputs, int32_t dtype,
                 void *packed, int32_t num_threads);

void unpack_blocks(const void *blocks, int64_t num_outputs, int64_t num_inputs, int32_t format,
                   void *values, int32_t dtype, int32_t num_threads);

static int num_wrong;

static void *random_values(int64_t count, int dtype) {
    void *values = malloc((size_t)(count * size_of(dtype)));
    for (int64_t i = 0; i < count; i++)
        write_as(values, i, (float)rand() / (float)RAND_MAX - 0.5f, dtype);
    return values;
}

static void expect(double value, double expected, double tolerance) {
    num_wrong += !(fabs(value - expected) <= tolerance);
}

/* Every row beside a plain sum, and bitwise beside itself alone. */
static void check_linear(int64_t rows, int64_t outputs, int64_t inputs, int dtype) {
    int64_t padded = dtype == BFLOAT16 ? (inputs + 31) / 32 * 32 : inputs;
    void *weight = random_values(outputs * inputs, dtype), *x = random_values(rows * inputs, dtype);
    void *packed = malloc((size_t)((outputs + 31) / 32 * 32 * padded * size_of(dtype)));
    float *y = malloc(sizeof(float) * (size_t)(rows * outputs));
    float *alone = malloc(sizeof(float) * (size_t)outputs);
    pack_weight(weight, outputs, inputs, dtype, packed, 2);
    Weight packed_weight = {packed, outputs, dtype};
    Linear l = {.x = x, .weights = &packed_weight, .y = y, .num_rows = rows, .num_inputs = inputs,
                .num_outputs = outputs, .num_weights = 1, .dtype = dtype, .y_dtype = FLOAT32,
                .num_threads = 2};
    linear(&l);
    for (int64_t row = 0; row < rows; row++) {
        const char *own = (const char *)x + row * inputs * size_of(dtype);
        Linear one = l;
        one.x = own, one.y = alone, one.num_rows = 1, one.num_threads = 1;
        linear(&one);
        num_wrong += memcmp(alone, y + row * outputs, sizeof(float) * (size_t)outputs) != 0;
        for (int64_t output = 0; output < outputs; output++) {
            double sum = 0;
            for (int64_t i = 0; i < inputs; i++)
                sum += (double)read_as(own, i, dtype) * read_as(weight, output * inputs + i, dtype);
            expect(y[row * outputs + output], sum, 1e-4);
        }
    }
    free(weight), free(x), free(packed), free(y), free(alone);
}

/* The values of whole matrices beside those of packed rows, which are the same numbers. */
static void check_unpacked(const void *raw, const void *packed, int64_t outputs, int64_t inputs,
                           int format, int dtype) {
    void *values = malloc((size_t)(outputs * inputs * size_of(dtype)));
    void *row = malloc((size_t)(inputs * size_of(dtype)));
    unpack_blocks(raw, outputs, inputs, format, values, dtype, 2);
    for (int64_t output = 0; output < outputs; output++) {
        read_rows(packed, inputs, format, &output, 1, row, dtype, 1);
        for (int64_t i = 0; i < inputs; i++)
            expect(read_as(values, output * inputs + i, dtype), read_as(row, i, dtype), 0.0);
    }
    free(values), free(row);
}

/* Weights in blocks beside a plain sum of their values, and bitwise beside each row alone. Any bytes
 * are codes; scales in float16 are 0x2c00 and what is left of them, all of the order of 0.1. */
static void check_blocks(int64_t rows, int64_t outputs, int64_t inputs, int format, int64_t bytes) {
    uint8_t *raw = malloc((size_t)bytes);
    for (int64_t i = 0; i < bytes; i++) raw[i] = (uint8_t)(i % 2 ? 0x1c + rand() % 8 : rand());
    void *packed = malloc((size_t)packed_block_bytes(outputs, inputs, format));
    pack_blocks(raw, outputs, inputs, format, packed, 2);
    for (int dtype = FLOAT32; dtype <= BFLOAT16; dtype++)
        check_unpacked(raw, packed, outputs, inputs, format, dtype);
    float *x = random_values(rows * inputs, FLOAT32), *weight = malloc(sizeof(float) * (size_t)inputs);
    float *y = malloc(sizeof(float) * (size_t)(rows * outputs));
    float *alone = malloc(sizeof(float) * (size_t)outputs);
    Weight weights = {packed, outputs, format};
    Linear l = {.x = x, .weights = &weights, .y = y,
                .quantized = malloc((size_t)(rows * quantized_bytes(inputs))), .num_rows = rows,
                .num_inputs = inputs, .num_outputs = outputs, .num_weights = 1, .dtype = FLOAT32,
                .y_dtype = FLOAT32, .num_threads = 2};
    linear(&l);
    for (int64_t output = 0; output < outputs; output++) {
        read_rows(packed, inputs, format, &output, 1, weight, FLOAT32, 1);
        for (int64_t row = 0; row < rows; row++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < inputs; i++) {
                double product = (double)x[row * inputs + i] * weight[i];
                sum += product;
                size += product * product;
            }
            expect(y[row * outputs + output], sum, 0.05 * sqrt(size) + 1e-6);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        Linear one = l;
        one.x = x + row * inputs, one.y = alone, one.num_rows = 1, one.num_threads = 1;
        linear(&one);
        num_wrong += memcmp(alone, y + row * outputs, sizeof(float) * (size_t)outputs) != 0;
    }
    free(raw), free(packed), free(x), free(weight), free(y), free(alone), free(l.quantized);
}

enum { TOKENS = 40, HEADS = 4, DIM = 24, PAGE = 8 };

static double dot_keys(const void *q, const void *k, int token, int head, int key, int dtype) {
    double sum = 0;
    for (int i = 0; i < DIM; i++)
        sum += (double)read_as(q, (token * HEADS + head) * DIM + i, dtype) * read_as(k, key * DIM + i, dtype);
    return sum;
}

/* Of keys and values of two heads; or of latents, whose first `num_latents` values are the values. */
static void check_attention(int dtype, int cells, int num_latents) {
    const int KV_HEADS = num_latents ? 1 : 2, VALUES = num_latents ? num_latents : DIM;
    void *q = random_values(TOKENS * HEADS * DIM, dtype);
    void *out = random_values(TOKENS * HEADS * VALUES, dtype);
    void *k = random_values(TOKENS * KV_HEADS * DIM, dtype);
    void *v = num_latents ? k : random_values(TOKENS * KV_HEADS * DIM, dtype);
    int64_t table[TOKENS / PAGE], context = TOKENS, start = 0;
    for (int i = 0; i < TOKENS / PAGE; i++) table[i] = i;
    Attention a = {.q = q, .out = out, .page_table = table,
                   .context_lengths = &context, .query_starts = &start, .num_rows = 1,
                   .num_tokens = TOKENS, .q_stride = HEADS * DIM, .table_stride = TOKENS / PAGE,
                   .num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_dim = DIM,
                   .value_dim = VALUES, .page_shift = 3, .q_dtype = dtype, .kv_dtype = cells,
                   .num_threads = 2, .scale = 0.2f, .out_scale = 1.0f};
    int64_t slots[TOKENS];
    for (int i = 0; i < TOKENS; i++) slots[i] = i;
    a.k_pages = malloc((size_t)(TOKENS * KV_HEADS * DIM * size_of(cells)));
    if (!num_latents) a.v_pages = malloc((size_t)(TOKENS * KV_HEADS * DIM * size_of(cells)));
    if (cells == INT8) {
        a.k_scales = malloc(sizeof(bf16) * (size_t)(TOKENS * KV_HEADS));
        a.v_scales = num_latents ? a.k_scales : malloc(sizeof(bf16) * (size_t)(TOKENS * KV_HEADS));
    }
    double tolerance = cells == FLOAT8 ? 0.02 : cells == INT8 ? 0.01 : dtype == BFLOAT16 ? 0.01 : 1e-4;
    write_pages(&a, slots, k, v);
    num_wrong += paged_attention(&a);
    for (int token = 0; token < TOKENS; token++)
        for (int head = 0; head < HEADS; head++) {
            double weights[TOKENS], total = 0;
            int cell[TOKENS];
            for (int key = 0; key <= token; key++) {
                cell[key] = key * KV_HEADS + head * KV_HEADS / HEADS;
                total += weights[key] = exp(0.2 * dot_keys(q, k, token, head, cell[key], dtype));
            }
            for (int i = 0; i < VALUES; i++) {
                double sum = 0;
                for (int key = 0; key <= token; key++)
                    sum += weights[key] * read_as(v, cell[key] * DIM + i, dtype);
                float value = read_as(out, (token * HEADS + head) * VALUES + i, dtype);
                expect(value, sum / total, tolerance);
            }
        }
    if (!num_latents) free(v), free(a.v_scales);
    free(q), free(k), free(out), free(a.k_pages), free(a.v_pages), free(a.k_scales);
}

enum { CHOSEN = 9 };

/* What the heads of an index score a key. */
static double index_score(const Attention *a, const void *k, const float *weights, int token, int key) {
    double sum = 0;
    for (int head = 0; head < HEADS; head++) {
        double product = a->scale * dot_keys(a->q, k, token, head, key, a->q_dtype);
        sum += weights[token * HEADS + head] * (product > 0 ? product : 0);
    }
    return sum;
}

/* No key that a token sees and does not choose scores higher than one that it chooses. */
static void expect_choice(const Attention *a, const Choice *c, const void *k, int token, double tolerance) {
    int64_t count = c->lengths[token], *slots = c->slots + token * CHOSEN, next = 0;
    double lowest = INFINITY, highest = -INFINITY;
    num_wrong += count != (token < CHOSEN ? token + 1 : CHOSEN);
    for (int key = 0; key <= token; key++) {
        double score = index_score(a, k, c->weights, token, key);
        int is_chosen = next < count && slots[next] == key;
        next += is_chosen;
        if (is_chosen && score < lowest) lowest = score;
        if (!is_chosen && score > highest) highest = score;
    }
    num_wrong += next != count || highest > lowest + tolerance;
}

/* The choice of an index, in parts, and attention over it. */
static void check_choice(int dtype, int cells) {
    void *q = random_values(TOKENS * HEADS * DIM, dtype), *k = random_values(TOKENS * DIM, dtype);
    void *out = random_values(TOKENS * HEADS * DIM, dtype);
    int64_t table[TOKENS / PAGE], slots[TOKENS], context = TOKENS, start = 0;
    for (int i = 0; i < TOKENS; i++) slots[i] = i, table[i / PAGE] = i / PAGE;
    Attention a = {.q = q, .out = out, .page_table = table, .context_lengths = &context,
                   .query_starts = &start, .num_rows = 1, .num_tokens = TOKENS,
                   .q_stride = HEADS * DIM, .table_stride = TOKENS / PAGE, .num_heads = HEADS,
                   .num_kv_heads = 1, .head_dim = DIM, .value_dim = DIM, .page_shift = 3,
                   .q_dtype = dtype, .kv_dtype = cells, .num_threads = 2, .scale = 0.2f,
                   .out_scale = 1.0f};
    a.k_pages = malloc((size_t)(TOKENS * DIM * size_of(cells)));
    if (cells == INT8) a.k_scales = a.v_scales = malloc(sizeof(bf16) * TOKENS);
    int64_t chosen[TOKENS * CHOSEN], lengths[TOKENS];
    Choice c = {.weights = random_values(TOKENS * HEADS, FLOAT32), .slots = chosen, .lengths = lengths,
                .starts = slots, .num_chosen = CHOSEN, .num_ranked = 7, .rank_stride = TOKENS};
    c.ranks = malloc(sizeof(uint32_t) * (size_t)(c.num_ranked * c.rank_stride));
    write_pages(&a, slots, k, NULL);
    choose_keys(&a, &c);
    for (int token = 0; token < TOKENS; token++)
        expect_choice(&a, &c, k, token, cells == FLOAT8 ? 0.02 : cells == FLOAT32 ? 1e-5 : 0.004);
    Attention over = over_chosen(a, &c);
    num_wrong += paged_attention(&over);
    free(q), free(k), free(out), free(a.k_pages), free(a.k_scales), free(c.weights), free(c.ranks);
}

/* Counts of tokens, in every fifth of which there are some. */
static int32_t *some_counts(int64_t size) {
    int32_t *counts = malloc(sizeof(int32_t) * (size_t)size);
    for (int64_t i = 0; i < size; i++) counts[i] = (int32_t)(i % 5 ? 0 : i | 1 << 30);
    return counts;
}

/* A mask: all of some words, none of others and a part of the rest. */
static char *some_mask(int64_t size) {
    int64_t num_bytes = (size + 31) / 32 * 4;
    char *mask = malloc((size_t)num_bytes);
    for (int64_t i = 0; i < num_bytes; i++)
        mask[i] = (char)(i % 16 < 4 ? -1 : i % 16 < 8 ? 0 : i * 37);
    return mask;
}

static void draw_checked(const SampleRows *d) {
    num_wrong += sample_rows(d) != 0;
    for (int row = 0; row < d->num_rows; row++) {
        int64_t id = d->token_ids[row];
        num_wrong += id < 0 || id >= d->size || d->is_finite[row] != (row != 4);
        if (id >= 0 && id < d->size && row < 3) num_wrong += !(d->masks[row][id / 8] >> id % 8 & 1);
    }
}

/* A greedy row, one that is drawn plainly and one that is filtered, each with and without a mask and
 * penalties: what is drawn is allowed, and the likeliest where it must be. Then by edited scores of
 * few values and an infinite one, and where no token is allowed. The last row ends where `logits` do. */
static void check_draws(int64_t size) {
    int64_t stride = size + 3, num_scores = 6 * size;
    char *mask = some_mask(size), *nothing = calloc((size_t)(size + 31) / 32, 4);
    float *logits = random_values(5 * stride + size, FLOAT32);
    float *edited = malloc(sizeof(float) * (size_t)num_scores);
    int32_t *counts = some_counts(3 * size);
    static const float shapes[3][4] = {{1, 1, 1, 0}, {0.5f, 0, 1, 0}, {1, 7, 0.9f, 0.01f}};
    static const float penalties[3][3] = {{1.2f, 0.1f, 0.2f}, {0.9f, 0, 0}, {1, 0.3f, 0}};
    static const int64_t slots[] = {2, 1, 0, 2, 1, 0};
    static const double uniforms[] = {0.0, 0.3, 0.5, 0.7, 0.9, 1.0 - 1.0 / (1ll << 52)};
    static const uint8_t is_penalized[] = {1, 0, 1, 0, 1, 0};
    const char *masks[] = {mask, mask, mask, NULL, NULL, NULL};
    int64_t ids[6];
    uint8_t is_finite[6];
    logits[4 * stride] = NAN;
    SampleRows d = {.logits = logits, .shapes = shapes[0], .penalties = penalties[0], .masks = masks,
               .counts = counts, .is_penalized = is_penalized, .slots = slots,
               .uniforms = uniforms, .token_ids = ids, .is_finite = is_finite, .num_rows = 6,
               .size = size, .stride = stride, .num_threads = 2};
    draw_checked(&d);
    for (int64_t i = 0; i < size; i++)
        num_wrong += logits[5 * stride + i] > logits[5 * stride + ids[5]];
    for (int64_t i = 0; i < num_scores; i++) edited[i] = (float)(i * 7 % 4);
    edited[num_scores - 1] = 4, edited[4 * size - 1] = INFINITY;
    d.edited = edited;
    draw_checked(&d);
    num_wrong += ids[5] != size - 1 || ids[3] != size - 1;
    d.uniforms = NULL;
    draw_checked(&d);
    num_wrong += ids[5] != size - 1 || ids[3] != size - 1;
    for (int row = 3; row < 6; row++) masks[row] = nothing;
    for (d.uniforms = uniforms; d.num_threads < 4; d.num_threads++) draw_checked(&d);
    free(mask), free(nothing), free(logits), free(edited), free(counts);
}

static void copy_lines(char *to, const char *from, int64_t num_bytes) { memcpy(to, from, (size_t)num_bytes); }

/* A row of 7 tokens whose state is copied after the third, in one piece and in two: bitwise the same. */
static void check_recurrent(int kind, int num_decays, int dtype) {
    enum { NUM_CHANNELS = 21, KEYS = 5, VALUES = 11, WIDTH = 3, TOKENS = 7, CUT = 3 };
    int is_delta = kind == DELTA_NET;
    int64_t conv_bytes = (WIDTH - 1) * NUM_CHANNELS * 4, state_bytes = KEYS * VALUES * 4;
    int64_t line_bytes = conv_bytes + state_bytes, num_bytes = 2 * line_bytes;
    Recurrent r = {.kind = kind, .dtype = dtype,
                   .in_width = is_delta ? NUM_CHANNELS + 1 + num_decays + VALUES : 3 * NUM_CHANNELS,
                   .out_width = is_delta ? VALUES : NUM_CHANNELS};
    float *numbers = random_values((WIDTH + 1) * NUM_CHANNELS + 1 + KEYS + VALUES, FLOAT32);
    char *start = random_values(num_bytes / 4, FLOAT32), *whole = malloc((size_t)num_bytes);
    char *parts = malloc((size_t)num_bytes), *source = random_values(TOKENS * r.in_width, dtype);
    int64_t in_bytes = r.in_width * size_of(dtype), out_bytes = r.out_width * size_of(dtype);
    char *in = malloc((size_t)(TOKENS * in_bytes)), *out = malloc((size_t)(TOKENS * out_bytes));
    char *again = malloc((size_t)(TOKENS * out_bytes));
    r.convolution = (Convolution){.weight = numbers, .bias = numbers + WIDTH * NUM_CHANNELS,
                                  .num_channels = NUM_CHANNELS, .width = WIDTH, .activates = is_delta};
    float *others = numbers + (WIDTH + 1) * NUM_CHANNELS;
    r.delta = (DeltaRule){.decay = others, .dt_bias = others + 1, .norm = others + 1 + KEYS, .num_key_heads = 1,
                          .num_value_heads = 1, .key_dim = KEYS, .value_dim = VALUES,
                          .num_decays = num_decays, .eps = 1e-6f, .beta_scale = 2.0f};
    int64_t starts[] = {0, TOKENS}, slot = 0, cut[] = {0, CUT, 1}, first[] = {0, CUT};
    int64_t rest[] = {0, TOKENS - CUT};
    StateRows rows = {.starts = starts, .slots = &slot, .cuts = cut, .num_rows = 1, .num_cuts = 1,
                      .line_bytes = line_bytes, .num_threads = 2};
    copy_lines(whole, start, num_bytes), copy_lines(parts, start, num_bytes);
    copy_lines(in, source, TOKENS * in_bytes);
    r.convolution.state = whole, r.delta.state = whole + conv_bytes;
    recur(&r, &rows, in, out);
    copy_lines(in, source, TOKENS * in_bytes);
    r.convolution.state = parts, r.delta.state = parts + conv_bytes;
    rows.starts = first, rows.num_cuts = 0;
    recur(&r, &rows, in, again);
    int64_t used = is_delta ? line_bytes : conv_bytes;
    num_wrong += memcmp(parts, whole + line_bytes, (size_t)used) != 0;
    rows.starts = rest;
    recur(&r, &rows, in + CUT * in_bytes, again + CUT * out_bytes);
    num_wrong += memcmp(parts, whole, (size_t)used) != 0;
    num_wrong += memcmp(out, again, (size_t)(TOKENS * out_bytes)) != 0;
    free(numbers), free(start), free(whole), free(parts), free(source), free(in), free(out), free(again);
}

int main(void) {
    for (int dtype = FLOAT32; dtype <= BFLOAT16; dtype++) {
        check_recurrent(SHORT_CONV, 0, dtype);
        check_recurrent(DELTA_NET, 1, dtype), check_recurrent(DELTA_NET, 5, dtype);
    }
    for (int64_t size = 1; size < 700; size += 31) check_draws(size);
    for (int dtype = FLOAT32; dtype <= BFLOAT16; dtype++) {
        for (int64_t rows = 1; rows < 40; rows += 5)
            for (int64_t inputs = 1; inputs < 70; inputs += 9) check_linear(rows, 45, inputs, dtype);
        check_linear(3, 33, 1100, dtype);
        check_linear(13, 33, 1025, dtype);
        check_linear(200, 32, 64, dtype);
        check_choice(dtype, dtype), check_choice(dtype, INT8), check_choice(dtype, FLOAT8);
        for (int num_latents = 0; num_latents <= 18; num_latents += 18) {
            check_attention(dtype, dtype, num_latents);
            check_attention(dtype, INT8, num_latents);
            check_attention(dtype, FLOAT8, num_latents);
        }
    }
    static const int block_bytes[] = {34, 18, 20, 22, 24, 144, 176, 210};
    for (int i = 0; i < 8; i++) {
        int64_t in_block = i < 5 ? 32 : 256, inputs = 512, outputs = 45;
        int64_t bytes = outputs * inputs / in_block * block_bytes[i];
        for (int64_t rows = 1; rows < 40; rows += 9) check_blocks(rows, outputs, inputs, 2 + i, bytes);
    }
    printf("%d wrong\n", num_wrong);
    return num_wrong != 0;
}
