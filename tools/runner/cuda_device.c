/* SPDX-License-Identifier: MIT */
/* Opens the module that runs models on a CUDA device. */
#define _GNU_SOURCE /* secure_getenv */
#include "cuda_device.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../options.h"
#include "quant.h"

#define MODULE_PATH_BYTES 4096

bool device_parse(const char *text, enum device_choice *choice, struct error *error)
{
    if (strcmp(text, "auto") == 0)
        *choice = DEVICE_AUTO;
    else if (strcmp(text, "cpu") == 0)
        *choice = DEVICE_CPU;
    else if (strcmp(text, "cuda") == 0)
        *choice = DEVICE_CUDA;
    else
        return error_set(error, "--backend: \"%.40s\" is not one of auto, cpu, cuda", text);
    return true;
}

/* An open module stays. */
static bool open_module(const struct device_operations **operations, struct error *error)
{
    const char *folder = secure_getenv("PUZZLEKV_MODULES");
    const struct device_module *module;
    char path[MODULE_PATH_BYTES];
    void *handle;

    if (snprintf(path, sizeof path, "%s/puzzlekv-runner-cuda.so",
                 folder && *folder ? folder : PKGLIBDIR) >= (int)sizeof path)
        return error_set(error, "--backend cuda: the module's path is too long");
    if (access(path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR))
        return error_set(error, "--backend cuda: there is no %s, which a build with CUDA has",
                         path);
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return error_set(error, "--backend cuda: %s", dlerror());
    module = dlsym(handle, "puzzlekv_runner_module");
    if (module == NULL || strcmp(module->version, PKV_VERSION) != 0) {
        dlclose(handle);
        return error_set(error, "--backend cuda: %s is not a module of version " PKV_VERSION, path);
    }
    *operations = module->operations;
    return true;
}

/* The library has a module of its own: the smallest cache tells whether it is there. */
static bool try_library(const struct device *device, struct error *error)
{
    char message[PKV_MESSAGE_BYTES];
    pkv_config config;
    pkv_cache *cache;

    pkv_config_init(&config, sizeof config);
    config.layers = config.query_heads = config.kv_heads = 1;
    config.head_dim = 8;
    config.rank_k = config.rank_v = 1;
    config.max_tokens = 1;
    device_configure(device, &config);
    if (pkv_cache_open(&config, &cache, message) != PKV_OK)
        return error_set(error, "--backend cuda: the library: %s", message);
    pkv_cache_close(cache);
    return true;
}

bool device_open(enum device_choice choice, bool able, struct device **device, struct error *error)
{
    const struct device_operations *operations;
    bool found;

    *device = NULL;
    if (choice == DEVICE_CPU || (choice == DEVICE_AUTO && !able))
        return true;
    found = open_module(&operations, error) && operations->open(0, device, error) &&
            try_library(*device, error);
    if (!found) {
        device_close(*device);
        *device = NULL;
    }
    return found || choice == DEVICE_AUTO;
}

void device_close(struct device *device)
{
    if (device != NULL)
        device->operations->close(device);
}

const char *device_name(const struct device *device)
{
    return device != NULL ? "cuda" : "cpu";
}

bool device_isa(const struct device *device, const char **isa, struct error *error)
{
    if (device == NULL)
        return machine_isa(isa, error);
    *isa = device->isa;
    return true;
}

static void expand(void *opaque, const struct weight *weight, size_t first, size_t rows, float *out)
{
    const unsigned threads = *(const unsigned *)opaque;
    const char *data = (const char *)weight->data + first * weight->row_bytes;

    (void)threads; /* unused without OpenMP */
#pragma omp parallel for num_threads(threads) if (rows > 8)
    for (size_t row = 0; row < rows; row++)
        quant_info(weight->type)
            ->dequantise(data + row * weight->row_bytes, weight->columns,
                         out + row * weight->columns);
}

bool device_open_forward(struct device *device, const struct model *model, unsigned threads,
                         bool exact, struct forward **forward, struct error *error)
{
    const struct device_model_options options = {
        .exact = exact, .expand = expand, .opaque = &threads};

    return device->operations->open_forward(device, model, &options, forward, error);
}

void device_configure(const struct device *device, pkv_config *config)
{
    config->backend = device_name(device);
    if (device != NULL) {
        config->device = device->ordinal;
        config->stream = device->stream;
    }
}
