/* SPDX-License-Identifier: MIT */
/* Inner loops of products.c for the build's base instruction set. */
#define PRODUCTS_TABLE products_generic
#define PRODUCTS_NAME  "generic"
#define PRODUCTS_ISA   "generic"

#include "products_body.h"
