/* Row-wise operations whose bits do not depend on the batch: products, attention, norms, SiLU, log-softmax, drawing.
 *
 * Every floating-point sum has one order, which follows from the row it belongs to: not from the number of rows, their
 * place, tiles, threads or the instruction set. exact_lanes.h states the arithmetic and is compiled for each
 * instruction set; wider vectors hold other rows or columns, never another part of a sum. Plain C11 and libc, called
 * through ctypes; build with -ffp-contract=off, so that only what is written as fused is fused.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 16                 /* output channels of a panel of a packed weight */
#define MR 6                     /* rows of a product's tile: 12 sums, 2 weights and 1 input fill 16 registers */
#define KBLOCK 256               /* inputs of a panel block: 16 KiB stay in L1 */
#define BLOCK_BYTES (256 * 1024) /* inputs of a row block; stay in L2 */
#define UNIT_ROWS 24             /* query rows that share a pass over the keys */
#define VALUE_BLOCK 64           /* keys whose values are converted together */
#define DRAW_BLOCK 512           /* tokens whose weights are summed before the draw looks inside */
#ifndef LQRL_MAX_LEVEL
#define LQRL_MAX_LEVEL 1
#endif

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef uint16_t v8h __attribute__((vector_size(16)));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (v8i){__VA_ARGS__})
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed between inlined functions only */
#endif

typedef struct {
    const void *x, *packed, *bias; /* x [m, k]; bias [n] or NULL */
    void *out;                     /* [m, n] */
    int64_t m, n, k;
    int x_bf16, packed_bf16, bias_bf16, out_bf16;
    int row_parts, panel_parts, failed;
} product;

typedef struct {
    const void *q, *k, *v;
    void *out;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head; /* strides, in elements */
    /* Of each sequence: its first query's row, queries, elements before its first key and value, and the key that its
     * first query is. */
    const int64_t *query_row, *queries, *key_at, *value_at, *first;
    int64_t sequences, heads, kv_heads, key_width, value_width, window; /* window 0: none */
    float scale;
    int bf16;
    int64_t units, longest;
    int failed;
} attention;

/* Up to UNIT_ROWS query rows of one sequence and key head: row r is token r / group, head r % group. */
typedef struct {
    int64_t query_at, key_at, value_at, out_at, rows, group;
    int64_t first;      /* the key that the first token is */
    int64_t start, end; /* keys that any row sees */
    float *scores;      /* [rows][stride], from key `start` on */
    int64_t stride;
} unit;

typedef struct {
    const void *x, *weight;
    void *out;
    float *inverse;
    int64_t rows, width;
    float eps;
    int bf16;
} norm;

typedef struct {
    const void *x;
    void *out;
    int64_t count;
    int bf16;
} elements;

typedef struct {
    const float *logits; /* [rows, vocabulary] */
    const double *uniform;
    int64_t *tokens;
    float *largest;
    double *log_total;
    int64_t rows, vocabulary;
    float temperature;
    int failed;
} logit_job;

#define SMALL static inline __attribute__((always_inline))

SMALL int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }
SMALL int64_t at_least(int64_t v, int64_t low) { return v > low ? v : low; }
SMALL int64_t at_most(int64_t v, int64_t high) { return v < high ? v : high; }

SMALL float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

SMALL uint16_t float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
}

SMALL int64_t row_end(const unit *u, int64_t r) { return u->first + r / u->group + 1; }

SMALL int64_t row_start(const attention *j, const unit *u, int64_t r) {
    return j->window ? at_least(row_end(u, r) - j->window, 0) : 0;
}

static int64_t first_largest(const float *logits, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; i++) best = logits[i] > logits[best] ? i : best;
    return best;
}

/* First token whose cumulative weight is above `target`; blocks first. One with weight, whatever rounding does. */
static int64_t drawn(const float *weight, const double *partial, int64_t n, double target) {
    int64_t blocks = (n + DRAW_BLOCK - 1) / DRAW_BLOCK, block = 0;
    double before = 0.0;
    while (block < blocks - 1 && !(before + partial[block] > target)) before += partial[block++];
    int64_t stop = at_most((block + 1) * DRAW_BLOCK, n), last = block * DRAW_BLOCK;
    for (int64_t i = block * DRAW_BLOCK; i < stop; i++) {
        if (!(weight[i] > 0.0f)) continue;
        last = i;
        before += (double)weight[i];
        if (before > target) break;
    }
    return last;
}

