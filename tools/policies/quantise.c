/* SPDX-License-Identifier: MIT */
/* Asymmetric quantisation of groups of values with an f16 scale and an f16 zero each. */
#include "quantise.h"

#include <math.h>

#include "rounding.h"

void quantise_group(float *x, size_t count, size_t stride, unsigned bits)
{
    const float most = (float)((1u << bits) - 1);
    float least = x[0], largest = x[0];

    for (size_t i = 1; i < count; i++) {
        least = fminf(least, x[i * stride]);
        largest = fmaxf(largest, x[i * stride]);
    }

    float zero = rounding_f16(least), scale = rounding_f16((largest - least) / most);

    for (size_t i = 0; i < count; i++) {
        float code = scale > 0 ? rintf((x[i * stride] - zero) / scale) : 0;

        x[i * stride] = fminf(fmaxf(code, 0), most) * scale + zero;
    }
}

/* The storage type, bf16 for instance, may round up to 65536 what is below 65504. */
#define LARGEST 65280.0f

bool quantise_check(const struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    const struct model *m = store->options.model;
    size_t count = io->count * m->kv_heads * m->head_dim;

    for (size_t i = 0; i < count; i++) {
        if (fabsf(io->k[i]) > LARGEST || fabsf(io->v[i]) > LARGEST)
            return error_set(error,
                             "KV cache: layer %zu: %s has a magnitude of more than %g, too much "
                             "for the f16 scales of %s",
                             io->layer, fabsf(io->k[i]) > LARGEST ? "K" : "V", (double)LARGEST,
                             store->policy->name);
    }
    return true;
}
