/* SPDX-License-Identifier: MIT */
/* What the Check suites share. check.h has a macro `fail`, which is also the name of a function in
 * lib/message.h: a suite that includes message.h, by whatever way, does so before this file. */
#ifndef PUZZLEKV_TESTS_TESTS_H
#define PUZZLEKV_TESTS_TESTS_H

#include "puzzlekv.h"

#include <check.h>
#include <jansson.h>

#include <stdbool.h>

/* As ck_assert_msg() and ck_assert(), which write to a pipe even when all is well: too slow for
 * millions. */
#define require_msg(condition, ...)                                                                \
    do {                                                                                           \
        if (!(condition))                                                                          \
            ck_abort_msg(__VA_ARGS__);                                                             \
    } while (0)
#define require(condition) require_msg(condition, "%s", #condition)

/* Runs the suite and frees it. Returns main()'s exit status. */
int tests_run(Suite *suite);

/* ---- Backends ---- */

/* The backend that a suite runs on: the CPU's, unless tests_run_on_backends() says otherwise. */
extern const struct backend_ops *tests_backend;
bool tests_on_cpu(void);

/* As tests_run(), once on each backend that this build has, or on that of the environment variable
 * PUZZLEKV_TEST_BACKEND alone. */
int tests_run_on_backends(Suite *(*make)(void));

/* pkv_step_layer() with operands in the host's memory, whatever the cache's backend. */
pkv_status tests_step_layer(pkv_step *step, size_t layer, const pkv_step_io *io);

/* The same of struct backend_ops. */
struct backend;
struct geometry;
pkv_status tests_backend_layer(struct backend *backend, const struct geometry *geometry,
                               size_t rows, size_t layer, const pkv_step_io *io);

/* Zeroed; fails the test when memory runs out. */
void *tests_allocate(size_t count, size_t size);

/* ---- Files ---- */

/* The path of a file in $PUZZLEKV_TEST_DATA. It lasts until the next call. */
const char *tests_path(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The `count` elements that make up a file of f32; the caller frees them. */
float *tests_read_f32(const char *path, size_t count);

json_t *tests_json(const char *path);

/* A new folder for files that a test writes; removed with the files in it. */
#define TESTS_FOLDER_BYTES 256
void tests_make_folder(char folder[TESTS_FOLDER_BYTES]);
size_t tests_count_files(const char *folder);
void tests_remove_folder(const char *folder);

/* Adds Fisher information, k and v [layers], to a calibration of `puzzlekv-eval calibrate`, as
 * tools/fisher.py does. */
void tests_add_fisher(const char *path, const float *k, const float *v, size_t layers);

/* ---- Memory ---- */

/* `open`, which must refuse the file at `path` of `size` bytes, takes at most 40 times its size and
 * 2 MiB while it does. Not measured under AddressSanitizer, which multiplies small blocks. */
void tests_check_memory(bool (*open)(const char *path), const char *path, size_t size,
                        const char *what);

/* ---- Random numbers ---- */

/* The same sequence for the same seed everywhere. There is one for the whole process. */
void tests_seed(uint64_t seed);
uint32_t tests_random(void);
float tests_random_float(void); /* in -1 .. 1 */

/* |a - b|; infinity where one is not a number, which fmax() would pass over. */
double tests_difference(double a, double b);

/* ---- Caches ---- */

/* On tests_backend. */
pkv_cache *tests_open_cache(const pkv_config *config);

/* The instruction sets that tests_backend has on this machine and in this build. Returns how many.
 */
#define TESTS_ISAS 4
size_t tests_find_isas(const char *isas[TESTS_ISAS]);

/* ---- Comparisons ---- */

/* `what` names the text that the ids are of. */
void tests_compare_ids(const int32_t *ids, size_t count, const json_t *expected, const char *what);

/* An error's text begins with the path and has `what` in it. */
void tests_check_error(const char *text, const char *path, const char *what);

#endif
