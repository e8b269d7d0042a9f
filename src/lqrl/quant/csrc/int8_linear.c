/* int8 W8A8 linear layer for CPUs: per-token quantization, exact int32 GEMM, scales and bias, in one call.
 *
 * Plain C11 and libc only; compiled at first use and called through ctypes. The arithmetic is stated in
 * lqrl/quant/kernels.py and must give the same bits there and here: build with -ffp-contract=off.
 *
 * Weight layout ("packed"): panels of output channels, zero-padded; K4 is K rounded up to 4, zero-padded.
 * Portable and AVX2 code: a panel of NR channels is [K4 / 2][NR][2] int8, so that two neighbours along K sit side by
 * side as vpmaddwd wants them. Activations are quantized into int16 rows; one 32-bit broadcast carries a pair of them.
 * AVX512-VNNI and AMX code: see int8_wide.h. Every level gives the same bits.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NR 16                       /* output channels of a panel: two AVX2 registers of int32 */
#define MR 6                        /* rows of a tile: 12 sums, 2 weights, 1 activation, 1 product fill 16 registers */
#define BLOCK_BYTES (128 * 1024)    /* quantized activations of a row block; stays in L2 */
#define WIDE 32                     /* output channels of a panel of the wide code: two AVX512 registers */
#ifndef LQRL_MAX_LEVEL
#define LQRL_MAX_LEVEL 3
#endif
#define INLINE static inline __attribute__((always_inline))

enum level { LEVEL_PORTABLE = 0, LEVEL_AVX2 = 1, LEVEL_VNNI = 2, LEVEL_AMX = 3 };
enum input { INPUT_FLOAT32 = 0, INPUT_BFLOAT16 = 1, INPUT_CODES = 2 };

typedef struct {
    const void *x;       /* [m, k] float, bfloat16 or int8 codes */
    const int8_t *packed;
    const float *weight_scale; /* [n] */
    const void *bias;    /* [n] in the type of x, or NULL */
    void *out;           /* [m, n] in the type of x; int32 for codes */
    int64_t m, n, k;
    int input;
    int row_parts, panel_parts;
    int failed;
} job;

static int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

INLINE float bf16_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE uint16_t float_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
}

/* Largest |x| as bits: non-negative floats are ordered as their bits are, with NaN above inf. */
INLINE int32_t amax_bits(const void *x, int64_t k, int input) {
    int32_t top = 0;
    if (input == INPUT_FLOAT32) {
        const int32_t *p = x;
        for (int64_t i = 0; i < k; i++) {
            int32_t b = p[i] & 0x7fffffff;
            top = b > top ? b : top;
        }
        return top;
    }
    const int16_t *p = x;
    int16_t high = 0;
    for (int64_t i = 0; i < k; i++) {
        int16_t b = p[i] & 0x7fff;
        high = b > high ? b : high;
    }
    return (int32_t)high << 16;
}

/* A code as int16, or as uint8 with 128 added for the wide code. */
INLINE void put_code(void *codes, int64_t i, int32_t code, int wide) {
    if (wide) ((uint8_t *)codes)[i] = (uint8_t)(code + 128);
    else ((int16_t *)codes)[i] = (int16_t)code;
}

/* Codes of one row; returns the token scale. Adding 1.5 * 2^23 rounds half to even and leaves the integer in
 * the low bits. No clamp: |x| * (127 / amax) exceeds 127 by two roundings at most, and rounds back to 127. */
INLINE float quantize_row(const void *x, void *codes, int64_t k, int input, int wide) {
    const float magic = 12582912.0f;
    int32_t bits = amax_bits(x, k, input), magic_bits;
    float amax;
    memcpy(&amax, &bits, 4);
    memcpy(&magic_bits, &magic, 4);
    if (bits >= 0x7f800000) { /* NaN or inf: codes 0 and a NaN scale make the outputs NaN */
        for (int64_t i = 0; i < k; i++) put_code(codes, i, 0, wide);
        bits = 0x7fc00000;
        memcpy(&amax, &bits, 4);
        return amax;
    }
    amax = amax > 0x1.fffffcp+127f ? 0x1.fffffcp+127f : amax; /* amax_cap in numerics/amax.py */
    float inverse = amax > 0.0f ? 127.0f / amax : FLT_MAX;
    inverse = inverse > FLT_MAX ? FLT_MAX : inverse;
    if (input == INPUT_FLOAT32) {
        const float *p = x;
        for (int64_t i = 0; i < k; i++) {
            float r = p[i] * inverse + magic;
            int32_t b;
            memcpy(&b, &r, 4);
            put_code(codes, i, b - magic_bits, wide);
        }
    } else {
        const uint16_t *p = x;
        for (int64_t i = 0; i < k; i++) {
            float r = bf16_to_float(p[i]) * inverse + magic;
            int32_t b;
            memcpy(&b, &r, 4);
            put_code(codes, i, b - magic_bits, wide);
        }
    }
    return amax / 127.0f;
}

