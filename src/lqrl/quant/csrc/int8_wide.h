/* Tiles for CPUs with AVX512-VNNI or AMX; part of int8_linear.c, which includes it.
 *
 * A panel holds WIDE = 32 output channels as two halves of 16, each [K4 / 4][16][4] int8: four neighbours along K side
 * by side, a 64-byte row for vpdpbusd and, 16 rows at a time, a tile for tdpbusd. Both multiply unsigned by signed, so
 * activations are stored as code + 128, and the sums start from -128 * (sum of the channel's weights), kept behind the
 * two halves as int32[32]. Nothing saturates, and sums that wrap around 2^32 on the way end right: exact.
 */
#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 9
#if LQRL_MAX_LEVEL >= 2
#define HAVE_VNNI
#endif
#endif
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#if LQRL_MAX_LEVEL >= 3 && defined(__linux__)
#define HAVE_AMX
#endif
#endif

#if defined(HAVE_VNNI)
#define VNNI __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define VNNI_ROWS 8 /* rows of a vpdpbusd tile: 16 sums, enough to hide the latency */
#define AMX_ROWS 32 /* rows of a tdpbusd tile: two by two tile registers of sums */

static int cpu_has_vnni(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

/* acc[r] = start[r * start_stride] + inputs `from` to `to` of row r times the panel `b`. */
VNNI INLINE void vnni_rows(const uint8_t *a, int64_t stride, const int8_t *b, int64_t k4, int64_t from, int64_t to,
                           const int rows, const int32_t *start, int64_t start_stride, int32_t acc[][WIDE]) {
    __m512i low[VNNI_ROWS], high[VNNI_ROWS];
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
        low[r] = _mm512_loadu_si512(start + r * start_stride);
        high[r] = _mm512_loadu_si512(start + r * start_stride + 16);
    }
    for (int64_t i = from; i < to; i += 4) {
        __m512i b0 = _mm512_loadu_si512(b + 16 * i), b1 = _mm512_loadu_si512(b + 16 * (k4 + i));
        _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, a + r * stride + i, 4);
            __m512i x = _mm512_set1_epi32(four);
            low[r] = _mm512_dpbusd_epi32(low[r], x, b0);
            high[r] = _mm512_dpbusd_epi32(high[r], x, b1);
        }
    }
    _Pragma("GCC unroll 8") for (int r = 0; r < rows; r++) {
        _mm512_storeu_si512(acc[r], low[r]);
        _mm512_storeu_si512(acc[r] + 16, high[r]);
    }
}

VNNI static void tile_vnni(const uint8_t *a, int64_t stride, const int8_t *b, int64_t k4, int64_t from, int64_t to,
                           int rows, const int32_t *start, int64_t start_stride, int32_t acc[][WIDE]) {
#define CASE(rows) case rows: vnni_rows(a, stride, b, k4, from, to, rows, start, start_stride, acc); break
    switch (rows) {
        CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7);
    default: vnni_rows(a, stride, b, k4, from, to, VNNI_ROWS, start, start_stride, acc);
    }
#undef CASE
}

#if defined(HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define AMX __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8")))

/* The CPU has it and Linux lets this process keep tiles in its threads' state. */
static int cpu_has_amx(void) {
    const unsigned tile_and_int8 = 3u << 24;
    const long request_permission = 0x1023, tile_data = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tile_and_int8) != tile_and_int8) return 0;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

/* All eight tile registers: 16 rows of 64 bytes. */
AMX static void configure_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.row_bytes[t] = 64;
        config.rows[t] = 16;
    }
    _tile_loadconfig(&config);
}

