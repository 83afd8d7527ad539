/* SPDX-License-Identifier: MIT */
/* Inner loops of products.c for AVX2. */
#define PRODUCTS_TABLE products_avx2
#define PRODUCTS_NAME  "avx2"
#define PRODUCTS_ISA   "avx2"

#include "products_body.h"
