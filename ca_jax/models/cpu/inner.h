// The inner loops, written in vectors of CA_LANES floats; included once for each kind of machine, within a namespace.
// Everything in between is inlined: a call would cost more than what is called.
//
// Attention reads each key and value once, where it is: no copy, and no array of scores. A query is a row: a token's
// query head; those of a KV head's G query heads read the same keys. Where there are few rows (decoding) each key is
// multiplied with each row as it is. Where there are many (prefill) rows are lanes: scores are [keys, rows] and what
// comes out is [head dim, rows], so that nothing is transposed but the queries once. What lies behind a row's length is
// never read.

constexpr int W = CA_LANES;
constexpr int LANE_VECTORS = W == 16 ? 6 : 3;  // Of a task of many rows: sums of 4 times as many fit the registers.
constexpr int AT_ONCE = W == 16 ? 3 : 1;       // Rows of few whose sums fit.
constexpr int PRODUCT_ROWS = W == 16 ? 8 : 4;  // Likewise of a product.

#define CA_INLINE inline __attribute__((always_inline))

typedef float V __attribute__((vector_size(4 * W), aligned(4)));
typedef int32_t VI __attribute__((vector_size(4 * W), aligned(4)));
typedef uint16_t VH __attribute__((vector_size(2 * W), aligned(2)));
typedef uint32_t VU __attribute__((vector_size(4 * W), aligned(4)));

template <class T>
CA_INLINE T load(const void* from) {
  T found;
  std::memcpy(&found, from, sizeof(T));
  return found;
}
CA_INLINE V floats(const float* from) { return load<V>(from); }
CA_INLINE void store(float* to, V v) { std::memcpy(to, &v, sizeof(V)); }
CA_INLINE V all(float x) { return x - V{}; }
CA_INLINE V larger(V a, V b) { return a > b ? a : b; }
CA_INLINE V plus(V a, V b) { return a + b; }

#if CA_LANES == 16
CA_INLINE V turned(V v, std::integral_constant<int, 8>) {
  return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}
CA_INLINE V turned(V v, std::integral_constant<int, 4>) {
  return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
}
CA_INLINE V turned(V v, std::integral_constant<int, 2>) {
  return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
}
CA_INLINE V turned(V v, std::integral_constant<int, 1>) {
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}
#elif CA_LANES == 8
CA_INLINE V turned(V v, std::integral_constant<int, 4>) {
  return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
}
CA_INLINE V turned(V v, std::integral_constant<int, 2>) {
  return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
}
CA_INLINE V turned(V v, std::integral_constant<int, 1>) {
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
}
#else
CA_INLINE V turned(V v, std::integral_constant<int, 2>) { return __builtin_shufflevector(v, v, 2, 3, 0, 1); }
CA_INLINE V turned(V v, std::integral_constant<int, 1>) { return __builtin_shufflevector(v, v, 1, 0, 3, 2); }
#endif

template <V (*OP)(V, V), int STEP = W / 2>
CA_INLINE float reduced(V v) {
  v = OP(v, turned(v, std::integral_constant<int, STEP>{}));
  if constexpr (STEP > 1) return reduced<OP, STEP / 2>(v);
  return v[0];
}
CA_INLINE float sum(V v) { return reduced<plus>(v); }
CA_INLINE float largest(V v) { return reduced<larger>(v); }

// Lanes of two vectors that hold sums in groups of G lanes: of each group the first half, or the second.
template <int G, int SECOND, int... LANES>
CA_INLINE V halves(V a, V b, std::integer_sequence<int, LANES...>) {
  return __builtin_shufflevector(a, b, (LANES / (G / 2) * G + LANES % (G / 2) + SECOND * (G / 2))...);
}

// The sums of the lanes of COUNT vectors, which hold groups of G lanes: fewer steps than one sum after the other.
template <int COUNT, int G>
CA_INLINE V sums(V* parts) {
  if constexpr (COUNT == 1) {
    return parts[0];
  } else {
    constexpr auto lanes = std::make_integer_sequence<int, W>{};
    for (int i = 0; i < COUNT / 2; i++)
      parts[i] = halves<G, 0>(parts[2 * i], parts[2 * i + 1], lanes) + halves<G, 1>(parts[2 * i], parts[2 * i + 1], lanes);
    return sums<COUNT / 2, G / 2>(parts);
  }
}

