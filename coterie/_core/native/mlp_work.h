/* What the kernels of mlp.h and mixture.h take. */
#ifndef COTERIE_CHAIN_WORK_H
#define COTERIE_CHAIN_WORK_H

#include <stdint.h>

enum kind { LINEAR, RELU, TANH, SIGMOID };
enum task { MULTICLASS, BINARY, REGRESSION };

struct layer {
    int64_t kind, inputs, outputs, biased;
};

/* A stack of clients; the same fields are in coterie/models/fast/mlp_kernel.py. */
struct stack {
    float *result;
    const float *w, *x, *weight;
    const void *y; /* int64 for classes, else float */
    const struct layer *layer;
    int64_t layers, task, rows, result_step, w_step, x_client, x_row, y_client, weight_client;
};

/* to [rows, columns] = factor start + weights [rows, length] times models [length, columns], none of which has gaps;
   `start` may be NULL. The same fields are in coterie/theory/collaboration.py. */
struct mixture {
    float *to;
    const float *start, *weights, *models;
    int64_t rows, length, columns;
    float factor;
};

/* The kernels for vectors of some width. */
#define DECLARED(lanes)                                                                                                \
    int coterie_mlp_##lanes(const struct stack *s, int64_t begin, int64_t end);                                    \
    int coterie_mixture_##lanes(const struct mixture *m, int64_t begin, int64_t end);                                  \
    int coterie_midpoints_##lanes(float *to, const float *models, const int64_t *ends, int64_t pairs, int64_t n, int64_t d);

#endif
