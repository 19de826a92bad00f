// Products of many rows with packed weights where the machine multiplies tiles of bfloat16 (AMX). It is float32
// arithmetic all the same: a float32 is the sum of three bfloat16 exactly, and a packed weight's code is one.

using avx512::V;
using avx512::VH;
using avx512::VI;
using avx512::VU;

constexpr int TILE = 1024, TILE_ROWS = 16;  // Bytes and rows: of x 16 rows of 32 inputs, of weights 16 outputs of them.
constexpr int PARTS = 3, GROUP = 2 * TILE_ROWS;
constexpr int64_t ROWS_STEP = PARTS * 2 * TILE + GROUP * 4;     // Of a block of a group: tiles, then sums of rows.
constexpr int64_t CODES_STEP = 2 * TILE + 2 * PANEL * 4;        // Of a block of a panel: tiles, then scales and offsets.
constexpr int64_t PANEL_BYTES = PANEL_BLOCKS * CODES_STEP;

inline int64_t group_bytes(int64_t inputs) { return inputs / BLOCK * ROWS_STEP; }

// Rows of a group: of each block of inputs two tiles of each part, and the rows' sums.
inline void lay_out(const Product& p, int64_t group, uint8_t* to) {
  const int64_t rows = std::min<int64_t>(GROUP, p.rows - group * GROUP);
  for (int64_t r = 0; r < rows; r++) {
    const float* x = p.x + (group * GROUP + r) * p.inputs;
    uint8_t* block = to;
    for (int64_t i = 0; i < p.inputs; i += BLOCK, block += ROWS_STEP) {
      uint8_t* line = block + r / TILE_ROWS * TILE + r % TILE_ROWS * 64;
      V halves[] = {avx512::floats(x + i), avx512::floats(x + i + 16)};
      reinterpret_cast<float*>(block + PARTS * 2 * TILE)[r] = avx512::sum(halves[0] + halves[1]);
      for (int part = 0; part < PARTS; part++)
        for (int half = 0; half < 2; half++) {
          const VU taken = (VU)halves[half] & 0xffff0000u;  // Cut off, not rounded: what is not a number stays so.
          halves[half] -= (V)taken;
          const VH words = __builtin_convertvector(taken >> 16, VH);
          std::memcpy(line + part * 2 * TILE + half * 32, &words, 32);
        }
    }
  }
}

// Codes of 16 outputs, of `input` and the next: as bfloat16 they are exact.
template <Kind KIND>
inline __attribute__((always_inline)) VU codes_of(const uint8_t* block, int input) {
  constexpr int CODES = 32 / BITS[KIND];  // Of a word.
  const VU words = avx512::load<VU>(block + HEADER[KIND] + input / CODES * OUTPUTS * 4);
  if (KIND == BF16) return words;
  VU found[2];
  for (int i = 0; i < 2; i++) {
    const int at = input % CODES + i;
    const VI code = KIND == Q8 ? (VI)(words << (24 - 8 * at)) >> 24 : (VI)(words >> (4 * at) & 15u);
    found[i] = (VU)__builtin_convertvector(code, V);
  }
  return found[0] >> 16 | found[1];
}

// The codes of a block of 16 outputs as a tile; their scales and offsets.
template <Kind KIND>
inline void widen(const uint8_t* block, uint8_t* to, float* scales) {
  for (int i = 0; i < BLOCK; i += 2, to += 64) {
    const VU words = codes_of<KIND>(block, i);
    std::memcpy(to, &words, 64);
  }
  avx512::store(scales, KIND == BF16 ? avx512::all(1) : avx512::widened_halves(block));
  avx512::store(scales + PANEL, KIND == Q4 ? avx512::widened_halves(block + 2 * OUTPUTS) : V{});
}

