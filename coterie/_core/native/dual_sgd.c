/* Which of the versions of dual_sgd.h suits this processor, and threads for the parts. */
#define _GNU_SOURCE
#if defined(__aarch64__)
#define LANES 4
#define DUAL_SGD coterie_dual_sgd_4
#define GLM_GRADIENT coterie_glm_gradient_4
#define ROW_SPAN coterie_row_span_4
#include "dual_sgd.h"
#include "row_span.h"
#endif

#include "dual_sgd_work.h"
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

typedef int64_t kernel(const dual_sgd_work *, int);
typedef int64_t gradient(const glm_gradient_work *);
typedef int64_t span(const row_span_work *);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
kernel coterie_dual_sgd_8, coterie_dual_sgd_16;
gradient coterie_glm_gradient_8, coterie_glm_gradient_16;
span coterie_row_span_8, coterie_row_span_16;
#endif

/* With vectors of so many floats; 0: as many as this processor has. */
static kernel *chosen(int lanes) {
#if defined(__aarch64__)
    if (!lanes || lanes == 4) return coterie_dual_sgd_4;
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    if (wide && (!lanes || lanes == 16)) return coterie_dual_sgd_16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (!lanes || lanes == 8)) return coterie_dual_sgd_8;
#endif
    (void)lanes; /* which only processors with one of the versions look at */
    return NULL;
}

/* Whether there is one. */
int coterie_dual_sgd_suits(int lanes) { return chosen(lanes) != NULL; }

/* Parts that are left, for whoever comes; the last who holds this frees it. */
typedef struct {
    kernel *function;
    const dual_sgd_work *work;
    int parts, next, done, holders;
    int64_t problem;
    pthread_mutex_t lock;
    pthread_cond_t finished;
} team;

static void compute_parts(team *t) {
    for (int part; (part = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED)) < t->parts;) {
        int64_t problem = t->function(t->work, part);
        pthread_mutex_lock(&t->lock);
        if (problem) t->problem = problem;
        if (++t->done == t->parts) pthread_cond_signal(&t->finished);
        pthread_mutex_unlock(&t->lock);
    }
}

static void *leave(team *t) {
    if (__atomic_sub_fetch(&t->holders, 1, __ATOMIC_ACQ_REL)) return NULL;
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->finished);
    free(t);
    return NULL;
}

static void *help(void *with) {
    compute_parts(with);
    return leave(with);
}

/* A thread, on Linux on another processor: there it often stays on that of its maker for a second, and both wait. */
static void begin(team *t) {
    pthread_t thread;
    pthread_attr_t elsewhere;
    if (pthread_attr_init(&elsewhere)) return;
    pthread_attr_setdetachstate(&elsewhere, PTHREAD_CREATE_DETACHED);
#ifdef __linux__
    cpu_set_t processors;
    if (!sched_getaffinity(0, sizeof processors, &processors) && CPU_COUNT(&processors) > 1) {
        CPU_CLR(sched_getcpu(), &processors);
        pthread_attr_setaffinity_np(&elsewhere, sizeof processors, &processors);
    }
#endif
    __atomic_add_fetch(&t->holders, 1, __ATOMIC_RELAXED);
    if (pthread_create(&thread, &elsewhere, help, t)) __atomic_sub_fetch(&t->holders, 1, __ATOMIC_RELAXED);
    pthread_attr_destroy(&elsewhere);
}

/* All parts. Threads are made for them, which takes less than waking one that waits for Python's lock; what they have not
begun, because their processor has other things to do, is computed by who asked. */
int64_t coterie_dual_sgd(const dual_sgd_work *work, int lanes) {
    team *t = malloc(sizeof *t);
    if (!t) return NO_MEMORY;
    *t = (team){.function = chosen(lanes), .work = work, .parts = work->parts, .holders = 1};
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->finished, NULL);
    for (int part = 1; part < t->parts; part++) begin(t);
    compute_parts(t);
    pthread_mutex_lock(&t->lock);
    while (t->done < t->parts) pthread_cond_wait(&t->finished, &t->lock);
    int64_t problem = t->problem;
    pthread_mutex_unlock(&t->lock);
    leave(t);
    return problem;
}

/* Gradients of a stack, with the vectors that `chosen` takes. */
int64_t coterie_glm_gradient(const glm_gradient_work *work, int lanes) {
    kernel *like = chosen(lanes);
#if defined(__aarch64__)
    if (like) return coterie_glm_gradient_4(work);
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    if (like == coterie_dual_sgd_16) return coterie_glm_gradient_16(work);
    if (like == coterie_dual_sgd_8) return coterie_glm_gradient_8(work);
#endif
    return like || !work ? NO_MEMORY : OUT_OF_RANGE; /* nobody asks where nothing suits */
}

/* An operation in the span of rows, with the vectors that `chosen` takes. */
int64_t coterie_row_span(const row_span_work *work, int lanes) {
    kernel *like = chosen(lanes);
#if defined(__aarch64__)
    if (like) return coterie_row_span_4(work);
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    if (like == coterie_dual_sgd_16) return coterie_row_span_16(work);
    if (like == coterie_dual_sgd_8) return coterie_row_span_8(work);
#endif
    return like || !work ? NO_MEMORY : OUT_OF_RANGE; /* nobody asks where nothing suits */
}
