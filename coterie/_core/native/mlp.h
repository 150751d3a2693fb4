/* Gradients of chains of linear layers and activations: one client after the other, all of it in the nearest cache. */
#include "product.h"
#include "mlp_work.h"

#include <stdlib.h>

#define ROWS 64 /* of a client that are looked at together */

/* Where its parameters begin, its matrix by inputs in strips of LANES outputs, and by outputs (NULL in the first linear
   layer, whose inputs have no slopes), its bias, and its values. */
struct room {
    int64_t at;
    float *by_inputs, *by_outputs, *bias, *values;
};

static int64_t whole(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

/* up to LANES rows [count, length] of a matrix -> strip [length, LANES], with zeros for rows that are not there */
INLINE void turn(float *strip, const float *matrix, int64_t count, int64_t length) {
    const int_lanes low = (PLACES >> 1) + (PLACES & 1) * LANES, high = low + LANES / 2;
    for (int64_t at = 0; at < length; at += LANES) {
        lanes rows[LANES], next[LANES];
        if (count >= LANES && at + LANES <= length) {
            UNROLLED for (int r = 0; r < LANES; r++) rows[r] = load(matrix + r * length + at);
        } else {
            for (int r = 0; r < LANES; r++) rows[r] = r < count ? load_some(matrix + r * length + at, length - at) : all(0);
        }
        UNROLLED for (int round = 1; round < LANES; round *= 2) { /* each halves the distance of what is to be side by side */
            UNROLLED for (int r = 0; r < LANES / 2; r++) {
                next[2 * r] = shuffled(rows[r], rows[r + LANES / 2], low);
                next[2 * r + 1] = shuffled(rows[r], rows[r + LANES / 2], high);
            }
            UNROLLED for (int r = 0; r < LANES; r++) rows[r] = next[r];
        }
        if (at + LANES <= length) {
            UNROLLED for (int r = 0; r < LANES; r++) store(strip + (at + r) * LANES, rows[r]);
        } else {
            for (int r = 0; at + r < length; r++) store(strip + (at + r) * LANES, rows[r]);
        }
    }
}

INLINE void copy_rows(float *to, const float *from, int64_t rows, int64_t width, int64_t step) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < width; at += LANES)
            store(to + r * whole(width) + at, load_some(from + r * step + at, width - at));
}

INLINE lanes sigmoid(lanes x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE lanes hyperbolic_tangent(lanes x) {
    lanes square = x * x, small = all(-5.70498872745e-3f);
    small = small * square + 2.06390887954e-2f;
    small = small * square - 5.37397155531e-2f;
    small = small * square + 1.33314422036e-1f;
    small = small * square - 3.33332819422e-1f;
    small = small * square * x + x;
    return choose(square < 0.390625f, small, 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f));
}

INLINE void activate(int64_t kind, float *values, int64_t count) {
    for (int64_t at = 0; at < count; at += LANES) {
        lanes x = load(values + at);
        if (kind == RELU) x = choose(x <= 0.0f, all(0), x);
        else if (kind == TANH) x = hyperbolic_tangent(x);
        else x = sigmoid(x);
        store(values + at, x);
    }
}

/* slopes in the values after an activation -> in those before it */
INLINE void deactivate(int64_t kind, float *slopes, const float *values, int64_t count) {
    for (int64_t at = 0; at < count; at += LANES) {
        lanes slope = load(slopes + at), y = load(values + at);
        if (kind == RELU) slope = choose(y <= 0.0f, all(0), slope);
        else if (kind == TANH) slope *= 1.0f - y * y;
        else slope *= y * (1.0f - y);
        store(slopes + at, slope);
    }
}

/* the sum of all, in pairs */
INLINE float added_up(lanes x) {
    UNROLLED for (int step = LANES / 2; step; step /= 2) x += shuffled(x, x, (PLACES + step) & (LANES - 1));
    return x[0];
}

