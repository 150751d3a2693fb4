/* Products of small matrices, a tile of rows and columns in registers at a time; to be compiled for each width, LANES. */
#ifndef COTERIE_PRODUCT_H
#define COTERIE_PRODUCT_H

#include "lanes.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define MOST_ROWS 12 /* of a tile of two vectors: 24 sums in 32 registers */
#else
#define MOST_ROWS 6 /* 12 sums in 16 */
#endif

#if LANES == 16
#define PLACES ((int_lanes){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif LANES == 8
#define PLACES ((int_lanes){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define PLACES ((int_lanes){0, 1, 2, 3})
#endif

/* to[r, c] = factor start[r, c] + sum over k < length of left[r, k] right[k, c], for r < rows and c < columns.

   Steps are distances in memory. LANES columns of `right` lie side by side, of which those beyond `columns` are read
   and not used; `right_wide` is the distance to the next LANES. `start` is NULL for zeros. */
struct product {
    float *to;
    const float *start, *left, *right;
    int64_t rows, columns, length, to_step, start_step, left_step, left_next, right_step, right_wide;
    float factor;
};

/* The first `count` of LANES, zeros behind them. */
INLINE lanes load_some(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    lanes value;
    for (int c = 0; c < LANES; c++) value[c] = c < count ? from[c] : 0;
    return value;
}

INLINE void store_some(float *to, lanes value, int64_t count) {
    if (count >= LANES) store(to, value);
    else
        for (int c = 0; c < count; c++) to[c] = value[c];
}

/* Rows and vectors of a tile are constants where this is called, so that sums stay in registers. */
INLINE void tile(const int rows, const int wide, const struct product *p, int64_t row, int64_t column) {
    const float *left = p->left + row * p->left_step, *right = p->right + column / LANES * p->right_wide;
    lanes sums[MOST_ROWS][2];
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++) sums[r][c] = all(0);
    for (int64_t k = 0; k < p->length; k++) {
        lanes values[2];
        UNROLLED for (int c = 0; c < wide; c++) values[c] = load(right + c * p->right_wide + k * p->right_step);
        const float *factor = left + k * p->left_next;
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++)
            sums[r][c] += factor[r * p->left_step] * values[c];
    }
    if (column + wide * LANES <= p->columns) {
        UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++) {
            int64_t at = column + c * LANES;
            if (p->start) sums[r][c] += ROUNDED(p->factor * load(p->start + (row + r) * p->start_step + at));
            store(p->to + (row + r) * p->to_step + at, sums[r][c]);
        }
        return;
    }
    /* the same operations, so that digits do not depend on where columns end */
    UNROLLED for (int r = 0; r < rows; r++) UNROLLED for (int c = 0; c < wide; c++) {
        int64_t at = column + c * LANES, count = p->columns - at;
        if (p->start) sums[r][c] += ROUNDED(p->factor * load_some(p->start + (row + r) * p->start_step + at, count));
        store_some(p->to + (row + r) * p->to_step + at, sums[r][c], count);
    }
}

#define CASE(HEIGHT) \
    case HEIGHT: \
        if (wide) tile(HEIGHT, 2, p, row, column); \
        else tile(HEIGHT, 1, p, row, column); \
        break;

/* All of the product in tiles of equal heights. */
static void product(const struct product *p) {
    int64_t tiles = (p->rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t column = 0; column < p->columns; column += 2 * LANES) {
        int wide = p->columns - column > LANES;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t row = p->rows * t / tiles;
            switch (p->rows * (t + 1) / tiles - row) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if MOST_ROWS > 6
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
    }
}

#endif
