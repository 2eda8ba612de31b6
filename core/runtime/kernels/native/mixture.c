/* Mixtures of experts: each token goes through a few of many MLPs, and through a shared one.
 *
 * Scores of a token's experts choose them (core/runtime/kernels/routing.py). Pairs of a token and an
 * expert are sorted by expert, so that the rows of an expert lie next to each other, and the products
 * of all experts run as one call. A token's results are added in the order of its choice. So they
 * depend neither on other tokens nor on the threads.
 */
#include "gate.h"
#include "pool.h"

#define MOST_TOKENS 512   /* of a pass: limits memory, while each expert still has many rows */
#define PART 1024         /* columns of a task that adds up results */
#define ROWS_PER_TASK 4   /* of gates, copies and choices */
#define MAX_GROUPS 64     /* and chosen experts; `native_mixture.py` repeats it */
#define MAX_CHOSEN MAX_GROUPS

/* Memory of a pass; T tokens, E experts, P pairs, C hidden. */
typedef struct {
    float *logits;           /* [T][E] */
    float *scores, *ranked;  /* [T][padded E] */
    float *weights;          /* [T][num_chosen] */
    int32_t *experts;        /* the same: numbers of experts */
    int64_t *ends;           /* [E]: of an expert's rows in the order below */
    int32_t *places, *pairs; /* [P]: a pair's row, and a row's pair */
    char *rows, *gate_up, *gated, *shared_gate_up, *shared_gated;
    float *results, *shared, *shared_scores; /* [P][C], [T][C], [T] */
    char *quantized;
    Linear *linears;         /* [E + 1] */
} Memory;

/* One pass: some of the tokens. */
typedef struct {
    const Mix *m;
    Memory at;
    int64_t first, num_tokens, num_linears;
} Pass;

INLINE int64_t round_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

INLINE int64_t padded_experts(const Mixture *x) { return round_up(x->num_experts, LANES); }

