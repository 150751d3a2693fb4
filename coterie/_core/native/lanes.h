/* LANES floats at a time. gcc 12 keeps vectors wider than the processor's in memory and computes them float by float:
sums of rows with sixteen lanes took sixteen times as long on eight. What must be fast everywhere is compiled for each
width, as dual_sgd.h is. */
#ifndef COTERIE_LANES_H
#define COTERIE_LANES_H

#include <stdint.h>
#include <string.h>

#ifndef LANES
#define LANES 16
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t int_lanes __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

/* A product that is rounded before it is added: compilers choose otherwise which of two products they fuse with a sum,
   and gcc 16 chooses differently for tiles of different sizes. */
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
#define ROUNDED(product) __builtin_assoc_barrier(product)
#else
#define ROUNDED(product) (product)
#endif

#define UNROLLED _Pragma("GCC unroll 16") /* loops over what is to stay in registers */

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, lanes value) { memcpy(to, &value, sizeof value); }

INLINE lanes all(float value) { return value - (lanes){0}; }

INLINE lanes choose(int_lanes condition, lanes yes, lanes no) {
    return (lanes)((condition & (int_lanes)yes) | (~condition & (int_lanes)no));
}

/* Those of a, then b, that are at these places; clang has no such function, and makes one instruction of the loop. */
INLINE lanes shuffled(lanes a, lanes b, int_lanes places) {
#ifdef __clang__
    lanes result = a;
    UNROLLED for (int k = 0; k < LANES; k++) result[k] = places[k] < LANES ? a[places[k]] : b[places[k] - LANES];
    return result;
#else
    return __builtin_shuffle(a, b, places);
#endif
}

/* e^x within two units in the last place; 0 below -87, infinity above 88, nan for nan. */
INLINE lanes exponential(lanes x) {
    lanes clipped = choose(x < -87.0f, all(-87.0f), x);
    clipped = choose(x > 88.0f, all(88.0f), clipped);
    lanes scaled = clipped * 1.44269504f + 12582912.0f; /* the nearest integer is in the low bits */
    int_lanes power = ((int_lanes)scaled - 0x4B400000) << 23;
    lanes whole = scaled - 12582912.0f;
    lanes rest = clipped - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes sum = all(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    lanes result = (lanes)((int_lanes)sum + power);
    result = choose(x < -87.0f, all(0), result);
    result = choose(x > 88.0f, all(__builtin_inff()), result);
    return choose(x == x, result, x);
}

#endif
