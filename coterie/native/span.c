/* Which of the versions of span.h suits this processor, and threads for the parts. */
#define _GNU_SOURCE
#if defined(__aarch64__)
#define LANES 4
#define SPAN coterie_span_4
#include "span.h"
#endif

#include "span_work.h"
#include <pthread.h>
#include <sched.h>
#include <stddef.h>

typedef int64_t span(const span_work *, int);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
span coterie_span_8, coterie_span_16;
#endif

/* With vectors of so many floats; 0: as many as this processor has. */
static span *chosen(int lanes) {
#if defined(__aarch64__)
    if (!lanes || lanes == 4) return coterie_span_4;
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    if (wide && (!lanes || lanes == 16)) return coterie_span_16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (!lanes || lanes == 8)) return coterie_span_8;
#endif
    return NULL;
}

/* Whether there is one. */
int coterie_span_suits(int lanes) { return chosen(lanes) != NULL; }

/* Bytes, which tell whether the library is of the same time as what calls it. */
int coterie_span_work_size(void) { return sizeof(span_work); }

typedef struct {
    span *function;
    const span_work *work;
    int part;
    int64_t problem;
} task;

static void *carry_out(void *of) {
    task *mine = of;
    mine->problem = mine->function(mine->work, mine->part);
    return NULL;
}

/* A thread, on Linux on another processor: there it often stays on that of its maker for a second, and both wait. */
static int begin(pthread_t *thread, task *of) {
    pthread_attr_t elsewhere;
    if (pthread_attr_init(&elsewhere)) return 0;
#ifdef __linux__
    cpu_set_t processors;
    if (!sched_getaffinity(0, sizeof processors, &processors) && CPU_COUNT(&processors) > 1) {
        CPU_CLR(sched_getcpu(), &processors);
        pthread_attr_setaffinity_np(&elsewhere, sizeof processors, &processors);
    }
#endif
    int begun = !pthread_create(thread, &elsewhere, carry_out, of);
    pthread_attr_destroy(&elsewhere);
    return begun;
}

/* All parts at once; threads are made for them, which takes less than waking one that waits for Python's lock. */
int64_t coterie_span(const span_work *work, int lanes) {
    int parts = work->parts, made = 1;
    if (parts < 1) return FINE;
    task tasks[parts];
    pthread_t threads[parts];
    for (int part = 0; part < parts; part++) tasks[part] = (task){chosen(lanes), work, part, FINE};
    while (made < parts && begin(&threads[made], &tasks[made])) made++;
    carry_out(&tasks[0]);
    for (int part = made; part < parts; part++) carry_out(&tasks[part]);
    int64_t problem = tasks[0].problem;
    for (int part = 1; part < parts; part++) {
        if (part < made) pthread_join(threads[part], NULL);
        if (tasks[part].problem) problem = tasks[part].problem;
    }
    return problem;
}
