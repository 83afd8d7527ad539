/* SPDX-License-Identifier: MIT */
/* What the programs share: command lines, text files, Ctrl-C, progress, JSON, the machine. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "options.h"

#include <cblas.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "runner/cuda_device.h"
#include "runner/pretokenizer.h"
#include "runner/products.h"
#include "runner/read_files.h"

void error_print(const char *program, const struct error *error)
{
    fprintf(stderr, "%s: %s\n", program, error->text);
}

void warning_print(const char *program, const char *path, const char *text)
{
    struct error warning;

    error_set(&warning, "%s: warning: %s", path, text);
    error_print(program, &warning);
}

/* ---- Command lines --------------------------------------------------------------------------- */

static const struct option_row *find_row(const struct option_table *table, int id)
{
    for (size_t i = 0; i < table->count; i++) {
        if (table->rows[i].id == id)
            return &table->rows[i];
    }
    return NULL;
}

bool options_next(const struct option_table *table, int argc, char **argv, int *id,
                  const char **argument, struct error *error)
{
    struct option names[OPTIONS_MAX + 1] = {{NULL, 0, NULL, 0}};
    char letters[2 * OPTIONS_MAX + 2] = ":";
    size_t length = 1;
    const struct option_row *row;

    for (size_t i = 0; i < table->count && i < OPTIONS_MAX; i++) {
        row = &table->rows[i];
        names[i] = (struct option){row->name, row->argument ? required_argument : no_argument, NULL,
                                   row->id};
        if (row->id < OPTION_LONG_ONLY) {
            letters[length++] = (char)row->id;
            if (row->argument != NULL)
                letters[length++] = ':';
        }
    }
    letters[length] = '\0';

    opterr = 0;
    *id = getopt_long(argc, argv, letters, names, NULL);
    *argument = optarg;
    if (*id != ':' && *id != '?') {
        row = find_row(table, *id);
        if (row == NULL || row->argument == NULL || strcmp(row->argument, "FILE") != 0 ||
            *optarg != '\0')
            return true;
        return error_set(error, "--%s: the name is empty", row->name);
    }
    row = find_row(table, optopt);
    if (*id == ':')
        return error_set(error, "--%s: %s is missing", row->name, row->argument);
    if (row != NULL)
        return error_set(error, "--%s: takes no argument", row->name);
    if (optopt != 0)
        return error_set(error, "-%c: unknown option; --help lists them", optopt);
    return error_set(error, "%s: unknown or ambiguous option; --help lists them", argv[optind - 1]);
}

bool options_operands(int argc, char **argv, const char *const *names, size_t count,
                      const char **operands, struct error *error)
{
    char *const *given = argv + optind;
    const size_t given_count = (size_t)(argc - optind);

    for (size_t i = 0; i < count; i++) {
        if (i >= given_count)
            return error_set(error, "%s: is missing; --help shows the usage", names[i]);
        if (*given[i] == '\0')
            return error_set(error, "%s: the name is empty", names[i]);
        operands[i] = given[i];
    }
    if (given_count > count && count == 0)
        return error_set(error, "%s: unexpected argument", given[0]);
    if (given_count > count)
        return error_set(error, "%s: unexpected argument after %s", given[count], names[count - 1]);
    return true;
}

bool options_help(const struct option_table *table, struct error *error)
{
    printf("Usage: %s\n%s\n\n", table->usage, table->summary);
    for (size_t i = 0; i < table->count; i++) {
        const struct option_row *row = &table->rows[i];
        const char *line = row->help;
        char left[64];
        int length = row->id < OPTION_LONG_ONLY ? snprintf(left, sizeof left, "-%c, ", row->id)
                                                : snprintf(left, sizeof left, "    ");

        snprintf(left + length, sizeof left - (size_t)length, "--%s%s%s", row->name,
                 row->argument ? " " : "", row->argument ? row->argument : "");
        while (line != NULL) {
            const char *end = strchr(line, '\n');

            printf("  %-26s %.*s\n", left, (int)(end ? (size_t)(end - line) : strlen(line)), line);
            line = end ? end + 1 : NULL;
            left[0] = '\0';
        }
    }
    return output_flush(error);
}

/* The core type that OpenBLAS had better be told of, if it runs one without AVX2 where there is
 * AVX2, as an older OpenBLAS does on a processor that it does not know; else NULL. */
