from tilelang_ops.norm.norm_quantize.op import Normed as Normed
from tilelang_ops.norm.norm_quantize.op import norm_quantize as norm_quantize
