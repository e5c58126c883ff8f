from tilelang_ops.hyper_connection.mean_streams.op import mean_streams as mean_streams
