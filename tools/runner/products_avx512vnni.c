/* SPDX-License-Identifier: MIT */
/* Inner loops of products.c for AVX-512 with VNNI. */
#define PRODUCTS_TABLE products_avx512vnni
#define PRODUCTS_NAME  "avx512vnni"
#define PRODUCTS_ISA   "avx512"

#include "products_body.h"