#define NAME(x) x##_portable
#define TARGET
#if defined(__FP_FAST_FMAF)
SMALL v8 fused_portable(v8 a, v8 b, v8 c) {
#else /* fmaf is a function of libm: calling it from one place keeps the code small */
__attribute__((noinline)) static v8 fused_portable(v8 a, v8 b, v8 c) {
#endif
    for (int i = 0; i < 8; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
#define FUSED fused_portable
#include "exact_lanes.h"
#undef NAME
#undef TARGET
#undef FUSED

#if defined(__x86_64__) && LQRL_MAX_LEVEL >= 1
#define HAVE_AVX2
#include <immintrin.h>
#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define FUSED(a, b, c) ((v8)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#include "exact_lanes.h"
#undef NAME
#undef TARGET
#undef FUSED
#endif

static struct {
    void (*product_task)(product *, int64_t, int64_t, int64_t, int64_t);
    void (*attend)(const attention *, const unit *, float *);
    void (*norm_rows)(const norm *, int64_t, int64_t);
    void (*silu_rows)(const elements *, int64_t, int64_t);
    void (*logit_rows)(logit_job *, int64_t, int64_t);
} code = {product_task_portable, attend_portable, norm_rows_portable, silu_rows_portable, logit_rows_portable};

/* ---- threads: the OpenMP pool PyTorch already runs, found among the process's symbols; without one, one thread ---- */

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void);
static int (*thread_count)(void);

/* Call once before anything else. Returns the level in use. */
int lqrl_exact_setup(void) {
    *(void **)&thread_number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&thread_count = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (thread_number && thread_count) *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#if defined(HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        code.product_task = product_task_avx2;
        code.attend = attend_avx2;
        code.norm_rows = norm_rows_avx2;
        code.silu_rows = silu_rows_avx2;
        code.logit_rows = logit_rows_avx2;
        return 1;
    }
#endif
    return 0;
}

int lqrl_exact_has_threads(void) { return parallel != NULL; }

typedef struct {
    void (*part)(void *job, int part, int parts);
    void *job;
    int parts;
} team;

static void run_member(void *data) {
    team *t = data;
    for (int part = thread_number(); part < t->parts; part += thread_count()) t->part(t->job, part, t->parts);
}

/* `work` in multiply-adds: below 2^22 a thread costs more than it saves. */
static void run(void (*part)(void *, int, int), void *job, int threads, double work) {
    if (threads > work / (4 << 20)) threads = (int)(work / (4 << 20));
    if (!parallel || threads <= 1) {
        part(job, 0, 1);
        return;
    }
    team t = {part, job, threads};
    parallel(run_member, &t, (unsigned)threads, 0);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

static void product_part(void *job, int part, int parts) {
    product *j = job;
    int64_t panels = (j->n + PANEL - 1) / PANEL, rows = j->m / 24;
    int row_parts = rows < 1 ? 1 : rows > parts ? parts : (int)rows, panel_parts = parts / row_parts;
    if (part >= row_parts * panel_parts) return;
    int64_t r = part / panel_parts, p = part % panel_parts;
    code.product_task(j, j->m * r / row_parts, j->m * (r + 1) / row_parts, panels * p / panel_parts,
                      panels * (p + 1) / panel_parts);
}

/* out = x @ w.T + bias; each output is fma over k = 0, 1, ..., from 0; the bias is added to it, then it is rounded.
 * `types` has bit 0 for a bfloat16 x, 1 for packed, 2 for bias, 3 for out; else they are float. Returns 1 without
 * memory. */
int lqrl_exact_linear(const void *x, const void *packed, const void *bias, void *out, int64_t m, int64_t n, int64_t k,
                      int types, int threads) {
    product j = {x, packed, bias, out, m, n, k, types & 1, types >> 1 & 1, types >> 2 & 1, types >> 3 & 1, 1, 1, 0};
    if (m && n) run(product_part, &j, threads, (double)m * (double)n * (double)k);
    return j.failed;
}

/* [n, k] to panels of PANEL channels, each [k][PANEL]; the last one is narrower. Elements of `size` bytes. */
void lqrl_exact_pack(const void *weight, void *packed, int64_t n, int64_t k, int64_t size) {
    for (int64_t first = 0; first < n; first += PANEL) {
        int64_t columns = at_most(n - first, PANEL);
        const char *from = (const char *)weight + first * k * size;
        char *to = (char *)packed + first * k * size;
        for (int64_t start = 0; start < k; start += 64)
            for (int64_t c = 0; c < columns; c++)
                for (int64_t i = start; i < at_most(start + 64, k); i++) {
                    if (size == 4) memcpy(to + (i * columns + c) * 4, from + (c * k + i) * 4, 4);
                    else memcpy(to + (i * columns + c) * 2, from + (c * k + i) * 2, 2);
                }
    }
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

static void attention_part(void *job, int part, int parts) {
    attention *j = job;
    int64_t group = j->heads / j->kv_heads, tokens = at_least(UNIT_ROWS / group, 1), taken = at_most(group, UNIT_ROWS);
    int64_t stride = round_up(j->longest, 8) + 8, pad = at_least(round_up(j->key_width, 8), round_up(j->value_width, 8));
    float *memory = malloc(sizeof(float) * (size_t)(UNIT_ROWS * stride + (UNIT_ROWS + VALUE_BLOCK) * pad));
    if (!memory) {
        j->failed = 1;
        return;
    }
    int64_t index = 0;
    for (int64_t s = 0; s < j->sequences; s++)
        for (int64_t head = 0; head < j->kv_heads; head++)
            for (int64_t token = 0; token < j->queries[s]; token += tokens)
                for (int64_t g = 0; g < group; g += taken) {
                    if (index++ % parts != part) continue;
                    int64_t count = at_most(tokens, j->queries[s] - token), row = j->query_row[s] + token;
                    unit u = {.group = at_most(taken, group - g), .first = j->first[s] + token, .scores = memory};
                    u.rows = count * u.group;
                    u.query_at = row * j->q_token + (head * group + g) * j->q_head;
                    u.out_at = row * j->out_token + (head * group + g) * j->out_head;
                    u.key_at = j->key_at[s] + head * j->k_head;
                    u.value_at = j->value_at[s] + head * j->v_head;
                    u.start = row_start(j, &u, 0);
                    u.end = row_end(&u, u.rows - 1);
                    u.stride = stride;
                    code.attend(j, &u, memory + UNIT_ROWS * stride);
                }
    free(memory);
}

/* `strides`: q, k, v, out, each of a token and a head. `sequences`: rows of query_row, queries, key_at, value_at, first.
 * Query i of a sequence sees keys up to first + i. Returns 1 without memory. */
int lqrl_exact_attention(const void *q, const void *k, const void *v, void *out, const int64_t *strides,
                         const int64_t *sequences, int64_t count, int64_t heads, int64_t kv_heads, int64_t key_width,
                         int64_t value_width, int64_t window, float scale, int bf16, int threads) {
    attention j = {q, k, v, out, strides[0], strides[1], strides[2], strides[3], strides[4], strides[5], strides[6],
                   strides[7], sequences, sequences + count, sequences + 2 * count, sequences + 3 * count,
                   sequences + 4 * count, count, heads, kv_heads, key_width, value_width, window, scale, bf16, 0, 1, 0};
    double pairs = 0.0;
    for (int64_t s = 0; s < count; s++) {
        j.longest = at_least(j.longest, j.first[s] + j.queries[s]);
        pairs += (double)j.queries[s] * (double)(j.first[s] + (j.queries[s] + 1) / 2);
    }
    run(attention_part, &j, threads, pairs * (double)(heads * (key_width + value_width)));
    return j.failed;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static void norm_part(void *job, int part, int parts) {
    norm *j = job;
    code.norm_rows(j, j->rows * part / parts, j->rows * (part + 1) / parts);
}

void lqrl_exact_rms_norm(const void *x, const void *weight, void *out, float *inverse, int64_t rows, int64_t width,
                         float eps, int bf16, int threads) {
    norm j = {x, weight, out, inverse, rows, width, eps, bf16};
    run(norm_part, &j, threads, 16.0 * (double)rows * (double)width);
}

static void silu_part(void *job, int part, int parts) {
    elements *j = job;
    code.silu_rows(j, j->count * part / parts, j->count * (part + 1) / parts);
}

void lqrl_exact_silu(const void *x, void *out, int64_t count, int bf16, int threads) {
    elements j = {x, out, count, bf16};
    run(silu_part, &j, threads, 32.0 * (double)count);
}

static void logit_part(void *job, int part, int parts) {
    logit_job *j = job;
    code.logit_rows(j, j->rows * part / parts, j->rows * (part + 1) / parts);
}

/* Largest and log of the total of each row; with `tokens` also a draw: by `uniform` in [0, 1), or without it the first largest.
 * Returns 1 without memory. */
int lqrl_exact_logits(const float *logits, const double *uniform, int64_t *tokens, float *largest, double *log_total,
                       int64_t rows, int64_t vocabulary, float temperature, int threads) {
    logit_job j = {logits, uniform, tokens, largest, log_total, rows, vocabulary, temperature, 0};
    run(logit_part, &j, threads, 32.0 * (double)rows * (double)vocabulary);
    return j.failed;
}

/* Rotary tables [length][frequencies]: the angle is rounded to float, its functions are computed in double. */
void lqrl_exact_rotary(const float *frequency, float *cosines, float *sines, int64_t length, int64_t frequencies) {
    for (int64_t i = 0; i < length * frequencies; i++) {
        float angle = (float)(i / frequencies) * frequency[i % frequencies];
        cosines[i] = (float)cos((double)angle);
        sines[i] = (float)sin((double)angle);
    }
}
