/* For processors with sixteen registers of eight floats. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
#define NAMED(name) name##_8
#include "mlp.h"
#include "mixture.h"
#endif
