// CPU kernels behind `jax.ffi`: attention that reads keys and values once, and products with weights that stay as small
// in memory as their file has them. Float32 arithmetic throughout. And the products of KV that is coded for storage.
//
// The inner loops (inner.h) are compiled for several kinds of x86-64, of which the machine takes the best; elsewhere for
// what the compiler is set to.
//
// Not here: what is asked for (calls.h), who uses which, which matrices are packed (cpu_kernels.py).
#include <numeric>
#include <type_traits>
#include <utility>

#include "calls.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CA_X86 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define CA_LANES 16
#define CA_NAME "avx512"
namespace ca::avx512 {
#include "inner.h"
}
#undef CA_LANES
#undef CA_NAME
#pragma GCC pop_options
#if defined(__linux__) && __GNUC__ >= 11
#define CA_AMX 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,amx-tile,amx-bf16")
namespace ca::amx {
#include "amx.h"
}
#pragma GCC pop_options
#endif
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define CA_LANES 8
#define CA_NAME "avx2"
namespace ca::avx2 {
#include "inner.h"
}
#undef CA_LANES
#undef CA_NAME
#pragma GCC pop_options
#endif
#define CA_LANES 4
#define CA_NAME "plain"
namespace ca::plain {
#include "inner.h"
}

namespace ca {
namespace {

// Those that the machine has, best first.
std::vector<const Inner*> served() {
  std::vector<const Inner*> found;
#ifdef CA_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
#ifdef CA_AMX
    if (amx::is_served()) found.push_back(&amx::INNER);
#endif
    found.push_back(&avx512::INNER);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2::INNER);
#endif
  found.push_back(&plain::INNER);
  return found;
}

std::atomic<const Inner*> chosen{served().front()};

// Attention.

bool has_few_rows_of(int64_t dim) {
  return dim == 16 || dim == 32 || dim == 64 || dim == 80 || dim == 96 || dim == 128;
}

// The results of rows whose keys several tasks have read: tasks `[begin, end)`, of the same rows.
void join(const Call& c, const std::vector<Task>& tasks, size_t begin, size_t end) {
  const Task& first = tasks[begin];
  for (int64_t i = 0; i < first.stop - first.first; i++) {
    const int64_t offset = i * (c.dim + 2);
    float top = -INFINITY, weight = 0, *out = result(c, first, first.first + i);
    for (size_t j = begin; j < end; j++) top = std::max(top, tasks[j].partial[offset]);
    std::memset(out, 0, sizeof(float) * c.dim);
    for (size_t j = begin; j < end; j++) {
      const float* part = tasks[j].partial + offset;
      const float share = part[0] == -INFINITY ? 0.0f : std::exp(part[0] - top);
      weight += share * part[1];
      for (int64_t d = 0; d < c.dim; d++) out[d] += share * part[2 + d];
    }
    for (int64_t d = 0; d < c.dim; d++) out[d] /= weight;
  }
}

void attend(ffi::ThreadPool& pool, const Call& c, int64_t rows) {
  const Inner& inner = *chosen.load();
  std::vector<Task> few, many;
  int64_t num_partials = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t count = c.tokens(row) * c.groups();
    if (!count) continue;
    if ((count <= FEW || c.tokens(row) == 1) && has_few_rows_of(c.dim)) {
      const int64_t end = c.place(row, c.tokens(row) - 1) + 1;
      const int64_t begin = c.window > 0 ? std::max<int64_t>(0, c.place(row, 0) - c.window + 1) : 0;
      for (int64_t head = 0; head < c.kv_heads; head++)
        for (int64_t first = 0; first < count; first += FEW)
          for (int64_t at = begin; at < end; at += SPLIT) {
            few.push_back({row, head, first, std::min(first + FEW, count), at, std::min(at + SPLIT, end), nullptr});
            num_partials += FEW * (c.dim + 2);
          }
    } else {
      // The last rows have most keys: they go first.
      for (int64_t first = (count - 1) / inner.lanes * inner.lanes; first >= 0; first -= inner.lanes)
        for (int64_t head = 0; head < c.kv_heads; head++)
          many.push_back({row, head, first, std::min(first + inner.lanes, count), 0, 0, nullptr});
    }
  }
  std::vector<float> partials(num_partials);
  for (size_t i = 0; i < few.size(); i++) few[i].partial = partials.data() + i * FEW * (c.dim + 2);
  const size_t size = scratch_floats(c.dim, inner.lanes);
  in_parallel(pool, many.size() + few.size(), [&](int64_t i) {
    thread_local std::vector<float> scratch;
    if (scratch.size() < size) scratch.resize(size);
    const int64_t among_few = i - static_cast<int64_t>(many.size());
    among_few < 0 ? inner.many_rows(c, many[i], scratch.data()) : inner.few_rows(c, few[among_few], scratch.data());
  });
  for (size_t i = 0, end; i < few.size(); i = end) {
    for (end = i + 1; end < few.size() && few[end].begin > few[i].begin && few[end].head == few[i].head &&
                      few[end].row == few[i].row && few[end].first == few[i].first;)
      end++;
    join(c, few, i, end);
  }
}