/* The outputs of the first projection of experts with `size` features. */
INLINE int64_t first_width(const Mixture *x, int64_t size) { return (1 + x->has_gate) * size; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Bytes of one row of quantized inputs of any projection; 0 if none is in blocks. */
INLINE int64_t row_quantized_bytes(const Mixture *x, int64_t hidden) {
    int64_t widest = larger(hidden, larger(x->intermediate, x->shared_intermediate));
    return x->has_blocks ? round_up(quantized_bytes(widest), 64) : 0;
}

/* Divide the memory from `base` on; returns its size. */
static int64_t divide(const Mixture *x, char *base, int64_t tokens, int64_t hidden, int dtype,
                      Memory *to) {
    int64_t pairs = tokens * x->num_chosen, size = size_of(dtype), used = 0;
    int64_t shared = x->shared_intermediate ? tokens : 0;
#define TAKE(field, num, bytes)                           \
    to->field = (void *)(base + used);                    \
    used += round_up((int64_t)(num) * (int64_t)(bytes), 64)
    TAKE(logits, tokens * x->num_experts, sizeof(float));
    TAKE(scores, tokens * padded_experts(x), sizeof(float));
    TAKE(ranked, tokens * padded_experts(x), sizeof(float));
    TAKE(weights, pairs, sizeof(float));
    TAKE(experts, pairs, sizeof(int32_t));
    TAKE(ends, x->num_experts, sizeof(int64_t));
    TAKE(places, pairs, sizeof(int32_t));
    TAKE(pairs, pairs, sizeof(int32_t));
    TAKE(rows, pairs * hidden, size);
    TAKE(gate_up, pairs * first_width(x, x->intermediate), size);
    TAKE(gated, pairs * x->intermediate, size);
    TAKE(results, pairs * hidden, sizeof(float));
    TAKE(shared_gate_up, shared * first_width(x, x->shared_intermediate), size);
    TAKE(shared_gated, shared * x->shared_intermediate, size);
    TAKE(shared, shared * hidden, sizeof(float));
    TAKE(shared_scores, shared, sizeof(float));
    TAKE(quantized, (pairs + shared), row_quantized_bytes(x, hidden));
    TAKE(linears, x->num_experts + 1, sizeof(Linear));
#undef TAKE
    return used;
}

int64_t mixture_bytes(const Mixture *x, int64_t num_tokens, int64_t hidden, int32_t dtype) {
    Memory unused;
    int64_t tokens = num_tokens < MOST_TOKENS ? num_tokens : MOST_TOKENS;
    return divide(x, NULL, tokens, hidden, dtype, &unused);
}

/* ---- the choice -------------------------------------------------------------------------------- */

/* The first of the largest numbers. */
static int64_t best_of(const float *x, int64_t begin, int64_t end) {
    int64_t best = begin;
    for (int64_t i = begin + 1; i < end; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* Softmax or sigmoid of the logits, padded with zeros. */
static void score(const Mixture *x, const float *logits, float *scores) {
    int64_t num = x->num_experts, padded = padded_experts(x);
    vec most = splat(-INFINITY), total = splat(0.0f);
    for (int64_t i = 0; i < padded; i++) scores[i] = i < num ? logits[i] : -INFINITY;
    for (int64_t i = 0; i < padded; i += LANES) most = max_vec(most, load(scores + i));
    float peak = max_lanes(most);
    for (int64_t i = 0; i < padded; i += LANES) {
        vec some = load(scores + i);
        some = x->scoring == SIGMOID ? 1.0f / (1.0f + exp_vec(-some)) : exp_vec(some - peak);
        total += some;
        store(scores + i, some);
    }
    if (x->scoring == SIGMOID) return;
    float sum = sum_lanes(total);
    for (int64_t i = 0; i < padded; i += LANES) store(scores + i, load(scores + i) / sum);
}

/* The sum of the best scores of a group, whose order stays. */
static float rank_group(const Mixture *x, float *ranked, int64_t begin, int64_t end) {
    float sum = 0.0f, taken[MAX_GROUPS];
    int64_t places[MAX_GROUPS];
    for (int i = 0; i < x->num_group_scores; i++) {
        places[i] = best_of(ranked, begin, end);
        sum += taken[i] = ranked[places[i]];
        ranked[places[i]] = -INFINITY;
    }
    for (int i = 0; i < x->num_group_scores; i++) ranked[places[i]] = taken[i];
    return sum;
}

static void leave_groups_out(const Mixture *x, float *ranked) {
    int64_t size = x->num_experts / x->num_groups;
    float ranks[MAX_GROUPS];
    int is_chosen[MAX_GROUPS] = {0};
    for (int g = 0; g < x->num_groups; g++)
        ranks[g] = rank_group(x, ranked, g * size, (g + 1) * size);
    for (int i = 0; i < x->num_chosen_groups; i++) {
        int64_t best = best_of(ranks, 0, x->num_groups);
        is_chosen[best] = 1;
        ranks[best] = -INFINITY;
    }
    for (int64_t i = 0; i < x->num_experts; i++)
        if (!is_chosen[i / size]) ranked[i] = -INFINITY;
}

/* A row of NaN takes the first experts, so that only its own weights are NaN. */
static void choose(const Mixture *x, const float *scores, float *ranked, float *weights,
                   int32_t *experts) {
    float total = 0.0f;
    for (int64_t i = 0; i < x->num_experts; i++) {
        ranked[i] = x->correction ? scores[i] + x->correction[i] : scores[i];
        if (ranked[i] != ranked[i]) ranked[i] = -3e38f;
    }
    if (x->num_chosen_groups < x->num_groups) leave_groups_out(x, ranked);
    for (int64_t slot = 0; slot < x->num_chosen; slot++) {
        int64_t best = best_of(ranked, 0, x->num_experts);
        ranked[best] = -INFINITY;
        experts[slot] = (int32_t)best;
        total += weights[slot] = scores[best];
    }
    float factor = x->renormalizes ? x->scale / (total + 1e-20f) : x->scale;
    for (int64_t slot = 0; slot < x->num_chosen; slot++) weights[slot] *= factor;
}

static void choose_some(void *context, int64_t index, int worker) {
    const Pass *p = context;
    const Mixture *x = p->m->mixture;
    int64_t end = (index + 1) * ROWS_PER_TASK;
    (void)worker;
    for (int64_t t = index * ROWS_PER_TASK; t < end && t < p->num_tokens; t++) {
        float *scores = p->at.scores + t * padded_experts(x);
        float *ranked = p->at.ranked + t * padded_experts(x);
        score(x, p->at.logits + t * x->num_experts, scores);
        choose(x, scores, ranked, p->at.weights + t * x->num_chosen,
               p->at.experts + t * x->num_chosen);
    }
}

/* ---- the order of pairs ------------------------------------------------------------------------ */

/* Sort pairs by expert; those of an expert stay in order. */
static void sort_pairs(Pass *p) {
    const Mixture *x = p->m->mixture;
    int64_t num_pairs = p->num_tokens * x->num_chosen, end = 0, *ends = p->at.ends;
    memset(ends, 0, sizeof(int64_t) * (size_t)x->num_experts);
    for (int64_t pair = 0; pair < num_pairs; pair++) ends[p->at.experts[pair]]++;
    for (int64_t e = 0; e < x->num_experts; e++) {
        end += ends[e];
        ends[e] = end - ends[e]; /* the begin, moved to the end by what follows */
    }
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        int64_t row = ends[p->at.experts[pair]]++;
        p->at.places[pair] = (int32_t)row;
        p->at.pairs[row] = (int32_t)pair;
    }
}

INLINE const char *token_at(const Pass *p, const void *values, int64_t token) {
    const Mix *m = p->m;
    return (const char *)values + (p->first + token) * m->hidden * size_of(m->dtype);
}

/* Whether experts read the tokens themselves: a single token is the row of each. */
INLINE int reads_tokens(const Pass *p) {
    return p->num_tokens == 1 && !p->m->mixture->scales_inputs;
}

INLINE void scale_row(const void *x, float weight, void *y, int64_t size, const int dtype) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store_as(y, i, load_as(x, i, dtype) * weight, dtype);
    for (; i < size; i++) write_as(y, i, read_as(x, i, dtype) * weight, dtype);
}

static void copy_rows(void *context, int64_t index, int worker) {
    const Pass *p = context;
    const Mix *m = p->m;
    int64_t num_chosen = m->mixture->num_chosen, num_rows = p->num_tokens * num_chosen;
    int64_t end = (index + 1) * ROWS_PER_TASK, bytes = m->hidden * size_of(m->dtype);
    (void)worker;
    for (int64_t row = index * ROWS_PER_TASK; row < end && row < num_rows; row++) {
        int64_t pair = p->at.pairs[row];
        const void *from = token_at(p, m->x, pair / num_chosen);
        void *to = p->at.rows + row * bytes;
        if (!m->mixture->scales_inputs)
            memcpy(to, from, (size_t)bytes);
        else if (m->dtype == FLOAT32)
            scale_row(from, p->at.weights[pair], to, m->hidden, FLOAT32);
        else
            scale_row(from, p->at.weights[pair], to, m->hidden, BFLOAT16);
    }
}

/* ---- products ---------------------------------------------------------------------------------- */

/* A product of some rows; more of them may be added to the same call. */
static Linear *add_linear(Pass *p, const Projection *by, const void *x, void *y, int64_t num_rows) {
    Linear *l = &p->at.linears[p->num_linears++];
    *l = (Linear){.x = x, .y = y, .bias = by->bias, .weights = by->weights, .num_rows = num_rows,
                  .num_weights = (int32_t)by->num_weights, .dtype = p->m->dtype,
                  .y_dtype = p->m->dtype, .num_threads = p->m->num_threads};
    return l;
}

static void run_linears(Pass *p) {
    linears(p->at.linears, p->num_linears);
    p->num_linears = 0;
}

/* Scores of experts, and of the shared one. */
static void project_scores(Pass *p) {
    const Mixture *x = p->m->mixture;
    const void *tokens = token_at(p, p->m->x, 0);
    const Projection *by[] = {&x->router, &x->shared_gate};
    float *to[] = {p->at.logits, p->at.shared_scores};
    for (int i = 0; i < 2 && by[i]->weights; i++) {
        Linear *l = add_linear(p, by[i], tokens, to[i], p->num_tokens);
        l->num_inputs = p->m->hidden;
        l->num_outputs = i ? 1 : x->num_experts;
        l->y_dtype = FLOAT32;
        l->quantized = p->at.quantized;
    }
    run_linears(p);
}

/* The first or the second projection of every expert that has rows. */
static void project_experts(Pass *p, int is_down) {
    const Mix *m = p->m;
    const Mixture *x = m->mixture;
    int64_t size = size_of(m->dtype), per_row = row_quantized_bytes(x, m->hidden), begin = 0;
    int64_t inputs = is_down ? x->intermediate : m->hidden;
    int64_t outputs = is_down ? m->hidden : first_width(x, x->intermediate);
    int shares = !is_down && reads_tokens(p);
    for (int64_t e = 0; e < x->num_experts; begin = p->at.ends[e++]) {
        int64_t num_rows = p->at.ends[e] - begin;
        if (!num_rows) continue;
        const char *rows = is_down ? p->at.gated : p->at.rows;
        const void *from = shares ? token_at(p, m->x, 0) : rows + begin * inputs * size;
        char *to = is_down ? (char *)p->at.results : p->at.gate_up;
        to += begin * outputs * (is_down ? (int64_t)sizeof(float) : size);
        const Projection *by = is_down ? &x->down[e] : &x->gate_up[e];
        Linear *l = add_linear(p, by, from, to, num_rows);
        l->num_inputs = inputs;
        l->num_outputs = outputs;
        l->quantized = p->at.quantized + (shares ? 0 : begin * per_row);
        if (is_down) l->y_dtype = FLOAT32;
    }
}

/* The same of the shared expert. */
static void project_shared(Pass *p, int is_down) {
    const Mix *m = p->m;
    const Mixture *x = m->mixture;
    int64_t per_row = row_quantized_bytes(x, m->hidden);
    if (!x->shared_intermediate) return;
    const void *from = is_down ? p->at.shared_gated : token_at(p, m->x, 0);
    void *to = is_down ? (void *)p->at.shared : p->at.shared_gate_up;
    Linear *l = add_linear(p, is_down ? &x->shared_down : &x->shared_gate_up, from, to,
                           p->num_tokens);
    l->num_inputs = is_down ? x->shared_intermediate : m->hidden;
    l->num_outputs = is_down ? m->hidden : first_width(x, x->shared_intermediate);
    l->quantized = p->at.quantized + p->num_tokens * x->num_chosen * per_row;
    if (is_down) l->y_dtype = FLOAT32;
}

/* The gates of all pairs, then those of the shared expert. */
static void gate_rows(void *context, int64_t index, int worker) {
    const Pass *p = context;
    const Mix *m = p->m;
    const Mixture *x = m->mixture;
    int64_t num_pairs = p->num_tokens * x->num_chosen, size = size_of(m->dtype);
    int64_t row = index - num_pairs, shared = x->shared_intermediate;
    (void)worker;
    if (row < 0)
        gate_row(p->at.gate_up + index * first_width(x, x->intermediate) * size,
                 p->at.gated + index * x->intermediate * size, x->intermediate, &x->gate,
                 x->has_gate, m->dtype);
    else
        gate_row(p->at.shared_gate_up + row * first_width(x, shared) * size,
                 p->at.shared_gated + row * shared * size, shared, &m->shared_gate, x->has_gate,
                 m->dtype);
}

/* ---- the sum ----------------------------------------------------------------------------------- */

/* The weighted results of a token: of its experts, in the order of its choice, and of the shared. */
typedef struct {
    const float *results[MAX_CHOSEN + 1];
    float weights[MAX_CHOSEN + 1], scale;
    int num;
} Terms;

static Terms terms_of(const Pass *p, int64_t token) {
    const Mixture *x = p->m->mixture;
    int64_t hidden = p->m->hidden, first = token * x->num_chosen;
    Terms t = {.scale = p->m->out_scale};
    for (; t.num < x->num_chosen; t.num++) {
        t.results[t.num] = p->at.results + p->at.places[first + t.num] * hidden;
        t.weights[t.num] = x->scales_inputs ? 1.0f : p->at.weights[first + t.num];
    }
    if (!x->shared_intermediate) return t;
    float score = x->shared_gate.weights ? p->at.shared_scores[token] : INFINITY;
    t.results[t.num] = p->at.shared + token * hidden;
    t.weights[t.num++] = 1.0f / (1.0f + exp_vec(splat(-score))[0]);
    return t;
}

INLINE void add_terms(const Terms *t, const void *residual, void *y, int64_t begin, int64_t end,
                      const int dtype) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        vec sum = splat(0.0f);
        for (int n = 0; n < t->num; n++) sum += load(t->results[n] + i) * t->weights[n];
        sum *= t->scale;
        store_as(y, i, residual ? load_as(residual, i, dtype) + sum : sum, dtype);
    }
    for (; i < end; i++) {
        float sum = 0.0f;
        for (int n = 0; n < t->num; n++) sum += t->results[n][i] * t->weights[n];
        sum *= t->scale;
        write_as(y, i, residual ? read_as(residual, i, dtype) + sum : sum, dtype);
    }
}

