#include "cpu/kernels.hpp"

#include <stdexcept>

namespace deepinfer::cpu {
namespace {

/// Kernels that this machine can run, the best first.
std::vector<const Kernels*> find_kernels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512) found.push_back(&kAvx512Kernels);
    if (has_avx2) found.push_back(&kAvx2Kernels);
#endif
    found.push_back(&kGenericKernels);
    return found;
}

}  // namespace

const Kernels& select_kernels(std::string_view name) {
    for (const Kernels* kernels : find_kernels()) {
        if (name == "auto" || name == kernels->name) return *kernels;
    }
    throw std::invalid_argument("this machine has no \"" + std::string(name) + "\" kernels");
}

std::vector<std::string> available_kernels() {
    std::vector<std::string> names;
    for (const Kernels* kernels : find_kernels()) names.emplace_back(kernels->name);
    return names;
}

}  // namespace deepinfer::cpu
