// KV's numbers to steps and back (calls.h, Transform) where the machine multiplies tiles of bfloat16: each layer's matrices
// times columns, one a token. Included in the namespace of amx.h.
//
// A number is the sum of two bfloat16, the nearest and what that leaves, and of the four products of two such sums all are
// taken but the smallest: what is lost is a 2^-17th. Sums are float32, and stay in tiles over all inputs.
//
//   columns     of 32 inputs of 32 tokens four tiles of 16 pairs of inputs, 16 tokens: the first two of what comes first
//   matrices    of 32 inputs of 32 outputs four tiles of 16 outputs, 32 inputs, likewise; or the first two alone, where
//               bfloat16 leaves nothing

using avx512::VH;
typedef int16_t VS __attribute__((vector_size(32)));

constexpr int64_t SIDE = 32;  // Inputs, outputs and tokens of a block.

// Blocks of matrices times those of columns, onto tiles 0 to 3. What is needed next, so many bytes for each block from
// `ahead` on, is fetched meanwhile: matrices do not fit the caches.
inline void add_blocks(const uint8_t* w, const uint8_t* x, int64_t blocks, bool has_rest, const uint8_t* ahead,
                       int64_t bytes) {
  const auto multiply = [](const uint8_t* tiles) {
    if (tiles) {
      _tile_loadd(6, tiles, 64);
      _tile_loadd(7, tiles + TILE, 64);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  };
  for (int64_t k = 0; k < blocks; k++, x += 4 * TILE) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + k * bytes + i, 0, 2);
    _tile_loadd(4, w, 64);
    _tile_loadd(5, w + TILE, 64);
    multiply(x + 2 * TILE);  // Small ones go first.
    multiply(x);
    w += 2 * TILE;
    if (!has_rest) continue;
    _tile_loadd(4, w, 64);
    _tile_loadd(5, w + TILE, 64);
    multiply(nullptr);
    w += 2 * TILE;
  }
}

// The nearest bfloat16, in the upper half. What is not a number stays so.
inline VU rounded(V v) {
  const VU words = (VU)v + 0x7fffu + ((VU)v >> 16 & 1u);
  return (v == v ? words : (VU)v) & 0xffff0000u;
}

// A pair of inputs of 16 tokens, to a row of the first tiles and of those of the rest.
inline void lay_out_pair(V a, V b, uint8_t* to) {
  const VU first[] = {rounded(a), rounded(b)};
  const VU rows[] = {first[0] >> 16 | first[1], rounded(a - (V)first[0]) >> 16 | rounded(b - (V)first[1])};
  std::memcpy(to, &rows[0], 64);
  std::memcpy(to + 2 * TILE, &rows[1], 64);
}

template <int STEP, int... LANES>
inline void exchange(V* rows, std::integer_sequence<int, LANES...>) {
  for (int i = 0; i < 16; i++) {
    if (i & STEP) continue;
    const V a = rows[i], b = rows[i + STEP];
    rows[i] = __builtin_shufflevector(a, b, (LANES & STEP ? 16 + LANES - STEP : LANES)...);
    rows[i + STEP] = __builtin_shufflevector(a, b, (LANES & STEP ? 16 + LANES : LANES + STEP)...);
  }
}

inline void transpose(V* rows) {
  constexpr std::make_integer_sequence<int, 16> LANES{};
  exchange<8>(rows, LANES), exchange<4>(rows, LANES), exchange<2>(rows, LANES), exchange<1>(rows, LANES);
}

// Up to 16 numbers; what is not there is 0.
inline V some(const float* from, int64_t count) {
  V row{};
  if (count >= 16) row = avx512::floats(from);
  else std::memcpy(&row, from, count * 4);
  return row;
}

inline V some(const int16_t* from, int64_t count) {
  VS row{};
  if (count >= 16) std::memcpy(&row, from, 32);
  else std::memcpy(&row, from, count * 2);
  return __builtin_convertvector(__builtin_convertvector(row, VI), V);  // In one step it takes one lane after the other.
}

inline void store_some(float* to, V v, int64_t count) {
  if (count >= 16) avx512::store(to, v);
  else std::memcpy(to, &v, count * 4);
}

