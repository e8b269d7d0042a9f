/* int8 W8A8 linear layer for CPUs: per-token quantization, exact int32 GEMM, scales and bias, in one call.
 *
 * Plain C11 and libc only; compiled at first use and called through ctypes. The arithmetic is stated in
 * lqrl/quant/kernels.py and must give the same bits there and here: build with -ffp-contract=off.
 *
 * Weight layout ("packed"): panels of NR output channels, zero-padded; a panel is [K4 / 2][NR][2] int8, so that two
 * neighbours along K sit side by side as vpmaddwd wants them. K4 is K rounded up to 4, zero-padded.
 * Activations are quantized into int16 rows; one 32-bit broadcast then carries a pair of them.
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
#define MACS_PER_THREAD (4 << 20)   /* below this a thread costs more than it saves */
#define ROWS_PER_THREAD 24          /* rows are split before channels while each thread keeps this many */
#define INLINE static inline __attribute__((always_inline))

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

/* Codes of one row as int16; returns the token scale. Adding 1.5 * 2^23 rounds half to even and leaves the integer in
 * the low bits. No clamp: |x| * (127 / amax) exceeds 127 by two roundings at most, and rounds back to 127. */
INLINE float quantize_row(const void *x, int16_t *codes, int64_t k, int input) {
    const float magic = 12582912.0f;
    int32_t bits = amax_bits(x, k, input), magic_bits;
    float amax;
    memcpy(&amax, &bits, 4);
    memcpy(&magic_bits, &magic, 4);
    if (bits >= 0x7f800000) { /* NaN or inf: codes 0 and a NaN scale make the outputs NaN */
        memset(codes, 0, (size_t)k * sizeof(int16_t));
        bits = 0x7fc00000;
        memcpy(&amax, &bits, 4);
        return amax;
    }
    float inverse = amax > 0.0f ? 127.0f / amax : FLT_MAX;
    inverse = inverse > FLT_MAX ? FLT_MAX : inverse;
    if (input == INPUT_FLOAT32) {
        const float *p = x;
        for (int64_t i = 0; i < k; i++) {
            float r = p[i] * inverse + magic;
            int32_t b;
            memcpy(&b, &r, 4);
            codes[i] = (int16_t)(b - magic_bits);
        }
    } else {
        const uint16_t *p = x;
        for (int64_t i = 0; i < k; i++) {
            float r = bf16_to_float(p[i]) * inverse + magic;
            int32_t b;
            memcpy(&b, &r, 4);
            codes[i] = (int16_t)(b - magic_bits);
        }
    }
    return amax / 127.0f;
}

INLINE void load_rows(const job *j, int64_t row, int64_t rows, int16_t *codes, int64_t stride, float *scales,
                      int input) {
    for (int64_t r = 0; r < rows; r++) {
        int16_t *to = codes + r * stride;
        scales[r] = 0.0f;
        if (input == INPUT_CODES) {
            const int8_t *from = (const int8_t *)j->x + (row + r) * j->k;
            for (int64_t i = 0; i < j->k; i++) to[i] = from[i];
        } else if (input == INPUT_FLOAT32) {
            scales[r] = quantize_row((const float *)j->x + (row + r) * j->k, to, j->k, INPUT_FLOAT32);
        } else {
            scales[r] = quantize_row((const uint16_t *)j->x + (row + r) * j->k, to, j->k, INPUT_BFLOAT16);
        }
        for (int64_t i = j->k; i < round_up(j->k, 4); i++) to[i] = 0;
    }
}

/* What one panel of output channels needs after the GEMM, zero-padded to NR. */
typedef struct {
    float scale[NR], bias[NR];
    int has_bias;
    int64_t column, columns;
} panel_info;

INLINE void load_panel(const job *j, int64_t p, panel_info *info, int input) {
    info->column = p * NR;
    info->columns = j->n - info->column < NR ? j->n - info->column : NR;
    info->has_bias = j->bias != NULL;
    if (input == INPUT_CODES) return;
    for (int64_t c = 0; c < NR; c++) {
        int64_t from = info->column + (c < info->columns ? c : 0);
        info->scale[c] = j->weight_scale[from];
        if (!j->bias) info->bias[c] = 0.0f;
        else if (input == INPUT_FLOAT32) info->bias[c] = ((const float *)j->bias)[from];
        else info->bias[c] = bf16_to_float(((const uint16_t *)j->bias)[from]);
    }
}