/* `stride` in bytes. Past K the weights are zero, so any code would do. */
INLINE void load_rows(const job *j, int64_t row, int64_t rows, void *codes, int64_t stride, float *scales, int input,
                      int wide) {
    for (int64_t r = 0; r < rows; r++) {
        void *to = (char *)codes + r * stride;
        scales[r] = 0.0f;
        if (input == INPUT_CODES) {
            const int8_t *from = (const int8_t *)j->x + (row + r) * j->k;
            for (int64_t i = 0; i < j->k; i++) put_code(to, i, from[i], wide);
        } else if (input == INPUT_FLOAT32) {
            scales[r] = quantize_row((const float *)j->x + (row + r) * j->k, to, j->k, INPUT_FLOAT32, wide);
        } else {
            scales[r] = quantize_row((const uint16_t *)j->x + (row + r) * j->k, to, j->k, INPUT_BFLOAT16, wide);
        }
        for (int64_t i = j->k; i < round_up(j->k, 4); i++) put_code(to, i, 0, wide);
    }
}

/* What one panel of output channels needs after the GEMM. */
typedef struct {
    float scale[WIDE], bias[WIDE];
    int has_bias;
    int64_t column, columns;
} panel_info;

INLINE void load_panel(const job *j, int64_t p, panel_info *info, int input, const int width) {
    info->column = p * width;
    info->columns = j->n - info->column < width ? j->n - info->column : width;
    info->has_bias = j->bias != NULL;
    if (input == INPUT_CODES) return;
    for (int64_t c = 0; c < width; c++) {
        int64_t from = info->column + (c < info->columns ? c : 0);
        info->scale[c] = j->weight_scale[from];
        if (!j->bias) info->bias[c] = 0.0f;
        else if (input == INPUT_FLOAT32) info->bias[c] = ((const float *)j->bias)[from];
        else info->bias[c] = bf16_to_float(((const uint16_t *)j->bias)[from]);
    }
}

/* Scales, bias and the output type, in the order that all backends share. */
INLINE void store_row(const job *j, const int32_t *acc, int64_t row, const panel_info *info, float token_scale,
                      int input, const int width) {
    int64_t at = row * j->n + info->column;
    if (input == INPUT_CODES) {
        memcpy((int32_t *)j->out + at, acc, (size_t)info->columns * 4);
        return;
    }
    float value[WIDE];
    for (int c = 0; c < width; c++) value[c] = ((float)acc[c] * info->scale[c]) * token_scale;
    if (input == INPUT_FLOAT32) {
        if (info->has_bias)
            for (int c = 0; c < width; c++) value[c] = value[c] + info->bias[c];
        if (info->columns == width) memcpy((float *)j->out + at, value, sizeof *value * width);
        else memcpy((float *)j->out + at, value, (size_t)info->columns * 4);
        return;
    }
    uint16_t half[WIDE];
    for (int c = 0; c < width; c++) half[c] = float_to_bf16(value[c]);
    if (info->has_bias)
        for (int c = 0; c < width; c++) half[c] = float_to_bf16(bf16_to_float(half[c]) + info->bias[c]);
    if (info->columns == width) memcpy((uint16_t *)j->out + at, half, sizeof *half * width);
    else memcpy((uint16_t *)j->out + at, half, (size_t)info->columns * 2);
}

/* acc[r][c] = sum over k4 inputs of row a + r * stride times channel c of panel b. */
typedef void (*tile_function)(const int16_t *a, int64_t stride, const int8_t *b, int64_t k4, int rows,
                              int32_t acc[MR][NR]);