/* Inputs 0 to `to`, a multiple of 64, of 16 or 32 rows. Reads whole tiles of rows; what is past the last is dropped. */
AMX static void tile_amx(const uint8_t *a, int64_t stride, const int8_t *b, int64_t k4, int64_t to, int rows,
                         const int32_t *start, int32_t acc[][WIDE]) {
    __asm__ volatile("" ::: "memory"); /* the compiler does not know that tile loads read memory */
    _tile_loadd(0, start, 0);
    _tile_loadd(1, start + 16, 0);
    if (rows <= 16) {
        for (int64_t i = 0; i < to; i += 64) {
            _tile_loadd(4, a + i, stride);
            _tile_loadd(6, b + 16 * i, 64);
            _tile_dpbusd(0, 4, 6);
            _tile_loadd(7, b + 16 * (k4 + i), 64);
            _tile_dpbusd(1, 4, 7);
        }
    } else {
        _tile_loadd(2, start, 0);
        _tile_loadd(3, start + 16, 0);
        for (int64_t i = 0; i < to; i += 64) {
            _tile_loadd(4, a + i, stride);
            _tile_loadd(6, b + 16 * i, 64);
            _tile_dpbusd(0, 4, 6);
            _tile_loadd(7, b + 16 * (k4 + i), 64);
            _tile_dpbusd(1, 4, 7);
            _tile_loadd(5, a + 16 * stride + i, stride);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(2, acc[16], WIDE * 4);
        _tile_stored(3, acc[16] + 16, WIDE * 4);
    }
    _tile_stored(0, acc[0], WIDE * 4);
    _tile_stored(1, acc[0] + 16, WIDE * 4);
    __asm__ volatile("" ::: "memory");
}
#else
#define AMX VNNI
INLINE void configure_tiles(void) {}
INLINE void tile_amx(const uint8_t *a, int64_t stride, const int8_t *b, int64_t k4, int64_t to, int rows,
                     const int32_t *start, int32_t acc[][WIDE]) {
    (void)a, (void)stride, (void)b, (void)k4, (void)to, (void)rows, (void)start, (void)acc;
}
#endif

/* `run_task` for wide panels. Inputs past the last multiple of 64 go through vpdpbusd in both versions. */
INLINE void run_wide(job *j, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end, const int input,
                     const int amx) {
    int64_t k4 = round_up(j->k, 4), panel_bytes = WIDE * k4 + WIDE * 4, whole = amx ? k4 / 64 * 64 : 0;
    int64_t stride = round_up(k4, 64) | 64; /* an odd number of cache lines: rows spread over the sets */
    int64_t block = BLOCK_BYTES / stride / AMX_ROWS * AMX_ROWS, step = amx ? AMX_ROWS : VNNI_ROWS;
    if (block < AMX_ROWS) block = AMX_ROWS;
    if (block > row_end - row) block = row_end - row;
    int64_t code_bytes = round_up(block, 16) * stride;
    uint8_t *codes = aligned_alloc(64, (size_t)round_up(code_bytes + block * 4, 64));
    if (!codes) {
        j->failed = 1;
        return;
    }
    float *scales = (float *)(codes + code_bytes);
    int32_t acc[AMX_ROWS][WIDE] __attribute__((aligned(64)));
    for (; row < row_end; row += block) {
        int64_t rows = row_end - row < block ? row_end - row : block;
        load_rows(j, row, rows, codes, stride, scales, input, 1);
        for (int64_t p = panel; p < panel_end; p++) {
            panel_info info;
            const int8_t *b = j->packed + p * panel_bytes;
            const int32_t *start = (const int32_t *)(b + WIDE * k4);
            load_panel(j, p, &info, input, WIDE);
            for (int64_t first = 0; first < rows; first += step) {
                int64_t count = rows - first < step ? rows - first : step;
                const uint8_t *a = codes + first * stride;
                if (whole) tile_amx(a, stride, b, k4, whole, (int)count, start, acc);
                if (whole < k4)
                    for (int64_t r = 0; r < count; r += VNNI_ROWS)
                        tile_vnni(a + r * stride, stride, b, k4, whole, k4,
                                  (int)(count - r < VNNI_ROWS ? count - r : VNNI_ROWS), whole ? acc[r] : start,
                                  whole ? WIDE : 0, acc + r);
                for (int64_t r = 0; r < count; r++)
                    store_row(j, acc[r], row + first + r, &info, scales[first + r], input, WIDE);
            }
        }
    }
    free(codes);
}

VNNI static void task_vnni(job *j, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    if (j->input == INPUT_FLOAT32) run_wide(j, row, row_end, panel, panel_end, INPUT_FLOAT32, 0);
    else if (j->input == INPUT_BFLOAT16) run_wide(j, row, row_end, panel, panel_end, INPUT_BFLOAT16, 0);
    else run_wide(j, row, row_end, panel, panel_end, INPUT_CODES, 0);
}

#if defined(HAVE_AMX)
AMX static void task_amx(job *j, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    configure_tiles(); /* a thread's own state */
    if (j->input == INPUT_FLOAT32) run_wide(j, row, row_end, panel, panel_end, INPUT_FLOAT32, 1);
    else if (j->input == INPUT_BFLOAT16) run_wide(j, row, row_end, panel, panel_end, INPUT_BFLOAT16, 1);
    else run_wide(j, row, row_end, panel, panel_end, INPUT_CODES, 1);
    _tile_release();
}
#endif

static void pack_wide(const int8_t *codes, int8_t *packed, int64_t n, int64_t k) {
    const int64_t k4 = round_up(k, 4), strip = 64; /* 32 rows' parts and the panel's fit in L1 */
    for (int64_t p = 0; p * WIDE < n; p++, packed += WIDE * k4 + WIDE * 4) {
        const int8_t *rows = codes + p * WIDE * k;
        int64_t columns = n - p * WIDE < WIDE ? n - p * WIDE : WIDE;
        int32_t start[WIDE] = {0};
        if (columns < WIDE || k < k4) memset(packed, 0, (size_t)(k4 * WIDE));
        for (int64_t from = 0; from < k; from += 4 * strip) {
            int64_t end = from + 4 * strip < k ? from + 4 * strip : k;
            for (int64_t c = 0; c < columns; c++) {
                int8_t *to = packed + c / 16 * 16 * k4 + c % 16 * 4;
                int64_t i = from;
                for (; i + 4 <= end; i += 4) memcpy(to + 16 * i, rows + c * k + i, 4);
                for (int64_t tail = i; tail < end; tail++) to[16 * i + tail - i] = rows[c * k + tail];
                for (i = from; i < end; i++) start[c] -= 128 * rows[c * k + i];
            }
        }
        memcpy(packed + WIDE * k4, start, sizeof start);
    }
}
#endif
