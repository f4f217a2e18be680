/* Queries, keys and values of a projection; what is kept of them; attention with grouped keys and values.

   Keys are taken in tiles of TILE positions that begin at multiples of TILE, so that the order of all sums of a query follows from
   its position alone. A score is summed in lanes, neighbouring lanes in pairs: the same order where keys are read as they lie (few
   queries) and where they are turned so that a lane is a key (many). */
#include <stdlib.h>

#include "native.h"

#define TILE 64
#define MOST 96 /* queries x heads that a tile of keys meets at a time */
#define TURNED 12 /* from so many on keys are turned */
#define WHOLE(n) (((n) + PANEL - 1) / PANEL * PANEL)

#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define SWAPPED 1, 0, 3, 2
#endif

/* What does not change from step to step. Field order is that of `native.Heads`. */
typedef struct {
    int64_t heads, kv_heads, key_dim, value_dim;
    int64_t window, reset; /* 0: none */
    int64_t format, is_bf16; /* as stored; whether values between ops are rounded to bf16 */
    int64_t place, column, page_rows; /* where rows are kept */
    int64_t rope, norms, norm_all, norm_after, has_k, is_gated; /* norms: bits of queries, keys, values */
    float scale, softcap, q_eps, k_eps, v_eps;
    const float *sinks, *q_gain, *k_gain, *bias;
    const char *kept_k, *kept_v;
    int64_t k_page, v_page; /* bytes from page to page */
} heads_t;

enum { LOG = 0, RING = 1, PAGES = 2 };
enum { NORM_Q = 1, NORM_K = 2, NORM_V = 4 };

/* Queries, keys and values ------------------------------------------------------------------------------------------------ */

static void rms(float *x, int64_t width, const float *gain, float eps, int is_bf16) {
    vec square = all(0);
    for (int64_t i = 0; i < width; i += LANES) {
        vec a = load_some(x + i, width - i);
        square += a * a;
    }
    vec root = all(1.0f / sqrtf(sum_of(square) / (float)width + eps));
    for (int64_t i = 0; i < width; i += LANES) {
        vec a = load_some(x + i, width - i) * root;
        if (gain) a = a * load_some(gain + i, width - i);
        store_some(x + i, kept(a, is_bf16), width - i);
    }
}

static void normed(float *x, int64_t count, int64_t dim, const float *gain, float eps, int64_t is_joint, int is_bf16) {
    if (is_joint) {
        rms(x, count * dim, gain, eps, is_bf16);
    } else {
        for (int64_t h = 0; h < count; h++) rms(x + h * dim, dim, gain, eps, is_bf16);
    }
}

static void put(char *to, const float *from, int64_t count, int64_t format) {
    if (format == FP32) {
        memcpy(to, from, 4 * count);
        return;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        float lane[LANES];
        store(lane, bf16_of(load_some(from + i, count - i)));
        for (int64_t j = 0; j < LANES && i + j < count; j++) {
            uint32_t bits;
            memcpy(&bits, lane + j, 4);
            ((uint16_t *)to)[i + j] = (uint16_t)(bits >> 16);
        }
    }
}

/* rows [T, n], x_step apart: heads of queries, of keys, of values, gates -> q [T, H, D] scaled, own_k, own_v as stored, gates [T, H * D]
   or NULL. cos, sin  [T, rope], sin negative at even dims.   warmth  [T] factors of queries, or NULL. */