// exp of numbers <= 0, to 2 units in the last place; below -87 it is that of -87. Cephes' polynomial.
CA_INLINE V exp_of_negative(V x) {
  x = larger(x, all(-87.0f));
  V n = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number.
  const VI k = (VI)n - 0x4B400000;
  n = n - 12582912.0f;
  const V r = x - n * 0.693359375f + n * 2.12194440e-4f;
  V p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (V)((k + 127) << 23);
}

// Keys and values one behind the other, as far as a page goes.
struct Run {
  const float *keys, *values, *cosines, *sines;
  int64_t count;
};

CA_INLINE Run run_from(const Call& c, int64_t row, int64_t head, int64_t place) {
  const int64_t in_page = place % c.page_tokens;
  const float* keys = c.page(row, place) + (head * c.page_tokens + in_page) * c.dim;
  return {keys, keys + c.kv_heads * c.page_tokens * c.dim, c.cosines + place * c.half, c.sines + place * c.half,
          c.page_tokens - in_page};
}

// What is read soon, [count], is brought near.
CA_INLINE void ahead(const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(from + i);
}

// x [H] rotated and scaled; element i pairs with element i + half.
CA_INLINE void rotate(const float* __restrict x, const float* __restrict cosines, const float* __restrict sines,
                      int64_t half, int64_t dim, float scale, float* __restrict out) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    out[i] = (a * cosines[i] - b * sines[i]) * scale;
    out[i + half] = (b * cosines[i] + a * sines[i]) * scale;
  }
  for (int64_t i = 2 * half; i < dim; i++) out[i] = x[i] * scale;
}

CA_INLINE const float* query(const Call& c, const Task& t, int64_t i, float* turned) {
  const int64_t token = c.starts[t.row] + i / c.groups(), at = c.places[token] * c.half;
  const float* x = c.queries + (token * c.heads + t.head * c.groups() + i % c.groups()) * c.dim;
  rotate(x, c.cosines + at, c.sines + at, c.half, c.dim, c.scale, turned);
  return turned;
}

// out [4, NV vectors] = out * shrink + a [4, n] times b [n, NV vectors]; the steps of a are in floats.
template <int NV>
CA_INLINE void product(const float* a, int64_t row_step, int64_t column_step, const float* b, int64_t n, float* out,
                       const V* shrink) {
  V total[4][NV];
  for (int r = 0; r < 4; r++)
    for (int v = 0; v < NV; v++) total[r][v] = shrink ? floats(out + (r * NV + v) * W) * shrink[v] : V{};
  for (int64_t k = 0; k < n; k++)
    for (int v = 0; v < NV; v++) {
      const V lanes = floats(b + (k * NV + v) * W);
      for (int r = 0; r < 4; r++) total[r][v] += a[r * row_step + k * column_step] * lanes;
    }
  for (int r = 0; r < 4; r++)
    for (int v = 0; v < NV; v++) store(out + (r * NV + v) * W, total[r][v]);
}

