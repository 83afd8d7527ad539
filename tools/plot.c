/* SPDX-License-Identifier: MIT */
/* Plots as SVG files, which gnuplot draws. */
#define _GNU_SOURCE /* memfd_create, pipe2 */
#include "plot.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "output_file.h"
#include "runner/pretokenizer.h"

extern char **environ;

/* Starts gnuplot on a script from `input` that draws to `output`. */
static bool start(const char *option, int input, int output, pid_t *child, struct error *error)
{
    char *arguments[] = {(char[]){"gnuplot"}, NULL, NULL};
    posix_spawn_file_actions_t actions;
    char copy[16];
    int failed = posix_spawn_file_actions_init(&actions);

    if (option != NULL) {
        snprintf(copy, sizeof copy, "%s", option);
        arguments[1] = copy;
    }
    if (failed == 0)
        failed = posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
    if (failed == 0)
        failed = posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
    if (failed == 0)
        failed = posix_spawnp(child, "gnuplot", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (failed == ENOENT)
        return error_set(error, "gnuplot: is not installed, and --plot draws with it (Debian "
                                "package gnuplot-nox)");
    return failed == 0 || error_set(error, "gnuplot: cannot be run: %s", strerror(failed));
}

static bool finish(pid_t child, struct error *error)
{
    int status;

    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR)
            return error_set(error, "gnuplot: %s", strerror(errno));
    }
    if (WIFSIGNALED(status))
        return error_set(error, "gnuplot: ended by signal %d", WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ||
           error_set(error, "gnuplot: failed with status %d", WEXITSTATUS(status));
}

bool plot_check(struct error *error)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    pid_t child;
    bool done;

    if (null < 0)
        return error_set(error, "/dev/null: %s", strerror(errno));
    done = start("--version", null, null, &child, error) && finish(child, error);
    close(null);
    return done;
}

/* ---- Quality against ratio ---------------------------------------------------------------------
 */

static int compare_ratios(const void *a, const void *b)
{
    const double x = ((const struct plot_point *)a)->x, y = ((const struct plot_point *)b)->x;

    return (x > y) - (x < y);
}

/* Bytes of a policy's name, which its parameters follow. */
static size_t name_length(const char *kv)
{
    return strcspn(kv, ":");
}

static bool same_policy(const char *a, const char *b)
{
    return name_length(a) == name_length(b) && memcmp(a, b, name_length(a)) == 0;
}

bool plot_quality(const struct plot_quality *results, size_t count, bool bars,
                  struct plot_panel *panel, struct error *error)
{
    struct plot_series *all = calloc(count, sizeof *all);

    panel->series = all;
    panel->series_count = 0;
    panel->x_label = "stored bytes / dense bytes";
    if (all == NULL)
        return error_set(error, "out of memory for the plot");
    for (size_t i = 0; i < count; i++) {
        struct plot_series *series = &all[panel->series_count];
        struct plot_point *points;
        bool seen = false;

        for (size_t j = 0; j < i; j++)
            seen |= same_policy(results[i].kv, results[j].kv);
        if (seen)
            continue;
        points = calloc(count, sizeof *points);
        series->name = strndup(results[i].kv, name_length(results[i].kv));
        series->points = points;
        series->colour = (int)panel->series_count++;
        series->style = PLOT_MARKS;
        series->bars = bars;
        if (points == NULL || series->name == NULL)
            return error_set(error, "out of memory for the plot");
        for (size_t j = i; j < count; j++) {
            if (same_policy(results[i].kv, results[j].kv))
                points[series->count++] = (struct plot_point){results[j].ratio, results[j].value,
                                                              results[j].low, results[j].high};
        }
        qsort(points, series->count, sizeof *points, compare_ratios);
    }
    return true;
}

void plot_quality_free(struct plot_panel *panel)
{
    for (size_t i = 0; panel->series != NULL && i < panel->series_count; i++) {
        free((void *)panel->series[i].name);
        free((void *)panel->series[i].points);
    }
    free((void *)panel->series);
    panel->series = NULL;
    panel->series_count = 0;
}

