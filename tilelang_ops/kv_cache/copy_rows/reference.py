from torch import Tensor


def run(pool: Tensor, pairs: Tensor) -> None:
    pool.index_copy_(0, pairs[:, 1].long(), pool.index_select(0, pairs[:, 0]))
