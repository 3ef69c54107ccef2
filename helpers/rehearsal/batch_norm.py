"""SyncBatchNorm's operators for the CPU, because PyTorch only has them for GPUs.

torch's own SyncBatchNorm calls them on this rank's part of the batch. Between the calls the ranks exchange what the
operators return. So all ranks together normalize by the mean and the variance of the whole batch.

Shapes: ``input``, its gradient and the results of the elementwise operators are (batch, channels, ...), means, inverse
standard deviations, weights and sums are (channels,), and what was gathered is (ranks, channels).
"""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("aten", "IMPL", "CPU")
OptionalTensor = torch.Tensor | None


def patch() -> None:
    """Register the functions below as the CPU's kernels of SyncBatchNorm's operators."""
    operators: dict[str, Callable[..., Any]] = {
        "batch_norm_stats": stats,
        "batch_norm_gather_stats_with_counts": gather_stats,
        "batch_norm_elemt": normalize,
        "batch_norm_backward_reduce": reduce_gradient,
        "batch_norm_backward_elemt": gradient_of_input,
    }
    for name, function in operators.items():
        LIBRARY.impl(name, function)


def dims_of_batch(values: torch.Tensor) -> list[int]:
    """The dimensions of a batch over which a channel is averaged: all but the second, that of the channels."""
    return [0, *range(2, values.dim())]


def for_channels(vector: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A vector with one number for each channel, in a shape that broadcasts over ``values``: (1, channels, 1, ...)."""
    dims_after_channels = values.dim() - 2
    return vector.view(1, -1, *[1] * dims_after_channels)


def stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the inverse standard deviation of this rank's batch, by channel, in float32."""
    dims = dims_of_batch(input)
    mean = input.float().mean(dims)
    variance = input.float().var(dims, correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    input: torch.Tensor,
    means: torch.Tensor,
    inverse_deviations: torch.Tensor,
    running_mean: OptionalTensor,
    running_var: OptionalTensor,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the inverse standard deviation, by channel, of the whole batch, from those of each rank's part.

    Also updates the running averages. ``means`` and ``inverse_deviations`` are (ranks, channels). ``counts`` has how
    many elements a channel has on each rank. Both results are (channels,).
    """
    counts = counts.view(-1, 1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variances = inverse_deviations.pow(-2) - eps
    # The variance of the whole is the mean of the ranks' variances, plus the variance of the ranks' means.
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = variance * total / (total - 1)  # as torch keeps it for the evaluation
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def normalize(
    input: torch.Tensor,
    weight: OptionalTensor,
    bias: OptionalTensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """This rank's batch, normalized by the ``mean`` and the deviation of all ranks, then scaled and shifted.

    ``eps`` is not used: the inverse deviation has it already.
    """
    output = (input - for_channels(mean, input)) * for_channels(inverse_deviation, input)
    if weight is not None:
        output = output * for_channels(weight, input)
    if bias is not None:
        output = output + for_channels(bias, input)
    return output.to(input.dtype)


def reduce_gradient(
    gradient: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    weight: OptionalTensor,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first half of the backward pass: this rank's sums over its batch, by channel.

    ``gradient`` is that of the output. Returns its sum, the sum of it times the centred input, and the gradients of the
    weight and the bias. SyncBatchNorm adds up the first two over all ranks, for ``gradient_of_input``. All four are
    computed, whatever is needed.
    """
    dims = dims_of_batch(input)
    centred = input - for_channels(mean, input)
    total = gradient.float().sum(dims)
    product = (gradient.float() * centred).sum(dims)
    dtype = mean.dtype
    if weight is not None:
        dtype = weight.dtype
    gradient_of_weight = (product * inverse_deviation).to(dtype)
    gradient_of_bias = total.to(dtype)
    return total, product, gradient_of_weight, gradient_of_bias


def gradient_of_input(
    gradient: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    weight: OptionalTensor,
    total: torch.Tensor,
    product: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """The second half of the backward pass: the gradient of this rank's input.

    ``gradient`` is that of the output. ``total`` and ``product`` are the sums of ``reduce_gradient``, added up over all
    ranks: of the gradient, and of the gradient times the centred input. ``counts`` has the elements of a channel on
    each rank.
    """
    count = counts.sum()
    centred = input - for_channels(mean, input)
    # The input acts on the output also through the mean and the variance of its channel.
    through_mean = for_channels(total / count, input)
    through_variance = centred * for_channels(inverse_deviation.square() * product / count, input)
    output = gradient - through_mean - through_variance
    output = output * for_channels(inverse_deviation, input)
    if weight is not None:
        output = output * for_channels(weight, input)
    return output.to(input.dtype)