const char *plot_file_title(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash != NULL && slash[1] != '\0' ? slash + 1 : path;
}

/* ---- The script ------------------------------------------------------------------------------ */

/* A string of the script, as it is but for what an SVG file cannot hold. */
static void quote(FILE *script, const char *text)
{
    const size_t length = strlen(text);

    putc('\'', script);
    for (size_t at = 0; at < length;) {
        const int sequence = utf8_sequence(text + at, length - at);
        const size_t size = sequence > 0 ? (size_t)sequence : 1;

        if (text[at] == '\'')
            putc('\'', script);
        if (sequence <= 0)
            putc('?', script);
        else if ((unsigned char)text[at] < 0x20)
            putc(' ', script);
        else
            fwrite(text + at, 1, size, script);
        at += size;
    }
    putc('\'', script);
}

static bool is_plain(const struct plot_point *point)
{
    return isfinite(point->x) && isfinite(point->y);
}

static void write_points(FILE *script, const struct plot_series *series, size_t panel, size_t index)
{
    fprintf(script, "$data_%zu_%zu << END_OF_DATA\n", panel, index);
    for (size_t i = 0; i < series->count; i++) {
        const struct plot_point *point = &series->points[i];

        if (is_plain(point))
            fprintf(script, "%.9g %.9g %.9g %.9g\n", point->x, point->y,
                    series->bars ? point->low : point->y, series->bars ? point->high : point->y);
    }
    fputs("END_OF_DATA\n", script);
}

static void write_series(FILE *script, const struct plot_series *series, size_t panel, size_t index)
{
    static const char *const colours[] = {"#0060ad", "#dd181f", "#2e8b57", "#c46a00", "#7a3e9d",
                                          "#00808a", "#8a6d3b", "#d6338a", "#555555", "#6b8e23"};
    enum { COLOURS = sizeof colours / sizeof *colours };
    static const int point_types[] = {7, 9, 5, 13}; /* disc, triangle, square, diamond */
    const char *colour = colours[series->colour % COLOURS];
    const int point_type = point_types[series->colour / COLOURS % 4];

    if (series->bars)
        fprintf(script,
                "$data_%zu_%zu using 1:2:3:4 with yerrorbars linecolor '%s' pointtype 0 notitle, ",
                panel, index, colour);
    fprintf(script, "$data_%zu_%zu using 1:2 with ", panel, index);
    if (series->style == PLOT_MARKS)
        fprintf(script, "linespoints pointtype %d pointsize 0.7 linecolor '%s' linewidth 1",
                point_type, colour);
    else
        fprintf(script, "lines linecolor '%s' linewidth %s", colour,
                series->style == PLOT_LINE ? "2.5" : "0.4");
    if (series->name != NULL) {
        fputs(" title ", script);
        quote(script, series->name);
    } else {
        fputs(" notitle", script);
    }
}

/* gnuplot finds the range itself, but complains where there is none. */
static void write_range(FILE *script, char axis, double least, double most)
{
    if (least < most)
        fprintf(script, "set %crange [*:*] noextend\n", axis);
    else
        fprintf(script, "set %crange [%.9g:%.9g]\n", axis, least - 0.5, least + 0.5);
}

static void write_ranges(FILE *script, const struct plot_panel *panel)
{
    double least_x = INFINITY, most_x = -INFINITY, least_y = INFINITY, most_y = -INFINITY;

    for (size_t i = 0; i < panel->series_count; i++) {
        const struct plot_series *series = &panel->series[i];

        for (size_t j = 0; j < series->count; j++) {
            const struct plot_point *point = &series->points[j];

            if (!is_plain(point))
                continue;
            least_x = fmin(least_x, point->x);
            most_x = fmax(most_x, point->x);
            least_y = fmin(least_y, series->bars ? point->low : point->y);
            most_y = fmax(most_y, series->bars ? point->high : point->y);
        }
    }
    if (least_x <= most_x) {
        write_range(script, 'x', least_x, most_x);
        write_range(script, 'y', least_y, most_y);
    }
}