// Puts the rows' keys and values into their pages; `token_step` is from one token's to the next, in floats.
void write(ffi::ThreadPool& pool, const Call& c, int64_t rows, const float* keys, const float* values,
           int64_t token_step) {
  for (int64_t row = 0; row < rows; row++)
    in_parallel(pool, (c.tokens(row) + WRITTEN - 1) / WRITTEN, [&](int64_t part) {
      for (int64_t i = part * WRITTEN; i < std::min((part + 1) * WRITTEN, c.tokens(row)); i++) {
        const int64_t place = c.place(row, i), at = (c.starts[row] + i) * token_step;
        float* to = c.page(row, place) + place % c.page_tokens * c.dim;
        for (int64_t head = 0; head < c.kv_heads; head++, to += c.page_tokens * c.dim) {
          std::memcpy(to, keys + at + head * c.dim, sizeof(float) * c.dim);
          std::memcpy(to + c.kv_heads * c.page_tokens * c.dim, values + at + head * c.dim, sizeof(float) * c.dim);
        }
      }
    });
}

using Floats = ffi::Buffer<ffi::F32>;

using Numbers = ffi::Buffer<ffi::S32>;

Call over_pages(Floats& pages, Numbers& table) {
  const auto p = pages.dimensions();
  Call c{};
  c.pages = pages.typed_data(), c.table = table.typed_data(), c.most_pages = table.dimensions()[1];
  c.kv_heads = p[2], c.page_tokens = p[3], c.dim = p[4];
  return c;
}

// Unrotated queries [1, T, N, H] of all rows over pages [P, 2, K, page, H], into which new keys and values [1, T, K, H]
// are put first; none where there are none. The pages that come out are those that come in.
ffi::Error attend_pages(ffi::ThreadPool pool, Floats queries, Floats new_keys, Floats new_values, Floats pages,
                        Numbers table, Numbers starts, Numbers places, Floats cosines, Floats sines, int64_t window,
                        float scale, ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> written) {
  const auto q = queries.dimensions();
  const int64_t rows = table.dimensions()[0];
  if (written->typed_data() != pages.typed_data())
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "pages must be given to be written to");
  Call c = over_pages(pages, table);
  c.queries = queries.typed_data(), c.out = out->typed_data();
  c.starts = starts.typed_data(), c.places = places.typed_data();
  c.cosines = cosines.typed_data(), c.sines = sines.typed_data(), c.half = cosines.dimensions().back();
  c.heads = q[2], c.window = window, c.scale = scale;
  if (new_keys.element_count())
    write(pool, c, rows, new_keys.typed_data(), new_values.typed_data(), c.kv_heads * c.dim);
  attend(pool, c, rows);
  const int64_t used = c.starts[rows] * c.heads * c.dim;
  std::memset(c.out + used, 0, sizeof(float) * (q[0] * q[1] * c.heads * c.dim - used));
  return ffi::Error::Success();
}

