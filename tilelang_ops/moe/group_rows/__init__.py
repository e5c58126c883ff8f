from tilelang_ops.moe.group_rows.op import GroupedRows as GroupedRows
from tilelang_ops.moe.group_rows.op import group_rows as group_rows
