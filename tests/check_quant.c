/* SPDX-License-Identifier: MIT */
/* Element types of weights: conversions against the values that the Python package `gguf` gives. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../tools/runner/quant.h"
#include "tests.h"

static const uint8_t q4_0_blocks[] = {
    0x3d, 0x2a, 0x0f, 0xf0, 0x80, 0x08, 0x94, 0xc6, 0xd5, 0x39, 0x0e, 0x4c, 0x48, 0xdf,
    0xe9, 0x01, 0x7f, 0xd2, 0xf1, 0xb9, 0x0f, 0xf0, 0x80, 0x08, 0xd1, 0x4d, 0x57, 0x47,
    0xb8, 0x41, 0xfd, 0x71, 0x7a, 0x81, 0x95, 0x8d, 0x03, 0x80, 0x0f, 0xf0, 0x80, 0x08,
    0xb3, 0x9f, 0x57, 0xfd, 0x77, 0x37, 0xd8, 0x29, 0xdb, 0x9c, 0x1d, 0x0b,
};

static const uint32_t q4_0_bits[] = {
    0x3eaeac00, 0xbec7a000, 0xbec7a000, 0x00000000, 0xbe47a000, 0xbdc7a000, 0xbe15b800, 0x3d47a000,
    0x3e95b800, 0x3e47a000, 0x00000000, 0x3eaeac00, 0x3d47a000, 0xbeaeac00, 0x3eaeac00, 0xbe95b800,
    0xbec7a000, 0x3eaeac00, 0x00000000, 0xbec7a000, 0x3d47a000, 0x3e47a000, 0x3e798800, 0xbe798800,
    0xbec7a000, 0xbe47a000, 0xbe47a000, 0x3e798800, 0x3e95b800, 0xbec7a000, 0xbd47a000, 0x3e798800,
    0xc0a65c00, 0x40be2000, 0x40be2000, 0x80000000, 0x40a65c00, 0xc06da800, 0x3f3e2000, 0x3f3e2000,
    0x80000000, 0x40a65c00, 0xc06da800, 0x40a65c00, 0xbfbe2000, 0x40a65c00, 0x400e9800, 0xc06da800,
    0x40be2000, 0xc0a65c00, 0x80000000, 0x40be2000, 0xc06da800, 0x403e2000, 0x400e9800, 0x403e2000,
    0xc00e9800, 0x403e2000, 0xc0a65c00, 0x3f3e2000, 0x3f3e2000, 0x80000000, 0xbf3e2000, 0x80000000,
    0xb5a80000, 0x35c00000, 0x35c00000, 0x80000000, 0x35700000, 0xb5a80000, 0x34400000, 0xb5700000,
    0x34400000, 0x34400000, 0x80000000, 0xb4400000, 0xb5100000, 0xb5400000, 0xb5700000, 0xb5100000,
    0x35c00000, 0xb5a80000, 0x80000000, 0x35c00000, 0xb5100000, 0xb4400000, 0x35100000, 0xb5a80000,
    0x34400000, 0x35700000, 0xb5700000, 0x35900000, 0xb5700000, 0xb4400000, 0x35a80000, 0x35c00000,
};

static const uint8_t q4_1_blocks[] = {
    0x3d, 0x2a, 0x51, 0x9c, 0x0f, 0xf0, 0x80, 0x08, 0xf8, 0x77, 0xce, 0xea, 0xd2, 0xa1, 0x70,
    0x83, 0x44, 0x7f, 0x61, 0x3f, 0xf1, 0xb9, 0x2b, 0x4e, 0x0f, 0xf0, 0x80, 0x08, 0xf8, 0xb1,
    0xe1, 0x33, 0xb8, 0x5e, 0x7d, 0x00, 0x9e, 0xd4, 0xa9, 0x27, 0x03, 0x00, 0x55, 0x01, 0x0f,
    0xf0, 0x80, 0x08, 0x2f, 0x82, 0xf0, 0xd8, 0xb5, 0xa3, 0x0a, 0xbd, 0x79, 0x17, 0x3e, 0x8a,
};

static const uint32_t q4_1_bits[] = {
    0x3f3a11c0, 0xbb8a2000, 0xbb8a2000, 0x3ec57780, 0x3ec57780, 0x3eac8380, 0x3f2d97c0, 0x3ef75f80,
    0x3dbefe00, 0x3d365c00, 0xbb8a2000, 0x3e116700, 0x3e434f00, 0x3f3a11c0, 0x3d365c00, 0x3f3a11c0,
    0xbb8a2000, 0x3f3a11c0, 0x3ec57780, 0xbb8a2000, 0x3f3a11c0, 0x3eac8380, 0x3f14a3c0, 0x3f2d97c0,
    0x3f211dc0, 0x3ef75f80, 0x3eac8380, 0x3ec57780, 0x3e434f00, 0x3eac8380, 0x3e938f80, 0x3e116700,
    0x41588200, 0x41c56000, 0x41c56000, 0x4195d800, 0x4195d800, 0x41bf6f00, 0x41bf6f00, 0x41b38d00,
    0x4195d800, 0x41646400, 0x41704600, 0x41c56000, 0x41646400, 0x41ad9c00, 0x418fe700, 0x419bc900,
    0x41c56000, 0x41588200, 0x4195d800, 0x41c56000, 0x41588200, 0x41840500, 0x41646400, 0x41b38d00,
    0x41840500, 0x41a7ab00, 0x419bc900, 0x41c56000, 0x418fe700, 0x41704600, 0x4189f600, 0x41b97e00,
    0x37c10000, 0x37aa8000, 0x37aa8000, 0x37b68000, 0x37c10000, 0x37ad8000, 0x37aa8000, 0x37b68000,
    0x37b20000, 0x37af0000, 0x37b98000, 0x37be0000, 0x37b80000, 0x37b50000, 0x37bf8000, 0x37b98000,
    0x37aa8000, 0x37c10000, 0x37b68000, 0x37aa8000, 0x37ad8000, 0x37b68000, 0x37c10000, 0x37be0000,
    0x37bb0000, 0x37b98000, 0x37aa8000, 0x37bb0000, 0x37b50000, 0x37ac0000, 0x37af0000, 0x37b68000,
};

static const uint8_t q8_0_blocks[] = {
    0x3d, 0x2a, 0x80, 0x7f, 0x00, 0xff, 0xaf, 0x5c, 0xa4, 0x99, 0x1b, 0x0f, 0xa9, 0x63, 0x99,
    0x52, 0x39, 0x26, 0x61, 0xd0, 0x66, 0x61, 0x93, 0xfa, 0x64, 0x97, 0x70, 0x9a, 0x72, 0xa3,
    0x8c, 0xad, 0xf4, 0x26, 0xf1, 0xb9, 0x80, 0x7f, 0x00, 0xff, 0x0d, 0x67, 0xd3, 0x18, 0x67,
    0xf7, 0xf3, 0x37, 0x01, 0xab, 0x03, 0x4c, 0x7f, 0xdf, 0x17, 0xa9, 0x88, 0x21, 0xd8, 0xd8,
    0x7b, 0xf1, 0x9b, 0xe7, 0xf5, 0x91, 0x47, 0x25, 0x03, 0x80, 0x80, 0x7f, 0x00, 0xff, 0x3e,
    0x8d, 0x0c, 0x2e, 0x60, 0xe2, 0xf8, 0xa4, 0x95, 0x91, 0x0f, 0x60, 0xfb, 0x69, 0x36, 0x3d,
    0xb6, 0x09, 0xf8, 0xe0, 0x91, 0x77, 0xc2, 0x8c, 0x7a, 0x52, 0x72, 0xc0,
};

static const uint32_t q8_0_bits[] = {
    0xc0c7a000, 0x40c610c0, 0x00000000, 0xbd47a000, 0xc07ca680, 0x408f7b00, 0xc08f7b00, 0xc0a0a2c0,
    0x3fa86f00, 0x3f3b2600, 0xc087aec0, 0x409a65c0, 0xc0a0a2c0, 0x407fc500, 0x4031ca80, 0x3fed0e00,
    0x40974740, 0xc015b800, 0x409f1380, 0x40974740, 0xc0a9fe40, 0xbe95b800, 0x409bf500, 0xc0a3c140,
    0x40aeac00, 0xc09f1380, 0x40b1ca80, 0xc0910a40, 0xc0b4e900, 0xc08171c0, 0xbf15b800, 0x3fed0e00,
    0x42be2000, 0xc2bca3c0, 0x80000000, 0x3f3e2000, 0xc11a7a00, 0xc298fdc0, 0x4205ae80, 0xc18e9800,
    0xc298fdc0, 0x40d5e400, 0x411a7a00, 0xc2236380, 0xbf3e2000, 0x427c8280, 0xc00e9800, 0xc261c600,
    0xc2bca3c0, 0x41c41100, 0xc188a700, 0x428139c0, 0x42b23e00, 0xc1c41100, 0x41eda800, 0x41eda800,
    0xc2b6b2c0, 0x41323e00, 0x42960540, 0x41948900, 0x4102b600, 0x42a4dfc0, 0xc252eb80, 0xc1dbd500,
    0x37c00000, 0xb7be8000, 0x80000000, 0x34400000, 0xb73a0000, 0x37ac8000, 0xb6100000, 0xb70a0000,
    0xb7900000, 0x36b40000, 0x35c00000, 0x378a0000, 0x37a08000, 0x37a68000, 0xb6340000, 0xb7900000,
    0x35700000, 0xb79d8000, 0xb7220000, 0xb7370000, 0x375e0000, 0xb5d80000, 0x35c00000, 0x36c00000,
    0x37a68000, 0xb7b28000, 0x373a0000, 0x37ae0000, 0xb7b70000, 0xb7760000, 0xb7ab0000, 0x37400000,
};

static const uint16_t f16_values[] = {
    0x0000, 0x8000, 0x3c00, 0xbc00, 0x0001, 0x03ff, 0x0400,
    0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x2e66, 0x3555,
};

static const uint32_t f16_bits[] = {
    0x00000000, 0x80000000, 0x3f800000, 0xbf800000, 0x33800000, 0x387fc000, 0x38800000,
    0x477fe000, 0xc77fe000, 0x7f800000, 0xff800000, 0x3dccc000, 0x3eaaa000,
};

static const uint16_t bf16_values[] = {0x0000, 0x8000, 0x3f80, 0x0001, 0x7f7f, 0xff80, 0x4049};

static const uint32_t bf16_bits[] = {
    0x00000000, 0x80000000, 0x3f800000, 0x00010000, 0x7f7f0000, 0xff800000, 0x40490000,
};

static const uint32_t f32_bits[] = {0x00000001, 0x80000000, 0x7f7fffff, 0xc0490fdb};

/* Every prefix of whole blocks must give the same bits, and nothing past it may be written. */
static void check_row(enum quant_type type, const void *blocks, size_t bytes, const uint32_t *bits,
                      size_t count)
{
    const struct quant_info *info = quant_info(type);
    float *out = malloc((count + 1) * sizeof *out);
    size_t row_bytes;

    ck_assert(quant_row_bytes(type, count, &row_bytes));
    ck_assert_uint_eq(row_bytes, bytes);
    for (size_t n = 0; n <= count; n += info->block_elements) {
        memset(out, 0x5a, (count + 1) * sizeof *out);
        info->dequantise(blocks, n, out);
        for (size_t i = 0; i <= count; i++) {
            uint32_t got;

            memcpy(&got, &out[i], sizeof got);
            ck_assert_msg(got == (i < n ? bits[i] : 0x5a5a5a5a), "%s: %zu of %zu: %08x", info->name,
                          i, n, (unsigned)got);
        }
    }
    free(out);
}