static const char *better_core_type(void)
{
    const char *better = NULL;
#ifdef __x86_64__
    static const char *const without_avx2[] = {
        "Unknown",   "Katmai",       "Coppermine", "Northwood",  "Prescott", "Banias",
        "Atom",      "Core2",        "Penryn",     "Dunnington", "Nehalem",  "Athlon",
        "Opteron",   "Opteron_SSE3", "Barcelona",  "Nano",       "Bobcat",   "Sandybridge",
        "Bulldozer", "Piledriver",   "Steamroller"};
    const char *name = openblas_get_corename();

    for (size_t i = 0; i < sizeof without_avx2 / sizeof *without_avx2; i++) {
        if (strcmp(name, without_avx2[i]) == 0 && __builtin_cpu_supports("avx2") &&
            strstr(openblas_get_config(), "DYNAMIC_ARCH") != NULL)
            better = "Haswell";
    }
    if (better != NULL && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd"))
        better = "SkylakeX";
#endif
    return better;
}

bool options_version(const char *program, struct error *error)
{
    const char *isa, *core_type = better_core_type();
    struct device *device;

    if (!machine_isa(&isa, error) || !device_open(DEVICE_AUTO, true, &device, error))
        return false;
    printf("%s %s\ninstruction set: %s\nbackends: cpu", program, pkv_version(), isa);
    if (device != NULL)
        printf(", %s (%s)", device_name(device), device->isa);
    device_close(device);
    printf("\nBLAS: %s\n", openblas_get_config());
    if (core_type != NULL)
        printf("hint: OpenBLAS takes this processor for an old one, %s; set OPENBLAS_CORETYPE=%s\n",
               openblas_get_corename(), core_type);
    return output_flush(error);
}

bool number_size(const char *what, const char *text, size_t least, size_t most, size_t *value,
                 struct error *error)
{
    size_t number = 0;
    bool fits = *text != '\0';

    for (const char *c = text; fits && *c != '\0'; c++)
        fits = *c >= '0' && *c <= '9' && !__builtin_mul_overflow(number, 10, &number) &&
               !__builtin_add_overflow(number, (size_t)(*c - '0'), &number);
    if (fits && number >= least && number <= most) {
        *value = number;
        return true;
    }
    if (most == SIZE_MAX)
        return error_set(error, "%s: \"%.40s\" is not a whole number from %zu up", what, text,
                         least);
    return error_set(error, "%s: \"%.40s\" is not a whole number from %zu to %zu", what, text,
                     least, most);
}

bool number_real(const char *what, const char *text, double least, double most, double *value,
                 struct error *error)
{
    char *end;
    /* strtod also takes white space, "nan", "inf" and hexadecimal digits. */
    bool plain = *text != '\0' && text[strspn(text, "+-.0123456789eE")] == '\0';
    double number = plain ? strtod(text, &end) : 0;

    if (!plain || *end != '\0' || !(number >= least && number <= most))
        return error_set(error, "%s: \"%.40s\" is not a number from %g to %g", what, text, least,
                         most);
    *value = number;
    return true;
}

bool option_dtype(const char *text, pkv_dtype *dtype, struct error *error)
{
    if (strcmp(text, "bf16") == 0)
        *dtype = PKV_BF16;
    else if (strcmp(text, "f16") == 0)
        *dtype = PKV_F16;
    else if (strcmp(text, "f32") == 0)
        *dtype = PKV_F32;
    else
        return error_set(error, "--dtype: \"%.40s\" is not one of bf16, f16, f32", text);
    return true;
}

const char *dtype_name(pkv_dtype dtype)
{
    return dtype == PKV_F32 ? "f32" : dtype == PKV_F16 ? "f16" : "bf16";
}

bool option_threads(const char *text, unsigned *threads, struct error *error)
{
    size_t number;

    if (!number_size("--threads", text, 1, 1024, &number, error))
        return false;
    *threads = (unsigned)number;
    return true;
}

/* ---- Text files ------------------------------------------------------------------------------ */

bool text_read(const char *path, struct text *text, struct error *error)
{
    bool standard_input = strcmp(path, "-") == 0;
    const char *name = standard_input ? "standard input" : path;
    /* Opening a FIFO must not wait for its writer. */
    int file = standard_input ? STDIN_FILENO : open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat status;
    size_t capacity = 0;
    bool done = false;

    *text = (struct text){.name = name};
    if (file < 0 || fstat(file, &status) != 0) {
        error_set(error, "%s: %s", name, strerror(errno));
        goto out;
    }
    if (!standard_input && !S_ISREG(status.st_mode)) {
        error_set(error, "%s: not a regular file (- reads standard input)", name);
        goto out;
    }
    if (S_ISREG(status.st_mode) && !read_files_add(&status, name, error))
        goto out;
    for (;;) {
        ssize_t got;

        if (text->size + 1 >= capacity) {
            size_t more = capacity ? 2 * capacity : (size_t)1 << 16;
            char *data = realloc(text->data, more);

            if (data == NULL) {
                error_set(error, "%s: out of memory", name);
                goto out;
            }
            text->data = data;
            capacity = more;
        }
        got = read(file, text->data + text->size, capacity - text->size - 1);
        if (got == 0)
            break;
        if (got < 0 && errno == EINTR && !interrupt_seen())
            continue;
        if (got < 0) {
            error_set(error, "%s: %s", name, strerror(errno));
            goto out;
        }
        text->size += (size_t)got;
        if (text->size > TEXT_MAX_BYTES) {
            error_set(error, "%s: longer than %zu MiB", name, TEXT_MAX_BYTES >> 20);
            goto out;
        }
    }
    text->data[text->size] = '\0';
    done = true;
out:
    if (file >= 0 && !standard_input)
        close(file);
    if (!done) {
        free(text->data);
        text->data = NULL;
    }
    return done;
}

bool text_check_utf8(const char *what, const char *data, size_t size, struct error *error)
{
    size_t valid = utf8_valid_prefix(data, size);

    if (valid < size)
        return error_set(error, "%s: not valid UTF-8 at byte offset %zu", what, valid);
    return true;
}

/* ---- Ctrl-C and progress --------------------------------------------------------------------- */

/* A signal handler can reach nothing but such a variable. 0, or the signal: SIGTERM and SIGHUP
 * stay. */
static volatile sig_atomic_t interrupted;

static void note_interrupt(int signal)
{
    if (interrupted != SIGTERM && interrupted != SIGHUP)
        interrupted = signal;
}

void interrupt_catch(void)
{
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = SA_RESETHAND}, before;

    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    /* nohup(1) has it ignored. */
    if (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN)
        sigaction(SIGHUP, &action, NULL);
}

