#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu/formats.hpp"
#include "cpu/isa.hpp"
#include "cpu/kernels.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace deepinfer::cpu {
namespace {
namespace avx2 {

#include "cpu/vec_avx2.inl"
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

}  // namespace avx2
}  // namespace

const Kernels kAvx2Kernels = DI_KERNELS(avx2);

}  // namespace deepinfer::cpu

#pragma GCC pop_options

#endif
