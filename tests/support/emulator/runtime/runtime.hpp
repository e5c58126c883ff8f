// Everything that a printed program includes.
#pragma once
#include "tiles.hpp"

// What the caller hands over; `tests/support/emulator/program.py` has the same layout.
struct EmulatorTensor {
    void* data;
    int64_t begin, end;  // bytes of its storage, relative to data
};
