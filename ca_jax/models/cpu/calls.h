// What the kernels are asked for, and the loop over threads that runs them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ca {

namespace ffi = xla::ffi;

// Attention.

constexpr int KEYS = 64;    // Of a step.
constexpr int FEW = 8;      // Rows of a task, where they are not lanes.
constexpr int SPLIT = 512;  // Keys of a task of few rows.
constexpr int WRITTEN = 64;  // Tokens that a thread writes at a time.

struct Call {
  float* pages;          // [P, 2, K, page, H], 0 keys, 1 values.
  const int32_t* table;  // The pages of each row, [rows, most].
  int64_t most_pages, page_tokens;
  const float *cosines, *sines;     // Of each place.
  const float* queries;             // [tokens of all rows, N, H]
  const int32_t *starts, *places;   // Of each row its first token among all; of each token its place.
  float* out;                       // As the queries.
  int64_t heads, kv_heads, dim, half, window;
  float scale;

  int64_t groups() const { return heads / kv_heads; }
  int64_t tokens(int64_t row) const { return starts[row + 1] - starts[row]; }
  int64_t place(int64_t row, int64_t token) const { return places[starts[row] + token]; }
  float* page(int64_t row, int64_t place) const {  // Of keys; its values are behind those of all heads.
    return pages + table[row * most_pages + place / page_tokens] * 2 * kv_heads * page_tokens * dim;
  }
};

struct Task {
  int64_t row, head, first, stop;  // Rows [first, stop): row i is of token i / G and query head i % G.
  int64_t begin, end;              // Keys, where there are few rows.
  float* partial;                  // For each row the top score, the sum of weights and the weighted sum [H], likewise.
};

// Where row i of a task goes, [H].
inline float* result(const Call& c, const Task& t, int64_t i) {
  const int64_t token = c.starts[t.row] + i / c.groups();
  return c.out + (token * c.heads + t.head * c.groups() + i % c.groups()) * c.dim;
}

inline int64_t scratch_floats(int64_t dim, int64_t lanes) {
  return (2 * dim + KEYS) * lanes + (KEYS + 1) * dim + FEW * (dim + KEYS + 16 * 16);
}

// Products with packed weights: tiles of 16 outputs, one behind the other; of a tile there are blocks of 32 inputs:
//
//   4 bits     16 scales, 16 offsets (float16), then for each 8 inputs 16 words of 32 bits, one for each output:
//              its 8 codes, the first in the lowest bits
//   8 bits     16 scales, then for each 4 inputs 16 such words
//   bfloat16   for each 2 inputs 16 such words

constexpr int OUTPUTS = 16, BLOCK = 32;
enum Kind { Q4 = 0, Q8 = 1, BF16 = 2 };
constexpr int BITS[] = {4, 8, 16};  // Of a code.
constexpr int64_t HEADER[] = {2 * OUTPUTS * 2, OUTPUTS * 2, 0};
constexpr int64_t BLOCK_BYTES[] = {HEADER[Q4] + OUTPUTS * BLOCK / 2, HEADER[Q8] + OUTPUTS * BLOCK, OUTPUTS * BLOCK * 2};

struct Product {
  const uint8_t* packed;
  const float *x, *sums;  // [rows, inputs], and of it sums of blocks.
  float* out;             // [rows, outputs]
  int64_t kind, rows, inputs, outputs;
};

// Of many rows: groups of them are laid out, and each is multiplied with up to PANELS panels of PANEL outputs, PANEL_BLOCKS
// blocks of inputs of all after the other, so that all of it stays in the caches.
constexpr int PANEL = 2 * OUTPUTS, PANELS = 8, PANEL_BLOCKS = 6, WIDE_ROWS = 512;

struct Range {
  int64_t first, last;
};

struct Wide {
  int64_t group, scratch_bytes;             // Rows of a group; what a thread needs beside.
  int64_t (*group_bytes)(int64_t inputs);
  void (*lay_out)(const Product&, int64_t group, uint8_t* to);
  void (*multiply)(const Product&, const Range& panels, const Range& groups, const uint8_t* laid_out, uint8_t* scratch);
};

// KV coded for storage: numbers to steps and back, of a group of layers, as `ca_jax.storage.transform` has them. Numbers are
// [l, P, T, K, H], steps and codes [l, R, D, T].
struct Transform {
  enum What : int64_t { CODE = 0, ROUND = 1, DECODE = 2 };
  int64_t what;                             // Numbers to steps; those to codes, int16; codes to numbers.
  int64_t layers, parts, heads, dim, bundles, width, tokens;  // l, P, K, H, R, D, T
  int64_t earlier;                          // Layers that predict one, J.
  int64_t has_rest;                         // Matrices of those layers do not fit one bfloat16.
  int64_t is_half;                          // Numbers that come back are bfloat16.
  int64_t first, stop;                      // Of all layers those that are computed; `from` and `to` have no others.
  const uint8_t *matrices, *predicting;     // [l, R], forward or inverse; [l, J, R], those of layers before.
  const float *means, *kept;                // [l, P, K, H]; [l, R, D], 0 of steps that are left out, else 1.
  const void* from;
  void* to;
  uint8_t* kept_columns;                    // [R, J + 1], decoded steps between calls, in whole lines; or none: first is 0.
  float unit;                               // To whose multiples steps are rounded.

  int64_t blocks() const { return (width + 31) / 32; }
  int64_t token_step() const { return heads * dim; }
  int64_t matrix_bytes(bool has_rest) const { return blocks() * blocks() * (has_rest ? 4096 : 2048); }
  int64_t bundle_bytes() const { return (tokens + 31) / 32 * blocks() * 4096; }  // As columns.
};

// The inner loops, as compiled for one kind of machine.
struct Inner {
  void (*many_rows)(const Call&, const Task&, float* scratch);
  void (*few_rows)(const Call&, const Task&, float* scratch);
  void (*tile)(const Product&, int64_t tile);
  int64_t lanes;  // Rows of a task of many.
  const char* name;
  const Wide* wide;  // None: many rows are multiplied as few are.
  void (*transform)(const Transform&, uint8_t* scratch);  // None: the machine multiplies no tiles.
};

// Runs body(0) to body(count - 1) on the threads of XLA's pool and on this one, each as soon as a thread is free.
// Waits for all. A thread that comes late finds nothing left, and touches nothing.
template <class Body>
void in_parallel(ffi::ThreadPool& pool, int64_t count, const Body& body) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  auto state = std::make_shared<State>();
  auto work = [state, count, &body] {
    int64_t done = 0;
    for (int64_t i; (i = state->next.fetch_add(1)) < count; done++) body(i);
    if (done) state->done.fetch_add(done);
  };
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0; state->done.load() < count; spins++) {
    if (spins > 1000) std::this_thread::yield();
  }
}

}  // namespace ca