/* scores of a row -> their probabilities; what is beyond `outputs` becomes zero */
INLINE void softmax(float *slopes, const float *scores, int64_t outputs) {
    float most = scores[0];
    for (int64_t c = 1; c < outputs; c++) most = scores[c] > most ? scores[c] : most;
    lanes total = all(0);
    for (int64_t at = 0; at < outputs; at += LANES) {
        int_lanes inside = PLACES < (int32_t)(outputs - at);
        lanes part = choose(inside, exponential(load(scores + at) - most), all(0));
        total += part;
        store(slopes + at, part);
    }
    float share = 1 / added_up(total);
    for (int64_t at = 0; at < outputs; at += LANES) store(slopes + at, load(slopes + at) * share);
}

/* slopes of the weighted losses in the scores; 0 if a label is not one of the outputs */
INLINE int residuals(
    const struct stack *s, int64_t client, int64_t first, int64_t rows, int64_t outputs, const float *scores, float *slopes
) {
    const int64_t *labels = (const int64_t *)s->y + client * s->y_client + first;
    const float *targets = (const float *)s->y + client * s->y_client + first;
    for (int64_t b = 0; b < rows; b++, scores += whole(outputs), slopes += whole(outputs)) {
        if (s->task == MULTICLASS) {
            if (labels[b] < 0 || labels[b] >= outputs) return 0;
            softmax(slopes, scores, outputs);
            slopes[labels[b]] -= 1;
        } else {
            for (int64_t at = 0; at < outputs; at += LANES) {
                lanes score = load(scores + at);
                store(slopes + at, (s->task == BINARY ? sigmoid(score) : score) - targets[b]);
            }
        }
        float weight = s->weight[client * s->weight_client + first + b];
        for (int64_t at = 0; at < outputs; at += LANES) store(slopes + at, weight * load(slopes + at));
    }
    return 1;
}

INLINE void prepare(const struct stack *s, const struct room *rooms, const float *w) {
    for (int64_t k = 0; k < s->layers; k++) {
        struct layer layer = s->layer[k];
        if (layer.kind != LINEAR) continue;
        const float *matrix = w + rooms[k].at;
        for (int64_t o = 0; o < layer.outputs; o += LANES)
            turn(rooms[k].by_inputs + o * layer.inputs, matrix + o * layer.inputs, layer.outputs - o, layer.inputs);
        if (rooms[k].by_outputs) copy_rows(rooms[k].by_outputs, matrix, layer.outputs, layer.inputs, layer.inputs);
        if (layer.biased) copy_rows(rooms[k].bias, matrix + layer.outputs * layer.inputs, 1, layer.outputs, 0);
    }
}

