/* Leaves and histograms of binned rows: sums of two derivatives by client, tree, node, feature and bin; best splits. */

#include <float.h>
#include <math.h>
#include <stdint.h>

/* Split s of a tree: parent leaf, feature, threshold (a bin, or the bits of codes that go right), missing goes right. */
void coterie_tree_leaves(const uint8_t *bins, int64_t rows, int64_t features, const double *splits, int64_t trees,
                         int64_t count, const uint8_t *categorical, int64_t missing, int32_t *leaf) {
    for (int64_t tree = 0; tree < trees; tree++) {
        const double *own = splits + tree * count * 4;
        int64_t used = 0;
        while (used < count && own[4 * used] >= 0)
            used++;
        int64_t feature[256], threshold[256], gone[256], kind[256];
        int64_t child[512];
        int64_t first = -1, *next[257]; /* where the next split of a leaf is noted */
        next[0] = &first;
        for (int64_t s = 0; s < used; s++) {
            const int64_t parent = (int64_t)own[4 * s];
            feature[s] = (int64_t)own[4 * s + 1], threshold[s] = (int64_t)own[4 * s + 2];
            gone[s] = own[4 * s + 3] > 0.5, kind[s] = categorical[feature[s]];
            *next[parent] = s;
            child[2 * s] = -1 - parent, child[2 * s + 1] = -2 - s; /* leaves, until they are split */
            next[parent] = child + 2 * s, next[s + 1] = child + 2 * s + 1;
        }
        for (int64_t row = 0; row < rows; row++) {
            const uint8_t *x = bins + row * features;
            int64_t at = first;
            while (at >= 0) {
                const int64_t bin = x[feature[at]];
                const int64_t right =
                    kind[at] ? (threshold[at] >> (bin < 62 ? bin : 62)) & 1 : bin > threshold[at];
                at = child[2 * at + (bin == missing ? gone[at] : right)];
            }
            leaf[row * trees + tree] = (int32_t)(-1 - at);
        }
    }
}

/* Adds to sums [clients][trees][asked][features][bins][width] for the features first..last only; width is 2 or 3. */
void coterie_tree_histograms(const uint8_t *bins, const double *pairs, const int32_t *leaf, const int32_t *place,
                             int64_t clients, int64_t rows, int64_t features, int64_t trees, int64_t leaves,
                             int64_t asked, int64_t count, int64_t width, int64_t first, int64_t last,
                             double *sums) {
    const int64_t node = features * count * width, stride = count * width;
    for (int64_t client = 0; client < clients; client++)
        for (int64_t row = client * rows; row < (client + 1) * rows; row++) {
            const uint8_t *x = bins + row * features;
            for (int64_t tree = 0; tree < trees; tree++) {
                const int64_t slot = place[tree * leaves + leaf[row * trees + tree]];
                if (slot < 0)
                    continue;
                const double *own = pairs + (row * trees + tree) * width;
                const double g = own[0], h = own[1];
                if (h == 0.0 && g == 0.0)
                    continue; /* padding */
                double *cell = sums + ((client * trees + tree) * asked + slot) * node + first * stride;
                if (width == 2)
                    for (int64_t feature = first; feature < last; feature++, cell += stride) {
                        double *mine = cell + 2 * x[feature];
                        mine[0] += g;
                        mine[1] += h;
                    }
                else {
                    const double signed_g = own[2];
                    for (int64_t feature = first; feature < last; feature++, cell += stride) {
                        double *mine = cell + 3 * x[feature];
                        mine[0] += g;
                        mine[1] += h;
                        mine[2] += signed_g;
                    }
                }
            }
        }
}

/* Leaves of rows in trees with children: child[2 s], child[2 s + 1] are a split below, or -1 - leaf. */
void coterie_tree_walk(const double *x, int64_t rows, int64_t features, int64_t trees, int64_t count,
                       const int64_t *feature, const double *threshold, const uint8_t *missing, const int64_t *child,
                       const int64_t *start, const uint8_t *categorical, int64_t first, int64_t last, int64_t *leaf) {
    (void)rows;
    for (int64_t row = first; row < last; row++) {
        const double *own = x + row * features;
        for (int64_t tree = 0; tree < trees; tree++) {
            const int64_t base = tree * count;
            int64_t at = start[tree];
            while (at >= 0) {
                const int64_t s = base + at, f = feature[s];
                const double value = own[f];
                int64_t right;
                if (isnan(value))
                    right = missing[s];
                else if (categorical[f])
                    right = value >= 0 && value < 62 ? ((int64_t)threshold[s] >> (int64_t)value) & 1 : 0;
                else
                    right = value > threshold[s];
                at = child[2 * s + right];
            }
            leaf[row * trees + tree] = -1 - at;
        }
    }
}

