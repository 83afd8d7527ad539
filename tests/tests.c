/* SPDX-License-Identifier: MIT */
/* What the Check suites share. */
#include "config.h"

#include "cache.h"
#include "cuda_host/operands.h"
#include "tests.h"

#include <dirent.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int tests_run(Suite *suite)
{
    SRunner *runner = srunner_create(suite);
    int run, failed;

    srunner_run_all(runner, CK_ENV);
    run = srunner_ntests_run(runner);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    if (run == 0)
        fprintf(stderr,
                "nothing was run: CK_RUN_SUITE or CK_RUN_CASE names no suite or case here\n");
    return run > 0 && failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- Backends ---- */

static const struct backend_ops *const backends[] = {
    &backend_cpu,
#ifdef HAVE_CUDA_HOST
    &backend_cuda,
#endif
};

const struct backend_ops *tests_backend = &backend_cpu;

bool tests_on_cpu(void)
{
    return tests_backend == &backend_cpu;
}

int tests_run_on_backends(Suite *(*make)(void))
{
    const char *chosen = getenv("PUZZLEKV_TEST_BACKEND");
    int status = EXIT_SUCCESS;
    bool known = false;

    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        if (chosen && strcmp(chosen, backends[i]->name) != 0)
            continue;
        known = true;
        tests_backend = backends[i];
        printf("backend %s\n", tests_backend->name);
        fflush(stdout);
        if (tests_run(make()) != EXIT_SUCCESS)
            status = EXIT_FAILURE;
    }
    if (!known) {
        fprintf(stderr, "PUZZLEKV_TEST_BACKEND=%s: this build has no such backend\n", chosen);
        status = EXIT_FAILURE;
    }
    return status;
}

#ifdef HAVE_CUDA_HOST
pkv_status tests_step_layer(pkv_step *step, size_t layer, const pkv_step_io *io)
{
    pkv_step_io on_device;
    struct operands *operands = NULL;
    pkv_status status;

    if (step && step->open && io && step->cache->ops == &backend_cuda) {
        const struct geometry *geometry = &step->cache->geometry;

        operands = operands_upload(io, step->plan.rows, geometry->query_heads, geometry->kv_heads,
                                   geometry->head_dim, &on_device);
    }
    status = pkv_step_layer(step, layer, operands ? &on_device : io);
    if (operands)
        operands_download(operands, io);
    return status;
}

pkv_status tests_backend_layer(struct backend *backend, const struct geometry *geometry,
                               size_t rows, size_t layer, const pkv_step_io *io)
{
    pkv_step_io on_device;
    struct operands *operands = NULL;
    pkv_status status;

    if (tests_backend == &backend_cuda)
        operands = operands_upload(io, rows, geometry->query_heads, geometry->kv_heads,
                                   geometry->head_dim, &on_device);
    status = tests_backend->step_layer(backend, layer, operands ? &on_device : io);
    if (operands)
        operands_download(operands, io);
    return status;
}
#else
pkv_status tests_step_layer(pkv_step *step, size_t layer, const pkv_step_io *io)
{
    return pkv_step_layer(step, layer, io);
}

pkv_status tests_backend_layer(struct backend *backend, const struct geometry *geometry,
                               size_t rows, size_t layer, const pkv_step_io *io)
{
    (void)geometry;
    (void)rows;
    return tests_backend->step_layer(backend, layer, io);
}
#endif

void *tests_allocate(size_t count, size_t size)
{
    void *p = calloc(count, size);

    ck_assert_ptr_nonnull(p);
    return p;
}

/* ---- Files ---- */

const char *tests_path(const char *format, ...)
{
    static char path[4096];
    const char *data = getenv("PUZZLEKV_TEST_DATA");
    va_list arguments;
    size_t length;

    ck_assert_msg(data != NULL, "PUZZLEKV_TEST_DATA is not set");
    length = (size_t)snprintf(path, sizeof path, "%s/", data);
    ck_assert_uint_lt(length, sizeof path);
    va_start(arguments, format);
    length += (size_t)vsnprintf(path + length, sizeof path - length, format, arguments);
    va_end(arguments);
    ck_assert_uint_lt(length, sizeof path);
    return path;
}

