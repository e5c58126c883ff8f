from tilelang_ops.projection.encode_rows.op import EncodedRows as EncodedRows
from tilelang_ops.projection.encode_rows.op import Norm as Norm
from tilelang_ops.projection.encode_rows.op import Records as Records
from tilelang_ops.projection.encode_rows.op import Rotation as Rotation
from tilelang_ops.projection.encode_rows.op import encode_rows as encode_rows
