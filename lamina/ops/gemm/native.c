/* Products with a weight [out, in] that is stored panel by panel: PANEL rows of it, `in` fastest but for them. Every result is one
   chain of multiply-adds over `in`, from the first to the last, whatever the number of rows. */
#include "native.h"

#define MOST_VECTORS (4 * VECTORS)

int lamina_threads = 1;
int64_t lamina_least = 1 << 15;

void lamina_set_threads(int count, int64_t least) { lamina_threads = count, lamina_least = least; }

int64_t lamina_panel(void) { return PANEL; }

void lamina_pack(const float *weight, int64_t out, int64_t in, float *packed) {
    int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(lamina_threads)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t i = 0; i < in; i++)
            for (int64_t c = 0; c < PANEL; c++) {
                int64_t row = p * PANEL + c;
                packed[(p * in + i) * PANEL + c] = row < out ? weight[row * in + i] : 0;
            }
}

/* Rows x `panels` panels; few rows take several, so that enough sums are under way at a time. */
INLINE void tile(const int rows, const int panels, const float *restrict x, int64_t in, int64_t x_step, const float *restrict w,
                 const float *restrict bias, float *restrict y, int64_t y_step, int64_t columns, int is_bf16) {
    vec sum[ROWS_AT_ONCE][MOST_VECTORS];
    const int vectors = panels * VECTORS;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = all(0);
    for (int64_t i = 0; i < in; i++) {
        vec b[MOST_VECTORS];
        for (int v = 0; v < vectors; v++) b[v] = *(const vec *)(w + (v / VECTORS * in + i) * PANEL + v % VECTORS * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            float a = x[r * x_step + i];
            for (int v = 0; v < vectors; v++) sum[r][v] += a * b[v];
        }
    }
    for (int v = 0; v < vectors && v * LANES < columns; v++) {
        vec add = bias ? load_some(bias + v * LANES, columns - v * LANES) : all(0);
        for (int r = 0; r < rows; r++)
            store_some(y + r * y_step + v * LANES, kept(bias ? sum[r][v] + add : sum[r][v], is_bf16), columns - v * LANES);
    }
}

#define CASE(n) \
    case n: tile(n, 1, x, in, x_step, w, bias, y, y_step, columns, is_bf16); break;

static void panel(int64_t rows, const float *x, int64_t in, int64_t x_step, const float *w, const float *bias, float *y,
                  int64_t y_step, int64_t columns, int is_bf16) {
    for (; rows >= ROWS_AT_ONCE; rows -= ROWS_AT_ONCE, x += ROWS_AT_ONCE * x_step, y += ROWS_AT_ONCE * y_step)
        tile(ROWS_AT_ONCE, 1, x, in, x_step, w, bias, y, y_step, columns, is_bf16);
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#if ROWS_AT_ONCE > 6
        CASE(6) CASE(7)
#endif
#if ROWS_AT_ONCE > 8
        CASE(8) CASE(9) CASE(10) CASE(11)
#endif
    }
}

/* x [rows, in] with rows x_step apart -> y [rows, out]; bias [out] or NULL; is_bf16: results are rounded so. */
void lamina_linear(const float *x, int64_t rows, int64_t in, int64_t x_step, const float *w, int64_t out, const float *bias,
                   float *y, int64_t y_step, int is_bf16) {
    int64_t each = rows == 1 ? 4 * PANEL : rows == 2 ? 2 * PANEL : PANEL, parts = (out + each - 1) / each;
#pragma omp parallel for schedule(static) num_threads(lamina_threads) if (rows * in * out > lamina_least)
    for (int64_t p = 0; p < parts; p++) {
        int64_t first = p * each, columns = out - first < each ? out - first : each;
        const float *own = w + first * in, *add = bias ? bias + first : 0;
        if (rows == 1 && columns > 3 * PANEL) {
            tile(1, 4, x, in, x_step, own, add, y + first, y_step, columns, is_bf16);
        } else if (rows == 2 && columns > PANEL) {
            tile(2, 2, x, in, x_step, own, add, y + first, y_step, columns, is_bf16);
        } else {
            for (int64_t at = 0; at < columns; at += PANEL)
                panel(rows, x, in, x_step, own + at * in, add ? add + at : 0, y + first + at, y_step,
                      columns - at < PANEL ? columns - at : PANEL, is_bf16);
        }
    }
}
