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

# PKV_CUDA_HOST(IF-POSSIBLE, IF-NOT)
# Whether tests/cuda_host can be built: it has fibers in assembly for some processors.
AC_DEFUN([PKV_CUDA_HOST], [
    AC_MSG_CHECKING([whether $CXX builds the CUDA backend for tests on $host_cpu])
    AC_LANG_PUSH([C++])
    pkv_save_CXXFLAGS=$CXXFLAGS
    CXXFLAGS="$CXXFLAGS $COMMON_CXXFLAGS"
    AC_COMPILE_IFELSE([AC_LANG_SOURCE([[
            #include <functional>
            #if !defined(__x86_64__) && !defined(__aarch64__)
            #error "no fibers"
            #endif
            struct pair { int a, b; };
            std::function<int()> probe(const pair &p);
            std::function<int()> probe(const pair &p) { return [p]() { return p.a; }; }
            const pair constant = {.a = 1, .b = 2};
        ]])], [pkv_found=yes], [pkv_found=no])
    CXXFLAGS=$pkv_save_CXXFLAGS
    AC_LANG_POP([C++])
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

# PKV_NVCC(DIR|yes|auto|no, [ARCHITECTURES])
# Sets NVCC, empty where the CUDA backend is not to be built, NVCC_GENCODE, and have_cuda in words.
AC_DEFUN([PKV_NVCC], [
    NVCC= NVCC_GENCODE= pkv_nvcc=
    AS_CASE([$1],
        [no], [have_cuda=no],
        [yes | auto], [AC_PATH_PROG([pkv_nvcc], [nvcc], [], [$PATH$PATH_SEPARATOR/usr/local/cuda/bin])],
        [AC_PATH_PROG([pkv_nvcc], [nvcc], [], [$1/bin])])
    AS_IF([test -n "$pkv_nvcc"], [
        AC_MSG_CHECKING([for nvcc 12.8 or later])
        pkv_release=`"$pkv_nvcc" --version | sed -n 's/.*release \(@<:@0-9.@:>@*\).*/\1/p'`
        AC_MSG_RESULT([$pkv_release])
        AS_IF([echo "$pkv_release" | awk -F. '{ exit !(@S|@1 * 100 + @S|@2 >= 1208) }'],
            [NVCC=$pkv_nvcc],
            [have_cuda="no ($pkv_nvcc is of release $pkv_release; 12.8 or later is needed)"])
    ], [test "$1" != no], [have_cuda="no (nvcc was not found)"])
    AS_CASE([$1:$NVCC], [no: | auto:], [], [*:],
        [AC_MSG_ERROR([--with-cuda=$1: $have_cuda])])
    AS_IF([test -n "$NVCC"], [
        pkv_offered=`"$NVCC" --list-gpu-code | tr '\n' ' '`
        pkv_last= pkv_archs=
        for pkv_arch in `echo "m4_default([$2], [])" | tr ',' ' '`; do
            AS_CASE([" $pkv_offered"], [*" $pkv_arch "*], [AS_VAR_APPEND([pkv_archs], [" $pkv_arch"])],
                [AC_MSG_ERROR([--with-cuda-arch: $pkv_arch is not one of nvcc's: $pkv_offered])])
        done
        AS_IF([test -z "$pkv_archs"], [
            for pkv_arch in sm_80 sm_86 sm_89 sm_90 sm_100 sm_120; do
                AS_CASE([" $pkv_offered"], [*" $pkv_arch "*],
                    [AS_VAR_APPEND([pkv_archs], [" $pkv_arch"])])
            done
            NVCC_GENCODE="-gencode=arch=compute_90,code=compute_90"
        ])
        for pkv_arch in $pkv_archs; do
            pkv_last=`echo "$pkv_arch" | sed 's/sm_/compute_/'`
            AS_VAR_APPEND([NVCC_GENCODE], [" -gencode=arch=$pkv_last,code=$pkv_arch"])
        done
        AS_VAR_APPEND([NVCC_GENCODE], [" -gencode=arch=$pkv_last,code=$pkv_last"])
        have_cuda="$NVCC$pkv_archs"
    ])
    AC_SUBST([NVCC])
    AC_SUBST([NVCC_ARCHITECTURES], [$pkv_archs])
    AC_SUBST([NVCC_GENCODE])
])

# PKV_CUBLAS
# Whether nvcc finds cuBLAS, which running models on a device takes; adds to have_cuda if not.
AC_DEFUN([PKV_CUBLAS], [
    pkv_found=no
    AS_IF([test -n "$NVCC" && test "$enable_tools" = yes], [
        AC_MSG_CHECKING([for cuBLAS])
        echo '#include <cublas_v2.h>' > conftest.cu
        AS_IF(["$NVCC" -E conftest.cu > /dev/null 2>&AS_MESSAGE_LOG_FD], [pkv_found=yes],
            [AS_VAR_APPEND([have_cuda], [", without cuBLAS, so models run on the CPU alone"])])
        rm -f conftest.cu
        AC_MSG_RESULT([$pkv_found])
    ])
    AM_CONDITIONAL([HAVE_CUBLAS], [test "$pkv_found" = yes])
])