template <int NV>
CA_INLINE void many_rows_of(const Call& c, const Task& t, float* scratch) {
  constexpr int N = NV * W;
  const int64_t dim = c.dim, count = t.stop - t.first, groups = c.groups();
  const int64_t first_own = c.place(t.row, t.first / groups), end = c.place(t.row, (t.stop - 1) / groups) + 1;
  float *q = scratch, *total = q + dim * N;               // [H, N] each.
  float *scores = total + dim * N, *keys = scores + KEYS * N;  // [KEYS, N], [KEYS, H].
  float* one = keys + KEYS * dim;                              // [H]
  V top[NV], weight[NV], place[NV];
  std::memset(q, 0, sizeof(float) * 2 * dim * N);
  std::memset(keys, 0, sizeof(float) * KEYS * dim);
  for (int v = 0; v < NV; v++) top[v] = all(-1e30f), weight[v] = V{}, place[v] = all(first_own);
  for (int64_t i = 0; i < count; i++) {
    reinterpret_cast<float*>(place)[i] = c.place(t.row, (t.first + i) / groups);
    query(c, t, t.first + i, one);
    for (int64_t d = 0; d < dim; d++) q[d * N + i] = one[d];
  }
  for (int64_t at = c.window > 0 ? std::max<int64_t>(0, first_own - c.window + 1) : 0; at < end;) {
    const Run run = run_from(c, t.row, t.head, at);
    const int64_t n = std::min<int64_t>({KEYS, run.count, end - at});
    for (int64_t j = 0; j < n; j++)
      rotate(run.keys + j * dim, run.cosines + j * c.half, run.sines + j * c.half, c.half, dim, 1.0f,
             keys + j * dim);
    for (int64_t j = 0; j < n; j += 4) product<NV>(keys + j * dim, dim, 1, q, dim, scores + j * N, nullptr);
    if (at + n - 1 > first_own || c.window > 0)
      for (int64_t j = 0; j < n; j++)
        for (int v = 0; v < NV; v++) {
          const V key = all(at + j), unseen = all(-INFINITY);
          V score = key > place[v] ? unseen : floats(scores + j * N + v * W);
          if (c.window > 0) score = key > place[v] - static_cast<float>(c.window) ? score : unseen;
          store(scores + j * N + v * W, score);
        }
    V shrink[NV];
    for (int v = 0; v < NV; v++) {
      V now = top[v], added{};
      for (int64_t j = 0; j < n; j++) now = larger(now, floats(scores + j * N + v * W));
      for (int64_t j = 0; j < n; j++) {
        const V score = floats(scores + j * N + v * W), share = score > -1e30f ? exp_of_negative(score - now) : V{};
        added += share;
        store(scores + j * N + v * W, share);
      }
      shrink[v] = exp_of_negative(top[v] - now);
      weight[v] = weight[v] * shrink[v] + added;
      top[v] = now;
    }
    for (int64_t d = 0; d < dim; d += 4) product<NV>(run.values + d, 1, dim, scores, n, total + d * N, shrink);
    at += n;
  }
  for (int64_t i = 0; i < count; i++) {
    float* out = result(c, t, t.first + i);
    const float share = 1.0f / reinterpret_cast<float*>(weight)[i];
    for (int64_t d = 0; d < dim; d++) out[d] = total[d * N + i] * share;
  }
}

inline void many_rows(const Call& c, const Task& t, float* scratch) {
  const int64_t count = t.stop - t.first;
  if (count <= W) return many_rows_of<1>(c, t, scratch);
  if (count <= 2 * W) return many_rows_of<2>(c, t, scratch);
  many_rows_of<LANE_VECTORS>(c, t, scratch);
}

// The largest of a row of scores.
CA_INLINE V top_of(const float* scores) {
  V top = floats(scores);
  for (int v = 1; v < KEYS / W; v++) top = larger(top, floats(scores + v * W));
  return top;
}