void lamina_project(const heads_t *c, const float *x, int64_t rows, int64_t x_step, const float *cos, const float *sin,
                    const float *warmth, float *q, char *own_k, char *own_v, float *gates) {
    int64_t dim = c->key_dim, heads = c->heads, kv = c->has_k ? c->kv_heads : 0, rope = cos ? c->rope : 0;
    int64_t wide = (heads + kv) * dim, values = kv * c->value_dim, gate = c->is_gated ? heads * dim : 0;
    int64_t item = c->format == FP32 ? 4 : 2, all_wide = wide + values + gate;
    int is_bf16 = (int)c->is_bf16;
#pragma omp parallel num_threads(lamina_threads) if (4 * rows * all_wide > lamina_least)
    {
        float *line = malloc(4 * (all_wide + LANES));
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const float *from = x + r * x_step;
            for (int64_t i = 0; i < all_wide; i += LANES) {
                vec a = load_some(from + i, all_wide - i);
                if (c->bias) a = a + load_some(c->bias + i, all_wide - i);
                store(line + i, kept(a, is_bf16));
            }
            for (int turn = 0; turn < 2; turn++) {
                if (turn == (c->norm_after != 0)) {
                    if (c->norms & NORM_Q) normed(line, heads, dim, c->q_gain, c->q_eps, c->norm_all, is_bf16);
                    if (kv && c->norms & NORM_K)
                        normed(line + heads * dim, kv, dim, c->k_gain, c->k_eps, c->norm_all, is_bf16);
                } else if (rope) {
                    for (int64_t h = 0; h < heads + kv; h++) {
                        float *turned = line + h * dim + dim - rope;
                        for (int64_t i = 0; i < rope; i += LANES) {
                            vec a = load_some(turned + i, rope - i), other = __builtin_shufflevector(a, a, SWAPPED);
                            vec b = other * load_some(sin + r * rope + i, rope - i);
                            a = a * load_some(cos + r * rope + i, rope - i) + b;
                            store_some(turned + i, kept(a, is_bf16), rope - i);
                        }
                    }
                }
            }
            if (kv) {
                float *value = line + wide;
                if (c->norms & NORM_V) normed(value, kv, c->value_dim, 0, c->v_eps, 0, is_bf16);
                put(own_k + r * kv * dim * item, line + heads * dim, kv * dim, c->format);
                put(own_v + r * values * item, value, values, c->format);
            }
            for (int64_t i = 0; i < heads * dim; i += LANES) {
                vec a = load_some(line + i, heads * dim - i);
                if (warmth) a = a * warmth[r];
                store_some(q + r * heads * dim + i, a * c->scale, heads * dim - i);
            }
            if (gate) memcpy(gates + r * gate, line + wide + values, 4 * gate);
        }
        free(line);
    }
}

/* out [n] <- out / (1 + e^-gate), a gate for each number */
void lamina_gate(float *out, const float *gates, int64_t count, int is_bf16) {
    for (int64_t i = 0; i < count; i += LANES) {
        vec a = load_some(out + i, count - i) / (exp_of(-load_some(gates + i, count - i)) + 1.0f);
        store_some(out + i, kept(a, is_bf16), count - i);
    }
}

/* Copies rows of `fields` arrays to (page, row) places: field f is from[f], bytes[f] a row, to[f] + page * page_bytes[f]. */
void lamina_keep(int64_t count, const int64_t *rows, const int64_t *pages, const int64_t *where, int64_t fields,
                 const char **from, const int64_t *bytes, char **to, const int64_t *page_bytes) {
    for (int64_t f = 0; f < fields; f++)
        for (int64_t i = 0; i < count; i++)
            memcpy(to[f] + pages[i] * page_bytes[f] + where[i] * bytes[f], from[f] + rows[i] * bytes[f], bytes[f]);
}

/* Attention --------------------------------------------------------------------------------------------------------------- */

/* One sequence of a step; field order is that of `native.pieces`. */
typedef struct {
    int64_t first_row, count, start, valid_from, table_row, first_block;
} piece_t;

typedef struct {
    float *query, *keys, *turned, *values, *scores, *sums, *peaks, *totals;
} room_t;

INLINE vec pairs_of(vec a, vec b) { return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD); }

#define HALVED(n) \
    UNROLLED for (int j = 0; j < n; j++) x[j] = pairs_of(x[2 * j], x[2 * j + 1]);

/* Rows of keys and values of positions of a tile. */
typedef struct {
    const char *keys[TILE], *values[TILE];
} rows_t;