bool interrupt_seen(void)
{
    return interrupted != 0;
}

void interrupt_outlive(void)
{
    /* An answer that waits for the terminal (Ctrl-S) is not lost. */
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = SA_RESTART};

    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
}

bool interrupt_forget(void)
{
    if (interrupted == SIGINT)
        interrupted = 0;
    return interrupted == 0;
}

void progress_show(const char *format, ...)
{
    va_list arguments;

    if (!isatty(STDERR_FILENO))
        return;
    fputs("\r\033[K", stderr);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fflush(stderr);
}

void progress_clear(void)
{
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

json_t *json_finite(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *json_bytes(const char *bytes, size_t size)
{
    static const char replacement[] = "\xef\xbf\xbd";
    json_t *string = NULL;
    char *clean;
    size_t bytes_needed, length = 0;

    /* At worst every byte becomes the three of U+FFFD. */
    if (__builtin_mul_overflow(size, 3, &bytes_needed) ||
        (clean = malloc(bytes_needed + 1)) == NULL)
        return NULL;
    for (size_t at = 0; at < size;) {
        int sequence = utf8_sequence(bytes + at, size - at);
        size_t used = sequence > 0   ? (size_t)sequence
                      : sequence < 0 ? (size_t)-sequence
                                     : size - at;
        size_t add = sequence > 0 ? used : sizeof replacement - 1;

        memcpy(clean + length, sequence > 0 ? bytes + at : replacement, add);
        length += add;
        at += used;
    }
    string = json_stringn(clean, length);
    free(clean);
    return string;
}

json_t *json_text(const char *text)
{
    return json_bytes(text, strlen(text));
}

bool json_print(json_t *document, struct error *error)
{
    int failed;

    if (document == NULL)
        return error_set(error, "out of memory for the JSON document");
    /* Jansson's default of 17 digits reads back as the same double. */
    failed = json_dumpf(document, stdout, JSON_INDENT(2));
    putchar('\n');
    json_decref(document);
    if (failed)
        return error_set(error, "standard output: cannot write the JSON document");
    return output_flush(error);
}

void csv_text(const char *text)
{
    if (text[strcspn(text, ",\"\r\n")] == '\0') {
        fputs(text, stdout);
        return;
    }
    putchar('"');
    for (; *text != '\0'; text++) {
        if (*text == '"')
            putchar('"');
        putchar(*text);
    }
    putchar('"');
}

bool output_flush(struct error *error)
{
    if (fflush(stdout) != 0 || ferror(stdout))
        return error_set(error, "standard output: %s", strerror(errno));
    return true;
}

/* ---- The machine ----------------------------------------------------------------------------- */

static long read_topology(int cpu, const char *field)
{
    char path[96];
    long value = -1;
    FILE *file;

    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/%s", cpu, field);
    file = fopen(path, "re");
    if (file == NULL)
        return -1;
    if (fscanf(file, "%ld", &value) != 1)
        value = -1;
    fclose(file);
    return value;
}

void machine_hold_standard_files(const char *program)
{
    /* Open, but not for what it is used for: to read or to write fails as if it were closed. */
    static const int modes[] = {
        [STDIN_FILENO] = O_WRONLY, [STDOUT_FILENO] = O_RDONLY, [STDERR_FILENO] = O_RDONLY};
    struct error error;

    /* open() takes the lowest number that is free. */
    for (int file = STDIN_FILENO; file <= STDERR_FILENO; file++) {
        if (fcntl(file, F_GETFD) >= 0 || open("/dev/null", modes[file]) == file)
            continue;
        error_set(&error, "/dev/null: %s", strerror(errno));
        error_print(program, &error);
        _exit(EXIT_FAILED);
    }
}

void machine_calm_threads(char **argv)
{
    static const char *const variables[][2] = {{"GOMP_SPINCOUNT", "1000"}, {"KMP_BLOCKTIME", "0"}};

    if (getenv("OMP_WAIT_POLICY") != NULL)
        return;
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        if (getenv(variables[i][0]) != NULL || setenv(variables[i][0], variables[i][1], 0) != 0)
            return;
    }
    /* OpenMP reads them when it is loaded. If this fails, the program only waits less well. */
    execv("/proc/self/exe", argv);
}

void machine_start_blas(const char *program)
{
    size_t need = (size_t)openblas_get_num_threads() * PRODUCTS_BLAS_BYTES;
    struct rlimit limit;
    struct error error;

    /* The runner spreads its products over OpenMP threads that each call BLAS: a second pool of
     * threads inside BLAS would compete with them for the same cores. */
    openblas_set_num_threads(1);
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur < need) {
        error_set(&error, "address space: its limit (ulimit -v) leaves OpenBLAS less than %zu MiB",
                  need >> 20);
        error_print(program, &error);
        /* At an orderly end BLAS would wait for threads that wait for memory. */
        _exit(EXIT_FAILED);
    }
}

