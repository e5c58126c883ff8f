from tilelang_ops.moe.swiglu_quantize.op import swiglu_quantize as swiglu_quantize