/* Codes of a category in the order of their means, empty ones last; ties keep the order of the codes. */
static void in_order(const double *cells, int64_t codes, int64_t width, double ordering, int64_t *order) {
    double mean[256];
    for (int64_t code = 0; code < codes; code++) {
        const double h = cells[code * width + 1], own = h > 0 ? cells[code * width] / (h + ordering) : INFINITY;
        int64_t at = code;
        for (; at > 0 && mean[at - 1] > own; at--)
            mean[at] = mean[at - 1], order[at] = order[at - 1];
        mean[at] = own, order[at] = code;
    }
}

static double score(double g, double h, double smoothing) {
    const double curvature = h + smoothing;
    return g * g / (curvature < DBL_MIN ? DBL_MIN : curvature);
}

/* The best split of each node. sums [nodes][features][bins][width], the last bin is for missing values; total
   [nodes][width]; parent [nodes], what the node gains unsplit. The first split within tie of the best is taken; missing
   values go right (way 0) or left (way 1). work has 2 * features * (bins - 1) places. */
void coterie_tree_splits(const double *sums, int64_t nodes, int64_t features, int64_t bins, int64_t width,
                         const double *total, const double *parent, const uint8_t *categorical, double smoothing,
                         double least, double ordering, double tie, int64_t levels, double *work, double *gain,
                         int64_t *feature, double *threshold, int64_t *missing, double *chosen) {
    const int64_t cuts = bins - 1, size = features * cuts;
    int64_t order[256];
    for (int64_t node = 0; node < nodes; node++) {
        const double *all = total + node * width;
        double best = -INFINITY;
        int64_t undefined = 0;
        for (int64_t f = 0; f < features; f++) {
            const double *cells = sums + (node * features + f) * bins * width, *gone = cells + cuts * width;
            const int64_t some = gone[0] != 0 || gone[1] != 0 || (width > 2 && gone[2] != 0);
            if (categorical[f])
                in_order(cells, cuts, width, ordering, order);
            double run[3] = {0, 0, 0};
            for (int64_t place = 0; place < cuts; place++) {
                const double *cell = cells + (categorical[f] ? order[place] : place) * width;
                for (int64_t k = 0; k < width; k++)
                    run[k] += cell[k];
                for (int64_t way = 0; way < 2; way++) {
                    double value = -INFINITY, left[3] = {0, 0, 0}, right[3] = {0, 0, 0};
                    if (way == 0 || some) {
                        for (int64_t k = 0; k < width; k++)
                            left[k] = way ? run[k] + gone[k] : run[k], right[k] = all[k] - left[k];
                        if (left[1] >= least && right[1] >= least) {
                            value = score(left[0], left[1], smoothing) + score(right[0], right[1], smoothing);
                            if (width > 2) {
                                value = value + score(left[2], left[1], smoothing);
                                value = value + score(right[2], right[1], smoothing);
                            }
                            value -= parent[node];
                        }
                    }
                    work[way * size + f * cuts + place] = value;
                    undefined |= isnan(value);
                    best = value > best ? value : best;
                }
            }
        }
        best = undefined ? NAN : best;
        const double enough = best - tie * (fabs(best) + fabs(parent[node]));
        int64_t at = 0;
        while (at < 2 * size && !(work[at] >= enough))
            at++;
        at = at < 2 * size ? at : 0;
        const int64_t way = at / size, f = at % size / cuts, place = at % cuts;
        const double *cells = sums + (node * features + f) * bins * width, *gone = cells + cuts * width;
        double *left = chosen + node * width, bits = 0;
        if (categorical[f])
            in_order(cells, cuts, width, ordering, order);
        for (int64_t k = 0; k < width; k++)
            left[k] = 0;
        for (int64_t p = 0; p < cuts; p++) {
            const int64_t code = categorical[f] ? order[p] : p;
            for (int64_t k = 0; k < width && p <= place; k++)
                left[k] += cells[code * width + k];
            if (p > place && code < levels)
                bits += ldexp(1.0, (int)code);
        }
        for (int64_t k = 0; k < width && way; k++)
            left[k] += gone[k];
        gain[node] = best, feature[node] = f;
        threshold[node] = categorical[f] ? bits : (double)place;
        missing[node] = gone[1] <= 0 ? left[1] < all[1] - left[1] : 1 - way;
    }
}