/* Scales, bias and the output type, in the order that all backends share. */
INLINE void store_row(const job *j, const int32_t *acc, int64_t row, const panel_info *info, float token_scale,
                      int input) {
    int64_t at = row * j->n + info->column;
    if (input == INPUT_CODES) {
        memcpy((int32_t *)j->out + at, acc, (size_t)info->columns * 4);
        return;
    }
    float value[NR];
    for (int c = 0; c < NR; c++) value[c] = ((float)acc[c] * info->scale[c]) * token_scale;
    if (input == INPUT_FLOAT32) {
        if (info->has_bias)
            for (int c = 0; c < NR; c++) value[c] = value[c] + info->bias[c];
        if (info->columns == NR) memcpy((float *)j->out + at, value, sizeof value);
        else memcpy((float *)j->out + at, value, (size_t)info->columns * 4);
        return;
    }
    uint16_t half[NR];
    for (int c = 0; c < NR; c++) half[c] = float_to_bf16(value[c]);
    if (info->has_bias)
        for (int c = 0; c < NR; c++) half[c] = float_to_bf16(bf16_to_float(half[c]) + info->bias[c]);
    if (info->columns == NR) memcpy((uint16_t *)j->out + at, half, sizeof half);
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
        load_rows(j, row, rows, codes, stride, scales, input);
        for (int64_t p = panel; p < panel_end; p++) {
            panel_info info;
            load_panel(j, p, &info, input);
            for (int64_t t = 0; t < tiles; t++) { /* even shares: 8 rows are 4 + 4, not 6 + 2 */
                int64_t first = rows * t / tiles, last = rows * (t + 1) / tiles;
                int32_t acc[MR][NR];
                tile(codes + first * stride, stride, j->packed + p * k4 * NR, k4, (int)(last - first), acc);
                for (int64_t r = first; r < last; r++)
                    store_row(j, acc[r - first], row + r, &info, scales[r], input);
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

#if defined(__x86_64__) && !defined(LQRL_PORTABLE)
#define HAVE_AVX2
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))

/* acc += x * b over pairs: vpmaddwd makes 16 exact products. In assembly, because the compiler would reorder the
 * integer sums of two steps and run out of registers. */
#define MULTIPLY_ADD(acc, x, b)                                                                                   \
    do {                                                                                                          \
        __m256i product;                                                                                          \
        __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(product) : "x"(b), "x"(x));         \
    } while (0)

#define PAIR(offset)                                                                                              \
    do {                                                                                                          \
        __m256i b0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(b + NR * (offset))));                 \
        __m256i b1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(b + NR * (offset) + NR)));            \
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {                                                  \
            int32_t pair;                                                                                         \
            memcpy(&pair, a + r * stride + i + (offset), 4);                                                      \
            __m256i x = _mm256_set1_epi32(pair);                                                                  \
            MULTIPLY_ADD(low[r], x, b0);                                                                          \
            MULTIPLY_ADD(high[r], x, b1);                                                                         \
        }                                                                                                         \
    } while (0)

AVX2 INLINE void tile_rows(const int16_t *a, int64_t stride, const int8_t *b, int64_t k4, const int rows,
                           int32_t acc[MR][NR]) {
    __m256i low[MR], high[MR];
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) low[r] = high[r] = _mm256_setzero_si256();
    for (int64_t i = 0; i < k4; i += 4, b += 4 * NR) {
        PAIR(0);
        PAIR(2);
    }
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
        _mm256_storeu_si256((__m256i *)acc[r], low[r]);
        _mm256_storeu_si256((__m256i *)(acc[r] + 8), high[r]);
    }
}

AVX2 static void tile_avx2(const int16_t *a, int64_t stride, const int8_t *b, int64_t k4, int rows,
                           int32_t acc[MR][NR]) {
    switch (rows) {
    case 1: tile_rows(a, stride, b, k4, 1, acc); break;
    case 2: tile_rows(a, stride, b, k4, 2, acc); break;
    case 3: tile_rows(a, stride, b, k4, 3, acc); break;
    case 4: tile_rows(a, stride, b, k4, 4, acc); break;
    case 5: tile_rows(a, stride, b, k4, 5, acc); break;
    default: tile_rows(a, stride, b, k4, 6, acc); break;
    }
}

AVX2 static void task_avx2(job *j, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    if (j->input == INPUT_FLOAT32) run_task(j, row, row_end, panel, panel_end, INPUT_FLOAT32, tile_avx2);
    else if (j->input == INPUT_BFLOAT16) run_task(j, row, row_end, panel, panel_end, INPUT_BFLOAT16, tile_avx2);
    else run_task(j, row, row_end, panel, panel_end, INPUT_CODES, tile_avx2);
}
#endif

static void (*task)(job *, int64_t, int64_t, int64_t, int64_t) = task_portable;

/* The OpenMP pool PyTorch already runs, found among the process's symbols; without one, a single thread. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void);
static int (*thread_count)(void);

/* Call once before anything else. Returns 1 when AVX2 is used, 0 for the portable code. */
int lqrl_int8_setup(void) {
    *(void **)&thread_number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&thread_count = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (thread_number && thread_count) *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#if defined(HAVE_AVX2)
    if (__builtin_cpu_supports("avx2")) {
        task = task_avx2;
        return 1;
    }
#endif
    return 0;
}

int lqrl_int8_has_threads(void) { return parallel != NULL; }

static void run_part(job *j, int part) {
    int64_t panels = (j->n + NR - 1) / NR, r = part / j->panel_parts, p = part % j->panel_parts;
    task(j, j->m * r / j->row_parts, j->m * (r + 1) / j->row_parts, panels * p / j->panel_parts,
         panels * (p + 1) / j->panel_parts);
}

static void run_thread(void *data) {
    job *j = data;
    for (int part = thread_number(); part < j->row_parts * j->panel_parts; part += thread_count()) run_part(j, part);
}

static int run(job *j, int threads) {
    if (j->m == 0 || j->n == 0) return 0;
    double most = (double)j->m * (double)j->n * (double)j->k / MACS_PER_THREAD;
    int64_t panels = (j->n + NR - 1) / NR;
    if (threads > most) threads = (int)most;
    if (!parallel || threads <= 1) {
        task(j, 0, j->m, 0, panels);
        return j->failed;
    }
    int64_t row_parts = j->m / ROWS_PER_THREAD;
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

int64_t lqrl_int8_packed_size(int64_t n, int64_t k) { return round_up(n, NR) * round_up(k, 4); }

void lqrl_int8_pack(const int8_t *codes, int8_t *packed, int64_t n, int64_t k) {
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