// HV: vectors of a head.
template <int HV>
CA_INLINE void few_rows_of(const Call& c, const Task& t, float* scratch) {
  constexpr int DIM = HV * W, PART = DIM + 2;
  const int64_t count = t.stop - t.first, groups = c.groups();
  float *q = scratch, *scores = q + FEW * DIM, *dots = scores + FEW * KEYS;  // [rows, H], [rows, KEYS], [rows, W, W].
  for (int64_t i = 0; i < count; i++) {
    query(c, t, t.first + i, q + i * DIM);
    float* part = t.partial + i * PART;
    part[0] = -INFINITY, part[1] = 0;
    std::memset(part + 2, 0, sizeof(float) * DIM);
  }
  const bool in_vectors = c.half % W == 0;
  for (int64_t at = t.begin; at < t.end;) {
    const Run run = run_from(c, t.row, t.head, at);
    const int64_t n = std::min<int64_t>({KEYS, run.count, t.end - at});
    const Run next = at + n < t.end ? run_from(c, t.row, t.head, at + n) : run;
    for (int64_t j = 0; j < n; j++) {
      const float *key = run.keys + j * DIM, *cosines = run.cosines + j * c.half, *sines = run.sines + j * c.half;
      ahead(j + 8 < n ? key + 8 * DIM : next.keys + (j + 8 - n) * DIM, DIM);
      V parts[HV];
      if (!in_vectors) {
        float turned[DIM];
        rotate(key, cosines, sines, c.half, DIM, 1.0f, turned);
        for (int v = 0; v < HV; v++) parts[v] = floats(turned + v * W);
      } else {
        const int pairs = c.half / W;
        for (int v = 0; v < HV; v++) parts[v] = floats(key + v * W);
        if (pairs == HV / 2 && HV > 1) {
          for (int v = 0; v < HV / 2; v++) {
            const V a = parts[v], b = parts[v + HV / 2], x = floats(cosines + v * W), y = floats(sines + v * W);
            parts[v] = a * x - b * y, parts[v + HV / 2] = b * x + a * y;
          }
        } else {
          for (int v = 0; v < pairs; v++) {
            const V a = floats(key + v * W), b = floats(key + (v + pairs) * W);
            const V x = floats(cosines + v * W), y = floats(sines + v * W);
            parts[v] = a * x - b * y, parts[v + pairs] = b * x + a * y;
          }
        }
      }
      for (int64_t i = 0; i < count; i++) {
        V dot = floats(q + i * DIM) * parts[0];
        for (int v = 1; v < HV; v++) dot += floats(q + i * DIM + v * W) * parts[v];
        store(dots + (i * W + j % W) * W, dot);
      }
      if (j % W < W - 1 && j < n - 1) continue;
      for (int64_t i = 0; i < count; i++) {  // Of keys behind the last one anything is summed, and masked below.
        V of_keys[W];
        for (int k = 0; k < W; k++) of_keys[k] = floats(dots + (i * W + k) * W);
        store(scores + i * KEYS + j / W * W, sums<W, W>(of_keys));
      }
    }
    for (int64_t i = 0; i < count; i++) {
      float *row = scores + i * KEYS, *part = t.partial + i * PART;
      const int64_t place = c.place(t.row, (t.first + i) / groups);
      for (int64_t j = 0; j < KEYS; j++)
        if (j >= n || at + j > place || (c.window > 0 && at + j <= place - c.window)) row[j] = -INFINITY;
      const float now = std::max(part[0], largest(top_of(row)));
      V added{};
      for (int v = 0; v < KEYS / W; v++) {
        const V score = floats(row + v * W), share = score > -1e30f ? exp_of_negative(score - now) : V{};
        added += share;
        store(row + v * W, share);
      }
      const float shrink = part[0] == -INFINITY ? 0.0f : std::exp(part[0] - now);
      part[0] = now;
      part[1] = part[1] * shrink + sum(added);
      for (int v = 0; v < HV; v++) store(part + 2 + v * W, floats(part + 2 + v * W) * shrink);
    }
    for (int64_t i = 0; i < count; i += AT_ONCE) {
      const int rows = std::min<int64_t>(AT_ONCE, count - i);
      V total[AT_ONCE][HV];
      for (int r = 0; r < AT_ONCE; r++)
        for (int v = 0; v < HV; v++) total[r][v] = r < rows ? floats(t.partial + (i + r) * PART + 2 + v * W) : V{};
      for (int64_t j = 0; j < n; j++) {
        const float* value = run.values + j * DIM;
        if (!i) ahead(j + 8 < n ? value + 8 * DIM : next.values + (j + 8 - n) * DIM, DIM);
        for (int v = 0; v < HV; v++) {
          const V x = floats(value + v * W);
          for (int r = 0; r < AT_ONCE; r++) total[r][v] += scores[std::min<int64_t>(i + r, FEW - 1) * KEYS + j] * x;
        }
      }
      for (int r = 0; r < rows; r++)
        for (int v = 0; v < HV; v++) store(t.partial + (i + r) * PART + 2 + v * W, total[r][v]);
    }
    at += n;
  }
}

inline void few_rows(const Call& c, const Task& t, float* scratch) {
  switch (c.dim) {
    case 16: return few_rows_of<16 / W>(c, t, scratch);
    case 32: return few_rows_of<32 / W>(c, t, scratch);
    case 64: return few_rows_of<64 / W>(c, t, scratch);
    case 80: return few_rows_of<80 / W>(c, t, scratch);
    case 96: return few_rows_of<96 / W>(c, t, scratch);
    case 128: return few_rows_of<128 / W>(c, t, scratch);
  }
}

