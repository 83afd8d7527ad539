# SPDX-License-Identifier: MIT
# Macros of configure.ac.

# PKV_TRY_CFLAGS(FLAGS, IF-TAKEN, [IF-NOT])
AC_DEFUN([PKV_TRY_CFLAGS], [
    AC_MSG_CHECKING([whether $CC takes $1])
    pkv_save_CFLAGS=$CFLAGS
    CFLAGS="$CFLAGS $1 -Werror"
    AC_COMPILE_IFELSE([AC_LANG_PROGRAM()], [pkv_taken=yes], [pkv_taken=no])
    CFLAGS=$pkv_save_CFLAGS
    AC_MSG_RESULT([$pkv_taken])
    AS_IF([test "$pkv_taken" = yes], [$2], [$3])
])

# PKV_CFLAGS(VARIABLE, FLAGS)
# Appends to VARIABLE each of FLAGS that the compiler takes.
AC_DEFUN([PKV_CFLAGS], [
    for pkv_flag in $2; do
        PKV_TRY_CFLAGS([$pkv_flag], [AS_VAR_APPEND([$1], [" $pkv_flag"])])
    done
])

# PKV_FUZZER(IF-FOUND, IF-NOT)
# Sets pkv_fuzzer_cflags, for all objects, if a libFuzzer target links. That also takes a C++ library.
AC_DEFUN([PKV_FUZZER], [
    AC_MSG_CHECKING([whether $CC builds libFuzzer targets])
    pkv_fuzzer_cflags="-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all"
    pkv_save_CFLAGS=$CFLAGS pkv_save_LDFLAGS=$LDFLAGS
    CFLAGS="$CFLAGS $pkv_fuzzer_cflags"
    LDFLAGS="$LDFLAGS -fsanitize=fuzzer"
    AC_LINK_IFELSE([AC_LANG_SOURCE([[
            int LLVMFuzzerTestOneInput(const unsigned char *data, unsigned long size);
            int LLVMFuzzerTestOneInput(const unsigned char *data, unsigned long size)
            {
                return size > 0 && data[0] > 255;
            }
        ]])], [pkv_found=yes], [pkv_found=no])
    CFLAGS=$pkv_save_CFLAGS LDFLAGS=$pkv_save_LDFLAGS
    AC_MSG_RESULT([$pkv_found])
    AS_IF([test "$pkv_found" = yes], [$1], [$2])
])

# PKV_KERNELS(ISA, NAME, BUILD?)
# Makes the conditional and the define HAVE_NAME_KERNELS.
AC_DEFUN([PKV_KERNELS], [
    AM_CONDITIONAL([HAVE_$2_KERNELS], [test "$3" = yes])
    AS_IF([test "$3" = yes], [
        AS_VAR_APPEND([kernels], [" $1"])
        AC_DEFINE([HAVE_$2_KERNELS], [1], [Define to 1 when the $1 kernels are built.])
    ])
])

# PKV_DEPENDENCY(VARIABLE, NAME, MODULE, DEBIAN-PACKAGE, [IF-NOT])
# Sets VARIABLE_CFLAGS and VARIABLE_LIBS from pkg-config's MODULE; what is not found is noted.
AC_DEFUN([PKV_DEPENDENCY], [
    PKG_CHECK_MODULES([$1], [$3], [], [m4_default([$5], [PKV_MISSING([$2], [$4])])])
])

# PKV_MISSING(NAME, DEBIAN-PACKAGE)
AC_DEFUN([PKV_MISSING], [
    pkv_missing="$pkv_missing
  $1 (Debian package $2)"
    pkv_packages="$pkv_packages $2"
])

# PKV_REPORT_MISSING
# Stops with one message that names everything that is missing.
AC_DEFUN([PKV_REPORT_MISSING], [
    AS_IF([test -n "$pkv_missing"], [AC_MSG_ERROR([not found:
$pkv_missing

On Debian and Ubuntu: apt-get install$pkv_packages])])
])
