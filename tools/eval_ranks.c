/* SPDX-License-Identifier: MIT */
/* puzzlekv-eval ranks: how much of a page's energy its leading directions hold. */
#include "eval.h"

#include <cblas.h>
#include <lapacke.h>
#include <stdio.h>
#include <stdlib.h>

#include "options.h"
#include "output_file.h"
#include "plot.h"
#include "policies/policy.h"

/* Where --tokens is not given: what the text and the context have of it. */
#define DEFAULT_TOKENS 2048

/* What is looked at. */
enum part { PART_K, PART_PLAIN_K, PART_V, PARTS };

static const char *const part_names[PARTS] = {"k", "k-before-rope", "v"};

#define PAGE_SIZES 3
#define MOST_RANK  64

static const size_t page_sizes[PAGE_SIZES] = {16, 32, 64};

/* The page size of the right half of the plot, and the energy that is asked for there. */
#define PLOTTED_SIZE 1
#define ENOUGH       0.8

/* Of one page size: sums over the pages, then means, of the share of |X|^2 that the best
 * approximation X' of rank r keeps: 1 - |X - X'|^2 / |X|^2. */
struct energies {
    size_t page_tokens, ranks; /* ranks = min(page_tokens, head_dim) */
    size_t pages;              /* whole ones, without the first */
    double *sums;              /* [PARTS, layers, kv_heads, ranks]; of rank r at r - 1 */
};

/* A store that keeps nothing but looks at what would be kept. */
struct probe {
    struct kv_store store;
    struct energies energies[PAGE_SIZES];
    double *rows, *gram, *eigenvalues; /* of one page */
};

static double *energy(const struct probe *probe, const struct energies *e, int part, size_t layer,
                      size_t head)
{
    const struct model *model = probe->store.options.model;

    return e->sums +
           (((size_t)part * model->layer_count + layer) * model->kv_heads + head) * e->ranks;
}

/* ---- The store ---------------------------------------------------------------------------------
 */

/* Adds one page's energies: those of the eigenvalues of X X^T or X^T X, whichever is smaller. */
static bool add_page(struct probe *probe, const struct energies *e, const float *x, double *sums,
                     struct error *error)
{
    const struct model *model = probe->store.options.model;
    const size_t d = model->head_dim, stride = model->kv_heads * d, n = e->ranks;
    const bool tall = e->page_tokens > d;
    double total = 0, kept = 0;

    for (size_t row = 0; row < e->page_tokens; row++) {
        for (size_t i = 0; i < d; i++)
            probe->rows[row * d + i] = x[row * stride + i];
    }
    cblas_dsyrk(CblasRowMajor, CblasLower, tall ? CblasTrans : CblasNoTrans, (int)n,
                (int)(tall ? e->page_tokens : d), 1, probe->rows, (int)d, 0, probe->gram, (int)n);
    if (LAPACKE_dsyevd(LAPACK_ROW_MAJOR, 'N', 'L', (int)n, probe->gram, (int)n,
                       probe->eigenvalues) != 0)
        return error_set(error, "the eigenvalues of a page were not found");
    for (size_t i = 0; i < n; i++)
        total += probe->eigenvalues[i];
    /* They ascend. A page of zeros is kept whole by any rank. */
    for (size_t rank = 1; rank <= n; rank++) {
        kept += probe->eigenvalues[n - rank];
        sums[rank - 1] += total > 0 ? kept / total : 1;
    }
    return true;
}

static bool look(struct kv_store *store, const struct kv_layer *io, struct error *error)
{
    struct probe *probe = (struct probe *)store;
    const struct model *model = store->options.model;
    const float *const parts[PARTS] = {
        [PART_K] = io->k, [PART_PLAIN_K] = io->plain_k, [PART_V] = io->v};

    for (size_t size = 0; size < PAGE_SIZES; size++) {
        const struct energies *e = &probe->energies[size];
        const size_t page_elements = e->page_tokens * model->kv_heads * model->head_dim;

        for (int part = 0; part < PARTS; part++) {
            for (size_t head = 0; head < model->kv_heads; head++) {
                double *sums = energy(probe, e, part, io->layer, head);
                const float *x = parts[part] + head * model->head_dim;

                for (size_t page = 1; page <= e->pages; page++) {
                    if (!add_page(probe, e, x + page * page_elements, sums, error))
                        return false;
                }
            }
        }
    }
    return true;
}