static void tile_portable(const int16_t *a, int64_t stride, const int8_t *b, int64_t k4, int rows,
                          int32_t acc[MR][NR]) {
    memset(acc, 0, sizeof(int32_t) * MR * NR);
    for (int64_t i = 0; i < k4; i += 2, b += 2 * NR)
        for (int r = 0; r < rows; r++) {
            int32_t a0 = a[r * stride + i], a1 = a[r * stride + i + 1];
            for (int c = 0; c < NR; c++) acc[r][c] += a0 * b[2 * c] + a1 * b[2 * c + 1];
        }
}

/* One task: a range of rows by a range of panels. Tasks that share rows each quantize them: cheaper than waiting. */
INLINE void run_task(job *j, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end, int input,
                     tile_function tile) {
    int64_t k4 = round_up(j->k, 4), stride = round_up(j->k, 32) + 32; /* off a power of two: rows share no cache set */
    int64_t block = BLOCK_BYTES / (stride * 2) / MR * MR;
    if (block < MR) block = MR;
    if (block > row_end - row) block = row_end - row;
    int16_t *codes = malloc((size_t)(block * stride) * 2 + (size_t)block * 4);
    if (!codes) {
        j->failed = 1;
        return;
    }
    float *scales = (float *)(codes + block * stride);
    for (; row < row_end; row += block) {
        int64_t rows = row_end - row < block ? row_end - row : block;
        int64_t tiles = (rows + MR - 1) / MR;
        load_rows(j, row, rows, codes, stride * 2, scales, input, 0);
        for (int64_t p = panel; p < panel_end; p++) {
            panel_info info;
            load_panel(j, p, &info, input, NR);
            for (int64_t t = 0; t < tiles; t++) { /* even shares: 8 rows are 4 + 4, not 6 + 2 */
                int64_t first = rows * t / tiles, last = rows * (t + 1) / tiles;
                int32_t acc[MR][NR];
                tile(codes + first * stride, stride, j->packed + p * k4 * NR, k4, (int)(last - first), acc);
                for (int64_t r = first; r < last; r++)
                    store_row(j, acc[r - first], row + r, &info, scales[r], input, NR);
            }
        }
    }
    free(codes);
}

static void task_portable(job *j, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    if (j->input == INPUT_FLOAT32) run_task(j, row, row_end, panel, panel_end, INPUT_FLOAT32, tile_portable);
    else if (j->input == INPUT_BFLOAT16) run_task(j, row, row_end, panel, panel_end, INPUT_BFLOAT16, tile_portable);
    else run_task(j, row, row_end, panel, panel_end, INPUT_CODES, tile_portable);
}

#if defined(__x86_64__) && LQRL_MAX_LEVEL >= 1
#define HAVE_AVX2
#include <immintrin.h>
#include "int8_avx2.h"
#include "int8_wide.h"
#endif

static void (*task)(job *, int64_t, int64_t, int64_t, int64_t) = task_portable;

/* What depends on the level: output channels of a panel and bytes behind its weights; below `macs_per_thread` a thread
 * costs more than it saves; rows are split before channels while each thread keeps `rows_per_thread`. */
static int64_t panel_channels = NR, panel_extra = 0, macs_per_thread = 4 << 20, rows_per_thread = 24;

/* The OpenMP pool PyTorch already runs, found among the process's symbols; without one, a single thread. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void);
static int (*thread_count)(void);

/* Call once before anything else. Returns the level in use. */
int lqrl_int8_setup(void) {
    *(void **)&thread_number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&thread_count = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (thread_number && thread_count) *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    int level = LEVEL_PORTABLE;
#if defined(HAVE_AVX2)
    if (__builtin_cpu_supports("avx2")) {
        level = LEVEL_AVX2;
        task = task_avx2;
    }
#endif
#if defined(HAVE_VNNI)
    if (cpu_has_vnni()) {
        level = LEVEL_VNNI;
        task = task_vnni;
        panel_channels = WIDE;
        panel_extra = WIDE * sizeof(int32_t);
        macs_per_thread = 8 << 20;
        rows_per_thread = 64;
    }
#endif
#if defined(HAVE_AMX)
    if (level == LEVEL_VNNI && cpu_has_amx()) {
        level = LEVEL_AMX;
        task = task_amx;
    }
#endif
    return level;
}

