/* SPDX-License-Identifier: MIT */
/* session_edit FILE OFFSET BYTE...: puts bytes, in hexadecimal, into the user data of a session and
 * makes the checksum right, as someone does who knows the format. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* As puzzlekv-session(5) has it: the numbers after the magic bytes, from 1. */
enum { LAYERS = 2, MODEL_ID_BYTES = 14, USER_BYTES = 15, HEADER_BYTES = 128, CHECKSUM_BYTES = 8 };

static uint64_t number_at(FILE *file, long offset)
{
    unsigned char bytes[8] = {0};
    uint64_t number = 0;

    if (fseek(file, offset, SEEK_SET) != 0 || fread(bytes, sizeof bytes, 1, file) != 1)
        exit(1);
    for (int i = 8; i-- > 0;)
        number = number << 8 | bytes[i];
    return number;
}

int main(int argc, char **argv)
{
    FILE *file = argc > 2 ? fopen(argv[1], "r+b") : NULL;
    unsigned char *user, checksum[CHECKSUM_BYTES];
    size_t offset, size;
    long begin;

    if (file == NULL)
        return 1;
    offset = (size_t)atol(argv[2]);
    size = number_at(file, 8L * USER_BYTES);
    begin = HEADER_BYTES + CHECKSUM_BYTES + (long)number_at(file, 8L * MODEL_ID_BYTES) +
            8 * (long)number_at(file, 8L * LAYERS) + CHECKSUM_BYTES;
    user = malloc(size);
    if (user == NULL || size < offset + (size_t)(argc - 3) || fseek(file, begin, SEEK_SET) != 0 ||
        fread(user, size, 1, file) != 1)
        return 1;
    for (int i = 3; i < argc; i++)
        user[offset + (size_t)i - 3] = (unsigned char)strtoul(argv[i], NULL, 16);
    for (int i = 0; i < CHECKSUM_BYTES; i++)
        checksum[i] = (unsigned char)(XXH3_64bits(user, size) >> 8 * i);
    if (fseek(file, begin, SEEK_SET) != 0 || fwrite(user, size, 1, file) != 1 ||
        fwrite(checksum, sizeof checksum, 1, file) != 1)
        return 1;
    free(user);
    return fclose(file) == 0 ? 0 : 1;
}
