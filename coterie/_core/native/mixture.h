/* Means of pairs of models, and mixtures of all: products of a small matrix with a wide one, whose columns come into the
   cache a strip at a time. */
#include "product.h"
#include "mlp_work.h"

#include <stdlib.h>

#define STRIP (2 * LANES)

/* The columns from `begin` to before `end`: 0, or 2 if there is no memory. */
int NAMED(coterie_mixture)(const struct mixture *m, int64_t begin, int64_t end) {
    float *strip = aligned_alloc(sizeof(lanes), (m->length + 1) * STRIP * sizeof(float));
    if (!strip) return 2;
    for (int64_t at = begin; at < end; at += STRIP) {
        int64_t count = end - at < STRIP ? end - at : STRIP;
        for (int64_t k = 0; k < m->length; k++)
            for (int64_t c = 0; c < STRIP; c += LANES)
                store(strip + k * STRIP + c, load_some(m->models + k * m->columns + at + c, count - c));
        product(&(struct product){
            .to = m->to + at, .to_step = m->columns, .rows = m->rows, .columns = count, .length = m->length,
            .start = m->start ? m->start + at : NULL, .start_step = m->columns, .factor = m->factor,
            .left = m->weights, .left_step = m->length, .left_next = 1,
            .right = strip, .right_step = STRIP, .right_wide = LANES,
        });
    }
    free(strip);
    return 0;
}

/* to [2 pairs, d] = (x_i + x_j)/2 for both ends of each pair, the first ends before the second; 1 if an end is not one of
   the n models. */
int NAMED(coterie_midpoints)(float *to, const float *models, const int64_t *ends, int64_t pairs, int64_t n, int64_t d) {
    for (int64_t k = 0; k < 2 * pairs; k++)
        if (ends[k] < 0 || ends[k] >= n) return 1;
    for (int64_t k = 0; k < pairs; k++) {
        const float *x = models + ends[k] * d, *y = models + ends[pairs + k] * d;
        for (int64_t at = 0; at < d; at += LANES) {
            lanes middle = 0.5f * (load_some(x + at, d - at) + load_some(y + at, d - at));
            store_some(to + k * d + at, middle, d - at);
            store_some(to + (pairs + k) * d + at, middle, d - at);
        }
    }
    return 0;
}
