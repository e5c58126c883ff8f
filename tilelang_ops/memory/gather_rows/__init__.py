from tilelang_ops.memory.gather_rows.op import gather_rows as gather_rows
