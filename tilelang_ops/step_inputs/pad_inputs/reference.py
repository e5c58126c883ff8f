from torch import Tensor


def run(source: Tensor, table: Tensor, target: Tensor) -> None:
    for start, rows, width, place, full_rows, full_width, value in table.tolist():
        buffer = target[place : place + full_rows * full_width].view(full_rows, full_width)
        buffer.fill_(value)
        buffer[:rows, :width] = source[start : start + rows * width].view(rows, width)