float *tests_read_f32(const char *path, size_t count)
{
    float *x = tests_allocate(count, sizeof *x);
    FILE *file = fopen(path, "rb");

    ck_assert_msg(file != NULL, "cannot open %s", path);
    ck_assert_uint_eq(fread(x, sizeof *x, count, file), count);
    ck_assert_int_eq(fgetc(file), EOF);
    fclose(file);
    return x;
}

json_t *tests_json(const char *path)
{
    json_error_t error;
    json_t *json = json_load_file(path, JSON_ALLOW_NUL, &error);

    ck_assert_msg(json != NULL, "%s: %s", path, error.text);
    return json;
}

static void list_fisher(json_t *header, const char *name, size_t begin, size_t layers)
{
    json_object_set_new(header, name,
                        json_pack("{s:s, s:[I], s:[I, I]}", "dtype", "F32", "shape",
                                  (json_int_t)layers, "data_offsets", (json_int_t)begin,
                                  (json_int_t)(begin + layers * sizeof(float))));
}

void tests_add_fisher(const char *path, const float *k, const float *v, size_t layers)
{
    FILE *file = fopen(path, "r+b");
    uint64_t length;
    json_t *header;
    char *text, *data;
    size_t size;

    ck_assert_msg(file != NULL, "cannot open %s", path);
    ck_assert_uint_eq(fread(&length, sizeof length, 1, file), 1);
    text = tests_allocate(length + 1, 1);
    ck_assert_uint_eq(fread(text, 1, length, file), length);
    header = json_loads(text, 0, NULL);
    ck_assert_ptr_nonnull(header);
    free(text);
    fseek(file, 0, SEEK_END);
    size = (size_t)ftell(file) - sizeof length - length;
    data = tests_allocate(size, 1);
    fseek(file, (long)(sizeof length + length), SEEK_SET);
    ck_assert_uint_eq(fread(data, 1, size, file), size);

    list_fisher(header, "fisher.k", size, layers);
    list_fisher(header, "fisher.v", size + layers * sizeof *k, layers);
    text = json_dumps(header, 0);
    length = strlen(text);
    rewind(file);
    fwrite(&length, sizeof length, 1, file);
    fwrite(text, 1, length, file);
    fwrite(data, 1, size, file);
    fwrite(k, sizeof *k, layers, file);
    fwrite(v, sizeof *v, layers, file);
    ck_assert_int_eq(fclose(file), 0);
    json_decref(header);
    free(text);
    free(data);
}

void tests_make_folder(char folder[TESTS_FOLDER_BYTES])
{
    const char *parent = getenv("TMPDIR");
    int length = snprintf(folder, TESTS_FOLDER_BYTES, "%s/puzzlekv-check.XXXXXX",
                          parent == NULL ? "/tmp" : parent);

    ck_assert_int_lt(length, TESTS_FOLDER_BYTES);
    ck_assert_ptr_nonnull(mkdtemp(folder));
}

size_t tests_count_files(const char *folder)
{
    DIR *stream = opendir(folder);
    size_t n = 0;

    ck_assert_ptr_nonnull(stream);
    for (const struct dirent *entry; (entry = readdir(stream)) != NULL;)
        n += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(stream);
    return n;
}

void tests_remove_folder(const char *folder)
{
    DIR *stream = opendir(folder);

    ck_assert_ptr_nonnull(stream);
    for (struct dirent *entry; (entry = readdir(stream)) != NULL;) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(stream), entry->d_name, 0);
    }
    closedir(stream);
    rmdir(folder);
}

/* ---- Memory ---- */

/* AddressSanitizer, where it is there. */
extern void __asan_init(void) __attribute__((weak));