static const struct kv_store_operations operations = {.reads_plain_k = true, .layer = look};
static const struct policy probe_policy = {.name = "ranks"};

static bool open_probe(const struct model *model, size_t tokens, struct probe *probe,
                       struct error *error)
{
    *probe = (struct probe){.store = {.operations = &operations,
                                      .policy = &probe_policy,
                                      .options = {.model = model,
                                                  .max_tokens = tokens,
                                                  .max_step_tokens = tokens,
                                                  .threads = 1}}};
    probe->rows = calloc(MOST_RANK * model->head_dim, sizeof *probe->rows);
    probe->gram = calloc(MOST_RANK * MOST_RANK, sizeof *probe->gram);
    probe->eigenvalues = calloc(MOST_RANK, sizeof *probe->eigenvalues);
    if (probe->rows == NULL || probe->gram == NULL || probe->eigenvalues == NULL)
        return error_set(error, "out of memory for a page");
    for (size_t size = 0; size < PAGE_SIZES; size++) {
        struct energies *e = &probe->energies[size];

        e->page_tokens = page_sizes[size];
        e->ranks = e->page_tokens < model->head_dim ? e->page_tokens : model->head_dim;
        e->pages = tokens / e->page_tokens - 1;
        e->sums = calloc(PARTS * model->layer_count * model->kv_heads * e->ranks, sizeof *e->sums);
        if (e->sums == NULL)
            return error_set(error, "out of memory for the energies");
    }
    return true;
}

static void close_probe(struct probe *probe)
{
    for (size_t size = 0; size < PAGE_SIZES; size++)
        free(probe->energies[size].sums);
    free(probe->eigenvalues);
    free(probe->gram);
    free(probe->rows);
}

/* Feeds the text as one step to a dense cache, and lets the probe look. */
static bool run(const struct eval_arguments *arguments, const struct model *model,
                struct probe *probe, const int32_t *ids, size_t tokens, struct error *error)
{
    struct transformer *transformer = NULL;
    struct eval_cache cache = {.store = NULL};
    struct kv_spec spec;
    bool done = false;

    progress_show("%zu tokens", tokens);
    if (!kv_spec_parse("static", &spec, error) ||
        !eval_cache_open(arguments, model, &spec, tokens, tokens, &cache, error) ||
        !eval_transformer_open(arguments, model, &transformer, error))
        goto out;
    done =
        transformer_step_shared(transformer, (struct kv_store *const[]){cache.store, &probe->store},
                                2, ids, tokens, NULL, error);
out:
    progress_clear();
    transformer_close(transformer);
    eval_cache_close(&cache);
    if (!done)
        return false;
    for (size_t size = 0; size < PAGE_SIZES; size++) {
        struct energies *e = &probe->energies[size];
        const size_t count = PARTS * model->layer_count * model->kv_heads * e->ranks;

        for (size_t i = 0; i < count; i++)
            e->sums[i] /= (double)e->pages;
    }
    return true;
}

/* ---- Results -----------------------------------------------------------------------------------
 */

/* The lowest rank whose mean energy is enough. */
static size_t rank_needed(const struct probe *probe, const struct energies *e, int part,
                          size_t layer, size_t head)
{
    const double *energies = energy(probe, e, part, layer, head);
    size_t rank = 1;

    while (rank < e->ranks && energies[rank - 1] < ENOUGH)
        rank++;
    return rank;
}

/* The mean over layers and heads. */
static double mean_energy(const struct probe *probe, const struct energies *e, int part,
                          size_t rank)
{
    const struct model *model = probe->store.options.model;
    double sum = 0;

    for (size_t layer = 0; layer < model->layer_count; layer++) {
        for (size_t head = 0; head < model->kv_heads; head++)
            sum += energy(probe, e, part, layer, head)[rank - 1];
    }
    return sum / (double)(model->layer_count * model->kv_heads);
}