// Keys and values [2, S, K, H] into the pages of one row: `count` of them, from place `start` on.
ffi::Error write_pages(ffi::ThreadPool pool, Floats kv, Floats pages, Numbers table, Numbers start, Numbers count,
                       ffi::ResultBuffer<ffi::F32> written) {
  if (written->typed_data() != pages.typed_data())
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "pages must be given to be written to");
  const auto shape = kv.dimensions();
  const int32_t starts[] = {0, count.typed_data()[0]};
  std::vector<int32_t> places(starts[1]);
  std::iota(places.begin(), places.end(), start.typed_data()[0]);
  Call c = over_pages(pages, table);
  c.starts = starts, c.places = places.data();
  const float* keys = kv.typed_data();
  write(pool, c, 1, keys, keys + shape[1] * shape[2] * shape[3], c.kv_heads * c.dim);
  return ffi::Error::Success();
}

// Products with packed weights.

// Memory that a thread keeps from one call to the next: fresh pages cost more than what is put there. In whole lines of the
// cache: tiles that straddle them load at a third of the speed.
struct Kept {
  std::unique_ptr<uint8_t[]> all;
  int64_t size = 0;
  uint8_t* of(int64_t bytes) {
    if (size < bytes) all.reset(new uint8_t[bytes + 63]()), size = bytes;
    return all.get() + (64 - reinterpret_cast<uintptr_t>(all.get()) % 64) % 64;
  }
};

// Of many rows, so many at a time: what they are laid out in is kept.
void product_of_many(ffi::ThreadPool& pool, const Wide& wide, const Product& all) {
  thread_local Kept groups;
  const int64_t panels = (all.outputs + PANEL - 1) / PANEL, bytes = wide.group_bytes(all.inputs);
  for (int64_t row = 0; row < all.rows; row += WIDE_ROWS) {
    Product p = all;
    p.x += row * p.inputs, p.out += row * p.outputs, p.rows = std::min<int64_t>(WIDE_ROWS, p.rows - row);
    const int64_t count = (p.rows + wide.group - 1) / wide.group;
    uint8_t* laid_out = groups.of(count * bytes);
    in_parallel(pool, count, [&](int64_t i) { wide.lay_out(p, i, laid_out + i * bytes); });
    // At least four tasks a thread, of up to PANELS panels; where there are few panels, of a part of the rows.
    const int64_t wanted = 4 * static_cast<int64_t>(pool.num_threads());
    const int64_t batch = std::clamp<int64_t>(panels / wanted, 1, PANELS), batches = (panels + batch - 1) / batch;
    const int64_t parts = std::clamp<int64_t>(wanted / batches, 1, count);
    in_parallel(pool, batches * parts, [&](int64_t i) {
      thread_local Kept scratch;
      const int64_t part = i / batches, first = i % batches * batch;
      wide.multiply(p, {first, std::min(first + batch, panels)}, {part * count / parts, (part + 1) * count / parts}, laid_out,
                 scratch.of(wide.scratch_bytes));
    });
  }
}

ffi::Error packed_dot(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> packed, int64_t kind,
                      ffi::ResultBuffer<ffi::F32> out) {
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1], outputs = out->dimensions()[1];
  const int64_t tile_bytes = inputs / BLOCK * BLOCK_BYTES[kind], tiles = outputs / OUTPUTS;
  if (tiles * tile_bytes != static_cast<int64_t>(packed.element_count()) || outputs % OUTPUTS || inputs % BLOCK)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "packed weights must be as large as inputs times outputs");
  const float* from = x.typed_data();
  const Inner& inner = *chosen.load();
  if (inner.wide && rows > inner.wide->group) {
    product_of_many(pool, *inner.wide, {packed.typed_data(), from, nullptr, out->typed_data(), kind, rows, inputs, outputs});
    return ffi::Error::Success();
  }
  std::vector<float> sums;
  if (kind == Q4) {
    sums.resize(rows * (inputs / BLOCK));
    for (size_t i = 0; i < sums.size(); i++) sums[i] = std::accumulate(from + i * BLOCK, from + (i + 1) * BLOCK, 0.0f);
  }
  const Product product{packed.typed_data(), from, sums.data(), out->typed_data(), kind, rows, inputs, outputs};
  const int64_t chunk = std::max<int64_t>(1, tiles / (8 * static_cast<int64_t>(pool.num_threads())));
  in_parallel(pool, (tiles + chunk - 1) / chunk, [&](int64_t i) {
    for (int64_t tile = i * chunk; tile < std::min((i + 1) * chunk, tiles); tile++) inner.tile(product, tile);
  });
  return ffi::Error::Success();
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

