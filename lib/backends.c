/* SPDX-License-Identifier: MIT */
/* The backends by name. */
#define _GNU_SOURCE /* secure_getenv */
#include "backends.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODULE_PATH_BYTES 4096

/* An open module stays: whoever opened a cache of it may still be there. */
static pkv_status open_module(const char *name, const struct backend_ops **ops,
                              struct message *message)
{
    const char *folder = secure_getenv("PUZZLEKV_MODULES");
    const struct backend_module *module;
    char path[MODULE_PATH_BYTES];
    void *handle;

    if (snprintf(path, sizeof path, "%s/puzzlekv-%s.so", folder && *folder ? folder : PKGLIBDIR,
                 name) >= (int)sizeof path)
        return fail(message, PKV_ERROR_UNSUPPORTED,
                    "backend: \"%s\": the module's path is too long", name);
    if (access(path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR))
        return fail(message, PKV_ERROR_UNSUPPORTED,
                    "backend: \"%s\": there is no %s, which a build with CUDA has", name, path);
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return fail(message, PKV_ERROR_UNSUPPORTED, "backend: \"%s\": %s", name, dlerror());
    module = dlsym(handle, "puzzlekv_module");
    if (module == NULL || strcmp(module->version, PKV_VERSION) != 0) {
        dlclose(handle);
        return fail(message, PKV_ERROR_UNSUPPORTED,
                    "backend: \"%s\": %s is not a module of version " PKV_VERSION, name, path);
    }
    *ops = module->ops;
    return PKV_OK;
}

pkv_status backends_find(const char *name, const struct backend_ops **ops, struct message *message)
{
    *ops = &backend_cpu;
    if (name == NULL || strcmp(name, "cpu") == 0)
        return PKV_OK;
    if (strcmp(name, "cuda") == 0)
        return open_module(name, ops, message);
    return fail(message, PKV_ERROR_UNSUPPORTED,
                "backend: \"%.64s\" is not one of \"auto\", \"cpu\", \"cuda\"", name);
}