int lqrl_int8_panel_channels(void) { return (int)panel_channels; }

int lqrl_int8_panel_extra(void) { return (int)panel_extra; }

int lqrl_int8_has_threads(void) { return parallel != NULL; }

static void run_part(job *j, int part) {
    int64_t panels = (j->n + panel_channels - 1) / panel_channels, r = part / j->panel_parts, p = part % j->panel_parts;
    task(j, j->m * r / j->row_parts, j->m * (r + 1) / j->row_parts, panels * p / j->panel_parts,
         panels * (p + 1) / j->panel_parts);
}

static void run_thread(void *data) {
    job *j = data;
    for (int part = thread_number(); part < j->row_parts * j->panel_parts; part += thread_count()) run_part(j, part);
}

static int run(job *j, int threads) {
    if (j->m == 0 || j->n == 0) return 0;
    double most = (double)j->m * (double)j->n * (double)j->k / (double)macs_per_thread;
    int64_t panels = (j->n + panel_channels - 1) / panel_channels;
    if (threads > most) threads = (int)most;
    if (!parallel || threads <= 1) {
        task(j, 0, j->m, 0, panels);
        return j->failed;
    }
    int64_t row_parts = j->m / rows_per_thread;
    j->row_parts = row_parts < 1 ? 1 : row_parts > threads ? threads : (int)row_parts;
    j->panel_parts = threads / j->row_parts;
    if (j->panel_parts > panels) j->panel_parts = (int)panels;
    parallel(run_thread, j, (unsigned)(j->row_parts * j->panel_parts), 0);
    return j->failed;
}

/* x, bias and out are bfloat16 when bfloat16 is not 0, else float. Returns 0, or 1 when memory ran out. */
int lqrl_int8_linear(const void *x, const int8_t *packed, const float *weight_scale, const void *bias, void *out,
                     int64_t m, int64_t n, int64_t k, int bfloat16, int threads) {
    job j = {x, packed, weight_scale, bias, out, m, n, k, bfloat16 ? INPUT_BFLOAT16 : INPUT_FLOAT32, 1, 1, 0};
    return run(&j, threads);
}

int lqrl_int8_mm(const int8_t *codes, const int8_t *packed, int32_t *out, int64_t m, int64_t n, int64_t k,
                 int threads) {
    job j = {codes, packed, NULL, NULL, out, m, n, k, INPUT_CODES, 1, 1, 0};
    return run(&j, threads);
}

int64_t lqrl_int8_packed_size(int64_t n, int64_t k) {
    return (n + panel_channels - 1) / panel_channels * (panel_channels * round_up(k, 4) + panel_extra);
}

static void pack_narrow(const int8_t *codes, int8_t *packed, int64_t n, int64_t k) {
    const int64_t k4 = round_up(k, 4), strip = 128; /* pairs; 16 rows of them and their panel part fit in L1 */
    for (int64_t p = 0; p * NR < n; p++, packed += k4 * NR) {
        const int8_t *rows = codes + p * NR * k;
        int64_t columns = n - p * NR < NR ? n - p * NR : NR;
        if (columns < NR || k < k4) memset(packed, 0, (size_t)(k4 * NR));
        for (int64_t start = 0; start < k / 2; start += strip) {
            int64_t end = start + strip < k / 2 ? start + strip : k / 2;
            for (int64_t c = 0; c < columns; c++)
                for (int64_t i = start; i < end; i++) memcpy(packed + (i * NR + c) * 2, rows + c * k + 2 * i, 2);
        }
        if (k % 2)
            for (int64_t c = 0; c < columns; c++) packed[(k / 2 * NR + c) * 2] = rows[c * k + k - 1];
    }
}

void lqrl_int8_pack(const int8_t *codes, int8_t *packed, int64_t n, int64_t k) {
#if defined(HAVE_VNNI)
    if (panel_channels == WIDE) {
        pack_wide(codes, packed, n, k);
        return;
    }
#endif
    pack_narrow(codes, packed, n, k);
}