inline void store_some(uint16_t* to, V v, int64_t count) {  // Bfloat16.
  const VH words = __builtin_convertvector(rounded(v) >> 16, VH);
  if (count >= 16) std::memcpy(to, &words, 32);
  else std::memcpy(to, &words, count * 2);
}

inline void store_some(int16_t* to, V v, int64_t count) {  // Codes; those that do not fit, and none, are the largest.
  const V low = v > -32767.0f ? v : avx512::all(-32767);
  const VI words = __builtin_convertvector(low < 32767.0f ? low : avx512::all(32767), VI);
  const VS row = __builtin_convertvector(words, VS);
  std::memcpy(to, &row, std::min<int64_t>(count, 16) * 2);
}

// A bundle of heads of a layer.
struct Bundle {
  const Transform& c;
  int64_t layer, bundle;

  int64_t row(int64_t step, int64_t first) const { return ((layer - first) * c.bundles + bundle) * c.width + step; }

  // Of up to 16 numbers from `first` on those that lie together, [lane, lane + count): calls
  // act(lane, where their means are, where those of the first token are, count). Tokens are `c.token_step()` apart.
  template <class Act>
  void together(int64_t first, const Act& act) const {
    const int64_t end = std::min(first + 16, c.width);
    for (int64_t at = first, count; at < end; at += count) {
      count = std::min(end - at, c.dim - at % c.dim);
      const int64_t head = bundle * (c.heads / c.bundles) + at / (c.parts * c.dim), place = head * c.dim + at % c.dim;
      const int64_t part = at / c.dim % c.parts, here = (layer - c.first) * c.parts + part;
      act(at - first, (layer * c.parts + part) * c.token_step() + place, here * c.token_step() * c.tokens + place, count);
    }
  }

  // Numbers, less means, as columns.
  void take(uint8_t* to) const {
    for (int64_t t = 0; t < c.tokens; t += 16)
      for (int64_t first = 0; first < c.blocks() * SIDE; first += 16) {
        V rows[16] = {};
        together(first, [&](int64_t lane, int64_t mean, int64_t place, int64_t count) {
          const V means = some(c.means + mean, count);
          const float* from = static_cast<const float*>(c.from) + place + t * c.token_step();
          for (int64_t i = 0; i < std::min<int64_t>(16, c.tokens - t); i++)
            store_some(reinterpret_cast<float*>(rows + i) + lane, some(from + i * c.token_step(), count) - means, count);
        });
        transpose(rows);
        uint8_t* block = to + (t / SIDE * c.blocks() + first / SIDE) * 4 * TILE + t % SIDE / 16 * TILE;
        for (int i = 0; i < 16; i += 2) lay_out_pair(rows[i], rows[i + 1], block + (first % SIDE + i) / 2 * 64);
      }
  }

  // Sums, of numbers from `first` on and tokens from `t` on, plus means, to where they belong.
  template <class T>
  void put(const float* sums, int64_t first, int64_t t, T* to) const {
    for (int quarter = 0; quarter < 4; quarter++) {
      const int64_t number = quarter / 2 * 16, token = quarter % 2 * 16;
      V rows[16];
      for (int i = 0; i < 16; i++) rows[i] = avx512::floats(sums + (number + i) * SIDE + token);
      transpose(rows);
      together(first + number, [&](int64_t lane, int64_t mean, int64_t place, int64_t count) {
        const V means = some(c.means + mean, count);
        T* line = to + place + (t + token) * c.token_step();
        for (int64_t i = 0; i < std::min<int64_t>(16, c.tokens - t - token); i++)
          store_some(line + i * c.token_step(), some(reinterpret_cast<const float*>(rows + i) + lane, count) + means, count);
      });
    }
  }

