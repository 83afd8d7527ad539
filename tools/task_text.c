/* SPDX-License-Identifier: MIT */
/* The words and sentences that test rows are made of. */
#include "task_text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void writing_add(struct writing *writing, const char *format, ...)
{
    va_list arguments;
    int length;

    if (writing->failed)
        return;
    va_start(arguments, format);
    length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) {
        writing->failed = true;
        return;
    }
    if (writing->capacity - writing->length <= (size_t)length) {
        size_t capacity = 2 * (writing->length + (size_t)length + 1);
        char *text = realloc(writing->text, capacity);

        if (text == NULL) {
            writing->failed = true;
            return;
        }
        writing->text = text;
        writing->capacity = capacity;
    }
    va_start(arguments, format);
    vsnprintf(writing->text + writing->length, writing->capacity - writing->length, format,
              arguments);
    va_end(arguments);
    writing->length += (size_t)length;
}

uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

size_t random_below(uint64_t *state, size_t count)
{
    /* The counts are far too small for the remainder to prefer any number noticeably. */
    return (size_t)(random_next(state) % count);
}

/* clang-format off */
const char *const task_adjectives[TASK_ADJECTIVES] = {
    "amber", "ancient", "bitter", "blue", "bold", "brass", "bright", "broad",
    "calm", "clever", "cold", "copper", "crimson", "distant", "dry", "early",
    "eager", "gentle", "golden", "grand", "green", "heavy", "hidden", "honest",
    "humble", "late", "little", "loud", "lucky", "mild", "narrow", "northern",
    "patient", "plain", "proud", "purple", "quick", "quiet", "round", "scarlet",
    "sharp", "silver", "simple", "smooth", "southern", "steady", "swift", "wooden",
};

const char *const task_nouns[TASK_NOUNS] = {
    "acorn", "anchor", "apple", "apron", "arrow", "badge", "balloon", "banner",
    "barrel", "basket", "beacon", "bell", "bench", "blanket", "boat", "book",
    "bottle", "bowl", "bracelet", "branch", "brick", "bridge", "broom", "bucket",
    "button", "cabin", "cable", "candle", "canoe", "canvas", "carpet", "castle",
    "cellar", "chain", "chair", "chest", "chimney", "circle", "clock", "cloud",
    "coat", "coin", "column", "comet", "compass", "cottage", "cradle", "crane",
    "crown", "cup", "curtain", "desert", "diamond", "dish", "dolphin", "door",
    "drum", "eagle", "echo", "engine", "falcon", "farm", "feather", "fence",
    "ferry", "field", "flag", "flame", "flute", "forest", "fork", "fountain",
    "fox", "frame", "garden", "gate", "glacier", "glass", "globe", "glove",
    "grain", "guitar", "hammer", "harbour", "harvest", "hat", "hill", "honey",
    "horn", "horse", "island", "ivory", "jacket", "jar", "jewel", "kettle",
    "key", "kitchen", "kite", "knot", "ladder", "lake", "lamp", "lantern",
    "leaf", "lemon", "lens", "letter", "lion", "magnet", "maple", "marble",
    "market", "mask", "meadow", "medal", "mill", "mirror", "mountain", "needle",
    "nest", "oak", "oar", "ocean", "olive", "orchard", "organ", "otter",
    "oven", "paddle", "paint", "palace", "paper", "parrot", "path", "pearl",
    "pebble", "pencil", "piano", "pillow", "planet", "plate", "plough", "pocket",
    "pond", "pump", "quarry", "quilt", "rabbit", "railway", "rainbow", "ribbon",
    "rice", "river", "robin", "roof", "rope", "rose", "saddle", "sail",
    "sand", "scarf", "school", "shell", "shield", "ship", "shore", "spoon",
    "spring", "stable", "staircase", "star", "statue", "stone", "storm", "sugar",
    "swan", "temple", "tent", "thread", "tiger", "torch", "tower", "train",
    "tunnel", "valley", "vase", "village", "violin", "wagon", "whistle", "window",
};

const char *const task_refrain[TASK_REFRAIN] = {
    "The lamp is on.",
    "The door is shut.",
    "The tea is hot.",
    "Here we sit.",
};

static const char *const times[] = {
    "In the early morning", "Before breakfast", "After the rain", "Late in the evening",
    "On market day", "During the long winter", "Just before noon", "When the bells had stopped",
    "Once a month", "On the first warm day", "At the end of the season", "Towards sunset",
    "Without any hurry", "As in every year", "While the kettle boiled", "On the following day",
    "For want of better work", "To everyone's surprise",
};

static const char *const people[] = {
    "the baker", "an old sailor", "the schoolteacher", "a young painter", "the ferryman",
    "the miller's daughter", "a visiting doctor", "the postman", "two brothers", "the organist",
    "a group of students", "the night watchman", "a retired judge", "the gardener", "the tailor",
    "an elderly couple", "the fisherman", "a travelling musician", "the librarian", "the smith",
    "a cheerful farmer", "the innkeeper", "the carpenter", "a quiet stranger", "the shepherd",
    "the mayor's clerk", "some children", "the beekeeper", "a patient nurse", "the stonemason",
    "the lighthouse keeper", "a lost tourist",
};

static const char *const deeds[] = {
    "counted the empty baskets", "mended a torn sail", "carried firewood", "told the same story",
    "looked for a missing glove", "painted a wooden fence", "waited for the ferry",
    "read yesterday's newspaper", "fed the pigeons", "repaired an iron gate", "sang an old tune",
    "planted a row of beans", "drew a map of the coast", "cleaned the tall windows",
    "argued about the weather", "sold a few jars of honey", "wrote a long letter",
    "swept the narrow steps", "tuned a battered piano", "picked ripe plums", "watched the clouds",
    "polished a pair of boots", "folded the linen", "measured the length of the wall",
    "boiled a pot of soup", "studied a foreign language", "chased a runaway goat",
    "built a small boat", "collected smooth stones", "played a game of chess",
    "hung lanterns in the trees", "sharpened the kitchen knives", "weighed sacks of flour",
    "practised a difficult dance", "sorted a box of buttons", "listened to the wind",
};

static const char *const places[] = {
    "behind the mill", "near the harbour wall", "in the school yard", "beside the canal",
    "at the edge of the forest", "under the stone bridge", "in front of the town hall",
    "on the top of the hill", "next to the bakery", "along the river bank", "in the back room",
    "on the village green", "by the railway station", "in the shade of an oak",
    "outside the chapel", "at the old crossroads", "among the apple trees",
    "across the street from the inn", "in the attic", "on the pier", "at the corner shop",
    "close to the lighthouse", "down in the valley", "beyond the last houses",
    "in a quiet courtyard", "at the foot of the tower", "on a bench in the park",
    "inside the barn", "near the well", "on the far side of the lake", "by the garden gate",
    "between two haystacks",
};
/* clang-format on */

#define PICK(list, random) (list)[random_below(random, sizeof(list) / sizeof *(list))]

void task_prose(struct writing *writing, uint64_t *random)
{
    const char *time = PICK(times, random), *person = PICK(people, random);
    const char *deed = PICK(deeds, random), *place = PICK(places, random);

    writing_add(writing, "%s %s %s %s.", time, person, deed, place);
}
