/* What the C kernels of several ops share. A vector has as many lanes as the machine's widest registers; all sums follow an
   order that depends on the machine and on shapes alone, never on how many rows there are or on the number of threads. */
#ifndef LAMINA_NATIVE_H
#define LAMINA_NATIVE_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS_AT_ONCE 12 /* rows x VECTORS accumulators of a product stay in registers */
#elif defined(__AVX2__)
#define LANES 8
#define ROWS_AT_ONCE 6
#else
#define LANES 4
#define ROWS_AT_ONCE 8
#endif
#define VECTORS 2
#define PANEL (VECTORS * LANES) /* columns of a product that are computed together */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float vec_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

enum { FP32 = 0, BF16 = 1, FP8 = 2 };

/* Threads that share a function's work, where it is more than `lamina_least` multiply-adds: waking one has its price. */
extern int lamina_threads;
extern int64_t lamina_least;

INLINE vec load(const float *from) { return *(const vec_any *)from; }
INLINE void store(float *to, vec x) { *(vec_any *)to = x; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

/* The first `count` lanes, zeros behind them. */
INLINE vec load_some(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    float whole[LANES] = {0};
    memcpy(whole, from, 4 * count);
    return load(whole);
}

INLINE void store_some(float *to, vec x, int64_t count) {
    if (count >= LANES) {
        store(to, x);
    } else {
        float whole[LANES];
        store(whole, x);
        memcpy(to, whole, 4 * count);
    }
}

/* Lanes summed in neighbouring pairs, then pairs of pairs. */
INLINE float sum_of(vec x) {
    float lane[LANES];
    store(lane, x);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lane[i] = lane[2 * i] + lane[2 * i + 1];
    return lane[0];
}

INLINE float largest(vec x) {
    float lane[LANES], found;
    store(lane, x);
    found = lane[0];
    for (int i = 1; i < LANES; i++) found = lane[i] > found ? lane[i] : found;
    return found;
}

/* e^x within 2 units of the last place from -87 to 88; below 0, above infinite, NaN stays NaN. */
INLINE vec exp_of(vec x) {
    vec near = choose(x < -87.0f, all(-87.0f), choose(x > 88.0f, all(88.0f), x));
    vec whole = near * 1.44269504088896341f + 12582912.0f; /* rounds to an integer */
    vec n = whole - 12582912.0f;
    vec r = n * -0.693359375f + near;
    r = n * 2.12194440e-4f + r;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r;
    p = p + 1.0f;
    ivec power = ((ivec)whole - 0x4B400000 + 127) << 23;
    vec found = p * (vec)power;
    return choose(x < -87.0f, all(0.0f), choose(x == x, choose(x > 88.0f, x * HUGE_VALF, found), x));
}

/* As bf16 keeps it: to nearest, ties to even; a NaN becomes one that bf16 has (its upper half may say infinity). */
INLINE vec bf16_of(vec x) {
    ivec bits = (ivec)x;
    ivec up = (bits + 0x7FFF + ((bits >> 16) & 1)) & (int32_t)0xFFFF0000;
    return choose(x == x, (vec)up, all(__builtin_nanf("")));
}

INLINE vec kept(vec x, int is_bf16) { return is_bf16 ? bf16_of(x) : x; }

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, 4);
    return found;
}
#endif
