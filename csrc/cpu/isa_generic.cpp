#include "cpu/formats.hpp"
#include "cpu/isa.hpp"
#include "cpu/kernels.hpp"

namespace deepinfer::cpu {
namespace {
namespace generic {

#include "cpu/vec_generic.inl"
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

}  // namespace generic
}  // namespace

const Kernels kGenericKernels = DI_KERNELS(generic);

}  // namespace deepinfer::cpu
