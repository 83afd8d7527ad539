/* SPDX-License-Identifier: MIT */
/* A CUDA device on which models run: a module that is opened when it is asked for, so that no
 * program needs a library of CUDA. */
#ifndef PUZZLEKV_TOOLS_RUNNER_CUDA_DEVICE_H
#define PUZZLEKV_TOOLS_RUNNER_CUDA_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "../error.h"
#include "forward.h"
#include "model.h"

/* What --backend says. */
enum device_choice {
    DEVICE_AUTO, /* CUDA where module and device are there, else the CPU */
    DEVICE_CPU,
    DEVICE_CUDA
};

/* "auto", "cpu" or "cuda". */
bool device_parse(const char *text, enum device_choice *choice, struct error *error);

/* ---- What a module has ----------------------------------------------------------------------- */

struct device;

struct device_model_options {
    bool exact; /* see struct transformer_options */
    /* Expands rows `first` .. first + rows - 1 of a matrix. */
    void (*expand)(void *opaque, const struct weight *weight, size_t first, size_t rows,
                   float *out);
    void *opaque;
};

struct device_operations {
    bool (*open)(int ordinal, struct device **device, struct error *error);
    void (*close)(struct device *device);
    /* Copies the model's weights to the device and leaves it a forward pass. A matrix without data
     * is made up, with random elements of about the variance 1 / columns. */
    bool (*open_forward)(struct device *device, const struct model *model,
                         const struct device_model_options *options, struct forward **forward,
                         struct error *error);
    const struct forward_operations *forward;
    /* Of benchmarks: memory filled from the host's, or not, with `data` NULL; its release, with
     * NULL allowed; and how many bytes a second are read and written in copying `bytes` of them. */
    bool (*upload)(struct device *device, const void *data, size_t bytes, void **copy,
                   struct error *error);
    void (*release)(struct device *device, void *pointer);
    bool (*copy_speed)(struct device *device, size_t bytes, double *bytes_per_second,
                       struct error *error);
    /* What is queued between the first two is kept in a graph and not done. When it fails, and with
     * `graph` NULL, nothing is kept. What was launched is done when wait() returns. */
    bool (*capture_begin)(struct device *device, struct error *error);
    bool (*capture_end)(struct device *device, void **graph, struct error *error);
    bool (*launch)(struct device *device, void *graph, struct error *error);
    bool (*wait)(struct device *device, struct error *error);
    void (*free_graph)(struct device *device, void *graph);
};

/* What a module exports as `puzzlekv_runner_module`. */
struct device_module {
    const char *version; /* PKV_VERSION */
    const struct device_operations *operations;
};

/* A module's own begins with it. */
struct device {
    const struct device_operations *operations;
    int ordinal;
    void *stream; /* everything is queued on it: caches and steps too */
    char isa[16]; /* "sm_90" */
};

/* ---- Opening --------------------------------------------------------------------------------- */

/*
 * Opens what is chosen: *device is NULL for the CPU. `able` says whether all stores can be on a
 * device; if not, AUTO is the CPU, and CUDA the caller's error. The module is looked for where the
 * library looks for its own.
 */
bool device_open(enum device_choice choice, bool able, struct device **device, struct error *error);

/* Accepts NULL. What is on the device is closed before it. */
void device_close(struct device *device);

/* "cpu" or "cuda", and the instruction set: machine_isa()'s, or the device's. */
const char *device_name(const struct device *device);
bool device_isa(const struct device *device, const char **isa, struct error *error);

bool device_open_forward(struct device *device, const struct model *model, unsigned threads,
                         bool exact, struct forward **forward, struct error *error);

/* Sets where a cache is to be opened. */
void device_configure(const struct device *device, pkv_config *config);

#endif