// Products with packed weights.

// float16 to float32. No number on the way is subnormal: XLA's threads take such for 0.
CA_INLINE V widened_halves(const uint8_t* from) {
  const VI bits = __builtin_convertvector(load<VH>(from), VI), magnitude = bits & 0x7fff;
  const V subnormal = __builtin_convertvector(magnitude, V) * 0x1p-24f, normal = (V)((magnitude << 13) + 0x38000000);
  return (V)((VI)(subnormal < 0x1p-14f ? subnormal : normal) | ((bits & 0x8000) << 16));
}

// x's rows [ROWS, inputs] times W of a tile's outputs, from `first` on.
template <Kind KIND, int ROWS>
CA_INLINE void product_of_rows(const Product& p, const uint8_t* tile, int first, int64_t row, float* out) {
  constexpr int CODES = 32 / BITS[KIND];  // Of a word.
  const float *x = p.x + row * p.inputs, *sums = p.sums + row * (p.inputs / BLOCK);
  const int64_t blocks = p.inputs / BLOCK;
  V total[ROWS] = {};
  for (int64_t b = 0; b < blocks; b++, tile += BLOCK_BYTES[KIND], x += BLOCK) {
    V part[ROWS] = {};
    for (int i = 0; i < BLOCK; i += CODES) {
      const VU words = load<VU>(tile + HEADER[KIND] + (i / CODES * OUTPUTS + first) * 4);
#pragma GCC unroll 8
      for (int j = 0; j < CODES; j++) {
        V w;
        if constexpr (KIND == BF16) {
          w = (V)(j ? words & 0xffff0000u : words << 16);
        } else if constexpr (KIND == Q8) {
          w = __builtin_convertvector((VI)(words << (24 - 8 * j)) >> 24, V);
        } else {
          w = __builtin_convertvector((VI)(words >> (4 * j) & 15u), V);
        }
        for (int r = 0; r < ROWS; r++) part[r] += x[r * p.inputs + i + j] * w;
      }
    }
    if constexpr (KIND == BF16) {
      for (int r = 0; r < ROWS; r++) total[r] += part[r];
      continue;
    }
    const V scale = widened_halves(tile + 2 * first);
    for (int r = 0; r < ROWS; r++) total[r] += scale * part[r];
    if constexpr (KIND == Q4) {
      const V offset = widened_halves(tile + 2 * (OUTPUTS + first));
      for (int r = 0; r < ROWS; r++) total[r] += sums[r * blocks + b] * offset;
    }
  }
  for (int r = 0; r < ROWS; r++) store(out + (row + r) * p.outputs + first, total[r]);
}

template <Kind KIND>
CA_INLINE void tile_of(const Product& p, int64_t number) {
  const uint8_t* tile = p.packed + number * (p.inputs / BLOCK) * BLOCK_BYTES[KIND];
  float* out = p.out + number * OUTPUTS;
  for (int first = 0; first < OUTPUTS; first += W) {
    int64_t row = 0;
    for (; p.rows - row >= PRODUCT_ROWS; row += PRODUCT_ROWS)
      product_of_rows<KIND, PRODUCT_ROWS>(p, tile, first, row, out);
    if (PRODUCT_ROWS > 4 && p.rows - row >= 4) product_of_rows<KIND, 4>(p, tile, first, row, out), row += 4;
    if (p.rows - row >= 2) product_of_rows<KIND, 2>(p, tile, first, row, out), row += 2;
    if (p.rows > row) product_of_rows<KIND, 1>(p, tile, first, row, out);
  }
}

inline void tile(const Product& p, int64_t number) {
  if (p.kind == Q4) return tile_of<Q4>(p, number);
  if (p.kind == Q8) return tile_of<Q8>(p, number);
  tile_of<BF16>(p, number);
}

constexpr Inner INNER{many_rows, few_rows, tile, LANE_VECTORS * W, CA_NAME, nullptr, nullptr};

#undef CA_INLINE
