#include "cpu/kernels.hpp"

#include <stdexcept>
#include <string>
#include <string_view>

namespace deepinfer::cpu {

const Kernels& select_kernels(const char* name) {
    const std::string_view wanted(name);
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && (wanted == "avx512" || wanted == "auto")) return kAvx512Kernels;
    if (has_avx2 && (wanted == "avx2" || wanted == "auto")) return kAvx2Kernels;
#endif
    if (wanted == "generic" || wanted == "auto") return kGenericKernels;
    throw std::invalid_argument("this machine has no \"" + std::string(wanted) + "\" kernels");
}

}  // namespace deepinfer::cpu
