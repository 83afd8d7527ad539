/* SPDX-License-Identifier: MIT */
/* Names of versions, statuses and page states. */
#include "puzzlekv.h"

const char *pkv_version(void)
{
    return PKV_VERSION;
}

const char *pkv_strerror(pkv_status status)
{
    switch (status) {
    case PKV_OK:
        return "success";
    case PKV_ERROR_ARGUMENT:
        return "invalid argument";
    case PKV_ERROR_MEMORY:
        return "out of memory";
    case PKV_ERROR_CAPACITY:
        return "capacity exceeded";
    case PKV_ERROR_BUSY:
        return "busy with an open step";
    case PKV_ERROR_VALUE:
        return "value not finite in the storage type";
    case PKV_ERROR_UNSUPPORTED:
        return "not supported here";
    case PKV_ERROR_SOLVER:
        return "solver did not converge";
    case PKV_ERROR_DEVICE:
        return "device failure";
    case PKV_ERROR_IO:
        return "session cannot be read or written";
    case PKV_ERROR_FORMAT:
        return "not a sound session";
    case PKV_ERROR_MISMATCH:
        return "session of another model or other settings";
    }
    return "unknown status";
}

const char *pkv_page_state_name(pkv_page_state state)
{
    switch (state) {
    case PKV_PAGE_EMPTY:
        return "empty";
    case PKV_PAGE_FILLING:
        return "filling";
    case PKV_PAGE_SINK:
        return "sink";
    case PKV_PAGE_WINDOW:
        return "window";
    case PKV_PAGE_FACTORIZED:
        return "factorized";
    }
    return "unknown state";
}