// A block of a group's rows times the weights of two tiles, onto tiles 0 to 3. Small parts go first.
inline __attribute__((always_inline)) void multiply(const uint8_t* x, const uint8_t* w, int64_t column_step) {
  _tile_loadd(6, w, 64);
  _tile_loadd(7, w + column_step, 64);
  for (int part = PARTS - 1; part >= 0; part--) {
    _tile_loadd(4, x + part * 2 * TILE, 64);
    _tile_loadd(5, x + part * 2 * TILE + TILE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

inline __attribute__((always_inline)) void clear() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline __attribute__((always_inline)) void store_tiles(float* to) {  // [GROUP, PANEL]
  _tile_stored(0, to, PANEL * 4);
  _tile_stored(1, to + OUTPUTS, PANEL * 4);
  _tile_stored(2, to + TILE_ROWS * PANEL, PANEL * 4);
  _tile_stored(3, to + TILE_ROWS * PANEL + OUTPUTS, PANEL * 4);
}

// total [GROUP, PANEL] += found * scales + sums of rows * offsets.
inline __attribute__((always_inline)) void add_scaled(const float* found, const float* scales, const float* sums,
                                                      bool has_offsets, float* total) {
  const V scale[] = {avx512::floats(scales), avx512::floats(scales + OUTPUTS)};
  const V offset[] = {avx512::floats(scales + PANEL), avx512::floats(scales + PANEL + OUTPUTS)};
#pragma GCC unroll 4
  for (int r = 0; r < GROUP; r++)
    for (int t = 0; t < 2; t++) {
      const int at = r * PANEL + t * OUTPUTS;
      V sum = avx512::floats(total + at) + avx512::floats(found + at) * scale[t];
      if (has_offsets) sum += sums[r] * offset[t];
      avx512::store(total + at, sum);
    }
}

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The products of groups of rows with panels. Of rows and outputs that are not there something is computed, too, and not
// taken.
template <Kind KIND>
inline void product_of(const Product& p, const Range& panels, const Range& groups, const uint8_t* x, uint8_t* scratch) {
  const TileConfig config;
  _tile_loadconfig(&config);
  const int64_t blocks = p.inputs / BLOCK;
  const auto columns = [&](int64_t panel) { return std::min<int64_t>(PANEL, p.outputs - panel * PANEL); };
  const auto packed = [&](int64_t panel, int64_t tile, int64_t block) {
    return p.packed + ((panel * (PANEL / OUTPUTS) + tile) * blocks + block) * BLOCK_BYTES[KIND];
  };
  float* found = reinterpret_cast<float*>(scratch + PANELS * PANEL_BYTES);  // Of two blocks.
  float* totals = found + 2 * GROUP * PANEL;
  std::memset(totals, 0, (groups.last - groups.first) * PANELS * GROUP * PANEL * 4);
  for (int64_t at = 0; at < blocks; at += PANEL_BLOCKS) {
    const int64_t count = std::min<int64_t>(PANEL_BLOCKS, blocks - at);
    for (int64_t panel = panels.first; panel < panels.last; panel++)
      for (int64_t t = 0; t * OUTPUTS < columns(panel); t++)
        for (int64_t b = 0; b < count; b++) {
          uint8_t* block = scratch + (panel - panels.first) * PANEL_BYTES + b * CODES_STEP;
          widen<KIND>(packed(panel, t, at + b), block + t * TILE, reinterpret_cast<float*>(block + 2 * TILE) + t * OUTPUTS);
        }
    for (int64_t group = groups.first; group < groups.last; group++)
      for (int64_t panel = panels.first; panel < panels.last; panel++) {
        float* total = totals + ((group - groups.first) * PANELS + panel - panels.first) * GROUP * PANEL;
        const uint8_t* rows = x + group * group_bytes(p.inputs) + at * ROWS_STEP;
        const uint8_t* codes = scratch + (panel - panels.first) * PANEL_BYTES;
        for (int64_t b = 0; b <= count; b++) {  // Tiles of one block are multiplied as those of the last are added.
          asm volatile("" ::: "memory");        // They are loaded and stored behind the compiler's back.
          if (b < count) {
            clear();
            multiply(rows + b * ROWS_STEP, codes + b * CODES_STEP, TILE);
          }
          if (b > 0)
            add_scaled(found + (b - 1) % 2 * GROUP * PANEL,
                       reinterpret_cast<const float*>(codes + (b - 1) * CODES_STEP + 2 * TILE),
                       reinterpret_cast<const float*>(rows + (b - 1) * ROWS_STEP + PARTS * 2 * TILE), KIND == Q4, total);
          if (b < count) store_tiles(found + b % 2 * GROUP * PANEL);
          asm volatile("" ::: "memory");
        }
        if (at + count < blocks) continue;
        const int64_t last = std::min<int64_t>(GROUP, p.rows - group * GROUP);
        float* out = p.out + group * GROUP * p.outputs + panel * PANEL;
        for (int64_t r = 0; r < last; r++) std::memcpy(out + r * p.outputs, total + r * PANEL, columns(panel) * 4);
      }
  }
  _tile_release();
}

inline void product(const Product& p, const Range& panels, const Range& groups, const uint8_t* x, uint8_t* scratch) {
  if (p.kind == Q4) return product_of<Q4>(p, panels, groups, x, scratch);
  if (p.kind == Q8) return product_of<Q8>(p, panels, groups, x, scratch);
  product_of<BF16>(p, panels, groups, x, scratch);
}

#include "transform.h"

constexpr Wide WIDE{GROUP, PANELS * PANEL_BYTES + (2 + WIDE_ROWS / GROUP * PANELS) * GROUP * PANEL * 4, group_bytes,
                    lay_out, product};
constexpr Inner INNER{avx512::many_rows, avx512::few_rows, avx512::tile, avx512::INNER.lanes, "amx", &WIDE, transform};

// Whether the machine has it, and the system lets this process use it.
inline bool is_served() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}
