/// What the `isa_*.cpp` share: each compiles the same `.inl` files over its own sixteen-lane type, in its own
/// namespace and with its own target options, so that one library holds a set for every instruction set.
#pragma once

// A helper that was not inlined could be merged with one compiled for another instruction set.
#define DI_INLINE [[gnu::always_inline]] inline
#define DI_LAMBDA __attribute__((always_inline))

#define DI_KERNELS(isa)                                                                                    \
    {#isa,       isa::gemm,  isa::prepare_row,  isa::store_row,   isa::gated_row, isa::add_row,            \
     isa::decode_record, isa::attend, isa::merge, isa::decode_panel, isa::score_panel, isa::kIndexHeads,                          \
     isa::norm_row, isa::rotate_vector, isa::advance_row, isa::mix_row, isa::route_row, isa::gate_row,         \
     isa::encode_fp8, isa::encode_fp4, isa::encode_mxfp4, isa::round_mxfp4_row}