static void write_panel(FILE *script, const struct plot_panel *panel, size_t number)
{
    const char *gap = "plot ";

    fputs("set title ", script);
    quote(script, panel->title);
    fputs("\nset xlabel ", script);
    quote(script, panel->x_label);
    fputs("\nset ylabel ", script);
    quote(script, panel->y_label);
    /* Marks are not to lie on the frame. */
    fputs(panel->series_count > 0 && panel->series[0].style == PLOT_MARKS
              ? "\nset offsets graph 0.05, graph 0.05, graph 0.05, graph 0.05"
              : "\nset offsets 0, 0, graph 0.05, 0",
          script);
    fputs("\nset key outside right top vertical Left reverse samplen 2 noenhanced\n", script);
    write_ranges(script, panel);
    for (size_t i = 0; i < panel->series_count; i++)
        write_points(script, &panel->series[i], number, i);
    for (size_t i = 0; i < panel->series_count; i++) {
        bool any = false;

        for (size_t j = 0; j < panel->series[i].count; j++)
            any |= is_plain(&panel->series[i].points[j]);
        if (!any)
            continue;
        fputs(gap, script);
        write_series(script, &panel->series[i], number, i);
        gap = ", ";
    }
    putc('\n', script);
}

static void write_script(FILE *script, const struct plot_panel *panels, size_t panel_count)
{
    fprintf(script,
            "set terminal svg size %zu,480 dynamic noenhanced font 'sans-serif,13' "
            "background rgb 'white'\n"
            "set grid linecolor '#dddddd'\nset border 3\nset tics nomirror out\n"
            "set multiplot layout 1,%zu\n",
            40 + 700 * panel_count, panel_count);
    for (size_t i = 0; i < panel_count; i++)
        write_panel(script, &panels[i], i);
    fputs("unset multiplot\n", script);
}

/* The script as a file to be read, of no name; -1 with an error. */
static int open_script(const struct plot_panel *panels, size_t panel_count, struct error *error)
{
    int file = memfd_create("plot", MFD_CLOEXEC);
    int copy = file < 0 ? -1 : fcntl(file, F_DUPFD_CLOEXEC, 0);
    FILE *script = copy < 0 ? NULL : fdopen(copy, "w");
    bool done = script != NULL;

    if (done) {
        write_script(script, panels, panel_count);
        done = !ferror(script);
        done = fclose(script) == 0 && done && lseek(file, 0, SEEK_SET) == 0;
    } else if (copy >= 0) {
        close(copy);
    }
    if (!done) {
        error_set(error, "gnuplot: its script cannot be written: %s", strerror(errno));
        if (file >= 0)
            close(file);
        file = -1;
    }
    return file;
}

/* Takes all that gnuplot draws: it does not tell if what it writes to is full. */
static bool copy_drawing(int from, const char *path, FILE *to, struct error *error)
{
    char part[1 << 14];
    ssize_t got;

    for (;;) {
        got = read(from, part, sizeof part);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return error_set(error, "gnuplot: %s", strerror(errno));
        if (got == 0)
            break;
        if (fwrite(part, 1, (size_t)got, to) != (size_t)got)
            return error_set(error, "%s: %s", path, strerror(errno));
    }
    return fflush(to) == 0 || error_set(error, "%s: %s", path, strerror(errno));
}

bool plot_write(const char *path, const struct plot_panel *panels, size_t panel_count,
                struct error *error)
{
    struct output_file output;
    struct error ignored;
    int script = -1, ends[2] = {-1, -1};
    pid_t child;
    bool done = false;

    if (!output_file_open(&output, path, error))
        goto out;
    script = open_script(panels, panel_count, error);
    if (script < 0)
        goto out;
    if (pipe2(ends, O_CLOEXEC) != 0) {
        error_set(error, "gnuplot: %s", strerror(errno));
        goto out;
    }
    done = start(NULL, script, ends[1], &child, error);
    close(ends[1]);
    if (done) {
        done = copy_drawing(ends[0], path, output.file, error);
        /* What it is still writing then ends it. */
        close(ends[0]);
        done = finish(child, done ? error : &ignored) && done;
    } else {
        close(ends[0]);
    }
out:
    if (script >= 0)
        close(script);
    return output_file_close(&output, done, error);
}
