/* SPDX-License-Identifier: MIT */
/* Shapes of known models, for measurements that need no weights. */
#include "shapes.h"

#include <string.h>

static const struct shape shapes[] = {
    {"llama-3.1-8b", 32, 32, 8, 128},
    {"qwen3-8b", 36, 32, 8, 128},
    {"smollm2-135m", 30, 9, 3, 64},
};

const struct shape *shape_find(const char *name)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (strcmp(shapes[i].name, name) == 0)
            return &shapes[i];
    }
    return NULL;
}

void shape_describe(const struct shape *shape, pkv_config *config)
{
    config->layers = shape->layers;
    config->query_heads = shape->query_heads;
    config->kv_heads = shape->kv_heads;
    config->head_dim = shape->head_dim;
}
