/* SPDX-License-Identifier: MIT */
/* Inner loops of products.c for AVX-512. */
#define PRODUCTS_TABLE products_avx512
#define PRODUCTS_NAME  "avx512"
#define PRODUCTS_ISA   "avx512"

#include "products_body.h"
