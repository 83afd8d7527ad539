/* SPDX-License-Identifier: MIT */
/* Shapes of known models, for measurements that need no weights. */
#include "shapes.h"

#include <string.h>

struct shape {
    const char *name;
    struct model model;
};

static const struct shape shapes[] = {
    {"llama-3.1-8b",
     {.architecture = MODEL_LLAMA,
      .layer_count = 32,
      .hidden = 4096,
      .intermediate = 14336,
      .query_heads = 32,
      .kv_heads = 8,
      .head_dim = 128,
      .vocabulary = 128256,
      .context_length = 131072,
      .rms_epsilon = 1e-5f,
      .rope_theta = 500000}},
    {"qwen3-8b",
     {.architecture = MODEL_QWEN3,
      .layer_count = 36,
      .hidden = 4096,
      .intermediate = 12288,
      .query_heads = 32,
      .kv_heads = 8,
      .head_dim = 128,
      .vocabulary = 151936,
      .context_length = 40960,
      .rms_epsilon = 1e-6f,
      .rope_theta = 1000000}},
    {"smollm2-135m",
     {.architecture = MODEL_LLAMA,
      .layer_count = 30,
      .hidden = 576,
      .intermediate = 1536,
      .query_heads = 9,
      .kv_heads = 3,
      .head_dim = 64,
      .vocabulary = 49152,
      .context_length = 8192,
      .rms_epsilon = 1e-5f,
      .tied_output = true,
      .rope_theta = 100000}},
};

bool shape_find(const char *name, struct model *model)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (strcmp(shapes[i].name, name) == 0) {
            *model = shapes[i].model;
            return true;
        }
    }
    return false;
}
