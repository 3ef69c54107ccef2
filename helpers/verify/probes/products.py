"""Matrix products by type, size and data, and the speed of a GPU's memory.

Products of random matrices show what training reaches. Products of ones are faster, because fewer bits flip, so that
the GPU draws less power and clocks higher. Both are measured (He 2024, "Strangely, Matrix Multiplications on GPUs Run
Faster When Given 'Predictable' Data!", https://www.thonking.ai/p/strangely-matrix-multiplications).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from helpers.verify.probes.catalog import MATRIX, MEMORY_SPEED, product_name
from helpers.verify.probes.results import FORMATS, seconds_of
from helpers.verify.record import Figure

SIZES: tuple[int, ...] = (1024, 2048, 4096, MATRIX)
SMALL: tuple[int, ...] = (32, 64)  # on a CPU
IN_A_ROW = 10  # how many products are timed together, so that the launch of a small one does not count


def rate_of(multiply: Callable[[], Any], size: int, device: torch.device) -> float:
    """Measure TFLOP/s of a function that multiplies two square matrices of this size."""

    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            multiply()

    # Each of the size² results takes a multiplication and an addition for each number of a row.
    operations = 2 * size**3
    return IN_A_ROW * operations / seconds_of(in_a_row, device) / 1e12


def product_rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """Measure TFLOP/s of the product of two square matrices."""
    return rate_of(partial(torch.mm, a, b), size=len(a), device=a.device)


def rates(device: torch.device) -> Iterator[Figure]:
    """Yields TFLOP/s of matrix products in each number format, and GB/s of a copy within the GPU's memory.

    The matrices are random and of several sizes. For the largest size there is also a product of ones.
    """
    sizes = SIZES
    count = 1 << 30  # of float32: 4 GiB
    if device.type == "cpu":
        sizes = SMALL
        count = 1 << 20
    for number_format in FORMATS:
        torch.set_float32_matmul_precision(number_format.matmul_precision)
        for size in sizes:
            a = torch.randn(size, size, device=device, dtype=number_format.dtype)
            b = torch.randn(size, size, device=device, dtype=number_format.dtype)
            yield Figure(product_name(number_format.name, size), product_rate(a, b), "TFLOP/s")
        ones = torch.ones_like(a)
        yield Figure(product_name(number_format.name, sizes[-1], "of ones"), product_rate(ones, ones), "TFLOP/s")

    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(partial(target.copy_, source), device)
    bytes_moved = 2 * source.nbytes  # They are read and written.
    yield Figure(MEMORY_SPEED, bytes_moved / seconds / 1e9, "GB/s")


def float8(device: torch.device) -> Iterator[Figure]:
    """Yields TFLOP/s of products in float8, with one scale for each matrix, beside those in bfloat16.

    The time of the conversion to float8 is measured separately.
    """
    sizes = (*SIZES, 2 * MATRIX)
    if device.type == "cpu":
        sizes = SMALL
    scale = torch.ones((), device=device)
    for size in sizes:
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        yield Figure(product_name("bfloat16", size), product_rate(a, b), "TFLOP/s")

        seconds = seconds_of(partial(a.to, torch.float8_e4m3fn), device)
        yield Figure(product_name("conversion to float8", size), 1e6 * seconds, "us")
        if device.type == "cpu":
            continue  # Before PyTorch 2.13 a CPU has no such product.

        a8 = a.to(torch.float8_e4m3fn)
        b8 = b.to(torch.float8_e4m3fn).t()  # The kernel takes the second matrix column by column.

        multiply = partial(
            F.scaled_mm,
            a8,
            b8,
            scale_a=scale,
            scale_recipe_a=ScalingType.TensorWise,
            scale_b=scale,
            scale_recipe_b=ScalingType.TensorWise,
            use_fast_accum=True,
        )
        yield Figure(product_name("float8", size), rate_of(multiply, size, device), "TFLOP/s")
