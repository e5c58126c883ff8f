from tilelang_ops.norm.rms_norm.op import rms_norm as rms_norm
