/* SPDX-License-Identifier: MIT */
/* The inner loops over weight rows as they are, and single rows of activations in bytes, for
 * instruction sets without panels; included by products_body.h. Sums over blocks of 32 are exact
 * integers. Eight lanes on every instruction set. */
#ifndef PUZZLEKV_TOOLS_RUNNER_PRODUCTS_BYTES_H
#define PUZZLEKV_TOOLS_RUNNER_PRODUCTS_BYTES_H

typedef float lanes_f32 __attribute__((vector_size(32)));
typedef int32_t lanes_i32 __attribute__((vector_size(32)));

/* Adding it rounds to an integer, which is then the low bits. */
#define ROUNDING_MAGIC 0x1.8p23f

/* To 32 codes, -127 .. 127; returns their scale. */
static inline float round_block(const float *x, int8_t *codes)
{
    const float magic = ROUNDING_MAGIC;
    vector_i32 largest = {0};
    int32_t magnitude_bits = 0, magic_bits;

    /* Without the sign order of bits is order of magnitude, with infinities and NaNs on top. */
    for (size_t i = 0; i < 32; i += LANES) {
        const vector_i32 bits = (vector_i32)load_f32(x + i) & 0x7fffffff;
        const vector_i32 larger = bits > largest;

        largest = (bits & larger) | (largest & ~larger);
    }
    for (size_t i = 0; i < LANES; i++)
        magnitude_bits = largest[i] > magnitude_bits ? largest[i] : magnitude_bits;

    const float magnitude = quant_bits_f32((uint32_t)magnitude_bits);
    const float inverse = magnitude > SMALLEST_MAGNITUDE ? 127 / magnitude : 0;

    memcpy(&magic_bits, &magic, sizeof magic_bits);
    for (size_t i = 0; i < 32; i += LANES) {
        const vector_i32 rounded = (vector_i32)(load_f32(x + i) * inverse + magic) - magic_bits;
        const vector_u8 bytes = __builtin_convertvector(rounded, vector_u8);

        memcpy(codes + i, &bytes, sizeof bytes);
    }
    return magnitude / 127;
}

/* Plain loops: compilers know the idiom. */
static inline int32_t sum_16(const int8_t *codes)
{
    int32_t sum = 0;

    for (size_t i = 0; i < 16; i++)
        sum += codes[i];
    return sum;
}

static void round_row(const float *x, size_t columns, const struct byte_activations *row)
{
    for (size_t b = 0; b < columns / 32; b++) {
        int8_t *codes = row->codes + 32 * b;
        const float scale = round_block(x + 32 * b, codes);
        const int32_t low = sum_16(codes), high = sum_16(codes + 16);

        row->scales[b] = scale;
        row->sums_16[2 * b] = scale * (float)low;
        row->sums_16[2 * b + 1] = scale * (float)high;
        row->sums_32[b] = scale * (float)(low + high);
    }
}

/* The product of a block's 32 codes with those of block b, scaled, in lanes to be added. There is
 * one scale, or with groups of 16 there are two. At first sums are 16 bits wide, and of two
 * products: at most 2 * 128 * 127. */
#ifdef __AVX2__
static inline lanes_f32 block_dot(const int8_t *weights, const struct byte_activations *a, size_t b,
                                  bool unsigned_weights, const float *scales, size_t group)
{
    const float low = scales[0] * a->scales[b];
    const float high = group == 32 ? low : scales[1] * a->scales[b];
    __m256i codes = _mm256_loadu_si256((const __m256i *)(a->codes + 32 * b));
    __m256i w = _mm256_loadu_si256((const __m256i *)weights);
    if (!unsigned_weights) {
        codes = _mm256_sign_epi8(codes, w);
        w = _mm256_abs_epi8(w);
    }

    const __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(w, codes), _mm256_set1_epi16(1));

    return (lanes_f32)_mm256_cvtepi32_ps(sums) *
           (lanes_f32){low, low, low, low, high, high, high, high};
}
#else
typedef uint8_t eight_u8 __attribute__((vector_size(8)));
typedef uint16_t eight_u16 __attribute__((vector_size(16)));
typedef uint32_t eight_u32 __attribute__((vector_size(32)));

/* Compilers have an instruction for it if there is no sign: see from_i8(). */
static inline eight_u16 widen(const int8_t *p)
{
    eight_u8 v;

    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v ^ 0x80, eight_u16) - 128;
}

static inline lanes_i32 half_dot(const int8_t *weights, const int8_t *codes)
{
    const eight_u16 sums = widen(weights) * widen(codes) + widen(weights + 8) * widen(codes + 8);

    return (lanes_i32)(__builtin_convertvector(sums ^ 0x8000, eight_u32) - 0x8000);
}

static inline lanes_f32 block_dot(const int8_t *weights, const struct byte_activations *a, size_t b,
                                  bool unsigned_weights, const float *scales, size_t group)
{
    const int8_t *codes = a->codes + 32 * b;
    const lanes_i32 low = half_dot(weights, codes), high = half_dot(weights + 16, codes + 16);

    (void)unsigned_weights;
    if (group == 32)
        return __builtin_convertvector(low + high, lanes_f32) * (scales[0] * a->scales[b]);
    return __builtin_convertvector(low, lanes_f32) * (scales[0] * a->scales[b]) +
           __builtin_convertvector(high, lanes_f32) * (scales[1] * a->scales[b]);
}
#endif

static inline __attribute__((always_inline)) float
packed_byte_dot(const unsigned char *block, const struct byte_activations *a, size_t columns,
                unpack_block *unpack, size_t elements, size_t bytes, size_t group, bool has_minima)
{
    const size_t groups = elements / group;
    const float *sums = group == 16 ? a->sums_16 : a->sums_32;
    struct quant_block unpacked;
    lanes_f32 s[2] = {{0}, {0}};
    float minima[QUANT_MAX_GROUPS] = {0};

    for (size_t b = 0; b < columns / 32; b += elements / 32, block += bytes) {
        for (size_t line = 0; line < bytes; line += 64)
            __builtin_prefetch(block + PREFETCH + line);
        unpack(block, &unpacked);
#pragma GCC unroll 8
        for (size_t i = 0; i < elements / 32; i++) {
            s[i % 2] += block_dot(unpacked.codes + 32 * i, a, b + i, has_minima,
                                  unpacked.scales + 32 / group * i, group);
        }
        if (has_minima) {
            for (size_t g = 0; g < groups; g++)
                minima[g] += unpacked.minima[g] * sums[g];
            sums += groups;
        }
    }
    for (size_t g = 1; has_minima && g < groups; g++)
        minima[0] += minima[g];

    const lanes_f32 t = s[0] + s[1];

    return (((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]))) + minima[0];
}

#define PACKED_BYTE_DOT(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                    \
    static float byte_dot_##NAME(const void *row, const struct byte_activations *a,                \
                                 size_t columns)                                                   \
    {                                                                                              \
        return packed_byte_dot(row, a, columns, quant_unpack_##NAME, ELEMENTS, BYTES, GROUP,       \
                               HAS_MINIMA);                                                        \
    }
QUANT_PACKED_TYPES(PACKED_BYTE_DOT)

#define BYTE_DOT_ENTRY(TYPE, NAME, NUMBER, ELEMENTS, BYTES, GROUP, HAS_MINIMA)                     \
    [QUANT_##TYPE] = byte_dot_##NAME,

#endif
