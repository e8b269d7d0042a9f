/* Tiles for CPUs with AVX2; part of int8_linear.c, which includes it. */
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