/* In a process of its own: what a process had at most never falls. */
static size_t measure_opening(bool (*open)(const char *path), const char *path)
{
    size_t bytes = 0;
    int ends[2];
    pid_t child;
    int status;

    ck_assert_int_eq(pipe(ends), 0);
    child = fork();
    ck_assert_int_ge(child, 0);
    if (child == 0) {
        struct rusage before, after;
        bool opened;

        getrusage(RUSAGE_SELF, &before);
        opened = open(path);
        getrusage(RUSAGE_SELF, &after);
        bytes = (size_t)(after.ru_maxrss - before.ru_maxrss) * 1024;
        _exit(!opened && write(ends[1], &bytes, sizeof bytes) == sizeof bytes ? 0 : 1);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    ck_assert_int_eq(read(ends[0], &bytes, sizeof bytes), sizeof bytes);
    close(ends[0]);
    close(ends[1]);
    return bytes;
}

void tests_check_memory(bool (*open)(const char *path), const char *path, size_t size,
                        const char *what)
{
    const size_t bytes = measure_opening(open, path);

    if (__asan_init == NULL)
        ck_assert_msg(bytes <= 40 * size + ((size_t)2 << 20), "%s: %zu bytes for a file of %zu",
                      what, bytes, size);
}

/* ---- Random numbers ---- */

static uint64_t random_state;

void tests_seed(uint64_t seed)
{
    random_state = seed;
}

uint32_t tests_random(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

float tests_random_float(void)
{
    return (float)(int32_t)tests_random() * 0x1p-31f;
}

double tests_difference(double a, double b)
{
    const double difference = fabs(a - b);

    return isnan(difference) ? INFINITY : difference;
}

/* ---- Caches ---- */

pkv_cache *tests_open_cache(const pkv_config *config)
{
    char message[PKV_MESSAGE_BYTES];
    pkv_cache *cache;

    ck_assert_msg(cache_open_with(tests_backend, config, &cache, message) == PKV_OK, "%s", message);
    return cache;
}

size_t tests_find_isas(const char *isas[TESTS_ISAS])
{
    static const char *const names[TESTS_ISAS] = {"generic", "avx2", "avx512", "neon"};
    pkv_config config;
    pkv_cache *cache;
    size_t n = 0;

    pkv_config_init(&config, sizeof config);
    config.layers = config.query_heads = config.kv_heads = 1;
    config.head_dim = 64;
    config.max_tokens = 32;
    for (size_t i = 0; i < TESTS_ISAS && tests_on_cpu(); i++) {
        config.isa = names[i];
        if (pkv_cache_open(&config, &cache, NULL) == PKV_OK)
            isas[n++] = names[i];
        pkv_cache_close(cache);
    }
    if (!tests_on_cpu()) {
        static char isa[16];

        /* Outside of tests nothing may be asserted. */
        config.isa = NULL;
        if (cache_open_with(tests_backend, &config, &cache, NULL) == PKV_OK) {
            snprintf(isa, sizeof isa, "%s", pkv_cache_isa(cache));
            isas[n++] = isa;
        }
        pkv_cache_close(cache);
    }
    return n;
}

/* ---- Comparisons ---- */

void tests_compare_ids(const int32_t *ids, size_t count, const json_t *expected, const char *what)
{
    for (size_t i = 0; i < count && i < json_array_size(expected); i++)
        ck_assert_msg(ids[i] == json_integer_value(json_array_get(expected, i)),
                      "id %zu of '%s': %d, expected %lld", i, what, ids[i],
                      (long long)json_integer_value(json_array_get(expected, i)));
    ck_assert_msg(count == json_array_size(expected), "'%s': %zu ids, expected %zu", what, count,
                  json_array_size(expected));
}

void tests_check_error(const char *text, const char *path, const char *what)
{
    ck_assert_msg(strncmp(text, path, strlen(path)) == 0, "%s", text);
    ck_assert_msg(strstr(text, what) != NULL, "no '%s' in '%s'", what, text);
}
