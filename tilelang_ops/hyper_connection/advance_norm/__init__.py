from tilelang_ops.hyper_connection.advance_norm.op import Advanced as Advanced
from tilelang_ops.hyper_connection.advance_norm.op import advance_norm as advance_norm
