/* What stands between the two products of a feed-forward layer. */
#include "native.h"

enum { SILU = 0, GELU_TANH = 1, RELU2 = 2 };

INLINE vec activated(vec x, int kind) {
    if (kind == SILU) return x / (exp_of(-x) + 1.0f);
    if (kind == GELU_TANH) { /* 0.5 x (1 + tanh(y)) = x / (1 + exp(-2 y)) */
        vec y = ((x * x) * 0.044715f + 1.0f) * x * (-2 * 0.7978845608028654f);
        return x / (exp_of(y) + 1.0f);
    }
    vec above = choose(x > 0.0f, x, choose(x == x, all(0.0f), x));
    return above * above;
}

/* wide [rows, 2 * width] = [gate | up], or [rows, width] without a gate -> y [rows, width]. */
void lamina_gated(const float *wide, int64_t rows, int64_t width, int has_gate, int kind, float factor, float *y, int is_bf16) {
    int64_t step = has_gate ? 2 * width : width;
#pragma omp parallel for schedule(static) num_threads(lamina_threads) if (16 * rows * width > lamina_least)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = wide + r * step, *up = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            vec g = load_some(gate + i, width - i);
            if (factor != 1) g = g * factor;
            g = activated(g, kind);
            if (has_gate) g = g * load_some(up + i, width - i);
            store_some(y + r * width + i, kept(g, is_bf16), width - i);
        }
    }
}