unsigned machine_threads(void)
{
    long cores[CPU_SETSIZE][2];
    unsigned count = 0;
    cpu_set_t allowed;

    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        long online = sysconf(_SC_NPROCESSORS_ONLN);

        return online > 0 && online <= 1024 ? (unsigned)online : 1;
    }
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        long package, core;
        unsigned other = 0;

        if (!CPU_ISSET(cpu, &allowed))
            continue;
        package = read_topology(cpu, "physical_package_id");
        core = read_topology(cpu, "core_id");
        while (core >= 0 && other < count &&
               (cores[other][0] != package || cores[other][1] != core))
            other++;
        if (core < 0)
            other = count;
        if (other == count) {
            cores[count][0] = package;
            cores[count++][1] = core;
        }
    }
    return count > 0 ? count : 1;
}

void machine_cpu(char *name, size_t size)
{
    FILE *file = fopen("/proc/cpuinfo", "re");
    struct utsname system;
    char line[256];
    bool found = false;

    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL) {
        const char *value = strchr(line, ':');

        if (strncmp(line, "model name", 10) == 0 && value != NULL) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(name, size, "%s", value + 1 + strspn(value + 1, " \t"));
            found = true;
        }
    }
    if (file != NULL)
        fclose(file);
    if (!found)
        snprintf(name, size, "%s", uname(&system) == 0 ? system.machine : "unknown");
}

/* The number behind `name` in a file of such lines, or of a file that is a number if it is "". */
static bool read_number(const char *path, const char *name, size_t *value)
{
    size_t length = strlen(name);
    FILE *file = fopen(path, "re");
    char line[256];
    bool found = false;

    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL)
        found = strncmp(line, name, length) == 0 && sscanf(line + length, "%zu", value) == 1;
    if (file != NULL)
        fclose(file);
    return found;
}

size_t machine_free_memory(void)
{
    size_t free_memory = SIZE_MAX, kilobytes, limit, used;

    if (read_number("/proc/meminfo", "MemAvailable:", &kilobytes))
        free_memory = kilobytes * 1024;
    if (read_number("/sys/fs/cgroup/memory.max", "", &limit) &&
        read_number("/sys/fs/cgroup/memory.current", "", &used) && limit - used < free_memory)
        free_memory = limit > used ? limit - used : 0;
    return free_memory;
}

bool machine_isa(const char **isa, struct error *error)
{
    char message[PKV_MESSAGE_BYTES];
    pkv_config config;
    pkv_cache *cache;

    /* The library tells it of an open cache; the smallest will do. */
    pkv_config_init(&config, sizeof config);
    config.layers = config.query_heads = config.kv_heads = 1;
    config.head_dim = 8;
    config.rank_k = config.rank_v = 1;
    config.max_tokens = 1;
    if (pkv_cache_open(&config, &cache, message) != PKV_OK)
        return error_set(error, "the library: %s", message);
    *isa = pkv_cache_isa(cache);
    pkv_cache_close(cache);
    return true;
}

double machine_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
