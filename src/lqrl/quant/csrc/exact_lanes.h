/* The arithmetic of exact.c, written once and compiled for each instruction set; exact.c includes it with
 *   NAME(x)       x with the instruction set's suffix
 *   TARGET        the function attribute that allows its instructions
 *   FUSED(a, b, c) a * b + c of `v8`, rounded once
 * Every sum below has one order that depends on the row alone. */

#define FN TARGET static inline __attribute__((always_inline))

FN v8 NAME(splat)(float f) { return (v8){f, f, f, f, f, f, f, f}; }

FN v8 NAME(load)(const float *p) {
    v8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

FN void NAME(store)(float *p, v8 v) { memcpy(p, &v, sizeof v); }

/* 8 elements of float or bfloat16. */
FN v8 NAME(widen)(const void *x, int64_t i, const int bf16) {
    if (!bf16) return NAME(load)((const float *)x + i);
    v8h h;
    memcpy(&h, (const uint16_t *)x + i, sizeof h);
    return (v8)(__builtin_convertvector(h, v8i) << 16);
}

/* The first `n` of 8 elements, then `fill`. */
FN v8 NAME(widen_part)(const void *x, int64_t i, int64_t n, const int bf16, float fill) {
    float part[8];
    for (int c = 0; c < 8; c++) part[c] = c < n ? (bf16 ? bf16_to_float(((const uint16_t *)x)[i + c]) : ((const float *)x)[i + c]) : fill;
    return NAME(load)(part);
}

FN v8h NAME(to_bf16)(v8 v) {
    v8u bits = (v8u)v;
    v8u rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    v8u bad = (v8u)(v != v);
    return __builtin_convertvector((rounded & ~bad) | (bad & 0x7fc0u), v8h);
}

/* Write the first `n` of 8 elements; all of them when there are more. */
FN void NAME(narrow)(void *out, int64_t i, int64_t n, v8 v, const int bf16) {
    if (bf16) {
        v8h h = NAME(to_bf16)(v);
        if (n >= 8) memcpy((uint16_t *)out + i, &h, sizeof h);
        else memcpy((uint16_t *)out + i, &h, (size_t)n * 2);
        return;
    }
    if (n >= 8) memcpy((float *)out + i, &v, sizeof v);
    else memcpy((float *)out + i, &v, (size_t)n * 4);
}

/* ((0+4) + (2+6)) + ((1+5) + (3+7)) */
FN float NAME(tree)(v8 v) {
    v = v + SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v = v + SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

/* `tree` of eight vectors at once. */
FN v8 NAME(trees)(const v8 *a) {
    v8 c[4], d[2];
    for (int i = 0; i < 4; i++)
        c[i] = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 2; i++)
        d[i] = SHUFFLE(c[i], c[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(c[i], c[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    v8 e = SHUFFLE(d[0], d[1], 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(d[0], d[1], 1, 3, 9, 11, 5, 7, 13, 15);
    return SHUFFLE(e, e, 0, 2, 1, 3, 4, 6, 5, 7); /* e holds the sums 0 2 1 3 4 6 5 7 */
}

FN v8 NAME(choose)(v8i mask, v8 yes, v8 no) { return (v8)((mask & (v8i)yes) | (~mask & (v8i)no)); }

FN v8 NAME(larger)(v8 a, v8 b) { return NAME(choose)(a > b, a, b); } /* b when a is NaN */

/* e^x within 1 ulp: x = n ln 2 + r, a polynomial of degree 6 in r, and 2^n. Below -86.6 it is 0. */
FN v8 NAME(exp)(v8 x) {
    const v8 magic = NAME(splat)(12582912.0f), low = NAME(splat)(-86.6f), high = NAME(splat)(89.0f);
    v8i under = x < low;
    x = NAME(choose)(under, low, x);
    x = NAME(choose)(x > high, high, x);
    v8 shifted = FUSED(x, NAME(splat)(0x1.715476p+0f), magic), n = shifted - magic;
    v8 r = FUSED(n, NAME(splat)(-0x1.62e430p-1f), x);
    r = FUSED(n, NAME(splat)(0x1.05c610p-29f), r);
    v8 q = NAME(splat)(0x1.6a23cep-10f);
    q = FUSED(q, r, NAME(splat)(0x1.123a20p-7f));
    q = FUSED(q, r, NAME(splat)(0x1.5558f2p-5f));
    q = FUSED(q, r, NAME(splat)(0x1.555492p-3f));
    q = FUSED(q, r, NAME(splat)(0x1.fffffcp-2f));
    v8 y = FUSED(q, r * r, r) + NAME(splat)(1.0f);
    v8i exponent = (v8i)shifted - (v8i)magic + 126; /* of 2^(n - 1): n may be 128 */
    y = (y + y) * (v8)(exponent << 23);
    return (v8)(~under & (v8i)y);
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* acc[r][c] continues its sum over `steps` inputs, one fused multiply-add after the other. */
FN void NAME(tile_rows)(const float *a, int64_t stride, const float *b, int64_t steps, const int rows, float *acc) {
    v8 low[MR], high[MR];
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
        low[r] = NAME(load)(acc + r * PANEL);
        high[r] = NAME(load)(acc + r * PANEL + 8);
    }
    for (int64_t i = 0; i < steps; i++, b += PANEL) {
        v8 b0 = NAME(load)(b), b1 = NAME(load)(b + 8);
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
            v8 x = NAME(splat)(a[r * stride + i]);
            low[r] = FUSED(x, b0, low[r]);
            high[r] = FUSED(x, b1, high[r]);
        }
    }
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
        NAME(store)(acc + r * PANEL, low[r]);
        NAME(store)(acc + r * PANEL + 8, high[r]);
    }
}

TARGET static void NAME(tile)(const float *a, int64_t stride, const float *b, int64_t steps, int rows, float *acc) {
    switch (rows) {
    case 1: NAME(tile_rows)(a, stride, b, steps, 1, acc); break;
    case 2: NAME(tile_rows)(a, stride, b, steps, 2, acc); break;
    case 3: NAME(tile_rows)(a, stride, b, steps, 3, acc); break;
    case 4: NAME(tile_rows)(a, stride, b, steps, 4, acc); break;
    case 5: NAME(tile_rows)(a, stride, b, steps, 5, acc); break;
    default: NAME(tile_rows)(a, stride, b, steps, 6, acc); break;
    }
}

/* One row by four whole panels from element `at` on: eight sums in flight instead of two. */
FN void NAME(tile_panels)(const float *a, const void *b, int64_t at, int64_t steps, float *acc, const int bf16) {
    v8 sum[8];
    _Pragma("GCC unroll 8") for (int v = 0; v < 8; v++) sum[v] = NAME(splat)(0.0f);
    for (int64_t i = 0; i < steps; i++, at += PANEL) {
        v8 x = NAME(splat)(a[i]);
        _Pragma("GCC unroll 8") for (int v = 0; v < 8; v++)
            sum[v] = FUSED(x, NAME(widen)(b, at + v / 2 * PANEL * steps + v % 2 * 8, bf16), sum[v]);
    }
    _Pragma("GCC unroll 8") for (int v = 0; v < 8; v++) NAME(store)(acc + v * 8, sum[v]);
}

FN void NAME(store_outputs)(const product *j, const float *acc, int64_t row, int64_t column) {
    int64_t columns = j->n - column < PANEL ? j->n - column : PANEL, at = row * j->n + column;
    for (int64_t c = 0; c < columns; c += 8) {
        int64_t n = columns - c < 8 ? columns - c : 8;
        v8 y = NAME(load)(acc + c);
        if (j->bias) y = y + (n == 8 ? NAME(widen)(j->bias, column + c, j->bias_bf16) : NAME(widen_part)(j->bias, column + c, n, j->bias_bf16, 0.0f));
        NAME(narrow)(j->out, at + c, n, y, j->out_bf16);
    }
}

/* A panel block as floats, its missing columns 0. */
FN const float *NAME(widen_panel)(const product *j, int64_t from, int64_t steps, int64_t columns, float *to) {
    if (columns == PANEL)
        for (int64_t i = 0; i < steps * PANEL; i += 8) NAME(store)(to + i, NAME(widen)(j->packed, from + i, 1));
    else
        for (int64_t i = 0; i < steps; i++, from += columns)
            for (int c = 0; c < PANEL; c += 8)
                NAME(store)(to + i * PANEL + c, NAME(widen_part)(j->packed, from + c, columns - c, j->packed_bf16, 0.0f));
    return to;
}

/* Rows [row, row_end) by panels [panel, panel_end). Sums live in `acc` between blocks of K, so blocks change no bit. */
TARGET static void NAME(product_task)(product *j, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
    int64_t block = BLOCK_BYTES / (j->k * 4) / MR * MR;
    block = block < MR ? MR : block > 16 * MR ? 16 * MR : block;
    if (block > row_end - row) block = row_end - row;
    int64_t held = j->x_bf16 ? block * j->k : 0;
    float *memory = malloc(sizeof(float) * (size_t)(held + block * PANEL + KBLOCK * PANEL + 8));
    if (!memory) {
        j->failed = 1;
        return;
    }
    float *acc = memory + held, *widened = acc + block * PANEL;
    for (; row < row_end; row += block) {
        int64_t rows = row_end - row < block ? row_end - row : block, tiles = (rows + MR - 1) / MR;
        const float *x = (const float *)j->x + row * j->k;
        if (j->x_bf16) {
            for (int64_t i = 0; i < rows * j->k; i++) memory[i] = bf16_to_float(((const uint16_t *)j->x)[row * j->k + i]);
            x = memory;
        }
        int64_t p = panel;
        if (rows == 1)
            for (float four[4 * PANEL]; p + 4 <= panel_end && (p + 4) * PANEL <= j->n; p += 4) {
                if (j->packed_bf16) NAME(tile_panels)(x, j->packed, p * PANEL * j->k, j->k, four, 1);
                else NAME(tile_panels)(x, j->packed, p * PANEL * j->k, j->k, four, 0);
                for (int c = 0; c < 4; c++) NAME(store_outputs)(j, four + c * PANEL, row, (p + c) * PANEL);
            }
        for (; p < panel_end; p++) {
            memset(acc, 0, sizeof(float) * (size_t)(rows * PANEL));
            for (int64_t start = 0; start < j->k; start += KBLOCK) {
                int64_t steps = at_most(j->k - start, KBLOCK), columns = at_most(j->n - p * PANEL, PANEL);
                int64_t from = p * PANEL * j->k + start * columns;
                const float *b = (const float *)j->packed + from;
                if (j->packed_bf16 || columns < PANEL) b = NAME(widen_panel)(j, from, steps, columns, widened);
                for (int64_t t = 0; t < tiles; t++) { /* even shares: 8 rows are 4 + 4 */
                    int64_t first = rows * t / tiles, last = rows * (t + 1) / tiles;
                    NAME(tile)(x + first * j->k + start, j->k, b, steps, (int)(last - first), acc + first * PANEL);
                }
            }
            for (int64_t r = 0; r < rows; r++) NAME(store_outputs)(j, acc + r * PANEL, row + r, p * PANEL);
        }
    }
    free(memory);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* `rows` of `width` elements at `x`, `stride` apart, as floats: themselves, or copied and padded with 0 into `room`. */
FN const float *NAME(as_floats)(const void *x, int64_t at, int64_t rows, int64_t width, int64_t stride, int bf16,
                                float *room, int64_t *room_stride) {
    if (!bf16 && width % 8 == 0) {
        *room_stride = stride;
        return (const float *)x + at;
    }
    int64_t padded = round_up(width, 8);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i += 8) {
            int64_t n = width - i < 8 ? width - i : 8, from = at + r * stride + i;
            NAME(store)(room + r * padded + i,
                        n < 8 ? NAME(widen_part)(x, from, n, bf16, 0.0f)
                              : bf16 ? NAME(widen)(x, from, 1) : NAME(widen)(x, from, 0));
        }
    *room_stride = padded;
    return room;
}

/* Scaled products of the unit's queries with its keys. A dot product: 8 lanes along the width, then `tree`. */
FN void NAME(scores)(const attention *j, const unit *u, float *room) {
    int64_t padded = round_up(j->key_width, 8);
    float *queries = room, *copies = room + u->rows * padded;
    for (int64_t r = 0; r < u->rows; r++) {
        int64_t stride, at = u->query_at + r / u->group * j->q_token + r % u->group * j->q_head;
        const float *q = NAME(as_floats)(j->q, at, 1, j->key_width, 0, j->bf16, queries + r * padded, &stride);
        if (q != queries + r * padded) memcpy(queries + r * padded, q, sizeof(float) * (size_t)j->key_width);
    }
    const v8 scale = NAME(splat)(j->scale);
    for (int64_t key = u->start; key < u->end; key += 8) {
        int64_t keys = u->end - key < 8 ? u->end - key : 8, stride;
        const float *k = NAME(as_floats)(j->k, u->key_at + key * j->k_token, keys, j->key_width, j->k_token, j->bf16,
                                         copies, &stride);
        const float *row_of[8];
        for (int i = 0; i < 8; i++) row_of[i] = k + (i < keys ? i : keys - 1) * stride;
        for (int64_t r = 0; r < u->rows; r++) {
            if (row_end(u, r) <= key || row_start(j, u, r) >= key + 8) continue;
            v8 sum[8];
            for (int i = 0; i < 8; i++) sum[i] = NAME(splat)(0.0f);
            for (int64_t d = 0; d < padded; d += 8) {
                v8 q = NAME(load)(queries + r * padded + d);
                _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) sum[i] = FUSED(q, NAME(load)(row_of[i] + d), sum[i]);
            }
            NAME(store)(u->scores + r * u->stride + key - u->start, NAME(trees)(sum) * scale);
        }
    }
}

/* exp(score - largest) in place for one row's live keys; their sum by 8 lanes, counted from the row's first key. */
FN float NAME(weights)(float *s, int64_t n) {
    v8 top = NAME(splat)(-INFINITY);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) top = NAME(larger)(NAME(load)(s + i), top);
    if (i < n) top = NAME(larger)(NAME(widen_part)(s, i, n - i, 0, -INFINITY), top);
    float largest = top[0];
    for (int c = 1; c < 8; c++) largest = top[c] > largest ? top[c] : largest;
    v8 sum = NAME(splat)(0.0f), shift = NAME(splat)(largest);
    for (i = 0; i + 8 <= n; i += 8) {
        v8 e = NAME(exp)(NAME(load)(s + i) - shift);
        NAME(store)(s + i, e);
        sum = sum + e;
    }
    if (i < n) {
        v8 e = NAME(exp)(NAME(widen_part)(s, i, n - i, 0, -INFINITY) - shift);
        NAME(narrow)(s, i, n - i, e, 0);
        sum = sum + e;
    }
    return NAME(tree)(sum);
}

/* acc[r] += weight * value over keys [from, to), in order; `vectors` of 8 columns. */
FN void NAME(mix_rows)(const float *p, int64_t p_stride, const float *v, int64_t v_stride, int64_t keys, float *acc,
                       int64_t acc_stride, const int rows, const int vectors) {
    v8 sum[6][2];
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)
        _Pragma("GCC unroll 2") for (int c = 0; c < vectors; c++) sum[r][c] = NAME(load)(acc + r * acc_stride + 8 * c);
    for (int64_t i = 0; i < keys; i++) {
        v8 x[2];
        _Pragma("GCC unroll 2") for (int c = 0; c < vectors; c++) x[c] = NAME(load)(v + i * v_stride + 8 * c);
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
            v8 w = NAME(splat)(p[r * p_stride + i]);
            _Pragma("GCC unroll 2") for (int c = 0; c < vectors; c++) sum[r][c] = FUSED(w, x[c], sum[r][c]);
        }
    }
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)
        _Pragma("GCC unroll 2") for (int c = 0; c < vectors; c++) NAME(store)(acc + r * acc_stride + 8 * c, sum[r][c]);
}