static void print_table(const struct probe *probe)
{
    static const size_t shown[] = {4, 8, 12, 16, 24, 32, 48};
    const struct model *model = probe->store.options.model;

    printf("%4s %-13s  %-19s  energy at rank\n", "", "", "rank for 80 %");
    printf("%4s %-13s %6s %6s %6s ", "page", "part", "least", "mean", "most");
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
        printf(" %6zu", shown[i]);
    putchar('\n');
    for (size_t size = 0; size < PAGE_SIZES; size++) {
        const struct energies *e = &probe->energies[size];

        for (int part = 0; part < PARTS; part++) {
            size_t least = e->ranks, most = 0, sum = 0;

            for (size_t layer = 0; layer < model->layer_count; layer++) {
                for (size_t head = 0; head < model->kv_heads; head++) {
                    const size_t rank = rank_needed(probe, e, part, layer, head);

                    least = rank < least ? rank : least;
                    most = rank > most ? rank : most;
                    sum += rank;
                }
            }
            printf("%4zu %-13s %6zu %6.2f %6zu ", e->page_tokens, part_names[part], least,
                   (double)sum / (double)(model->layer_count * model->kv_heads), most);
            for (size_t i = 0; i < sizeof shown / sizeof *shown && shown[i] < e->ranks; i++)
                printf(" %6.4f", mean_energy(probe, e, part, shown[i]));
            putchar('\n');
        }
    }
}

static void print_csv(const struct probe *probe)
{
    const struct model *model = probe->store.options.model;

    puts("page,part,layer,head,rank,energy");
    for (size_t size = 0; size < PAGE_SIZES; size++) {
        const struct energies *e = &probe->energies[size];

        for (int part = 0; part < PARTS; part++) {
            for (size_t layer = 0; layer < model->layer_count; layer++) {
                for (size_t head = 0; head < model->kv_heads; head++) {
                    const double *energies = energy(probe, e, part, layer, head);

                    for (size_t rank = 1; rank <= e->ranks; rank++)
                        printf("%zu,%s,%zu,%zu,%zu,%.9g\n", e->page_tokens, part_names[part], layer,
                               head, rank, energies[rank - 1]);
                }
            }
        }
    }
}

static json_t *make_result(const struct probe *probe, const struct energies *e, int part)
{
    const struct model *model = probe->store.options.model;
    json_t *means = json_array(), *needed = json_array();

    for (size_t rank = 1; rank <= e->ranks; rank++)
        json_array_append_new(means, json_finite(mean_energy(probe, e, part, rank)));
    for (size_t layer = 0; layer < model->layer_count; layer++) {
        json_t *heads = json_array();

        for (size_t head = 0; head < model->kv_heads; head++)
            json_array_append_new(
                heads, json_integer((json_int_t)rank_needed(probe, e, part, layer, head)));
        json_array_append_new(needed, heads);
    }
    return json_pack("{s:I, s:s, s:I, s:o, s:o}", "page_tokens", (json_int_t)e->page_tokens, "part",
                     part_names[part], "pages", (json_int_t)e->pages, "energy", means, "rank_80",
                     needed);
}

static bool print_json(const struct eval_arguments *arguments, const struct probe *probe,
                       size_t tokens, struct error *error)
{
    json_t *results = json_array();

    for (size_t size = 0; size < PAGE_SIZES; size++) {
        for (int part = 0; part < PARTS; part++) {
            if (json_array_append_new(results, make_result(probe, &probe->energies[size], part)) !=
                0) {
                json_decref(results);
                return error_set(error, "out of memory for the JSON document");
            }
        }
    }
    return eval_print_document(
        arguments, json_pack("{s:I, s:o}", "tokens", (json_int_t)tokens, "results", results),
        error);
}

/* ---- The plot ----------------------------------------------------------------------------------
 */

/* Series of which each has its own points, in one block of memory. */
struct lines {
    struct plot_series *series;
    struct plot_point *points; /* [count, most] */
    size_t count, most;
};

static bool open_lines(struct lines *lines, size_t count, size_t most, struct error *error)
{
    *lines = (struct lines){calloc(count, sizeof *lines->series),
                            calloc(count * most, sizeof *lines->points), 0, most};
    return (lines->series != NULL && lines->points != NULL) ||
           error_set(error, "out of memory for the plot");
}

static void close_lines(struct lines *lines)
{
    free(lines->series);
    free(lines->points);
}

static struct plot_series *add_line(struct lines *lines, const char *name, int colour, bool thin)
{
    struct plot_series *series = &lines->series[lines->count];

    *series = (struct plot_series){.name = name,
                                   .points = lines->points + lines->count * lines->most,
                                   .colour = colour,
                                   .style = thin ? PLOT_THIN_LINE : PLOT_LINE};
    lines->count++;
    return series;
}

