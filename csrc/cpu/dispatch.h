// Run-time choice of the instruction set, without -march: the loader picks the best clone.
#pragma once

// (Not under the thread sanitizer, which is not up yet when the loader asks.)
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && \
    (!defined(__clang__) || __clang_major__ >= 17) && !defined(__SANITIZE_THREAD__)
#define DSL_VECTORIZED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DSL_VECTORIZED
#endif

#define DSL_INLINE inline __attribute__((always_inline))
