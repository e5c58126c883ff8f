#if defined(__x86_64__)

// GCC 12's own headers start their undefined vectors with `__Y = __Y`, which it reports where they are inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/formats.hpp"
#include "cpu/isa.hpp"
#include "cpu/kernels.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace deepinfer::cpu {
namespace {
namespace avx512 {

#include "cpu/vec_avx512.inl"
//
#include "cpu/sum_lanes_x86.inl"
//
#include "cpu/math.inl"
//
#include "cpu/gemm.inl"
//
#include "cpu/attention.inl"
//
#include "cpu/rows.inl"
//
#include "cpu/encode.inl"

}  // namespace avx512
}  // namespace

const Kernels kAvx512Kernels = DI_KERNELS(avx512);

}  // namespace deepinfer::cpu

#pragma GCC pop_options

#endif