  // Steps, or codes, to what comes back of them, as columns, where sums predict them.
  void step(const float* sums, int64_t first, int64_t t, uint8_t* to) const {
    for (int i = 0; i < SIDE; i += 2)
      for (int64_t half = 0; half < 2; half++) {
        const int64_t count = c.tokens - t - half * 16;
        V decoded[2] = {};
        for (int j = 0; j < 2 && first + i + j < c.width && count > 0; j++) {
          const V predicted = avx512::floats(sums + (i + j) * SIDE + half * 16);
          const int64_t at = row(first + i + j, c.first) * c.tokens + t + half * 16;
          V codes;
          if (c.what == Transform::DECODE) {
            codes = some(static_cast<const int16_t*>(c.from) + at, count);
          } else {
            const V left = (some(static_cast<const float*>(c.from) + at, count) - predicted) / c.unit;
            codes = (V)_mm512_maskz_roundscale_ps(0xffff, (__m512)left, 0) * c.kept[row(first + i + j, 0)];
            store_some(static_cast<int16_t*>(c.to) + at, codes, count);
          }
          decoded[j] = codes * c.unit + predicted;
        }
        lay_out_pair(decoded[0], decoded[1], to + half * TILE + i / 2 * 64);
      }
  }

  // Sums of steps from `first` on and tokens from `t` on.
  void put_steps(const float* sums, int64_t first, int64_t t) const {
    for (int64_t i = 0; i < std::min(SIDE, c.width - first); i++)
      for (int64_t at = t; at < std::min(t + SIDE, c.tokens); at += 16)
        store_some(static_cast<float*>(c.to) + row(first + i, c.first) * c.tokens + at, avx512::floats(sums + i * SIDE + at - t),
                   c.tokens - at);
  }
};

inline void transform(const Transform& c, uint8_t* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  alignas(64) float sums[SIDE * SIDE];
  const int64_t blocks = c.blocks(), bundle_bytes = c.bundle_bytes();
  const auto columns = [&](int64_t bundle, int64_t layer) {
    uint8_t* of_bundle = c.kept_columns ? c.kept_columns + bundle * (c.earlier + 1) * bundle_bytes : scratch;
    return of_bundle + layer % (c.earlier + 1) * bundle_bytes;
  };
  // Sums over `count` matrices of a bundle, of J a layer, times columns of layers from `layer` backward.
  const auto products = [&](const uint8_t* w, bool has_rest, int64_t count, int64_t bundle, int64_t layer, const auto& done) {
    const int64_t panel = blocks * (has_rest ? 4 : 2) * TILE;  // Of 32 outputs.
    const int64_t share = panel / blocks / ((c.tokens + SIDE - 1) / SIDE);
    for (int64_t o = 0; o < blocks; o++)
      for (int64_t t = 0; t * SIDE < c.tokens; t++) {
        asm volatile("" ::: "memory");  // Tiles are loaded and stored behind the compiler's back.
        clear();
        for (int64_t j = 0; j < count; j++) {
          const uint8_t* from = w + (j * c.bundles * blocks + o) * panel;
          add_blocks(from, columns(bundle, layer - j) + t * blocks * 4 * TILE, blocks, has_rest,
                     from + panel + t * share * blocks, share);
        }
        store_tiles(sums);
        asm volatile("" ::: "memory");
        done(o, t);
      }
  };
  for (int64_t i = 0; i < c.bundles; i++)
    for (int64_t layer = c.first; layer < c.stop; layer++) {
      const Bundle bundle{c, layer, i};
      const uint8_t* own = c.matrices + (layer * c.bundles + i) * c.matrix_bytes(true);
      if (c.what == Transform::CODE) {
        bundle.take(columns(i, layer));
        products(own, true, 1, i, layer, [&](int64_t o, int64_t t) { bundle.put_steps(sums, o * SIDE, t * SIDE); });
        continue;
      }
      const uint8_t* earlier = c.predicting + (layer * c.earlier * c.bundles + i) * c.matrix_bytes(c.has_rest);
      products(earlier, c.has_rest, std::min(layer, c.earlier), i, layer - 1, [&](int64_t o, int64_t t) {
        bundle.step(sums, o * SIDE, t * SIDE, columns(i, layer) + (t * blocks + o) * 4 * TILE);
      });
      if (c.what != Transform::DECODE) continue;
      products(own, true, 1, i, layer, [&](int64_t o, int64_t t) {
        if (c.is_half) bundle.put(sums, o * SIDE, t * SIDE, static_cast<uint16_t*>(c.to));
        else bundle.put(sums, o * SIDE, t * SIDE, static_cast<float*>(c.to));
      });
    }
  _tile_release();
}