INLINE void ask_for(const char *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

/* scores [n, TILE] of queries [n, dim] with keys as they lie. Lane j of a vector of scores is sum_of(x[j]). */
static void scores_of_few(const float *query, int64_t n, int64_t dim, const float **keys, float *scores, int64_t from, int64_t to) {
    for (int64_t first = from / LANES * LANES; first < to; first += LANES)
        for (int64_t r = 0; r < n; r++) {
            vec x[LANES];
            UNROLLED for (int j = 0; j < LANES; j++) x[j] = all(0);
            for (int64_t d = 0; d < dim; d += LANES) {
                vec a = load(query + r * dim + d);
                UNROLLED for (int j = 0; j < LANES; j++) x[j] += a * load(keys[first + j] + d);
            }
#if LANES == 16
            HALVED(8)
#endif
#if LANES >= 8
            HALVED(4)
#endif
            HALVED(2)
            HALVED(1)
            store(scores + r * TILE + first, x[0]);
        }
}

#define TOGETHER 4

/* The sum over lanes [lane, lane + count) of the lane sums, neighbouring ones in pairs; for TOGETHER queries. */
#define LANE_SUM(to, lane)                                                                      \
    for (int r = 0; r < TOGETHER; r++) to[r] = all(0);                                          \
    for (int64_t d = lane; d < dim; d += LANES) {                                               \
        vec key = *(const vec *)(turned + d * TILE);                                            \
        for (int r = 0; r < TOGETHER; r++) to[r] += query[r * dim + d] * key;                   \
    }
#define ADDED(to, a, b) \
    for (int r = 0; r < TOGETHER; r++) to[r] = a[r] + b[r];

INLINE void two(const float *query, int64_t dim, const float *turned, int lane, vec *to) {
    vec a[TOGETHER], b[TOGETHER];
    LANE_SUM(a, lane)
    LANE_SUM(b, lane + 1)
    ADDED(to, a, b)
}

INLINE void four(const float *query, int64_t dim, const float *turned, int lane, vec *to) {
    vec a[TOGETHER], b[TOGETHER];
    two(query, dim, turned, lane, a);
    two(query, dim, turned, lane + 2, b);
    ADDED(to, a, b)
}

#if LANES >= 8
INLINE void eight(const float *query, int64_t dim, const float *turned, int lane, vec *to) {
    vec a[TOGETHER], b[TOGETHER];
    four(query, dim, turned, lane, a);
    four(query, dim, turned, lane + 4, b);
    ADDED(to, a, b)
}
#endif

/* The same with keys turned: turned [dim, TILE]; n is a multiple of TOGETHER. */
static void scores_of_many(const float *query, int64_t n, int64_t dim, const float *turned, float *scores, int64_t from, int64_t to) {
    for (int64_t first = from / LANES * LANES; first < to; first += LANES)
        for (int64_t r = 0; r < n; r += TOGETHER) {
            vec found[TOGETHER];
#if LANES == 16
            vec other[TOGETHER];
            eight(query + r * dim, dim, turned + first, 0, found);
            eight(query + r * dim, dim, turned + first, 8, other);
            ADDED(found, found, other)
#elif LANES == 8
            eight(query + r * dim, dim, turned + first, 0, found);
#else
            four(query + r * dim, dim, turned + first, 0, found);
#endif
            for (int i = 0; i < TOGETHER; i++) store(scores + (r + i) * TILE + first, found[i]);
        }
}

INLINE void weigh(const int rows, const int vectors, const float *scores, const float **values, int64_t from, int64_t to,
                  int64_t at, float *sums, int64_t step) {
    vec sum[ROWS_AT_ONCE][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = load(sums + r * step + v * LANES);
    for (int64_t j = from; j < to; j++) {
        vec b[VECTORS];
        for (int v = 0; v < vectors; v++) b[v] = load(values[j] + at + v * LANES);
        UNROLLED for (int r = 0; r < rows; r++) {
            float a = scores[r * TILE + j];
            for (int v = 0; v < vectors; v++) sum[r][v] += a * b[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(sums + r * step + v * LANES, sum[r][v]);
}

#define WEIGH(n) \
    case n: weigh(n, VECTORS, scores, values, from, to, at, sums + at, step); break;

/* sums [n, dim] += weights [n, TILE] x values, in the order of positions. */
static void weighed(int64_t n, const float *scores, const float **values, int64_t from, int64_t to, int64_t dim, float *sums,
                    int64_t step) {
    for (; n > 0; n -= ROWS_AT_ONCE, scores += ROWS_AT_ONCE * TILE, sums += ROWS_AT_ONCE * step)
        for (int64_t at = 0; at < dim; at += PANEL)
            switch (n) {
                WEIGH(1) WEIGH(2) WEIGH(3) WEIGH(4) WEIGH(5)
#if ROWS_AT_ONCE > 6
                WEIGH(6) WEIGH(7)
#endif
#if ROWS_AT_ONCE > 8
                WEIGH(8) WEIGH(9) WEIGH(10) WEIGH(11)
#endif
                default: weigh(ROWS_AT_ONCE, VECTORS, scores, values, from, to, at, sums + at, step);
            }
}

INLINE int64_t lowest(const heads_t *c, const piece_t *piece, int64_t position) {
    int64_t low = 0;
    if (c->window && position - c->window + 1 > low) low = position - c->window + 1;
    if (c->reset && position - position % c->reset > low) low = position - position % c->reset;
    if ((c->window || c->reset) && piece->valid_from > low) low = piece->valid_from;
    return low;
}

/* Where the rows of a step lie: its own, and the table of pages; k_row, v_row  bytes of a row of all heads. */
typedef struct {
    const char *own_k, *own_v;
    const int64_t *table;
    int64_t table_width, k_row, v_row;
} place_t;

/* Where the rows of positions [position, most) lie, as many of them as lie together; returns how many. */
INLINE int64_t found_at(const heads_t *c, const piece_t *piece, const place_t *at, int64_t position, int64_t most,
                        const char **key, const char **value) {
    if (c->place != LOG && position >= piece->start) {
        int64_t row = piece->first_row + position - piece->start;
        *key = at->own_k + row * at->k_row, *value = at->own_v + row * at->v_row;
        return most - position;
    }
    int64_t whole = position / c->page_rows, row = position - whole * c->page_rows, end = position + c->page_rows - row;
    int64_t page = at->table[piece->table_row * at->table_width + (c->place == RING ? c->column : whole - piece->first_block)];
    *key = c->kept_k + page * c->k_page + row * at->k_row, *value = c->kept_v + page * c->v_page + row * at->v_row;
    if (c->place != LOG && end > piece->start) end = piece->start;
    return (end < most ? end : most) - position;
}

static const float *as_floats(const char *from, int64_t count, int64_t padded, int64_t format, float *into) {
    if (format == FP32) {
        memcpy(into, from, 4 * count);
    } else {
        for (int64_t i = 0; i < count; i++) into[i] = widened(((const uint16_t *)from)[i]);
    }
    for (int64_t i = count; i < padded; i++) into[i] = 0;
    return into;
}

static void softmax_rows(const heads_t *c, const piece_t *piece, int64_t base, int64_t first, int64_t n, int64_t group,
                         const room_t *room, int64_t step) {
    ivec number;
    for (int i = 0; i < LANES; i++) number[i] = i;
    for (int64_t m = 0; m < n; m++) {
        float *score = room->scores + m * TILE;
        int64_t position = first + m / group, low = lowest(c, piece, position);
        int32_t before = (int32_t)(low > base ? low - base : 0);
        int32_t last = (int32_t)(position - base < TILE ? position - base : TILE);
        vec most = all(-HUGE_VALF);
        for (int i = 0; i < TILE; i += LANES) {
            ivec column = number + i;
            vec a = load(score + i);
            if (c->softcap != 0) a = c->softcap - 2 * c->softcap / (exp_of(a * (2 / c->softcap)) + 1.0f);
            a = choose((column <= last) & (column >= before), a, all(-HUGE_VALF));
            store(score + i, a);
            most = choose(a > most, a, most);
        }
        float peak = largest(most), old = room->peaks[m];
        if (last < 0 || before >= TILE) { /* sees nothing here */
            for (int i = 0; i < TILE; i += LANES) store(score + i, all(0));
            continue;
        }
        if (!(peak > old)) peak = old;
        float shrink = old == peak ? 1 : exp_of(all(old - peak))[0];
        vec total = all(0);
        for (int i = 0; i < TILE; i += LANES) {
            vec a = load(score + i);
            ivec column = number + i;
            a = choose((column <= last) & (column >= before), exp_of(a - peak), all(0));
            store(score + i, a);
            total += a;
        }
        room->totals[m] = room->totals[m] * shrink + sum_of(total);
        room->peaks[m] = peak;
        if (shrink != 1)
            for (int64_t d = 0; d < step; d += LANES) store(room->sums + m * step + d, load(room->sums + m * step + d) * shrink);
    }
}

static void find_rows(const heads_t *c, const piece_t *piece, const place_t *at, int64_t base, int64_t begin, int64_t stop,
                      rows_t *rows) {
    const char *key = 0, *value = 0;
    for (int64_t j = begin, together = 0; j < stop; j++, together--, key += at->k_row, value += at->v_row) {
        if (!together) together = found_at(c, piece, at, base + j, base + stop, &key, &value);
        rows->keys[j] = key, rows->values[j] = value;
    }
}

/* Queries [from, from + count) of a sequence with the heads of key/value heads [kv_first, kv_stop). */
static void attend_some(const heads_t *c, const piece_t *piece, const place_t *at, int64_t from, int64_t count, int64_t kv_first,
                        int64_t kv_stop, const float *q, float *out, const room_t *all_room) {
    int64_t group = c->heads / c->kv_heads, n = count * group, dim = c->key_dim, value_dim = c->value_dim;
    int64_t wide = (dim + LANES - 1) / LANES * LANES, step = WHOLE(value_dim), item = c->format == FP32 ? 4 : 2;
    int64_t first = piece->start + from, last = first + count - 1, least = lowest(c, piece, first);
    int64_t rows = (n + TOGETHER - 1) / TOGETHER * TOGETHER, k_size = dim * item, v_size = value_dim * item;
    int64_t k_bytes = (kv_stop - kv_first) * k_size, v_bytes = (kv_stop - kv_first) * v_size;
    int is_turned = n >= TURNED;
    room_t room = *all_room;
    for (int64_t kv = kv_first; kv < kv_stop; kv++) {
        for (int64_t m = 0; m < rows; m++) {
            int64_t index = (kv - kv_first) * rows + m, row = piece->first_row + from + m / group, head = kv * group + m % group;
            memset(room.query + index * wide, 0, 4 * wide);
            memset(room.sums + index * step, 0, 4 * step);
            if (m >= n) continue;
            memcpy(room.query + index * wide, q + (row * c->heads + head) * dim, 4 * dim);
            room.peaks[index] = c->sinks ? c->sinks[head] : -HUGE_VALF;
            room.totals[index] = c->sinks ? 1 : 0;
        }
    }
    rows_t found[2];
    int64_t base = least / TILE * TILE, begin = least - base, stop = last - base + 1 < TILE ? last - base + 1 : TILE;
    find_rows(c, piece, at, base, begin, stop, found);
    for (int number = 0; base <= last; number ^= 1) {
        int64_t next = base + TILE, next_stop = last - next + 1 < TILE ? last - next + 1 : TILE;
        if (next <= last) find_rows(c, piece, at, next, 0, next_stop, found + !number);
        for (int64_t j = 0; next <= last && j < next_stop; j++) { /* they come while this tile is computed */
            ask_for(found[!number].keys[j] + kv_first * k_size, k_bytes);
            ask_for(found[!number].values[j] + kv_first * v_size, v_bytes);
        }
        for (int64_t kv = kv_first; kv < kv_stop; kv++) {
            const float *keys[TILE], *values[TILE];
            room.query = all_room->query + (kv - kv_first) * rows * wide;
            room.sums = all_room->sums + (kv - kv_first) * rows * step;
            room.peaks = all_room->peaks + (kv - kv_first) * rows;
            room.totals = all_room->totals + (kv - kv_first) * rows;
            for (int64_t j = begin; j < stop; j++) {
                const char *key = found[number].keys[j] + kv * k_size, *value = found[number].values[j] + kv * v_size;
                keys[j] = (const float *)key, values[j] = (const float *)value;
                if (c->format != FP32 || wide != dim) keys[j] = as_floats(key, dim, wide, c->format, room.keys + j * wide);
                if (c->format != FP32 || step != value_dim)
                    values[j] = as_floats(value, value_dim, step, c->format, room.values + j * step);
            }
            for (int64_t j = 0; j < begin; j++) keys[j] = keys[begin]; /* read, and hidden */
            for (int64_t j = stop; j < TILE; j++) keys[j] = keys[stop - 1];
            if (is_turned) {
                for (int64_t j = 0; j < TILE; j++)
                    for (int64_t d = 0; d < wide; d++) room.turned[d * TILE + j] = keys[j][d];
                scores_of_many(room.query, rows, wide, room.turned, room.scores, begin, stop);
            } else {
                scores_of_few(room.query, n, wide, keys, room.scores, begin, stop);
            }
            softmax_rows(c, piece, base, first, n, group, &room, step);
            weighed(n, room.scores, values, begin, stop, step, room.sums, step);
        }
        base = next, begin = 0, stop = next_stop;
    }
    for (int64_t kv = kv_first; kv < kv_stop; kv++)
        for (int64_t m = 0; m < n; m++) {
            int64_t index = (kv - kv_first) * rows + m, row = piece->first_row + from + m / group, head = kv * group + m % group;
            float *to = out + (row * c->heads + head) * value_dim;
            for (int64_t d = 0; d < value_dim; d += LANES) {
                vec x = load(all_room->sums + index * step + d) / all_room->totals[index];
                store_some(to + d, kept(x, (int)c->is_bf16), value_dim - d);
            }
        }
}

/* q [T, H, D] scaled, pieces of the step, own rows as stored -> out [T, H, Dv]; rows of padding (from num_rows on) are zeros. */
void lamina_attend(const heads_t *c, const float *q, const char *own_k, const char *own_v, const piece_t *pieces, int64_t count,
                   const int64_t *table, int64_t table_width, int64_t num_rows, int64_t padded_rows, float *out) {
    int64_t group = c->heads / c->kv_heads, each = group < MOST ? MOST / group : 1, tasks = 0, work = 0;
    int64_t item = c->format == FP32 ? 4 : 2, wide = WHOLE(c->key_dim), step = WHOLE(c->value_dim);
    place_t at = {own_k, own_v, table, table_width, c->kv_heads * c->key_dim * item, c->kv_heads * c->value_dim * item};
    int64_t *firsts = malloc(8 * (count + 1));
    for (int64_t p = 0; p < count; p++)
        work += pieces[p].count * (pieces[p].start + pieces[p].count - lowest(c, pieces + p, pieces[p].start));
    /* key/value heads that a task takes, when there is one query: rows of memory are read whole where sequences are many */
    int64_t together = c->heads > MOST || count < 2 * lamina_threads ? 1 : c->kv_heads;
    for (int64_t p = 0; p < count; p++) {
        firsts[p] = tasks;
        tasks += pieces[p].count == 1 ? c->kv_heads / together : (pieces[p].count + each - 1) / each * c->kv_heads;
    }
    firsts[count] = tasks;
    memset(out + num_rows * c->heads * c->value_dim, 0, 4 * (padded_rows - num_rows) * c->heads * c->value_dim);
#pragma omp parallel num_threads(lamina_threads) if (2 * work * c->heads * c->key_dim > lamina_least)
    {
        int64_t most = each * group > c->heads ? each * group : c->heads;
        most = most + TOGETHER * c->kv_heads;
        int64_t sizes[] = {most * wide, TILE * wide, TILE * wide, TILE * step, most * TILE, most * step, most, most};
        int64_t total = 0;
        for (int i = 0; i < 8; i++) total += WHOLE(sizes[i]);
        char *memory = malloc(4 * total + 64);
        float *next = (float *)(((uintptr_t)memory + 63) / 64 * 64), *parts[8];
        for (int i = 0; i < 8; i++) parts[i] = next, next += WHOLE(sizes[i]);
        room_t room = {parts[0], parts[1], parts[2], parts[3], parts[4], parts[5], parts[6], parts[7]};
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = tasks - 1; task >= 0; task--) {
            int64_t low = 0, high = count;
            while (high - low > 1) { /* the sequence of the task */
                int64_t middle = (low + high) / 2;
                if (firsts[middle] <= task) low = middle;
                else high = middle;
            }
            int64_t number = task - firsts[low];
            if (pieces[low].count == 1) {
                attend_some(c, pieces + low, &at, 0, 1, number * together, (number + 1) * together, q, out, &room);
            } else {
                int64_t from = number / c->kv_heads * each, left = pieces[low].count - from, kv = number % c->kv_heads;
                attend_some(c, pieces + low, &at, from, left < each ? left : each, kv, kv + 1, q, out, &room);
            }
        }
        free(memory);
    }
    free(firsts);
}