/* Adds the gradient of `rows` rows to result, or writes it there if they are the first. */
INLINE int differentiate(
    const struct stack *s, const struct room *rooms, float *slopes, float *spare, int64_t client, int64_t first, int64_t rows
) {
    const int64_t last = s->layers - 1;
    copy_rows(rooms[-1].values, s->x + client * s->x_client + first * s->x_row, rows, s->layer[0].inputs, s->x_row);
    for (int64_t k = 0; k < s->layers; k++) {
        struct layer layer = s->layer[k];
        int64_t width = whole(layer.outputs);
        if (layer.kind == LINEAR) {
            product(&(struct product){
                .to = rooms[k].values, .to_step = width, .rows = rows, .columns = width, .length = layer.inputs,
                .left = rooms[k - 1].values, .left_step = whole(layer.inputs), .left_next = 1,
                .right = rooms[k].by_inputs, .right_step = LANES, .right_wide = LANES * layer.inputs,
                .start = layer.biased ? rooms[k].bias : NULL, .factor = 1,
            });
        } else {
            if (rooms[k].values != rooms[k - 1].values)
                memcpy(rooms[k].values, rooms[k - 1].values, rows * width * sizeof(float));
            activate(layer.kind, rooms[k].values, rows * width);
        }
    }
    if (!residuals(s, client, first, rows, s->layer[last].outputs, rooms[last].values, slopes)) return 0;
    float *result = s->result + client * s->result_step;
    for (int64_t k = last; k >= 0; k--) {
        struct layer layer = s->layer[k];
        int64_t width = whole(layer.outputs), before = whole(layer.inputs);
        if (layer.kind != LINEAR) {
            deactivate(layer.kind, slopes, rooms[k].values, rows * width);
            continue;
        }
        float *matrix = result + rooms[k].at, *bias = matrix + layer.outputs * layer.inputs;
        if (layer.biased)
            for (int64_t at = 0; at < layer.outputs; at += LANES) {
                int64_t count = layer.outputs - at;
                lanes sum = first ? load_some(bias + at, count) : all(0);
                for (int64_t b = 0; b < rows; b++) sum += load(slopes + b * width + at);
                store_some(bias + at, sum, count);
            }
        product(&(struct product){
            .to = matrix, .to_step = layer.inputs, .rows = layer.outputs, .columns = layer.inputs, .length = rows,
            .left = slopes, .left_step = 1, .left_next = width,
            .right = rooms[k - 1].values, .right_step = before, .right_wide = LANES,
            .start = first ? matrix : NULL, .start_step = layer.inputs, .factor = 1,
        });
        if (!rooms[k].by_outputs) break;
        product(&(struct product){
            .to = spare, .to_step = before, .rows = rows, .columns = before, .length = layer.outputs,
            .left = slopes, .left_step = width, .left_next = 1,
            .right = rooms[k].by_outputs, .right_step = before, .right_wide = LANES,
        });
        float *used = slopes;
        slopes = spare, spare = used;
    }
    return 1;
}

static int all_clients(
    const struct stack *s, int64_t begin, int64_t end, const struct room *rooms, float *slopes, float *spare
) {
    for (int64_t client = begin; client < end; client++) {
        if (client == begin || s->w_step) prepare(s, rooms, s->w + client * s->w_step);
        int64_t first = 0;
        do {
            int64_t rows = s->rows - first < ROWS ? s->rows - first : ROWS;
            if (!differentiate(s, rooms, slopes, spare, client, first, rows)) return 1;
            first += ROWS;
        } while (first < s->rows);
    }
    return 0;
}

/* Gradients of the clients from `begin` to before `end`: 0, or 1 if a label is not one of the outputs, 2 if there is no
   memory. */
int NAMED(coterie_mlp)(const struct stack *s, int64_t begin, int64_t end) {
    struct room *rooms = calloc(s->layers + 1, sizeof(struct room)); /* the first has the rows themselves */
    int64_t widest = whole(s->layer[0].inputs), size = ROWS * widest;
    for (int64_t k = 0; k < s->layers; k++) {
        int64_t inputs = s->layer[k].inputs, outputs = s->layer[k].outputs;
        size += ROWS * whole(outputs) + (inputs + 1) * whole(outputs) + outputs * whole(inputs);
        widest = whole(outputs) > widest ? whole(outputs) : widest;
    }
    float *memory = aligned_alloc(sizeof(lanes), (size + 2 * ROWS * widest) * sizeof(float)), *next = memory;
    int problem = 2;
    if (memory && rooms) {
        int64_t at = 0;
        rooms->values = next, next += ROWS * whole(s->layer[0].inputs);
        for (int64_t k = 0; k < s->layers; k++) {
            struct layer layer = s->layer[k];
            struct room *room = rooms + 1 + k;
            int64_t width = whole(layer.outputs);
            int alone = layer.kind != LINEAR && k > 0 && s->layer[k - 1].kind == LINEAR; /* looks at what was before */
            room->values = alone ? room[-1].values : next, next += ROWS * width;
            if (layer.kind != LINEAR) continue;
            room->by_inputs = next, next += layer.inputs * width;
            room->bias = next, next += width;
            if (at) room->by_outputs = next, next += layer.outputs * whole(layer.inputs);
            room->at = at, at += layer.outputs * (layer.inputs + layer.biased);
        }
        problem = all_clients(s, begin, end, rooms + 1, next, next + ROWS * widest);
    }
    free(memory), free(rooms);
    return problem;
}