float float_of(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
  const float magnitude = exponent ? std::ldexp(0x400 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return half & 0x8000 ? -magnitude : magnitude;
}

uint16_t half_of(float x) {  // Rounded to the nearest, ties to even. Of numbers under 65,504; others are no codes' scale.
  const int exponent = std::max(x ? std::ilogb(x) : -15, -15);
  const float fraction = std::nearbyint(std::ldexp(std::fabs(x), 10 - std::max(exponent, -14)));
  const int found = exponent < -14 ? fraction : (exponent + 14) * 0x400 + fraction;  // A carry goes on to the exponent.
  return std::min(found, 0x7bff) | (std::signbit(x) ? 0x8000 : 0);
}

// Whether 32 weights are codes from `least` to `most` times a scale, behind an offset; to float32's rounding.
bool found_codes(const float* w, float scale, float offset, int least, int most, uint32_t* codes) {
  for (int i = 0; i < BLOCK; i++) {
    const float code = scale ? std::nearbyint((w[i] - offset) / scale) : 0;
    if (!(code >= least && code <= most)) return false;
    const float slack = 0x1p-22f * std::max(std::fabs(offset), std::fabs(w[i]));
    if (!(std::fabs(code * scale + offset - w[i]) <= slack)) return false;
    codes[i] = static_cast<int32_t>(code);
  }
  return true;
}

// Packs 32 weights of one output, `lane` of its tile; whether they are such numbers.
bool pack_block(const float* w, int64_t kind, int lane, uint8_t* block) {
  uint32_t codes[BLOCK];
  uint16_t scale = 0, offset = 0;
  const auto [low, high] = std::minmax_element(w, w + BLOCK);
  const float widest = std::fabs(*low) > std::fabs(*high) ? *low : *high;
  if (kind == BF16) {
    for (int i = 0; i < BLOCK; i++) {
      if (bits_of(w[i]) & 0xffff) return false;
      codes[i] = bits_of(w[i]) >> 16;
    }
  } else if (kind == Q8) {
    scale = half_of(std::fabs(widest) / 127);
    if (!found_codes(w, float_of(scale), 0, -127, 127, codes)) return false;
  } else {
    // Codes of Q4_1 reach from the least weight to the largest; of Q4_0 that of the widest weight is 0.
    scale = half_of((*high - *low) / 15), offset = half_of(*low);
    if (!found_codes(w, float_of(scale), float_of(offset), 0, 15, codes)) {
      scale = half_of(-widest / 8), offset = half_of(widest);
      if (!found_codes(w, float_of(scale), float_of(offset), 0, 15, codes)) return false;
    }
  }
  if (kind != BF16) std::memcpy(block + 2 * lane, &scale, 2);
  if (kind == Q4) std::memcpy(block + 2 * (OUTPUTS + lane), &offset, 2);
  const int bits = BITS[kind], count = 32 / bits;  // Codes of a word.
  for (int i = 0; i < BLOCK; i += count) {
    uint32_t word = 0;
    for (int j = 0; j < count; j++) word |= (codes[i + j] & ((1u << bits) - 1)) << (j * bits);
    std::memcpy(block + HEADER[kind] + (i / count * OUTPUTS + lane) * 4, &word, 4);
  }
  return true;
}

float to_bf16(float x) {  // The nearest, ties to even.
  const uint32_t bits = (bits_of(x) + 0x7fff + (bits_of(x) >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

}  // namespace
}  // namespace ca

// The kind of machine that the inner loops were compiled for.
extern "C" const char* ca_kind() { return ca::chosen.load()->name; }

// Takes those that were compiled for another kind, for comparison; 1 where the machine has it, else 0.
extern "C" int ca_use(const char* name) {
  for (const ca::Inner* inner : ca::served())
    if (!std::strcmp(inner->name, name)) return ca::chosen.store(inner), 1;
  return 0;
}

// Whether `ca_transform` is for this machine: 1, else 0.
extern "C" int ca_has_transform() { return ca::chosen.load()->transform != nullptr; }

// Codes or decodes KV, on this thread; 1, or 0 where it is not for this machine.
extern "C" int ca_transform(const ca::Transform* wanted) {
  const auto transform = ca::chosen.load()->transform;
  if (!transform) return 0;
  thread_local ca::Kept scratch;
  transform(*wanted, scratch.of((wanted->earlier + 1) * wanted->bundle_bytes()));
  return 1;
}

// Packs matrices [count, width, width] of inputs and outputs for `ca_transform` (transform.h).
extern "C" void ca_pack_transform(const float* w, int64_t count, int64_t width, int64_t has_rest, uint16_t* to) {
  const int64_t blocks = (width + 31) / 32;
  for (const float* end = w + count * width * width; w < end; w += width * width)
    for (int64_t first = 0; first < blocks * 32; first += 32)
      for (int64_t block = 0; block < blocks * 32; block += 32, to += has_rest ? 2048 : 1024)
        for (int64_t i = 0; i < 32; i++)
          for (int64_t o = 0; o < 32; o++) {
            const bool is_there = block + i < width && first + o < width;
            const float weight = is_there ? w[(block + i) * width + first + o] : 0;
            const float first = ca::to_bf16(weight);
            to[o * 32 + i] = ca::bits_of(first) >> 16;
            if (has_rest) to[1024 + o * 32 + i] = ca::bits_of(ca::to_bf16(weight - first)) >> 16;
          }
}

// Packs weights, `w[input * input_step + output * output_step]`; 1 where they are such numbers, else 0.
extern "C" int ca_pack(const float* w, int64_t inputs, int64_t outputs, int64_t input_step, int64_t output_step,
                       int64_t kind, uint8_t* to) {
  using namespace ca;
  for (int64_t tile = 0; tile < outputs; tile += OUTPUTS)
    for (int64_t b = 0; b < inputs; b += BLOCK, to += BLOCK_BYTES[kind])
      for (int lane = 0; lane < OUTPUTS; lane++) {
        float block[BLOCK];
        for (int i = 0; i < BLOCK; i++) block[i] = w[(b + i) * input_step + (tile + lane) * output_step];
        if (!pack_block(block, kind, lane, to)) return 0;
      }
  return 1;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(ca_attend_pages, ca::attend_pages,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<ca::Floats>()
                                  .Arg<ca::Floats>()
                                  .Arg<ca::Floats>()
                                  .Arg<ca::Floats>()
                                  .Arg<ca::Numbers>()
                                  .Arg<ca::Numbers>()
                                  .Arg<ca::Numbers>()
                                  .Arg<ca::Floats>()
                                  .Arg<ca::Floats>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Ret<ca::Floats>()
                                  .Ret<ca::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ca_write_pages, ca::write_pages,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<ca::Floats>()
                                  .Arg<ca::Floats>()
                                  .Arg<ca::Numbers>()
                                  .Arg<ca::Numbers>()
                                  .Arg<ca::Numbers>()
                                  .Ret<ca::Floats>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ca_packed_dot, ca::packed_dot,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::U8>>()
                                  .Attr<int64_t>("kind")
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
