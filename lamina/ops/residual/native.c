/* Norms of rows, and what is done between two parts of a model. */
#include "native.h"

/* One row: x / sqrt(mean of squares + eps) * weight; is_centred: the mean is taken off first. Sums run in lanes. */
INLINE void norm_row(const float *x, const float *weight, float eps, int is_centred, int64_t width, float *y, int is_bf16) {
    vec mean = all(0);
    if (is_centred) {
        vec sum = all(0);
        for (int64_t i = 0; i < width; i += LANES) sum += load_some(x + i, width - i);
        mean = all(sum_of(sum) / (float)width);
    }
    vec square = all(0);
    for (int64_t i = 0; i < width; i += LANES) {
        vec a = load_some(x + i, width - i);
        if (is_centred) {
            a -= mean;
            if (width - i < LANES) { /* lanes behind the row */
                float lane[LANES];
                store(lane, a);
                a = load_some(lane, width - i);
            }
        }
        square += a * a;
    }
    vec root = all(1.0f / sqrtf(sum_of(square) / (float)width + eps));
    for (int64_t i = 0; i < width; i += LANES) {
        vec a = load_some(x + i, width - i);
        if (is_centred) a -= mean;
        a = a * root;
        if (weight) a = a * load_some(weight + i, width - i);
        store_some(y + i, kept(a, is_bf16), width - i);
    }
}

/* x [rows, width] -> y; both contiguous, y may be x. */
void lamina_norm(const float *x, int64_t rows, int64_t width, const float *weight, float eps, int is_centred, float *y,
                 int is_bf16) {
#pragma omp parallel for schedule(static) num_threads(lamina_threads) if (4 * rows * width > lamina_least)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * width, weight, eps, is_centred, width, y + r * width, is_bf16);
}

/* y [rows, width] <- share * x + scale * norm(found), where `has_after`, else found; weight NULL: a norm without one. */
void lamina_join(const float *x, float *found, int64_t rows, int64_t width, int has_after, const float *weight, float eps,
                 int is_centred, float scale, float share, float *y, int is_bf16) {
#pragma omp parallel for schedule(static) num_threads(lamina_threads) if (4 * rows * width > lamina_least)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * width;
        float *add = found + r * width;
        if (has_after) norm_row(add, weight, eps, is_centred, width, add, is_bf16);
        for (int64_t i = 0; i < width; i += LANES) {
            vec part = load_some(add + i, width - i);
            if (scale != 1) part = part * scale;
            if (share != 0) {
                vec old = load_some(from + i, width - i);
                if (share != 1) old = old * share;
                part = old + part;
            }
            store_some(y + r * width + i, kept(part, is_bf16), width - i);
        }
    }
}