static void add_point(struct lines *lines, struct plot_series *series, double x, double y)
{
    lines->points[(size_t)(series->points - lines->points) + series->count++] =
        (struct plot_point){.x = x, .y = y};
}

/* Left: mean energy against rank, for each page size. Right: the rank that is needed in each layer,
 * a thin line for each head and their mean. */
static bool draw_plot(const struct eval_arguments *arguments, const struct probe *probe,
                      struct error *error)
{
    static const char *const names[PAGE_SIZES][PARTS] = {
        {"K, 16 tokens", NULL, "V, 16 tokens"},
        {"K, 32 tokens", NULL, "V, 32 tokens"},
        {"K, 64 tokens", NULL, "V, 64 tokens"},
    };
    static const char *const means[PARTS] = {"K, mean of the heads", NULL, "V, mean of the heads"};
    const struct model *model = probe->store.options.model;
    const struct energies *plotted = &probe->energies[PLOTTED_SIZE];
    struct lines left = {.series = NULL}, right = {.series = NULL};
    bool done = false;

    if (!open_lines(&left, PAGE_SIZES * PARTS, MOST_RANK, error) ||
        !open_lines(&right, PARTS * (model->kv_heads + 1), model->layer_count, error))
        goto out;
    for (int part = 0; part < PARTS; part++) {
        struct plot_series *series;

        if (part == PART_PLAIN_K)
            continue;
        for (size_t size = 0; size < PAGE_SIZES; size++) {
            const struct energies *e = &probe->energies[size];

            series = add_line(&left, names[size][part], part * 2 + (int)size, false);
            for (size_t rank = 1; rank <= e->ranks; rank++)
                add_point(&left, series, (double)rank, mean_energy(probe, e, part, rank));
        }
        for (size_t head = 0; head < model->kv_heads; head++) {
            series = add_line(&right, NULL, part / PART_V, true);
            for (size_t layer = 0; layer < model->layer_count; layer++)
                add_point(&right, series, (double)layer,
                          (double)rank_needed(probe, plotted, part, layer, head));
        }
        series = add_line(&right, means[part], part / PART_V, false);
        for (size_t layer = 0; layer < model->layer_count; layer++) {
            double sum = 0;

            for (size_t head = 0; head < model->kv_heads; head++)
                sum += (double)rank_needed(probe, plotted, part, layer, head);
            add_point(&right, series, (double)layer, sum / (double)model->kv_heads);
        }
    }
    done = plot_write(arguments->plot,
                      (const struct plot_panel[]){
                          {"Energy that the leading directions of a page hold", "rank", "energy",
                           left.series, left.count},
                          {"Rank for 80 % of the energy, 32 tokens a page", "layer", "rank",
                           right.series, right.count},
                      },
                      2, error);
out:
    close_lines(&left);
    close_lines(&right);
    return done;
}

/* ---- The command -------------------------------------------------------------------------------
 */

bool eval_ranks(const struct eval_arguments *arguments, struct error *error)
{
    struct model *model = NULL;
    struct token_list list = {NULL, 0, 0};
    struct probe probe = {.rows = NULL};
    size_t tokens = arguments->tokens;
    bool done = false;

    if (!model_open(arguments->model, &model, error) ||
        !eval_read_text(arguments, model, &list, error))
        goto out;
    if (tokens == 0) {
        tokens = list.count < DEFAULT_TOKENS ? list.count : DEFAULT_TOKENS;
        tokens = tokens < model->context_length ? tokens : model->context_length;
    }
    /* Two pages of each size: the first one is no subject. */
    if (tokens < 2 * page_sizes[PAGE_SIZES - 1]) {
        error_set(error, "%s: %zu tokens are fewer than the %zu of two pages", arguments->file,
                  tokens, 2 * page_sizes[PAGE_SIZES - 1]);
        goto out;
    }
    if (!open_probe(model, tokens, &probe, error) ||
        (arguments->plot != NULL && !output_file_try(arguments->plot, error)) ||
        !run(arguments, model, &probe, list.ids, tokens, error))
        goto out;
    if (arguments->json) {
        done = print_json(arguments, &probe, tokens, error);
    } else {
        (arguments->csv ? print_csv : print_table)(&probe);
        done = output_flush(error);
    }
    if (done && arguments->plot != NULL)
        done = draw_plot(arguments, &probe, error);
out:
    close_probe(&probe);
    token_list_free(&list);
    model_close(model);
    return done;
}