static void add_results(void *context, int64_t index, int worker) {
    const Pass *p = context;
    const Mix *m = p->m;
    int64_t parts = (m->hidden + PART - 1) / PART, token = index / parts;
    int64_t begin = index % parts * PART, end = begin + PART;
    const void *residual = m->residual ? token_at(p, m->residual, token) : NULL;
    void *y = (void *)token_at(p, m->y, token);
    Terms t = terms_of(p, token);
    (void)worker;
    if (end > m->hidden) end = m->hidden;
    if (m->dtype == FLOAT32)
        add_terms(&t, residual, y, begin, end, FLOAT32);
    else
        add_terms(&t, residual, y, begin, end, BFLOAT16);
}

static void mix_some(Pass *p) {
    const Mix *m = p->m;
    const Mixture *x = m->mixture;
    int64_t num_pairs = p->num_tokens * x->num_chosen, per_task = ROWS_PER_TASK;
    int64_t num_shared = x->shared_intermediate ? p->num_tokens : 0;
    project_scores(p);
    run_tasks((p->num_tokens + per_task - 1) / per_task, m->num_threads, choose_some, p);
    sort_pairs(p);
    if (!reads_tokens(p))
        run_tasks((num_pairs + per_task - 1) / per_task, m->num_threads, copy_rows, p);
    project_experts(p, 0);
    project_shared(p, 0);
    run_linears(p);
    run_tasks(num_pairs + num_shared, m->num_threads, gate_rows, p);
    project_experts(p, 1);
    project_shared(p, 1);
    run_linears(p);
    run_tasks(p->num_tokens * ((m->hidden + PART - 1) / PART), m->num_threads, add_results, p);
}

void mix(const Mix *m) {
    Pass p = {.m = m};
    for (; p.first < m->num_tokens; p.first += p.num_tokens) {
        int64_t left = m->num_tokens - p.first;
        p.num_tokens = left < MOST_TOKENS ? left : MOST_TOKENS;
        divide(m->mixture, m->scratch, p.num_tokens, m->hidden, m->dtype, &p.at);
        mix_some(&p);
    }
}