#define CHECK_ROW(type, blocks, bits)                                                              \
    check_row(type, blocks, sizeof(blocks), bits, sizeof(bits) / sizeof(bits)[0])

START_TEST(rows_are_bit_exact)
{
    CHECK_ROW(QUANT_F32, f32_bits, f32_bits);
    CHECK_ROW(QUANT_F16, f16_values, f16_bits);
    CHECK_ROW(QUANT_BF16, bf16_values, bf16_bits);
    CHECK_ROW(QUANT_Q4_0, q4_0_blocks, q4_0_bits);
    CHECK_ROW(QUANT_Q4_1, q4_1_blocks, q4_1_bits);
    CHECK_ROW(QUANT_Q8_0, q8_0_blocks, q8_0_bits);
}
END_TEST

static uint32_t hexadecimal(const char *text, size_t index, size_t digits)
{
    char number[9] = {0};

    memcpy(number, text + index * digits, digits);
    return (uint32_t)strtoul(number, NULL, 16);
}

/* Types whose elements are too many to be written out here. */
START_TEST(rows_in_data_are_bit_exact)
{
    json_t *data = tests_json(tests_path("quant.json"));
    size_t found = 0;

    for (int type = 0; type < QUANT_TYPES; type++) {
        const json_t *entry = json_object_get(data, quant_info((enum quant_type)type)->name);
        const char *blocks = json_string_value(json_object_get(entry, "blocks"));
        const char *values = json_string_value(json_object_get(entry, "values"));

        if (entry == NULL)
            continue;
        const size_t bytes = strlen(blocks) / 2, count = strlen(values) / 8;
        uint8_t *row = malloc(bytes);
        uint32_t *bits = malloc(count * sizeof *bits);

        for (size_t i = 0; i < bytes; i++)
            row[i] = (uint8_t)hexadecimal(blocks, i, 2);
        for (size_t i = 0; i < count; i++)
            bits[i] = hexadecimal(values, i, 8);
        ck_assert_uint_ge(count, 3 * quant_info((enum quant_type)type)->block_elements);
        check_row((enum quant_type)type, row, bytes, bits, count);
        free(row);
        free(bits);
        found++;
    }
    ck_assert_uint_eq(found, 9);
    json_decref(data);
}
END_TEST

