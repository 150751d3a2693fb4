/* What coterie/_core/native/dual_sgd.py asks for: the descents of some clients, k = 0, 1, ..., in parts with about as many rows each. */
#ifndef COTERIE_SPAN_WORK_H
#define COTERIE_SPAN_WORK_H

#include <stdint.h>

enum loss { SOFTMAX, LOGISTIC, LINEAR };
enum problem { FINE, NO_MEMORY, OUT_OF_RANGE };
enum moving { ALL, ALL_BUT_LAST, LAST }; /* columns that steps move */

typedef struct {
    int64_t parts, clients, everybody, rows, outputs, columns, largest, width, steps, batch;
    int64_t loss, integers, summed;   /* whether labels are integers, and losses of rows summed */
    int64_t moving;
    const int64_t *at;                /* [clients]: which of everybody each is; NULL: they are everybody */
    const int64_t *start, *size;      /* [everybody]: where the rows of each are */
    const float *x;                   /* [rows, columns] */
    const void *y;                    /* [rows], int64_t or float */
    float *kernels;                   /* [everybody, largest, width]: inner products of the rows of a client */
    uint8_t *made;                    /* [everybody]: whether they are there; otherwise they are made */
    const float *tables, *centres;    /* [outputs, columns], for each client so many floats on; no centres: NULL */
    int64_t table_step, centre_step;
    const float *importance; /* of a client's rows in its loss, for each client so many floats on; all 1: NULL */
    int64_t importance_step;
    const int64_t *keys;       /* [clients], of draws; NULL: `shares` are there already */
    int64_t number, every;     /* of the first minibatch, and how far it is to the next */
    float lr, keeps, pulled;   /* a step is w <- keeps w + pulled centre - lr gradient */
    float share, centre_share; /* of tables and centres in the models after all steps */
    float *shares;             /* [outputs, size] of one client after the other */
    const float *weights;      /* [clients] in the sum of shares X, or NULL */
    float *totals;             /* [parts, outputs, columns], to which that sum is added */
    float *models;             /* [clients, outputs, columns] to be written, or NULL */
    float *witness;            /* [parts], finite only if all scores and slopes are */
} dual_sgd_work;

/* Gradients of a stack of models, each on rows of its own. */
typedef struct {
    int64_t clients, rows, outputs, columns, loss, integers; /* rows of every client; whether labels are integers */
    const float *tables;                                     /* [outputs, columns], for each client so many floats on */
    int64_t table_step;
    const float *x;       /* [clients, rows, columns]; [total, columns] if rows are drawn from them */
    const void *y;        /* [clients, rows], or [total]; int64_t or float */
    const int64_t *drawn; /* [clients, rows], places among the total, or NULL */
    int64_t total;
    const float *weight; /* [clients, rows] */
    float *gradients;    /* [clients, outputs, columns] */
} glm_gradient_work;

/* One operation on the clients from `first` to before `last` of a stack, in the span of their rows. Arrays [outputs, length] have the
   rows of one client after the other, from `offset` on. With keys: slopes of the rows that are drawn; with blocks: the
   gradients of all rows at the tables, as models, and their sums; with models: these; with weights: a sum; otherwise scores. */
typedef struct {
    int64_t first, last, everybody, rows, outputs, columns, largest, width, length, batch, loss, integers;
    const int64_t *at, *start, *size, *offset; /* as above; [clients] */
    const float *x;
    const void *y;
    float *kernels;
    uint8_t *made;
    int64_t count;        /* of sets of tables that are scored */
    const float **tables; /* [count]: to be scored, or one to which rows are added to make models; NULL: zeros */
    const int64_t *steps; /* [count]: from the table of a client to that of the next */
    float *scores;        /* [count, outputs, length] */
    const int64_t *keys;  /* [clients], of the draw of a minibatch, which is the one with this number */
    int64_t number, summed;
    float *shares, *moved; /* [outputs, length]: of the rows, and what they change in the scores */
    float *models;         /* [clients, outputs, columns] */
    const float *weights;  /* [clients] in the sum of shares X */
    float *totals;         /* [outputs, columns], to which that sum is added */
    int64_t blocks;
    const int64_t *block;  /* [length]: of each row */
    float *sums;           /* [clients, blocks, blocks]: inner products of the summed gradients of blocks */
} row_span_work;

#endif
