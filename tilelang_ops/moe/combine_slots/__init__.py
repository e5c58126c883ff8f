from tilelang_ops.moe.combine_slots.op import combine_slots as combine_slots