START_TEST(every_f16_is_exact)
{
    for (uint32_t f16 = 0; f16 < 0x10000; f16++) {
        const int exponent = (int)(f16 >> 10 & 31);
        const double fraction = f16 & 1023;
        const float got = quant_f16_f32((uint16_t)f16);
        double expected;

        ck_assert_int_eq(signbit(got) != 0, f16 >> 15);
        if (exponent == 31) {
            ck_assert(fraction == 0 ? isinf(got) : isnan(got));
            continue;
        }
        expected = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
        ck_assert_msg(fabs((double)got) == expected, "%04x: %a", (unsigned)f16, (double)got);
    }
}
END_TEST

START_TEST(vectorised_and_single_conversions_agree)
{
    uint16_t *in = malloc(0x10000 * sizeof *in);
    float *out = malloc(0x10000 * sizeof *out);

    for (size_t i = 0; i < 0x10000; i++)
        in[i] = (uint16_t)i;
    quant_info(QUANT_F16)->dequantise(in, 0x10000, out);
    for (size_t i = 0; i < 0x10000; i++) {
        const float single = quant_f16_f32(in[i]);

        ck_assert(memcmp(&single, &out[i], sizeof single) == 0);
    }
    quant_info(QUANT_BF16)->dequantise(in, 0x10000, out);
    for (size_t i = 0; i < 0x10000; i++) {
        const uint32_t bits = (uint32_t)i << 16;

        ck_assert(memcmp(&bits, &out[i], sizeof bits) == 0);
    }
    free(in);
    free(out);
}
END_TEST