FN void NAME(mix)(const float *p, int64_t p_stride, const float *v, int64_t v_stride, int64_t keys, float *acc,
                  int64_t acc_stride, int64_t rows, int64_t padded) {
    if (keys <= 0) return;
    for (int64_t d = 0; d < padded; d += 16) {
        const int two = padded - d >= 16;
#define MIX(r) NAME(mix_rows)(p, p_stride, v + d, v_stride, keys, acc + d, acc_stride, r, 2)
        if (!two) {
            for (int64_t r = 0; r < rows; r++)
                NAME(mix_rows)(p + r * p_stride, 0, v + d, v_stride, keys, acc + r * acc_stride + d, 0, 1, 1);
            continue;
        }
        switch (rows) {
        case 1: MIX(1); break;
        case 2: MIX(2); break;
        case 3: MIX(3); break;
        case 4: MIX(4); break;
        case 5: MIX(5); break;
        default: MIX(6); break;
        }
#undef MIX
    }
}

TARGET static void NAME(attend)(const attention *j, const unit *u, float *room) {
    NAME(scores)(j, u, room);
    float total[UNIT_ROWS];
    for (int64_t r = 0; r < u->rows; r++) {
        int64_t start = row_start(j, u, r);
        total[r] = NAME(weights)(u->scores + r * u->stride + start - u->start, row_end(u, r) - start);
    }
    int64_t padded = round_up(j->value_width, 8);
    float *acc = room, *copies = room + u->rows * padded;
    memset(acc, 0, sizeof(float) * (size_t)(u->rows * padded));
    for (int64_t key = u->start; key < u->end; key += VALUE_BLOCK) {
        int64_t stop = key + VALUE_BLOCK < u->end ? key + VALUE_BLOCK : u->end, stride;
        const float *v = NAME(as_floats)(j->v, u->value_at + key * j->v_token, stop - key, j->value_width, j->v_token,
                                         j->bf16, copies, &stride);
        for (int64_t r = 0; r < u->rows; r += 6) {
            int64_t rows = u->rows - r < 6 ? u->rows - r : 6;
            /* Keys that all rows see; windows and the diagonal leave some to each row before and after these. */
            int64_t low = at_least(row_start(j, u, r + rows - 1), key), high = at_most(row_end(u, r), stop);
            if (high < low) low = high = at_most(low, stop);
            for (int64_t i = r; i < r + rows; i++) {
                int64_t from = at_least(row_start(j, u, i), key), to = at_most(row_end(u, i), low);
                NAME(mix)(u->scores + i * u->stride + from - u->start, 0, v + (from - key) * stride, stride, to - from,
                          acc + i * padded, 0, 1, padded);
            }
            NAME(mix)(u->scores + r * u->stride + low - u->start, u->stride, v + (low - key) * stride, stride,
                      high - low, acc + r * padded, padded, rows, padded);
            for (int64_t i = r; i < r + rows; i++) {
                int64_t from = at_least(row_start(j, u, i), at_least(high, low)), to = at_most(row_end(u, i), stop);
                NAME(mix)(u->scores + i * u->stride + from - u->start, 0, v + (from - key) * stride, stride, to - from,
                          acc + i * padded, 0, 1, padded);
            }
        }
    }
    for (int64_t r = 0; r < u->rows; r++) {
        int64_t at = u->out_at + r / u->group * j->out_token + r % u->group * j->out_head;
        v8 sum = NAME(splat)(total[r]);
        for (int64_t d = 0; d < j->value_width; d += 8)
            NAME(narrow)(j->out, at + d, j->value_width - d, NAME(load)(acc + r * padded + d) / sum, j->bf16);
    }
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* x * (1 / sqrt(mean(x^2) + eps)), rounded to the type of x, times the weight; the reciprocals are kept. */
TARGET static void NAME(norm_rows)(const norm *j, int64_t row, int64_t row_end) {
    for (; row < row_end; row++) {
        v8 sum = NAME(splat)(0.0f);
        for (int64_t i = 0; i < j->width; i += 8) {
            int64_t n = j->width - i, at = row * j->width + i;
            v8 x = n >= 8 ? NAME(widen)(j->x, at, j->bf16) : NAME(widen_part)(j->x, at, n, j->bf16, 0.0f);
            sum = FUSED(x, x, sum);
        }
        float inverse = 1.0f / sqrtf(NAME(tree)(sum) / (float)j->width + j->eps);
        j->inverse[row] = inverse;
        for (int64_t i = 0; i < j->width; i += 8) {
            int64_t n = j->width - i, at = row * j->width + i;
            v8 x = n >= 8 ? NAME(widen)(j->x, at, j->bf16) : NAME(widen_part)(j->x, at, n, j->bf16, 0.0f);
            v8 w = n >= 8 ? NAME(widen)(j->weight, i, j->bf16) : NAME(widen_part)(j->weight, i, n, j->bf16, 0.0f);
            x = x * NAME(splat)(inverse);
            if (j->bf16) x = (v8)(__builtin_convertvector(NAME(to_bf16)(x), v8i) << 16);
            NAME(narrow)(j->out, at, n, x * w, j->bf16);
        }
    }
}

/* x / (1 + e^-x) */
TARGET static void NAME(silu_rows)(const elements *j, int64_t start, int64_t end) {
    const v8 one = NAME(splat)(1.0f);
    for (; start < end; start += 8) {
        int64_t n = end - start;
        v8 x = n >= 8 ? NAME(widen)(j->x, start, j->bf16) : NAME(widen_part)(j->x, start, n, j->bf16, 0.0f);
        NAME(narrow)(j->out, start, n, x / (one + NAME(exp)(-x)), j->bf16);
    }
}

/* Largest of logits / temperature, and the sum of exp(. - largest): 8 lanes and `tree` in a block, blocks in order in
 * double. `weight` gets the exponentials and `partial` the blocks' sums where they are wanted. */
FN double NAME(normalize)(const float *logits, int64_t n, float temperature, float *weight, double *partial,
                          float *largest) {
    v8 top = NAME(splat)(-INFINITY), divisor = NAME(splat)(temperature);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) top = NAME(larger)(NAME(load)(logits + i), top);
    if (i < n) top = NAME(larger)(NAME(widen_part)(logits, i, n - i, 0, -INFINITY), top);
    float high = top[0];
    for (int c = 1; c < 8; c++) high = top[c] > high ? top[c] : high;
    high = high / temperature; /* rounding keeps the order */
    v8 shift = NAME(splat)(high);
    double total = 0.0;
    for (int64_t start = 0; start < n; start += DRAW_BLOCK) {
        int64_t stop = start + DRAW_BLOCK < n ? start + DRAW_BLOCK : n;
        v8 sum = NAME(splat)(0.0f);
        for (i = start; i < stop; i += 8) {
            v8 x = stop - i >= 8 ? NAME(load)(logits + i) : NAME(widen_part)(logits, i, stop - i, 0, -INFINITY);
            v8 e = NAME(exp)(x / divisor - shift);
            if (weight) NAME(narrow)(weight, i, stop - i, e, 0);
            sum = sum + e;
        }
        double part = (double)NAME(tree)(sum);
        if (partial) partial[start / DRAW_BLOCK] = part;
        total += part;
    }
    *largest = high;
    return total;
}

TARGET static void NAME(logit_rows)(logit_job *j, int64_t row, int64_t row_end) {
    double *partial = NULL;
    float *weight = NULL;
    if (j->tokens && j->uniform) {
        partial = malloc(sizeof(double) * (size_t)(j->vocabulary / DRAW_BLOCK + 1));
        weight = malloc(sizeof(float) * (size_t)j->vocabulary);
        if (!partial || !weight) {
            j->failed = 1;
            row = row_end;
        }
    }
    for (; row < row_end; row++) {
        const float *logits = j->logits + row * j->vocabulary;
        double total = NAME(normalize)(logits, j->vocabulary, j->temperature, weight, partial, j->largest + row);
        j->log_total[row] = log(total);
        if (!j->tokens) continue;
        j->tokens[row] = j->uniform ? drawn(weight, partial, j->vocabulary, j->uniform[row] * total)
                                    : first_largest(logits, j->vocabulary);
    }
    free(partial);
    free(weight);
}

#undef FN
