/* For processors with 32 registers of sixteen floats. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v4")
#define LANES 16
#define NAMED(name) name##_16
#include "mlp.h"
#include "mixture.h"
#endif