START_TEST(row_sizes_are_checked)
{
    size_t bytes;

    ck_assert(quant_row_bytes(QUANT_Q4_0, 64, &bytes));
    ck_assert_uint_eq(bytes, 36);
    ck_assert(quant_row_bytes(QUANT_Q4_1, 64, &bytes));
    ck_assert_uint_eq(bytes, 40);
    ck_assert(quant_row_bytes(QUANT_Q8_0, 64, &bytes));
    ck_assert_uint_eq(bytes, 68);
    ck_assert(quant_row_bytes(QUANT_Q6_K, 512, &bytes));
    ck_assert_uint_eq(bytes, 420);
    ck_assert(!quant_row_bytes(QUANT_Q6_K, 32, &bytes));
    ck_assert(!quant_row_bytes(QUANT_Q2_K, 384, &bytes));
    ck_assert(!quant_row_bytes(QUANT_Q4_0, 33, &bytes));
    ck_assert(!quant_row_bytes(QUANT_Q8_0, 31, &bytes));
    ck_assert(!quant_row_bytes(QUANT_F32, SIZE_MAX / 4 + 1, &bytes));
    ck_assert(!quant_row_bytes(QUANT_BF16, SIZE_MAX / 2 + 1, &bytes));
    ck_assert(!quant_row_bytes(QUANT_Q8_0, SIZE_MAX - 31, &bytes));
    ck_assert(quant_row_bytes(QUANT_F32, SIZE_MAX / 4, &bytes));
    ck_assert_uint_eq(bytes, SIZE_MAX - 3);
}
END_TEST

START_TEST(numbers_and_names_agree)
{
    char supported[128] = "";

    for (int i = 0; i < QUANT_TYPES; i++) {
        const struct quant_info *info = quant_info((enum quant_type)i);
        enum quant_type type = QUANT_TYPES;

        ck_assert(quant_from_gguf(info->gguf_type, &type));
        ck_assert_int_eq(type, i);
        ck_assert_str_eq(quant_gguf_name(info->gguf_type), info->name);
        strcat(supported, i == 0 ? "" : ", ");
        strcat(supported, info->name);
    }
    ck_assert_str_eq(supported, QUANT_SUPPORTED);
    ck_assert_str_eq(quant_gguf_name(16), "IQ2_XXS");
    ck_assert_str_eq(quant_gguf_name(4), "unknown");
    ck_assert_str_eq(quant_gguf_name(UINT32_MAX), "unknown");
}
END_TEST

START_TEST(other_numbers_are_unknown)
{
    enum quant_type type;

    ck_assert(!quant_from_gguf(16, &type));
    ck_assert(!quant_from_gguf(4, &type));
    ck_assert(!quant_from_gguf(UINT32_MAX, &type));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("quant");
    TCase *test_case = tcase_create("quant");

    tcase_add_test(test_case, rows_are_bit_exact);
    tcase_add_test(test_case, rows_in_data_are_bit_exact);
    tcase_add_test(test_case, every_f16_is_exact);
    tcase_add_test(test_case, vectorised_and_single_conversions_agree);
    tcase_add_test(test_case, row_sizes_are_checked);
    tcase_add_test(test_case, numbers_and_names_agree);
    tcase_add_test(test_case, other_numbers_are_unknown);
    suite_add_tcase(suite, test_case);
    return tests_run(suite);
}
