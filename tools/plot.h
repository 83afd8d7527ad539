/* SPDX-License-Identifier: MIT */
/* Plots as SVG files, which gnuplot draws. */
#ifndef PUZZLEKV_TOOLS_PLOT_H
#define PUZZLEKV_TOOLS_PLOT_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

struct plot_point {
    double x, y;
    double low, high; /* of y, where the series has bars */
};

struct plot_series {
    const char *name; /* NULL: not in the key */
    const struct plot_point *points;
    size_t count;
    int colour; /* 1, 2, ...: series of one colour belong together */
    enum { PLOT_LINE, PLOT_THIN_LINE, PLOT_MARKS } style; /* marks are joined by a line */
    bool bars;
};

/* One of several diagrams, side by side. */
struct plot_panel {
    const char *title, *x_label, *y_label;
    const struct plot_series *series;
    size_t series_count;
};

/* Quality against ratio: a mark for each policy, those that differ in their parameters alone in one
 * colour and joined in the order of their ratios. */
struct plot_quality {
    const char *kv; /* as typed */
    double ratio;
    double value;
    double low, high; /* of value, with bars */
};

/* Fills a panel with series, which the caller frees by plot_quality_free() whether it fails or not.
 */
bool plot_quality(const struct plot_quality *results, size_t count, bool bars,
                  struct plot_panel *panel, struct error *error);
void plot_quality_free(struct plot_panel *panel);

/* The title of a panel on a file: its name without folders. */
const char *plot_file_title(const char *path);

/* Fails if gnuplot cannot be run; so that a long run need not end with that. */
bool plot_check(struct error *error);

/* Writes `path`, which must not be a file that the process has read. Points that are not finite are
 * left out. */
bool plot_write(const char *path, const struct plot_panel *panels, size_t panel_count,
                struct error *error);

#endif
